"""The verbs: they put the steps of a call in order, and only that.

Checks, then the agent's start in the background, then the snapshot, specification, plan and submission. When a call
returns, the snapshot is complete and nothing has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import secrets
import string
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kale_dist import backends, checks, names, overrides, records, training_checks, weights
from kale_dist.backends.base import Adopts, Backend, Fetches, JobRef, Plan, Prepares, Selects, WarmsUp
from kale_dist.blobs import FolderStore, MemoryStore, Store
from kale_dist.checks import Machine, Run
from kale_dist.errors import BackendError, ConfigError, JobNotFoundError, SnapshotError, warn
from kale_dist.job import Job
from kale_dist.outcomes import OutcomeReader
from kale_dist.recipe import Recipe
from kale_dist.snapshot.capture import Captured, Originals, capture
from kale_dist.spec import ClusterOptions, JobSpec, Resources, Volume
from kale_dist.strategies import AllReduce, Strategy

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from kale_dist.training.result import TrainingResult

R = TypeVar("R")

_SUFFIX_LENGTH = 5
_GIB = 1 << 30

_jobs: weakref.WeakValueDictionary[str, Job[Any]] = weakref.WeakValueDictionary()
"""Reference to the handle that this process already has, which knows the notebook's own objects."""
_jobs_lock = threading.Lock()


def distribute(
    model: torch.nn.Module,
    train_data_loader: DataLoader[Any],
    criterion: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer,
    train_step: Callable[..., Any] | None = None,
    *,
    eval_data_loader: DataLoader[Any] | None = None,
    eval_step: Callable[..., Any] | None = None,
    epochs: int = 1,
    number_of_processes: int | None = None,
    cuda: bool = False,
    train_args: Any = None,
    eval_args: Any = None,
    scheduler: Any = None,
    accumulate: int = 1,
    precision: str | None = None,
    clip_norm: float | None = None,
    split_batches: bool = False,
    shard: bool = True,
    eval_sharding: str = "samples",
    checkpoint_every: int | None = 1,
    seed: int | None = None,
    name: str | None = None,
    on: str | Backend = "local",
    image: str | Recipe | None = None,
    packages: Sequence[str] | Literal["auto"] | None = None,
    requirements: str | os.PathLike[str] | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    processes_per_pod: int | None = None,
    volumes: Mapping[str, str] | Sequence[Volume] | None = None,
    store: str | None = None,
    cluster: ClusterOptions | Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    timeout_s: float | None = None,
    stall_warn_s: float | None = 300.0,
    stall_timeout_s: float | None = 1800.0,
    max_restarts: int = 0,
    detach: bool = False,
    strategy: Strategy | None = None,
) -> Job[TrainingResult]:
    """Train a model on several processes.

    Returns when everything the training needs is captured and before anything has started: later cells cannot change
    the job.

    Args:
        model: The module to train. It gets the trained weights after the job's success, by `job.wait()`,
            `job.result()` or `job.model`.
        train_data_loader: A DataLoader; its samples are shared out to the processes. `batch_size` is per process.
        criterion: The loss, such as `nn.CrossEntropyLoss()`. None if a `train_step` needs none.
        optimizer: Over the model's parameters. Its state goes with it and comes back.
        train_step: `train_step(model, data_loader, criterion, optimizer, device, args)` trains one epoch and returns a
            number or a dict of numbers, or nothing. It may use anything that the notebook defines. Left out: the usual
            supervised loop.
        eval_data_loader: Evaluated after each epoch.
        eval_step: `eval_step(model, data_loader, criterion, device, args)`, as `train_step`. Left out: loss, and
            accuracy for classes.
        epochs: How often the training data is passed over.
        number_of_processes: None: on this machine as many as there are GPUs (with `cuda`) or cores; elsewhere two, or
            those of one pod if `processes_per_pod` is more.
        cuda: Whether each process gets a GPU.
        train_args: Anything; given to `train_step` as `args`.
        eval_args: Anything; given to `eval_step` as `args`.
        scheduler: A learning-rate scheduler of this optimizer, stepped after each epoch unless `train_step` does it.
        accumulate: Batches whose gradients are gathered for one step of the optimizer.
        precision: `"bf16"` or `"fp16"` for mixed precision; None for the model's own.
        clip_norm: Gradients are scaled down to this norm before each step of the optimizer.
        split_batches: Whether `batch_size` is that of all processes together.
        shard: False for an iterable dataset that shares itself out.
        eval_sharding: `"samples"`: each process evaluates its share. `"none"`: each evaluates all, for metrics that are
            not means, such as F1.
        checkpoint_every: Epochs between checkpoints; None for none.
        seed: Of rank 0; rank r gets `seed + r`. None: a random one.
        name: The job's name; None for one made from the model's class.
        on: The backend: `"local"`, `"docker"` or `"kubernetes"`.
        image: On Docker and a cluster, the containers' image: any with PyTorch and this Python's minor version, or a
            `Recipe` of one, which is made if it is not there. None: the configured one; on a cluster else that of the
            notebook's own pod.
        packages: On Docker and a cluster, what the image is to have beyond that: requirements such as
            `["einops==0.8"]`, or `"auto"` for the packages that the call imports, as they are installed here.
        requirements: The same as a requirements file: its path, or its text.
        resources: What each process asks of a cluster, or gets of a Docker engine: `Resources`, or a dict such as
            `{"cpu": 2, "memory_gib": 4, "gpus": 1, "rdma/hca": 1}`. Texts with a unit of Kubernetes are `memory="2Gi"`
            and `cpu="500m"`. On this machine processes share what there is.
        processes_per_pod: Processes in one pod of a cluster, or one container of Docker; None for 1.
        volumes: Folders that the processes need, as `{path in the process: folder}`. On Docker a value without a `/`,
            `.` or `~` in front is a volume of the engine. On a cluster the values are
            `"claim"`, `"pvc://claim/folder"`, `"hostpath:///folder"`, `"configmap://name"`, `"secret://name"` or
            `"emptydir://"`, read-only with `":ro"` at the end; or a list of `Volume` objects.
        store: On a cluster, where bytes travel that do not fit into the request: `"pvc://claim/folder"`, or a URL that
            fsspec opens. None: the notebook sends and fetches them itself.
        cluster: On a cluster, where and how pods run: `ClusterOptions`, or a dict of its fields.
        environment: Variables to set in the processes.
        threads: Threads of a process; None for its fair share of the cores.
        timeout_s: Seconds from the start of the processes after which the job fails; None for no limit.
        stall_warn_s: Seconds without progress after which the stacks of all processes go into the log.
        stall_timeout_s: Seconds without progress after which the job fails; counted from the first finished step.
        max_restarts: How often all processes are started again, from the last checkpoint, after one was lost (a signal,
            an exit, a stall). Never after an exception, nor for lack of memory.
        detach: Whether the job runs on when the notebook's kernel ends.
        strategy: How gradients are exchanged; None for `AllReduce()`.

    Returns:
        The job. `job.result()` is rank 0's `TrainingResult`.

    Raises:
        ConfigError: An argument is wrong; nothing was read, written or started.
        JobExistsError: The name is taken.
        SnapshotError: Something cannot be sent to other processes; the message names the path to it.
        StoreError: The disk is full.
        BackendError: The backend refused.
    """
    return _start(*_training_call(locals()))


