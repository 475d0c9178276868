"""From the arguments of a verb to a `Call`: what runs on every rank, and the request for where and how, checked."""

from __future__ import annotations

import contextvars
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kale_dist import config, places, strategies
from kale_dist.calls import image_checks, save_to, training_checks
from kale_dist.calls.options import Options
from kale_dist.calls.resuming import Continued, Earlier
from kale_dist.calls.signatures import title
from kale_dist.errors import ConfigError
from kale_dist.job import interrupts
from kale_dist.job.backend import Backend
from kale_dist.job.spec import names, place_settings
from kale_dist.job.spec.job_spec import Request, Settled, Topology, size_on_machine
from kale_dist.job.spec.place_settings import Docker, Kubernetes, Local, Place
from kale_dist.places import machine_gpus as gpus
from kale_dist.places.agent_client import LOAD_ONLY_PREFIXES, READ_EARLY
from kale_dist.places.manifests import kind_of
from kale_dist.trackers import Tracker
from kale_dist.wire import Debugging, Policy
from kale_dist.wire.memory import free_memory
from kale_dist.wording import closest, seconds
from kale_dist.worker.training.settings import Training

if TYPE_CHECKING:
    from kale_dist.snapshot.modules import Script

PLACE_SETTINGS = tuple(dict.fromkeys(field.name for kind in (Docker, Kubernetes) for field in dataclasses.fields(kind)))
"""Arguments of `kd.Docker` and `kd.Kubernetes`."""

_ELSEWHERE_PROCESSES = 2
"""Processes in containers if the call gives no number: how many there is room for is not known here."""

_LEAST_GIB = 300 / 1024
"""Memory that a process needs to import torch and to train anything with it."""

_MIB, _GIB = 1 << 20, 1 << 30
_RANK_BYTES = 28 << 20
"""Memory that a rank shares with no other once it trains a small model on the CPU: measured with torch 2.13 on Linux."""

STALL_S = 1800.0
"""Limit for a training, or a function on several GPUs, that gives no sign of life."""

_OTHER_BATCHES = (
    "number_of_processes: whenever it changes, a step takes another number of samples, and the learning rate stays. "
    "split_batches=True keeps the number of samples"
)
_NEVER_LARGER = (
    "number_of_processes: the job does not start again when more pods come, because that takes a checkpoint within an epoch, "
    "and checkpoint_every={} writes none. 'auto' writes them"
)
refuses_ranges: contextvars.ContextVar[str] = contextvars.ContextVar("refuses_ranges", default="")
"""Why calls that are made now may not ask for a range of processes; empty where they may."""

_UNTRIED = ("pipeline", "tensor", "mesh")
"""Strategies whose messages differ on GPUs, and have not been tested there."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is to run on."""

    cores: int
    """Cores that this process may use."""
    gpus: int = 0
    gpu_problem: str = ""
    """Why the GPUs that there are do not work; a clause."""
    memory_bytes: int = 1 << 50
    """Memory that is free."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function and its arguments, as `launch` gets them."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    label: str
    """For people."""
    script: Script | None = None
    """A script whose files are sent along."""
    kind: str = "call"
    """Of the job: `call`, or `live`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a verb, checked."""

    what: Training | Function
    request: Request
    backend: Backend
    auto_packages: bool = False
    """Whether the packages that the call imports belong to the recipe, too."""
    here: tuple[str, ...] | None = None
    """As `ImageWanted.here`."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about what may be a mistake."""
    notes: tuple[str, ...] = ()
    """Sentences about what was chosen."""
    track: tuple[Tracker, ...] = ()
    """Where its metrics are written."""
    resume: Continued | None = None
    """What it continues from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """The ranks as they are laid out, and sentences for the user about that."""

    topology: Topology
    cuda: bool
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call from flat ones, as forms and command lines have them: those of the place go into `on`.

    Args:
        given: Arguments of `distribute` or `launch`, and of `kd.Docker` or `kd.Kubernetes`, by name.

    Raises:
        ConfigError: A setting of a place is wrong, or the place does not have it.
    """
    calls = {name: value for name, value in given.items() if name not in PLACE_SETTINGS}
    settings = {name: value for name, value in given.items() if name in PLACE_SETTINGS and value is not None}
    if not settings:
        return calls
    on = calls.get("on")
    if isinstance(on, Docker | Kubernetes):
        return {**calls, "on": dataclasses.replace(on, **settings)}
    word = "local" if isinstance(on, Local) else _word(on)
    if word == "local":
        name = next(iter(settings))
        problem = "processes on this machine use its packages, folders, memory and GPUs as they are"
        raise ConfigError(name, problem, f"Leave it out, or run with on=kd.Docker({name}=...) or on=kd.Kubernetes(...)")
    return {**calls, "on": place_settings.KINDS[word](**settings)}


