"""Starts a checked call as a job: its agent's start in the background, snapshot, specification, plan, submission.

When `start` returns, the job is submitted; its ranks may not have started yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import secrets
import string
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from kale_dist.calls.request import Call, Function
from kale_dist.errors import BackendError, KaleDistError, SnapshotError, log, users_line, warn
from kale_dist.job import call_arguments, interrupts, records, tracking, weights
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.handle import Job, inside
from kale_dist.job.live_job import LiveJob
from kale_dist.job.outcomes import OutcomeReader
from kale_dist.job.spec import names
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.notebook import live
from kale_dist.snapshot import datasets, unpicklable
from kale_dist.snapshot.capture import Snapshot, capture
from kale_dist.snapshot.reducers import References
from kale_dist.wire.blobs import FolderStore, Store, map_file
from kale_dist.wording import listed
from kale_dist.worker.training.settings import Training

SUFFIX_LENGTH = 5
_GIB = 1 << 30
_LARGE_BYTES = 100_000_000
_SHOWN_PATHS = 2

_jobs: weakref.WeakValueDictionary[str, Job[Any]] = weakref.WeakValueDictionary()
"""Reference to the handle that this process already has, which knows the notebook's own objects."""
_jobs_lock = threading.Lock()

_runs_of_cells: weakref.WeakKeyDictionary[Job[Any], tuple[tuple[str, int], int]] = weakref.WeakKeyDictionary()
"""The line of a notebook that started each job, with the number of the cell's run."""


def start(call: Call) -> Job[Any]:
    """Snapshot and submit.

    Args:
        call: What is to run, where and how.

    Raises:
        JobExistsError: The name is taken.
        SnapshotError: Something cannot be sent to other processes.
        StoreError: The disk is full.
        BackendError: The backend refused.
    """
    what, name, backend = call.what, call.request.name, call.backend
    if name is not None and records.exists(JobRef(backend.name, name).record_name):
        raise records.exists_error(name)
    backend.warm_up()
    params: dict[str, Any] = {}
    if isinstance(what, Training):
        resumed = call.resume
        restored = (resumed.origin, resumed.options, resumed.schedule) if resumed else ()
        params = call_arguments.of_training(what, *restored)
    key = secrets.token_bytes(32)
    with records.keeping_blobs():
        store = FolderStore(records.blobs_dir())
        snapshot, spec, notes = specify(call, name or _free_name(call.request.label), store, key)
        for note in call.notes:
            log(note)
        # Before the submission: if warnings are errors, no job is submitted without a handle.
        data = _data_warnings(what, backend.name, spec) if isinstance(what, Training) else ()
        for warning in (*call.warnings, *snapshot.notes, *notes, *data, *_disk_warnings()):
            warn(warning)
        targets: weights.Targets | None = None
        if isinstance(what, Training):
            targets = weights.of_training(what, snapshot.origin)
        elif call.request.kind != "live":
            targets = weights.of_function(what.fn, what.args, what.kwargs, snapshot.origin)
        ref = backend.submit(spec, key)
    with interrupts.passing_on(str(ref), functools.partial(backend.cancel, ref)):
        records.sync(ref.record_name)
        _log_started(ref, spec)
        _log_what_runs(targets)
        job = handle(backend, ref, spec, key, targets=targets, originals=snapshot.originals)
        if (run := interrupts.running_cell()) is not None:
            _runs_of_cells[job] = users_line(), run
        # Another process may have deleted the job by now.
        with contextlib.suppress(OSError):
            inside(job).files.arguments.write_text(json.dumps(params, default=str))
        tracking.begin(job, call.track, call_arguments.for_trackers(params))
        return job