def launch(
    fn: Callable[..., R],
    *args: Any,
    number_of_processes: int | None = None,
    cuda: bool = False,
    name: str | None = None,
    on: str | Backend = "local",
    image: str | Recipe | None = None,
    packages: Sequence[str] | Literal["auto"] | None = None,
    requirements: str | os.PathLike[str] | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    processes_per_pod: int | None = None,
    volumes: Mapping[str, str] | Sequence[Volume] | None = None,
    store: str | None = None,
    cluster: ClusterOptions | Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    stall_warn_s: float | None = 300.0,
    stall_timeout_s: float | None = None,
    max_restarts: int = 0,
    detach: bool = False,
    **kwargs: Any,
) -> Job[R]:
    """Call a function on several processes that can talk to each other through `torch.distributed`.

    The names of the arguments below are launch's own; all others go to the function. A function that has an argument
    of one of these names gets it by `functools.partial(fn, name=...)`.

    Args:
        fn: Any function; the process group is ready when it is called.
        *args: Its positional arguments.
        number_of_processes: None: on this machine as many as there are GPUs (with `cuda`) or cores; elsewhere two, or
            those of one pod if `processes_per_pod` is more.
        cuda: Whether each process gets a GPU.
        name: The job's name; None for one made from the function's.
        on: The backend: `"local"`, `"docker"` or `"kubernetes"`.
        image: On Docker and a cluster, the containers' image: any with PyTorch and this Python's minor version, or a
            `Recipe` of one, which is made if it is not there. None: the configured one; on a cluster else that of the
            notebook's own pod.
        packages: On Docker and a cluster, what the image is to have beyond that: requirements such as
            `["einops==0.8"]`, or `"auto"` for the packages that the call imports, as they are installed here.
        requirements: The same as a requirements file: its path, or its text.
        resources: What each process asks of a cluster, or gets of a Docker engine: `Resources`, or a dict such as
            `{"cpu": 2, "memory_gib": 4, "gpus": 1, "rdma/hca": 1}`. Texts with a unit of Kubernetes are `memory="2Gi"`
            and `cpu="500m"`. On this machine processes share what there is.
        processes_per_pod: Processes in one pod of a cluster, or one container of Docker; None for 1.
        volumes: Folders that the processes need, as `{path in the process: folder}`. On Docker a value without a `/`,
            `.` or `~` in front is a volume of the engine. On a cluster the values are
            `"claim"`, `"pvc://claim/folder"`, `"hostpath:///folder"`, `"configmap://name"`, `"secret://name"` or
            `"emptydir://"`, read-only with `":ro"` at the end; or a list of `Volume` objects.
        store: On a cluster, where bytes travel that do not fit into the request: `"pvc://claim/folder"`, or a URL that
            fsspec opens. None: the notebook sends and fetches them itself.
        cluster: On a cluster, where and how pods run: `ClusterOptions`, or a dict of its fields.
        environment: Variables to set in the processes.
        threads: Threads of a process; None for its fair share of the cores.
        seed: Of rank 0; rank r gets `seed + r`. None: a random one.
        timeout_s: Seconds from the start of the processes after which the job fails; None for no limit.
        stall_warn_s: Seconds without progress after which the stacks of all processes go into the log.
        stall_timeout_s: Seconds without progress after which the job fails; None for never.
        max_restarts: How often the function is called again on all processes after one was lost (a signal, an exit, a
            stall); `context().attempt` tells. Never after an exception, nor for lack of memory.
        detach: Whether the job runs on when the notebook's kernel ends.
        **kwargs: The function's keyword arguments.

    Returns:
        The job. `job.result()` is what the function returned on rank 0, `job.results()` on every rank.

    Raises:
        ConfigError: An argument is wrong; nothing was read, written or started.
        JobExistsError: The name is taken.
        SnapshotError: Something cannot be sent to other processes; the message names the path to it.
        StoreError: The disk is full.
        BackendError: The backend refused.
    """
    return _start(*_function_call(locals()))


