"""The verbs: each calls the steps of a call in order."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kale_dist import places, strategies
from kale_dist.calls import request, signatures, starting
from kale_dist.calls.options import NAMES, Options, of
from kale_dist.calls.request import Call, Function
from kale_dist.calls.resuming import Earlier, reference_of
from kale_dist.errors import ConfigError, JobNotFoundError, short_refusals
from kale_dist.job import records
from kale_dist.job.backend import Backend, JobRef, Plan
from kale_dist.job.handle import Job, inside
from kale_dist.job.live_job import LiveJob
from kale_dist.job.several import Comparison, Jobs
from kale_dist.job.spec import names
from kale_dist.job.spec.checks import FLAG
from kale_dist.job.spec.place_settings import Kubernetes, Place, word_of
from kale_dist.wire import GRACE_S, STALL_WARN_S
from kale_dist.wire.blobs import MemoryStore
from kale_dist.wording import closest, seconds, show
from kale_dist.worker.training.settings import Training

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from kale_dist.worker.training.result import TrainingResult

R = TypeVar("R")

_IDLE_S = 1800.0
"""After which live ranks elsewhere end, so that pods and GPUs are not held unseen."""


_instead: contextvars.ContextVar[Callable[[Call], Any] | None] = contextvars.ContextVar("_instead", default=None)
"""What a verb does with its call in place of a job; None where it starts one."""


@short_refusals
@signatures.known_words
def distribute(
    model: torch.nn.Module | dict[str, torch.nn.Module] | Callable[[], torch.nn.Module],
    train_data_loader: DataLoader[Any],
    criterion: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | Callable[..., Any] | None = None,
    train_step: Callable[..., Any] | None = None,
    *,
    eval_data_loader: DataLoader[Any] | None = None,
    eval_step: Callable[..., Any] | None = None,
    epochs: int = 1,
    number_of_processes: int | tuple[int, int] | None = None,
    cuda: bool | None = None,
    train_args: Any = None,
    eval_args: Any = None,
    scheduler: Any = None,
    accumulate: int = 1,
    precision: str | None = None,
    clip_norm: float | None = None,
    stop_on_nan: bool = False,
    split_batches: bool = False,
    shard: bool = True,
    eval_sharding: str = "samples",
    checkpoint_every: int | str | None = "auto",
    seed: int | None = None,
    name: str | None = None,
    on: str | Place | Backend | None = None,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    timeout_s: float | None = None,
    stall_warn_s: float | None = STALL_WARN_S,
    stall_timeout_s: float | None = request.STALL_S,
    max_restarts: int | None = None,
    grace_s: float = GRACE_S,
    detach: bool = False,
    track: Any = None,
    strategy: str | strategies.Settings | None = None,
    state: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    save_to: str | os.PathLike[str] | None = None,
    resume_from: Job[Any] | str | os.PathLike[str] | None = None,
) -> Job[TrainingResult]:
    """Train a model on several processes.

    Returns when a snapshot has been taken, before anything has started: later cells do not affect the job.

    Args:
        model: The module to train. It gets the trained weights after the job's success, by `job.wait()`,
            `job.result()` or `job.model`. Several models, as of a GAN: a dict of them, which `train_step` gets. A function or
            class: the processes make the model, and `optimizer` is a function of its parameters, `scheduler` of the optimizer.
        train_data_loader: A DataLoader; its samples are divided among the processes. `batch_size` is that of each process.
        criterion: The loss, such as `nn.CrossEntropyLoss()`. None if `train_step` needs none, or the model makes its loss of
            `labels`.
        optimizer: Needed. Over the model's parameters. Its state goes with it and comes back. Several: a dict of them.
        train_step: `train_step(model, data_loader, criterion, optimizer, device, args)` trains one epoch and returns a
            number or a dict of numbers, or nothing. It may use anything that the notebook defines. Left out: the usual
            supervised loop.
        eval_data_loader: Evaluated after each epoch.
        eval_step: `eval_step(model, data_loader, criterion, device, args)`, as `train_step`. Left out: loss, and
            accuracy for classes.
        epochs: How often the training data is passed over.
        number_of_processes: None: on this machine as many as there are GPUs, or else cores; elsewhere two, or those of
            one pod if `processes_per_pod` is more. On a cluster also a range, such as `(2, 8)`: the job begins with what there
            is, at least 2, continues without pods that go, and grows when more come.
        cuda: Whether each process gets a GPU. None: if there are enough, and a line shows it; in containers, if their
            `resources` have GPUs.
        train_args: Anything; given to `train_step` as `args`.
        eval_args: Anything; given to `eval_step` as `args`.
        scheduler: A learning-rate scheduler of this optimizer, stepped after each epoch unless `train_step` does it.
        accumulate: Batches whose gradients are gathered for one step of the optimizer.
        precision: `"bf16"` or `"fp16"` for mixed precision; None for the model's own.
        clip_norm: Gradients are scaled down to this norm before each step of the optimizer.
        stop_on_nan: Whether the job fails, without a restart, soon after a loss is nan and weights are, too.
        split_batches: Whether `batch_size` is that of all processes together.
        shard: False for an iterable dataset that divides itself among the processes.
        eval_sharding: `"samples"`: each process evaluates its share. `"none"`: each evaluates all, for metrics that are
            not means, such as F1.
        checkpoint_every: `"auto"`: at ends of epochs and within them, for at most 1 % of the time. A number: epochs between
            checkpoints. `"500 steps"`, `"10 min"`: within epochs, too. None for none.
        seed: The seed of rank 0; rank r gets `seed + r`. None: a random one.
        name: The job's name; None for one made from the model's class.
        on: Where: `"local"`, `"docker"` or `"kubernetes"`, with what is configured of it, or `kd.Local()`,
            `kd.Docker(...)` or `kd.Kubernetes(...)`, which name images, resources and volumes. None: the
            configured one, else this machine.
        environment: Variables to set in the processes.
        threads: Threads of a process; None for its fair share of the cores.
        timeout_s: Seconds from the start of the processes after which the job fails; None for no limit.
        stall_warn_s: Seconds without progress after which the stacks of all processes go into the log.
        stall_timeout_s: Seconds without progress after which the job fails; counted from the first finished step.
        max_restarts: How often the job restarts and resumes from its last checkpoint after a process was lost (a signal,
            an exit, a stall), or a GPU or NCCL failed. Not after another exception or out of memory. None: never, and of a
            range of processes 10 times.
        grace_s: Seconds (600 at most) that a last checkpoint may take when the job is cancelled, reaches `timeout_s`, or loses a pod
            that gets SIGTERM.
        detach: Whether a job on this machine keeps running when the notebook's kernel ends. In containers and on a cluster
            all jobs do.
        track: Where metrics are written besides `job.metrics`: `tensorboard`, `mlflow`, `wandb`, settings such as
            `kale_dist.trackers.MLflow(uri=...)`, or a list of them. This process writes, while it runs; `job.track()`
            continues later.
        strategy: How ranks share the training: a word such as `"ddp"`, or an object of `kd.strategies` with settings;
            None for `"ddp"`.
        state: Other objects that a step changes and that come back from rank 0: with a `state_dict` (an EMA model), or
            lists, dicts and sets.
        callbacks: `kd.callbacks.EarlyStopping`, `ModelCheckpoint`, `EMA` or `SWA`, and functions `fn(epoch, metrics, model)`
            that rank 0 calls after each epoch.
        save_to: Where the job itself saves the trained weights, as `torch.save` writes a `state_dict`: a path, `pvc://claim/path`
            on a cluster, or a URL that fsspec opens. They come back all the same. Of a model that ranks make with `fsdp`, a folder.
        resume_from: An earlier job, its name or reference, or the path of a checkpoint: the training continues there, with
            this call's code, ranks, strategy and place. `epochs` counts the earlier ones, too.

    Returns:
        The job. `job.result()` is rank 0's `TrainingResult`.

    Raises:
        ConfigError: An argument is wrong; nothing was read, written or started.
        JobExistsError: The name is taken.
        SnapshotError: Something cannot be sent to other processes; the message names the path to it.
        StoreError: The disk is full.
        BackendError: The backend refused.
    """
    training = of(Training, {**locals(), "strategy": strategies.resolve(strategy)})
    where_and_how = of(Options, locals())
    job: Job[TrainingResult] = _job(request.checked(training, where_and_how, earlier=Earlier.of(resume_from, attach)))
    return job


@short_refusals
@signatures.unambiguous_words
def launch(
    fn: Callable[..., R],
    *args: Any,
    number_of_processes: int | None = None,
    cuda: bool | None = None,
    name: str | None = None,
    on: str | Place | Backend | None = None,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    stall_warn_s: float | None = STALL_WARN_S,
    stall_timeout_s: float | None = None,
    max_restarts: int | None = None,
    grace_s: float = GRACE_S,
    detach: bool = False,
    track: Any = None,
    **kwargs: Any,
) -> Job[R]:
    """Call a function on several processes that can talk to each other through `torch.distributed`.

    The names of the arguments below are launch's own; all others go to the function. If the function has an argument of
    one of these names, too, the call is refused: `functools.partial(fn, seed=5)` passes it to the function.

    Args:
        fn: Any function; the process group is ready when it is called.
        *args: Its positional arguments.
        number_of_processes: As for `distribute`, but no range.
        cuda: Likewise.
        name: The job's name; None for one made from the function's.
        on: As for `distribute`.
        environment: Likewise.
        threads: Likewise.
        seed: Likewise.
        timeout_s: Likewise.
        stall_warn_s: Likewise.
        stall_timeout_s: Seconds without progress (steps, collectives, output) after which the job fails. None: 1,800 for
            several processes with GPUs, else never.
        max_restarts: How often the function is called again on all processes after one was lost (a signal, an exit, a
            stall), or a GPU or NCCL failed; `context().attempt` counts. Not after another exception or out of memory.
        grace_s: Seconds (600 at most) in which processes that are to leave save: by `kd.leaving()`, by the trainer of a package, or in
            a handler of SIGTERM, for which a process that hangs keeps the job from ending. They leave when the job is cancelled, reaches
            `timeout_s`, or loses a pod that gets SIGTERM.
        detach: As for `distribute`.
        track: Likewise.
        **kwargs: The function's keyword arguments.

    Returns:
        The job. `job.result()` is what the function returned on rank 0, `job.results()` on every rank.

    Raises:
        KaleDistError: As for `distribute`.
    """
    signatures.check_function(fn, args, kwargs, launch)
    function = Function(fn=fn, args=args, kwargs=kwargs, label=signatures.title(fn))
    where_and_how = of(Options, locals())
    job: Job[R] = _job(request.checked(function, where_and_how))
    return job


@short_refusals
@signatures.known_words
def live(
    number_of_processes: int | None = None,
    *,
    cuda: bool | None = None,
    name: str | None = None,
    on: str | Place | Backend | None = None,
    environment: Mapping[str, str] | None = None,
    threads: int | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    stall_warn_s: float | None = STALL_WARN_S,
    stall_timeout_s: float | None = None,
    idle: float | str | None = None,
) -> LiveJob:
    """Start ranks that run cells one after another, in the same processes: `job.run(source)`, or `%%distribute` in a notebook.

    Returns at once; the first cell waits for the ranks. Arguments and errors are those of `launch`. `timeout_s` is that of all cells
    together, `stall_warn_s` and `stall_timeout_s` count while a cell runs, and with `idle` (seconds, or text such as `"30 min"`) the
    ranks end when they have run no cell for this long. None: never on this machine, elsewhere after 30 minutes.

    Returns:
        The job. In a `with` statement it stops at the end of the block.
    """
    from kale_dist.worker.rank import live_rank

    is_local = request.where(on)[0].name == "local"
    idle_s = seconds(idle) if idle is not None else None if is_local else _IDLE_S
    if idle is not None and (idle_s is None or idle_s <= 0):
        raise ConfigError("idle", f"{show(idle)} is no time", "Give seconds, or text such as '30 min'")
    function = Function(fn=live_rank.serve, args=(idle_s,), label="live", kind="live")
    where_and_how = of(Options, locals())
    job: LiveJob = _job(request.checked(function, where_and_how))
    return job


@short_refusals
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
    return plan(planned(args, kwargs))


def plan(call: Call) -> Plan:
    """What a checked call would submit; raises as `render` does."""
    name = call.request.name or names.make(call.request.label, "x" * starting.SUFFIX_LENGTH)
    _, spec, _ = starting.specify(call, name, MemoryStore(), None)
    return call.backend.plan(spec)


def check(*args: Any, **kwargs: Any) -> None:
    """Check the arguments of `distribute` or `launch` as the call would, and do nothing.

    Args:
        *args: Those of `distribute` if the first is a model, else those of `launch`.
        **kwargs: Likewise.

    Raises:
        ConfigError: As the call would.
    """
    planned(args, kwargs)


def planned(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """A call of `distribute` or `launch` that is not made, checked."""
    first = args[0] if args else None
    is_training = "model" in kwargs or signatures.is_model(first) or isinstance(first, dict | list | tuple)
    verb: Callable[..., Any] = distribute if is_training else launch
    if is_training:
        signatures.check_words(kwargs, verb)
    try:
        inspect.signature(verb).bind(*args, **kwargs)
    except TypeError as error:
        remedy = f"Pass what you would pass to {verb.__name__}()"
        raise ConfigError("render", f"the arguments are incomplete ({error})", remedy) from None
    found: list[Call] = []
    before = _instead.set(found.append)
    try:
        verb(*args, **kwargs)
    finally:
        _instead.reset(before)
    return found[0]


def _job(call: Call) -> Any:
    """Start the job of a checked call, unless the call alone is asked for."""
    return (_instead.get() or starting.start)(call)


@short_refusals
def attach(ref: str, *, trust: bool = False) -> Job[Any]:
    """Find a job again: after a restart of the kernel, from any other process of the same user, from another machine.

    Args:
        ref: A job's reference, such as `local://train-net-x3k9f`, `docker://train-net-x3k9f` or
            `kubernetes://namespace/train-net-x3k9f`, or the name of a local job.
        trust: Whether results may be loaded of a job whose key is not on this machine: to load a result can run code of the
            person who submitted it.

    Returns:
        The handle that this process already has, if it has one, with the notebook's own model; else a new one, whose
        model is built from the snapshot.

    Raises:
        ConfigError: This is no reference.
        JobNotFoundError: There is no such job.
        ContractError: Another version of this library has submitted it.
    """
    if not isinstance(ref, str):
        raise ConfigError("ref", f"{show(ref)} is not text", "Write it as 'local://name'; see kale_dist.jobs()")
    FLAG("trust", trust)
    job = _found(ref, trust=trust)
    job.spec.check_version(job.ref)
    return job


def _found(ref: str, *, trust: bool | None) -> Job[Any]:
    parsed = JobRef.parse(ref)
    backend = named_backend("ref", parsed.backend)
    parsed = backend.adopt(parsed, trust=trust)
    record = records.read(parsed.record_name)
    key = records.read_key(parsed.record_name)
    known = starting.known(parsed)
    if known is not None and inside(known).key == key:
        return known
    return starting.handle(backend, parsed, record.spec, key)


@short_refusals
def jobs(on: str | Place = "local", *, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Jobs:
    """All jobs there are, oldest first: a list that shows itself as a table.

    Args:
        on: Where: `"local"` (this user's, on this machine), `"docker"`, `"kubernetes"`, or what a call takes as `on`.
        namespace: On a cluster, of this namespace; None for the configured one, `"*"` for all.
        labels: On a cluster, those that have all of these labels.

    Raises:
        ConfigError: There is no such backend, it has no namespaces and labels, or these are none.
    """
    if isinstance(on, Kubernetes):
        namespace = namespace or on.namespace or None
    backend = named_backend("on", word_of(on) if isinstance(on, Place) else on)
    if namespace is None and labels in (None, {}):
        listed = backend.list()
    else:
        listed = [JobRef.parse(status.ref) for status in backend.survey(namespace=namespace, labels=labels)]
    found = Jobs()
    for ref in listed:
        # Another process may delete a job between the list and the look.
        with contextlib.suppress(JobNotFoundError):
            found.append(_found(str(ref), trust=None))
    return found


@short_refusals
def compare(*jobs: Job[Any] | str | Sequence[Job[Any] | str]) -> Comparison:
    """Show jobs beside each other: a chart for each metric with a line for each job, their arguments and last metrics.

    Args:
        *jobs: Two or more jobs, names or references, or lists of them; `kd.compare(kd.jobs()[-3:])` takes the newest three.

    Raises:
        ConfigError: There are fewer than two different ones, or one is neither a job nor text.
        JobNotFoundError: There is no job of a name or reference.
    """
    given = [one for each in jobs for one in (each if isinstance(each, list | tuple) else (each,))]
    found = [_compared(one) for one in given]
    refs = [job.ref for job in found]
    if twice := next((ref for ref in refs if refs.count(ref) > 1), None):
        raise ConfigError("jobs", f"{twice} is given more than once", "Give two or more different jobs, each once")
    if len(found) < 2:  # noqa: PLR2004 - a pair
        problem = f"only {refs[0]} is given, and there is nothing to compare it with" if refs else "no job is given"
        raise ConfigError("jobs", problem, "Give two or more")
    return Comparison(tuple(found))


def _compared(given: Any) -> Job[Any]:
    if isinstance(given, Job):
        return given
    if not isinstance(given, str):
        raise ConfigError("jobs", f"{show(given)} is no job", "Give jobs, names or references, as kd.jobs() has them")
    return attach(reference_of(given, "jobs"))


def named_backend(argument: str, name: Any) -> Backend:
    """The backend of this name; the argument, `on` or that of a reference, is where it was given.

    Raises:
        ConfigError: There is none.
    """
    if not isinstance(name, str) or name not in places.NAMES:
        near = closest(name, places.NAMES)
        example = "Use one of: " + ", ".join(places.NAMES) if argument == "on" else "Write it as 'local://name'"
        raise ConfigError(argument, f"there is no backend {show(name)}", f"{near}{example}")
    return places.get(name)


SETTABLE = (*sorted(NAMES), *request.PLACE_SETTINGS)
"""What command lines and magics can set of a call: arguments of `launch`, and of the place where it runs."""


def check_setting(argument: str, name: str, allowed: Sequence[str] = SETTABLE) -> None:
    """Refuse what is not `SETTABLE`, or not among those `allowed`.

    Raises:
        ConfigError: Of `argument`, where it was given.
    """
    if name not in allowed:
        remedy = f"{closest(name, allowed)}See help(kale_dist.launch) and help(kale_dist.Kubernetes)"
        raise ConfigError(argument, f"there is no setting {show(name)}", remedy)
