"""Starts a checked call as a job: its agent's start in the background, snapshot, specification, plan, submission.

When `start` returns, the job is submitted; its ranks may not have started yet.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import string
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kale_dist.calls.layout import Run
from kale_dist.errors import BackendError, SnapshotError, say, warn
from kale_dist.job import records, tracking, weights
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.handle import Job, inside
from kale_dist.job.outcomes import OutcomeReader
from kale_dist.job.spec import names
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.notebook import live
from kale_dist.snapshot import datasets
from kale_dist.snapshot.capture import Snapshot, capture
from kale_dist.snapshot.given_models import models_in, together
from kale_dist.snapshot.modules import Script
from kale_dist.snapshot.reducers import References
from kale_dist.wire.blobs import FolderStore, Store

if TYPE_CHECKING:
    from kale_dist.worker.training.result import TrainingResult

SUFFIX_LENGTH = 5
_GIB = 1 << 30
_LARGE_BYTES = 100_000_000
_SHOWN_PATHS = 2

_jobs: weakref.WeakValueDictionary[str, Job[Any]] = weakref.WeakValueDictionary()
"""Reference to the handle that this process already has, which knows the notebook's own objects."""
_jobs_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The call that runs on every rank."""

    fn: Callable[..., Any] | None
    """None for the training loop: its import takes long, and so begins after the agent's start."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    script: Script | None = None
    """A script whose files are sent along."""


def _training_loop() -> Callable[..., TrainingResult]:
    from kale_dist.worker.training import loop

    return loop.train


def start(call: Call, run: Run) -> Job[Any]:
    """Snapshot and submit.

    Args:
        call: What is to run.
        run: Where and how.

    Raises:
        JobExistsError: The name is taken.
        SnapshotError: Something cannot be sent to other processes.
        StoreError: The disk is full.
        BackendError: The backend refused.
    """
    if run.name is not None and records.exists(JobRef(run.backend.name, run.name).record_name):
        raise records.exists_error(run.name)
    run.backend.warm_up()
    key = secrets.token_bytes(32)
    with records.keeping_blobs():
        snapshot, spec = capture_call(
            call, run, run.name or _free_name(run.spec.label), FolderStore(records.blobs_dir())
        )
        spec = run.backend.prepare(spec, submit=True)
        for note in run.notes:
            say(note)
        # Before the submission: if warnings are errors, no job is submitted without a handle.
        for warning in (
            *run.warnings,
            *snapshot.notes,
            *_data_warnings(call, run.backend.name, spec),
            *_disk_warnings(),
        ):
            warn(warning)
        given = call.kwargs
        targets = None
        if run.spec.kind == "training":
            targets = weights.remember(given["model"], given["optimizer"], given["scheduler"], given["state"])
        elif "torch" in sys.modules and (models := models_in(call.args, call.kwargs)):
            targets = weights.remember(together(models), None)
        ref = run.backend.submit(spec, key)
    _say_started(ref, spec)
    job = handle(run.backend, ref, spec, key, targets=targets, originals=snapshot.originals)
    tracking.begin(job, run.track, tracking.params_of(call.kwargs) if run.spec.kind == "training" else {})
    return job


def capture_call(call: Call, run: Run, name: str, store: Store) -> tuple[Snapshot, JobSpec]:
    """The snapshot of a call and the job's specification.

    Args:
        call: What is to run.
        run: Where and how.
        name: The job's.
        store: Where the snapshot's bytes go.

    Raises:
        SnapshotError: Something cannot be sent to other processes.
    """
    fn = call.fn or _training_loop()
    snapshot = capture(fn, call.args, dict(call.kwargs), store=store, label=run.spec.label, script=call.script)
    if snapshot.compiled and run.backend.name != "local":
        raise SnapshotError(
            f"{run.spec.label} uses {snapshot.compiled[0]}, a compiled module of your own, which need not run "
            f"anywhere but on this machine. Make it a package in the image, or use on='local'"
        )
    image, recipe = run.spec.image, run.spec.recipe
    if recipe is not None:
        from kale_dist.image.for_job import freeze

        imports = snapshot.imports if run.auto_packages else None
        recipe, notes = freeze(recipe, store, imports=imports, say=_say)
        if not recipe.adds_something:
            image, recipe = recipe.base, None
        snapshot = dataclasses.replace(snapshot, notes=(*snapshot.notes, *notes))
    return snapshot, dataclasses.replace(
        run.spec,
        name=name,
        snapshot=snapshot.digest,
        blobs=snapshot.blobs,
        snapshot_bytes=snapshot.size_bytes,
        image=image,
        recipe=recipe,
    )