def render(*args: Any, **kwargs: Any) -> Plan:
    """What `distribute` or `launch` would submit for the same arguments. Writes nothing and starts nothing.

    Args:
        *args: Those of `distribute` if the first is a model, else those of `launch`.
        **kwargs: Likewise. Without `name`, the name ends in `xxxxx` where a call would draw letters.

    Returns:
        The plan; `print` shows what would run.

    Raises:
        ConfigError: As the call would.
        SnapshotError: As the call would.
    """
    call, run = _checked(args, kwargs)
    name = run.name or names.make(call.label, "x" * _SUFFIX_LENGTH)
    _, spec = _capture(call, run, name, MemoryStore())
    if isinstance(run.backend, Prepares):
        spec = run.backend.prepare(spec, submit=False)
    return run.backend.plan(spec)


def check(*args: Any, **kwargs: Any) -> None:
    """Check the arguments of `distribute` or `launch` as the call would, and do nothing.

    Args:
        *args: Those of `distribute` if the first is a model, else those of `launch`.
        **kwargs: Likewise.

    Raises:
        ConfigError: As the call would.
    """
    _checked(args, kwargs)


def _checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call, Run]:
    """The arguments of whichever verb they are for, checked."""
    training = "model" in kwargs or (bool(args) and checks.is_model(args[0]))
    verb = distribute if training else launch
    try:
        bound = inspect.signature(verb).bind(*args, **kwargs)
    except TypeError as error:
        remedy = f"Pass what you would pass to {verb.__name__}()"
        raise ConfigError("render", f"the arguments are incomplete ({error})", remedy) from None
    bound.apply_defaults()
    return (_training_call if training else _function_call)(bound.arguments)