def specify(call: Call, name: str, store: Store, key: bytes | None) -> tuple[Snapshot, JobSpec, tuple[str, ...]]:
    """Take a call's snapshot, complete its job's specification, and return both with notes for the user on its image.

    Args:
        call: What is to run, where and how.
        name: The job's.
        store: Where the snapshot's bytes go.
        key: The job's secret; None where no submission follows (see `Backend.settle`): then its own secrets are left out.

    Raises:
        SnapshotError: Something cannot be sent to other processes.
        ConfigError: The place leaves something open that only the user can settle.
        BackendError: The job could not run there.
    """
    request, backend = call.request, call.backend
    processes = request.topology.number_of_processes
    if isinstance(call.what, Function) and processes > 1:
        what = call.what
        unpicklable.check_of_one_process(unpicklable.roots_of_call(what.fn, what.args, dict(what.kwargs)))
    snapshot = _capture(call.what, request.label, store)
    snapshot.check_counts(request.label, processes)
    if snapshot.compiled and backend.name != "local" and call.here is None:
        raise SnapshotError(
            f"{request.label} uses {snapshot.compiled[0]}, a compiled module of your own, which need not run "
            f"anywhere but on this machine. Make it a package in the image, or one that is installed here with packages='here', or use on='local'"
        )
    image, recipe = request.image, request.recipe
    notes: tuple[str, ...] = ()
    if recipe is not None:
        from kale_dist.image import for_job

        imports = snapshot.imports if call.auto_packages else None
        recipe, notes = for_job.freeze(recipe, store, imports=imports, log=for_job.log)
        if not recipe.adds_something:
            image, recipe = recipe.base, None
    settled = backend.settle(request, name=name, image=image, recipe=recipe, submit=key is not None)
    spec = JobSpec.complete(
        settled, key, snapshot=snapshot.digest, blobs=snapshot.blobs, snapshot_bytes=snapshot.size_bytes
    )
    if call.here is not None:
        from kale_dist.image import here

        offer, more = here.offer(here.find(snapshot.imports, call.here), store, packs=key is not None)
        spec, notes = dataclasses.replace(spec, offer=offer), (*notes, *more)
        log(here.describe(spec.image, offer))
    return snapshot, spec if call.resume is None else _resuming(spec, call.resume.path, store), notes


def _resuming(spec: JobSpec, checkpoint: pathlib.Path, store: Store) -> JobSpec:
    """The specification of a job that resumes from a checkpoint, which becomes one of its blobs."""
    data = map_file(checkpoint)
    digest = store.put([data])
    blobs = (*(blob for blob in spec.blobs if blob != spec.resume), digest)
    return dataclasses.replace(spec, blobs=blobs, resume=digest, snapshot_bytes=spec.snapshot_bytes + len(data))