def handle(
    backend: Backend,
    ref: JobRef,
    spec: JobSpec,
    key: bytes | None,
    *,
    targets: weights.Targets | None = None,
    originals: References | None = None,
) -> Job[Any]:
    """A new handle of a job, which `known` gives from now on while it is referenced.

    Args:
        backend: The job's.
        ref: The job's reference.
        spec: The job's specification.
        key: The job's secret; None where this process must not load results.
        targets: The notebook's own model, optimizer and scheduler, which the trained weights go into.
        originals: The notebook's own objects, by which results refer to them.
    """
    outcomes = OutcomeReader(
        ref=str(ref), spec=spec, files=records.files(ref.record_name), key=key, store=FolderStore(records.blobs_dir()),
        originals=originals, fetch=functools.partial(backend.fetch, ref),
    )  # fmt: skip
    job: Job[Any] = Job(
        backend=backend, ref=ref, spec=spec, outcomes=outcomes, targets=targets, display=live.show,
        again=functools.partial(_again, backend), track=tracking.again,
    )  # fmt: skip
    inside(job).after_wait.append(live.Pictures(records.files(ref.record_name).events).show)
    with _jobs_lock:
        _jobs[str(ref)] = job
    return job


def known(ref: JobRef) -> Job[Any] | None:
    """The handle that this process already has."""
    with _jobs_lock:
        return _jobs.get(str(ref))


def _again(backend: Backend, job: Job[Any]) -> Job[Any]:
    """Submit the same call as a new job."""
    key, spec = secrets.token_bytes(32), dataclasses.replace(job.spec, name=_free_name(job.spec.label))
    store = FolderStore(records.blobs_dir())
    with records.keeping_blobs():
        if not all(store.exists(digest) for digest in spec.blobs):
            raise BackendError(f"The snapshot of {job.ref} is not on this machine. Make the call again in a notebook")
        spec = backend.prepare(spec, submit=True)
        ref = backend.submit(spec, key)
    _say_started(ref, spec)
    return handle(backend, ref, spec, key, targets=inside(job).targets)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - beside the cell's own output, as pip's words are


def _say_started(ref: JobRef, spec: JobSpec) -> None:
    """A script would be silent until its first rank speaks; a notebook shows the job."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        ranks = spec.topology.number_of_processes
        say(f"{ref} starts on {ranks} rank{'' if ranks == 1 else 's'}")


def _free_name(label: str) -> str:
    while True:
        suffix = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(SUFFIX_LENGTH))
        name = names.make(label, suffix)
        if not records.exists(name):
            return name


def _data_warnings(call: Call, place: str, spec: JobSpec) -> Iterator[str]:
    """Parts of a training's data that are too large to send, or are not sent."""
    if spec.kind != "training" or place == "local":
        return
    for argument in ("train_data_loader", "eval_data_loader"):
        loader = call.kwargs[argument]
        if loader is None:
            continue
        found = datasets.examine(loader.dataset)
        missing = datasets.uncovered(found.paths, [volume.mount_path for volume in spec.volumes])
        where = "Kubernetes" if place == "kubernetes" else "Docker"
        remedy = f'on=kd.{where}(volumes={{"/data": ...}})'
        if missing:
            more = f" and {len(missing) - _SHOWN_PATHS} more" if len(missing) > _SHOWN_PATHS else ""
            yield (
                f"{argument}: its dataset refers to files of this machine, {', '.join(missing[:_SHOWN_PATHS])}{more}, "
                f"which the processes will not see. Put them on a volume that is mounted at the same path: {remedy}"
            )
        if found.memory_bytes > _LARGE_BYTES:
            yield (
                f"{argument}: its dataset holds {found.memory_bytes / 1e6:.0f} MB in memory, which are sent to each of "
                f"{spec.topology.number_of_pods} pods. Put the data on a volume, and read it there: {remedy}"
            )


def _disk_warnings() -> Iterator[str]:
    size = records.blobs_size()
    if size > records.BLOBS_WARNING_BYTES:
        yield (
            f"Snapshots of old jobs take {size / _GIB:.0f} GiB in {records.blobs_dir()}. `kale-dist delete --finished` "
            "removes the jobs that have ended, and with them what no other job needs"
        )