def attach(ref: str, *, trust: bool = False) -> Job[Any]:
    """Find a job again: after a restart of the kernel, from any other process of the same user, from another machine.

    Args:
        ref: A job's reference, such as `local://train-net-x3k9f`, `docker://train-net-x3k9f` or
            `kubernetes://namespace/train-net-x3k9f`, or the name of a local job.
        trust: Whether results may be loaded although another user of the cluster submitted the job: to load a result
            can run that user's code.

    Returns:
        The handle that this process already has, if it has one, with the notebook's own model; else a new one, whose
        model is built from the snapshot.

    Raises:
        ConfigError: This is no reference.
        JobNotFoundError: There is no such job.
    """
    if not isinstance(ref, str):
        raise ConfigError("ref", f"{ref!r} is not text", "Write it as 'local://name'; see kale_dist.jobs()")
    parsed = JobRef.parse(ref)
    backend = _named_backend("ref", parsed.backend)
    if isinstance(backend, Adopts):
        parsed = backend.adopt(parsed, trust=trust)
    record = records.read(parsed.record_name)
    key = records.read_key(parsed.record_name)
    with _jobs_lock:
        known = _jobs.get(str(parsed))
    if known is not None and known.has_key(key):
        return known
    return _handle(backend, parsed, record.spec, key)


def jobs(on: str = "local", *, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Job[Any]]:
    """All jobs there are, oldest first.

    Args:
        on: The backend. `"local"`: those of this user on this machine.
        namespace: On a cluster, of this namespace; None for the configured one, `"*"` for all.
        labels: On a cluster, those that have all of these labels.

    Raises:
        ConfigError: There is no such backend, it has no namespaces and labels, or these are none.
    """
    backend = _named_backend("on", on)
    if isinstance(backend, Selects):
        listed = backend.select(namespace=namespace, labels=labels)
    elif namespace is not None or labels is not None:
        raise ConfigError("namespace" if namespace is not None else "labels", f"{on!r} has none", "Leave it out")
    else:
        listed = backend.list()
    found = []
    for ref in listed:
        # Another process may delete a job between the list and the look.
        with contextlib.suppress(JobNotFoundError):
            found.append(attach(str(ref)))
    return found


def _named_backend(argument: str, name: Any) -> Backend:
    if name not in backends.NAMES:
        near = checks.closest(name, backends.NAMES)
        example = "Write it as 'local://name'" if argument == "ref" else "Use one of: " + ", ".join(backends.NAMES)
        raise ConfigError(argument, f"there is no backend {name!r}", f"{near}{example}")
    return backends.get(name)