def checked(
    what: Training | Function, options: Options, machine: Machine | None = None, earlier: Earlier | None = None
) -> Call:
    """A call of a verb. Nothing is written or started.

    Args:
        what: The arguments of `distribute`, its strategy resolved, or the function that `launch` runs, checked.
        options: Where and how.
        machine: In place of this one.
        earlier: What `resume_from` names.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    backend, place = where(options.on)
    volumes = () if isinstance(place, Local) else place.volumes
    training = what if isinstance(what, Training) else None
    if training is not None:
        target, volumes = save_to.find(training.save_to, volumes, backend.name, in_parts=training.in_parts)
        what = training = dataclasses.replace(training, save_to=target)
        training_checks.check(training)
    sizes = _sizes(options, place, training)
    _check_variables(options.environment, in_pods=not isinstance(place, Local))
    if isinstance(place, Local):
        weights = 0 if training is None else training_checks.rank_bytes(training)
        ranks = _on_machine(options, machine or _this_machine(options.cuda), weights, sizes)
    else:
        ranks = _in_pods(options, place, sizes, trains=training is not None)
    request = Request(
        name=options.name, label=what.label if isinstance(what, Function) else _label(what),
        kind=what.kind if isinstance(what, Function) else "training", topology=ranks.topology,
        cuda=ranks.cuda, threads=options.threads, seed=options.seed,
        environment=tuple(pair for pair in options.environment if pair[0].startswith(READ_EARLY)),
        secrets=tuple(pair for pair in options.environment if not pair[0].startswith(READ_EARLY)),
        policy=_policy(options, ranks, is_training=training is not None),
        debugging=_debugging(), strategy=strategies.DDP() if training is None else training.strategy,
        saves=training is not None and training.checkpoint_every is not None,
    )  # fmt: skip
    wanted = image_checks.ImageWanted()
    if not isinstance(place, Local):
        wanted = image_checks.check(place.image, place.packages, place.requirements)
        request = dataclasses.replace(
            request, volumes=volumes, image=wanted.image, recipe=wanted.recipe, resources=place.resources,
            keep_warm_s=seconds(place.keep_warm),
        )  # fmt: skip
    if isinstance(place, Kubernetes):
        request = dataclasses.replace(request, store=place.store, cluster=place.options)
        _check_manifest(request)
    call = Call(
        what=what, request=request, backend=backend, auto_packages=wanted.auto, here=wanted.here, warnings=ranks.warnings,
        notes=ranks.notes, track=options.track,
    )  # fmt: skip
    return call if training is None else _trains(call, training, options, place, earlier)


def _label(training: Training) -> str:
    model = training.model
    if isinstance(model, dict):
        return f"train {' '.join(model)}"
    return f"train {title(getattr(model, 'build', model)) if training.makes_model else type(model).__name__}"


def _trains(call: Call, training: Training, options: Options, place: Place, earlier: Earlier | None) -> Call:
    """A call of `distribute`, with what only can be checked of a training once its ranks are laid out."""
    request, warnings, notes = call.request, call.warnings, [*call.notes]
    training_checks.check_on(training, request)
    if request.cuda and (word := training.strategy.word) in _UNTRIED:
        warnings += (
            f"strategy: {word!r} has never run on GPUs. Compare its losses with those of 'ddp' or 'fsdp' first",
        )
    if options.cuda is None and not request.cuda and (gpu := training_checks.gpu_of(training)):
        notes.append(f"The model is on {gpu}, and the processes train on the CPU. cuda=True gives each of them a GPU")
    if training.in_parts and (whole := [one.word for one in options.track if one.model]):
        notes.append(f"{' and '.join(whole)} will not get the model, because no process has all of its weights")
    if isinstance(place, Kubernetes) and request.topology.sizes:
        notes += () if training.split_batches else (_OTHER_BATCHES,)
        if isinstance(training.checkpoint_every, int):
            notes.append(_NEVER_LARGER.format(training.checkpoint_every))
    resume = None
    if earlier is not None:
        # How many ranks a range begins with is not known yet: what their number changes is logged.
        resume = earlier.check(training, None if request.topology.sizes else request.topology.number_of_processes)
        notes += resume.sentences
    return dataclasses.replace(call, warnings=warnings, notes=tuple(notes), resume=resume)


def where(on: Any) -> tuple[Backend, Place]:
    """What starts jobs, and where, with what is configured of the place.

    Args:
        on: The argument of a call.

    Raises:
        ConfigError: There is no such place.
    """
    if isinstance(on, Backend) and not isinstance(on, type):
        backend, place = on, place_settings.KINDS.get(on.name, Local)()
    else:
        place = on if isinstance(on, Local | Docker | Kubernetes) else place_settings.KINDS[_word(on)]()
        backend = places.get(place_settings.word_of(place))
    if backend.name == "local" and sys.platform != "linux":
        problem = f"processes on this machine need Linux, and this is {sys.platform}"
        raise ConfigError("on", problem, "Give on=kd.Docker(...) or on=kd.Kubernetes(...), or use a notebook on Linux")
    return backend, place_settings.filled(place, config.load().place(place_settings.word_of(place)))


def _debugging() -> Debugging:
    """What is configured of errors, and whether a person may come to a breakpoint."""
    usual = Debugging()
    wait_s = usual.breakpoint_wait_s if interrupts.has_person() else 0.0
    return Debugging(breakpoint_wait_s=wait_s, show_locals=config.load().show_locals or usual.show_locals)


def _word(on: Any) -> str:
    if on is None:
        return config.load().on or "local"
    if isinstance(on, str) and on in places.NAMES:
        return on
    if isinstance(on, type) and on in place_settings.KINDS.values():
        raise ConfigError("on", f"{on.__name__} is a class", f"Make one: kd.{on.__name__}(...)")
    known = ", ".join(repr(name) for name in places.NAMES)
    remedy = f"{closest(on, places.NAMES)}Use one of: {known}, or kd.Local(), kd.Docker(...), kd.Kubernetes(...)"
    raise ConfigError("on", f"there is no place {on!r}", remedy)


def _policy(options: Options, ranks: _Ranks, *, is_training: bool) -> Policy:
    """The policy of a call, with a limit for functions on GPUs, where a rank that waits for a lost one looks busy."""
    stall_s = options.stall_timeout_s
    if stall_s is None and not is_training and ranks.cuda and ranks.topology.number_of_processes > 1:
        stall_s = STALL_S
    same = {field.name: getattr(options, field.name) for field in dataclasses.fields(Policy)}
    return Policy(**{**same, "stall_timeout_s": stall_s})


# -- processes -------------------------------------------------------------------------------------------------------


def _sizes(options: Options, place: Place, training: Training | None) -> tuple[int, ...]:
    """The world sizes that a call allows: none of its own, one, or those of a range that the strategy can have.

    Raises:
        ConfigError: There can be no range, or the strategy can have none of its sizes.
    """
    asked = options.number_of_processes
    if not isinstance(asked, tuple):
        return () if asked is None else (asked,)
    why = refuses_ranges.get()
    if training is None or why:
        why = why or "a function cannot be asked for a checkpoint when pods come and go"
        raise ConfigError("number_of_processes", f"{asked} is a range, and {why}", "Give one number")
    if isinstance(place, Kubernetes) and training.checkpoint_every is None:
        problem = f"None, and with a range of processes {asked} the job resumes whenever pods come or go"
        raise ConfigError("checkpoint_every", problem, "Leave it out, or give one number of processes")
    per_pod = place.processes_per_pod or 1 if isinstance(place, Kubernetes) else None
    return training_checks.sizes(training, range(asked[0], asked[1] + 1), per_pod, cuda=bool(options.cuda))


def _on_machine(options: Options, there: Machine, rank_bytes: int, sizes: tuple[int, ...]) -> _Ranks:
    """Lay the ranks out on one machine, if it has what they need."""
    cuda = options.cuda
    asked = sizes[0] if sizes else None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if cuda and there.gpus < 1:
        problem = f"True, but torch sees no GPU here{f': {there.gpu_problem}' if there.gpu_problem else ''}"
        raise ConfigError("cuda", problem, "Leave `cuda` out, or see `kale-dist doctor`")
    if cuda is None and there.gpu_problem:
        sentence = f"cuda: training on the CPU, because the GPUs here do not work with this torch: {there.gpu_problem}"
        warnings = (f"{sentence}. See `kale-dist doctor`, or say cuda=False",)
    if isinstance(options.number_of_processes, tuple):
        on_gpus = there.gpus and cuda is not False
        room = there.gpus if on_gpus else max(1, min(there.cores, there.memory_bytes // (_RANK_BYTES + rank_bytes)))
        asked, sentence = size_on_machine(sizes, room)
        notes = (sentence,)
    if cuda is None and there.gpus:
        cuda = asked is None or asked <= there.gpus
        if cuda:
            used = asked or there.gpus
            notes += (f"{used} of {there.gpus} GPUs, one for each process. cuda=False trains on the CPU",)
        else:
            sentence = (
                f"number_of_processes: {asked} processes train on the CPU, because there are {there.gpus} GPUs. Ask for at "
                f"most {there.gpus} to use them, or say cuda=False"
            )
            warnings = (sentence,)
    world = asked or (there.gpus if cuda else there.cores)
    if cuda and world > there.gpus:
        problem = f"{world} processes with cuda=True need {world} GPUs, and there are {there.gpus}"
        raise ConfigError("number_of_processes", problem, f"Ask for at most {there.gpus}")
    # On a GPU the weights are in its memory, not in this machine's.
    each = _RANK_BYTES + (0 if cuda else rank_bytes)
    if world * each > there.memory_bytes:
        problem = (
            f"{world} processes take at least {world * each / _GIB:.1f} GiB of memory ({each / _MIB:.0f} MiB each), and "
            f"{there.memory_bytes / _GIB:.1f} GiB are free"
        )
        remedy = f"Ask for {min(there.cores, max(1, there.memory_bytes // each))}, or run on a cluster"
        raise ConfigError("number_of_processes", problem, remedy)
    if world > there.cores and not cuda:
        sentence = (
            f"number_of_processes: {world} processes share {there.cores} cores. More processes than cores make training "
            "slower, not faster"
        )
        warnings = (*warnings, sentence)
    if cuda:
        notes = (*notes, *gpus.memory_notes(world))
    topology = Topology(number_of_processes=world, processes_per_pod=world)
    return _Ranks(topology=topology, cuda=bool(cuda), warnings=warnings, notes=notes)


def _in_pods(options: Options, place: Docker | Kubernetes, sizes: tuple[int, ...], *, trains: bool) -> _Ranks:
    """Lay the ranks out on pods, or in one container. What there is to run on is not asked here."""
    per_pod = place.processes_per_pod or 1 if isinstance(place, Kubernetes) else 1
    world = sizes[-1] if sizes else max(_ELSEWHERE_PROCESSES, per_pod)
    if per_pod > world:
        problem = f"{per_pod} is more than the {world} of number_of_processes"
        raise ConfigError("processes_per_pod", problem, "Lower it, or raise number_of_processes")
    each, cuda = place.resources.gpus, options.cuda
    if cuda and each == 0:
        raise ConfigError("resources.gpus", "0, and cuda=True needs one for each process", "Give 1, or leave it out")
    memory_gib = place.resources.memory_gib
    if trains and memory_gib is not None and memory_gib < _LEAST_GIB:
        problem = f"a process with torch needs at least {_LEAST_GIB * 1024:.0f} MiB, and {memory_gib * 1024:.0f} MiB were given"
        raise ConfigError("resources.memory", problem, "Give more, such as memory='1Gi'")
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if cuda is None and each:
        cuda, notes = True, (f"Each process uses its GPU (resources.gpus is {each}). cuda=False trains on the CPU",)
    elif each and not cuda:
        warnings = (f"resources.gpus: {each} for each process, which trains on the CPU all the same. Add cuda=True",)
    if cuda and world > 1 and isinstance(place, Kubernetes) and place.processes_per_pod is None:
        sentence = (
            "processes_per_pod: each process has a pod of its own, so that GPUs of one node exchange gradients over the "
            "network. Give it as many processes as a node has GPUs, such as 8, or say processes_per_pod=1"
        )
        warnings = (*warnings, sentence)
    servers = place.servers if isinstance(place, Kubernetes) else 0
    topology = Topology(
        number_of_processes=world + servers,
        processes_per_pod=per_pod if isinstance(place, Kubernetes) else world,
        sizes=sizes if len(sizes) > 1 and world > per_pod else (),
    )
    return _Ranks(topology=topology, cuda=bool(cuda), warnings=warnings, notes=notes)


def _check_manifest(request: Request) -> None:
    """Make the manifest of a job with this request, so that what is wrong with it is known before anything is asked."""
    # The longest name that could be drawn.
    trial = Settled.of(request, name=request.name or "x" * names.MAX_LENGTH)
    kind = kind_of(trial)
    longest = max(kind.pod_names(trial), key=len)
    if len(longest) > names.MAX_LABEL_LENGTH:
        problem = f"the pod's name {longest!r} has {len(longest)} characters, more than {names.MAX_LABEL_LENGTH}"
        raise ConfigError("name", problem, "Shorten the name")
    given = {variable for variable, _ in (*request.environment, *request.secrets)}
    for variable, _, _ in request.cluster.secret_environment:
        if variable in given:
            raise ConfigError("secret_environment", f"{variable} is in `environment`, too", "Leave one out")
    kind.make(trial)


def _check_variables(environment: tuple[tuple[str, str], ...], *, in_pods: bool) -> None:
    for name, _ in environment:
        if in_pods:
            names.VARIABLE("environment", name)
        if name.startswith(LOAD_ONLY_PREFIXES) and not in_pods:
            problem = f"{name} is read when libraries are loaded, which has been done before a rank gets its job"
            raise ConfigError("environment", problem, f"Set os.environ[{name!r}] before the call: a new agent starts")


# -- this machine ----------------------------------------------------------------------------------------------------


def _this_machine(cuda: bool | None) -> Machine:  # noqa: FBT001 - the call's own argument
    # To ask takes seconds: without a device there is nothing to ask.
    count, problem = gpus.usable() if cuda is not False and gpus.are_there() else (0, "")
    return Machine(cores=usable_cores(), gpus=count, gpu_problem=problem, memory_bytes=free_memory())


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