def _capture(what: Training | Function, label: str, store: Store) -> Snapshot:
    if isinstance(what, Function):
        return capture(what.fn, what.args, dict(what.kwargs), store=store, label=label, script=what.script)
    # Its import takes long, and so begins after the agent's start.
    from kale_dist.worker.training import loop

    return capture(loop.train, (what,), {}, store=store, label=label, roots=what.arguments(), own_devices=True)


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
        key: The job's secret; None where this process must not load results, or show what runs in a page.
        targets: The notebook's own model, optimizer and scheduler, which the trained weights go into.
        originals: The notebook's own objects, by which results refer to them.
    """
    outcomes = OutcomeReader(
        ref=str(ref), spec=spec, files=records.files(ref.record_name), key=key, store=FolderStore(records.blobs_dir()),
        originals=originals, fetch=functools.partial(backend.fetch, ref),
    )  # fmt: skip
    job = (LiveJob if spec.kind == "live" else Job)(
        backend=backend, ref=ref, spec=spec, outcomes=outcomes, targets=targets, display=live.show,
        again=functools.partial(_again, backend), track=tracking.again,
    )  # fmt: skip
    pictures = live.Pictures(records.files(ref.record_name).events, is_own=key is not None)
    inside(job).after_wait.append(pictures.show)
    with _jobs_lock:
        _jobs[str(ref)] = job
    return job


def known(ref: JobRef) -> Job[Any] | None:
    """The handle that this process already has."""
    with _jobs_lock:
        return _jobs.get(str(ref))


def _again(backend: Backend, job: Job[Any], checkpoint: pathlib.Path | None) -> Job[Any]:
    """Submit the same call as a new job, which resumes from a checkpoint if one is given."""
    key, store, old_key = secrets.token_bytes(32), FolderStore(records.blobs_dir()), inside(job).key
    job.spec.check_version(job.ref)
    if old_key is None and job.spec.sealed:
        problem = f"Variables of {job.ref} are sealed with its key, which this process does not have"
        raise BackendError(f"{problem}. Make the call again in a notebook")
    old = job.spec if old_key is None else job.spec.opened(old_key)
    with records.keeping_blobs():
        if not all(store.exists(digest) for digest in (*old.blobs, *old.offer.blobs)):
            raise BackendError(f"The snapshot of {job.ref} is not on this machine. Make the call again in a notebook")
        name = _free_name(old.label)
        settled = backend.settle(old, name=name, image=old.image, recipe=old.recipe, submit=True)
        spec = JobSpec.complete(
            settled,
            key,
            snapshot=old.snapshot,
            blobs=old.blobs,
            snapshot_bytes=old.snapshot_bytes,
            resume=old.resume,
            offer=old.offer,
        )
        spec = spec if checkpoint is None else _resuming(spec, checkpoint, store)
        ref = backend.submit(spec, key)
    with interrupts.passing_on(str(ref), functools.partial(backend.cancel, ref)):
        records.sync(ref.record_name)
        _log_started(ref, spec)
        with contextlib.suppress(OSError, ValueError):
            given = inside(job).files.arguments.read_text()
            if checkpoint is not None:
                given = json.dumps(json.loads(given) | {"resume_from": job.ref})
            records.files(ref.record_name).arguments.write_text(given)
        return handle(backend, ref, spec, key, targets=inside(job).targets)


def _log_started(ref: JobRef, spec: JobSpec) -> None:
    """A script would be silent until its first rank speaks; a notebook shows the job."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        ranks = spec.topology.number_of_processes
        log(f"{ref} starts on {ranks} rank{'' if ranks == 1 else 's'}")


def _log_what_runs(targets: weights.Targets | None) -> None:
    """Name the jobs that still run and that the user may think of as replaced: those of the same model or the same cell."""
    run, model = interrupts.running_cell(), targets.model if targets is not None else None
    with _jobs_lock:
        known_jobs = list(_jobs.values())
    same_model, same_cell = [], []
    for job in known_jobs:
        mine, (line, number) = inside(job).targets, _runs_of_cells.get(job, (None, run))
        with contextlib.suppress(KaleDistError):
            if mine is not None and model is not None and mine.model is model and not job.done():
                same_model.append(job.ref)
            # A loop of one cell starts several jobs on purpose.
            elif number != run and line == users_line() and not job.done():
                same_cell.append(job.ref)
    for refs, what in ((same_model, "the same model"), (same_cell, "this cell's last run")):
        if refs:
            log(f"A job of {what} still runs, too: {', '.join(refs)}. To cancel it: kd.attach('{refs[0]}').cancel()")


def _free_name(label: str) -> str:
    while True:
        suffix = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(SUFFIX_LENGTH))
        name = names.make(label, suffix)
        if not records.exists(name):
            return name


def _data_warnings(training: Training, place: str, spec: JobSpec) -> Iterator[str]:
    """Parts of a training's data that are too large to send, or are not sent."""
    if place == "local":
        return
    for argument in ("train_data_loader", "eval_data_loader"):
        loader = getattr(training, argument)
        if loader is None:
            continue
        found = datasets.examine(loader.dataset)
        missing = datasets.uncovered(found.paths, [volume.mount_path for volume in spec.volumes])
        where = "Kubernetes" if place == "kubernetes" else "Docker"
        remedy = f'on=kd.{where}(volumes={{"/data": ...}})'
        if missing:
            yield (
                f"{argument}: its dataset refers to files of this machine, {listed(missing, _SHOWN_PATHS)}, "
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