# -- inside ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What is to run on every rank."""

    fn: Callable[..., Any] | None
    """None for the training loop: its import takes long, and so begins after the agent's start."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    label: str
    kind: str
    strategy: Strategy


_TRAINING_NAMES = (
    "model", "train_data_loader", "criterion", "optimizer", "train_step", "eval_data_loader", "eval_step", "epochs",
    "cuda", "train_args", "eval_args", "scheduler", "accumulate", "precision", "clip_norm", "split_batches", "shard",
    "eval_sharding", "checkpoint_every", "strategy", "seed",
)  # fmt: skip
"""Arguments of `distribute` that go to the training loop."""


def _training_call(given: Mapping[str, Any]) -> tuple[_Call, Run]:
    """The arguments of `distribute`, checked."""
    given = overrides.apply(given)
    training_checks.check(given)
    run = checks.check_run(_machine, given)
    strategy = given["strategy"] or AllReduce()
    kwargs = {name: given[name] for name in _TRAINING_NAMES} | {"strategy": strategy}
    label = f"train {type(given['model']).__name__}"
    return _Call(fn=None, args=(), kwargs=kwargs, label=label, kind="training", strategy=strategy), run


def _function_call(given: Mapping[str, Any]) -> tuple[_Call, Run]:
    """The arguments of `launch`, checked."""
    given = overrides.apply(given)
    fn, args, kwargs = given["fn"], given["args"], given["kwargs"]
    checks.check_function(fn, args, kwargs)
    run = checks.check_run(_machine, given)
    return _Call(fn=fn, args=args, kwargs=kwargs, label=checks.title(fn), kind="call", strategy=AllReduce()), run


def _training_loop() -> Callable[..., TrainingResult]:
    from kale_dist.training import loop

    return loop.train


def _machine(cuda: bool) -> Machine:  # noqa: FBT001 - passed on as a callback
    gpus = 0
    if cuda:
        import torch

        gpus = torch.cuda.device_count()
    return Machine(cores=len(os.sched_getaffinity(0)), gpus=gpus)


def _start(call: _Call, run: Run) -> Job[Any]:
    if run.name is not None and records.exists(JobRef(run.backend.name, run.name).record_name):
        raise records.exists_error(run.name)
    if isinstance(run.backend, WarmsUp):
        run.backend.warm_up()
    key = secrets.token_bytes(32)
    with records.keeping_blobs():
        captured, spec = _capture(call, run, run.name or _free_name(call.label), FolderStore(records.blobs_dir()))
        if isinstance(run.backend, Prepares):
            spec = run.backend.prepare(spec, submit=True)
        # Before the submission: whoever turns warnings into errors gets no job that nobody holds.
        for warning in (*run.warnings, *captured.snapshot.notes, *_disk_warnings()):
            warn(warning)
        given = call.kwargs
        targets = None
        if call.kind == "training":
            targets = weights.remember(given["model"], given["optimizer"], given["scheduler"])
        ref = run.backend.submit(run.backend.plan(spec), key)
    return _handle(run.backend, ref, spec, key, targets=targets, originals=captured.originals)


def _capture(call: _Call, run: Run, name: str, store: Store) -> tuple[Captured, JobSpec]:
    captured = capture(call.fn or _training_loop(), call.args, dict(call.kwargs), store=store, label=call.label)
    if captured.snapshot.compiled and run.backend.name != "local":
        raise SnapshotError(
            f"{call.label} uses {captured.snapshot.compiled[0]}, a compiled module of your own, which need not run "
            f"anywhere but on this machine. Make it a package in the image, or use on='local'"
        )
    image, recipe = run.image, run.recipe
    if recipe is not None:
        from kale_dist.image.settle import settle

        imports = captured.snapshot.imports if run.auto_packages else None
        settled = settle(recipe, store, imports=imports, say=_say)
        image, recipe = settled.image, settled.recipe
        notes = (*captured.snapshot.notes, *settled.notes)
        captured = dataclasses.replace(captured, snapshot=dataclasses.replace(captured.snapshot, notes=notes))
    return captured, JobSpec(
        name=name,
        label=call.label,
        kind=call.kind,
        snapshot=captured.snapshot.digest,
        blobs=captured.snapshot.blobs,
        snapshot_bytes=captured.snapshot.size_bytes,
        topology=run.topology,
        cuda=run.cuda,
        threads=run.threads,
        seed=run.seed,
        volumes=run.volumes,
        environment=run.environment,
        image=image,
        recipe=recipe,
        resources=run.resources,
        store=run.store,
        cluster=run.cluster,
        strategy=call.strategy,
        policy=run.policy,
    )


def _handle(
    backend: Backend,
    ref: JobRef,
    spec: JobSpec,
    key: bytes | None,
    *,
    targets: weights.Targets | None = None,
    originals: Originals | None = None,
) -> Job[Any]:
    outcomes = OutcomeReader(
        ref=str(ref), spec=spec, files=records.files(ref.record_name), key=key, store=FolderStore(records.blobs_dir()),
        originals=originals, fetch=functools.partial(backend.fetch, ref) if isinstance(backend, Fetches) else None,
    )  # fmt: skip
    job: Job[Any] = Job(
        backend=backend, ref=ref, spec=spec, outcomes=outcomes, targets=targets, display=_show,
        again=functools.partial(_again, backend),
    )  # fmt: skip
    with _jobs_lock:
        _jobs[str(ref)] = job
    return job


def _again(backend: Backend, job: Job[Any]) -> Job[Any]:
    """Submit the same call as a new job."""
    key, spec = secrets.token_bytes(32), dataclasses.replace(job.spec, name=_free_name(job.spec.label))
    store = FolderStore(records.blobs_dir())
    with records.keeping_blobs():
        if not all(store.exists(digest) for digest in spec.blobs):
            raise BackendError(f"The snapshot of {job.ref} is not on this machine. Make the call again in a notebook")
        if isinstance(backend, Prepares):
            spec = backend.prepare(spec, submit=True)
        ref = backend.submit(backend.plan(spec), key)
    return _handle(backend, ref, spec, key, targets=job.targets)


def _show(job: Job[Any]) -> None:
    from kale_dist.notebook import live

    live.show(job)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - beside the cell's own output, as pip's words are


def _free_name(label: str) -> str:
    while True:
        suffix = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(_SUFFIX_LENGTH))
        name = names.make(label, suffix)
        if not records.exists(name):
            return name


def _disk_warnings() -> Iterator[str]:
    size = records.blobs_size()
    if size > records.BLOBS_WARNING_BYTES:
        yield (
            f"Snapshots of old jobs take {size / _GIB:.0f} GiB in {records.blobs_dir()}. `kale-dist delete --finished` "
            "removes the jobs that have ended, and with them what no other job needs"
        )
