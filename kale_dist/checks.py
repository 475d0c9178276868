"""Checks of the arguments that `distribute` and `launch` share. They read; nothing is written, started or pickled.

What a machine has (cores, GPUs) is passed in, so that a check of it is a function of its arguments alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kale_dist import backends, cluster_checks, image_checks, names, overrides, store_address, volume_checks
from kale_dist.backends.agent_client import LOAD_ONLY_PREFIXES
from kale_dist.backends.base import Backend
from kale_dist.errors import ConfigError
from kale_dist.recipe import Recipe
from kale_dist.spec import ClusterOptions, JobSpec, Policy, Resources, Topology, Volume, VolumeKind
from kale_dist.wording import closest as closest  # noqa: PLC0414 - other checks know it from here
from kale_dist.wording import show as show  # noqa: PLC0414 - other checks know it from here

_CLUSTER = "kubernetes"
_DOCKER = "docker"
_CLUSTER_PROCESSES = 2
"""Processes on a cluster where nobody says how many: nobody knows how many it has room for."""

_CLUSTER_ONLY = ("store", "cluster", "processes_per_pod")
_OWN_PREFIX = "KALE_DIST_"
_SET_BY_US = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is to run on."""

    cores: int
    """Cores that this process may use."""
    gpus: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The shared arguments of a call, checked and in one form."""

    backend: Backend
    name: str | None
    topology: Topology
    cuda: bool
    threads: int | None
    seed: int | None
    volumes: tuple[Volume, ...]
    environment: tuple[tuple[str, str], ...]
    image: str
    """Empty where the backend chooses one, or one is made."""
    recipe: Recipe | None
    """What the image is made of, if it is made."""
    auto_packages: bool
    """Whether the packages that the call imports belong to the recipe, too."""
    resources: Resources
    store: str
    """Empty where bytes travel by themselves."""
    cluster: ClusterOptions
    policy: Policy
    warnings: tuple[str, ...]
    """Sentences for the user."""


def check_run(machine: Callable[[bool], Machine], given: Mapping[str, Any]) -> Run:
    """Check and normalise what a call of any kind takes.

    Args:
        machine: Tells what the machine has; it is asked with whether GPUs matter.
        given: The call's arguments by name; those that are not shared are passed over.

    Raises:
        ConfigError: The first argument that is wrong.
    """
    number_of_processes, cuda, name = given["number_of_processes"], given["cuda"], given["name"]
    threads, seed, detach = given["threads"], given["seed"], given["detach"]
    limits = {field: given[field] for field in ("timeout_s", "stall_warn_s", "stall_timeout_s")}
    backend = _backend(given["on"])
    if name is not None:
        names.check(name)
    check_flag("cuda", cuda)
    check_flag("detach", detach)
    if number_of_processes is not None:
        check_count("number_of_processes", number_of_processes)
    if threads is not None:
        check_count("threads", threads)
    if seed is not None:
        check_seed(seed)
    if given["processes_per_pod"] is not None:
        check_count("processes_per_pod", given["processes_per_pod"])
    if backend.name == "local":
        image_checks.check_none(given["image"], given["packages"], given["requirements"])
        _check_local(given)
    if backend.name == _DOCKER:
        cluster_checks.check_docker(given)
    volumes = {_CLUSTER: volume_checks.pod_volumes, _DOCKER: volume_checks.container_volumes}.get(
        backend.name, _volumes
    )
    wanted = image_checks.check(given["image"], given["packages"], given["requirements"])
    run = Run(
        backend=backend,
        name=name,
        topology=Topology(number_of_processes=number_of_processes or 1),
        cuda=cuda,
        threads=threads,
        seed=seed,
        volumes=volumes(given["volumes"]),
        environment=_environment(given["environment"], in_pods=backend.name in (_CLUSTER, _DOCKER)),
        image=wanted.image,
        recipe=wanted.recipe,
        auto_packages=wanted.auto,
        resources=cluster_checks.resources(given["resources"]),
        store=store_address.check("store", given["store"]),
        cluster=cluster_checks.cluster_options(given["cluster"]),
        policy=Policy(**limits, detach=detach, max_restarts=given["max_restarts"]),
        warnings=(),
    )
    if backend.name in (_CLUSTER, _DOCKER):
        run = _in_pods(run, number_of_processes, given["processes_per_pod"])
        return _on_cluster(run) if backend.name == _CLUSTER else run
    if backend.name == "local":
        for volume in run.volumes:
            _check_folder(volume)
    return _on_machine(run, machine(cuda), number_of_processes)


def _on_machine(run: Run, there: Machine, number_of_processes: int | None) -> Run:
    """Lay the ranks out on one machine, if it has what they need."""
    cuda = run.cuda
    if cuda and there.gpus < 1:
        raise ConfigError("cuda", "True, but torch sees no GPU here", "Leave `cuda` out, or see `kale-dist doctor`")
    world = number_of_processes or (there.gpus if cuda else there.cores)
    if cuda and world > there.gpus:
        problem = f"{world} processes with cuda=True need {world} GPUs, and there are {there.gpus}"
        raise ConfigError("number_of_processes", problem, f"Ask for at most {there.gpus}")
    crowded = (
        f"number_of_processes: {world} processes share {there.cores} cores. More processes than cores make training "
        "slower, not faster"
    )
    return dataclasses.replace(
        run,
        topology=Topology(number_of_processes=world, processes_per_pod=world),
        warnings=(crowded,) if world > there.cores and not cuda else (),
    )


def _in_pods(run: Run, number_of_processes: int | None, processes_per_pod: int | None) -> Run:
    """Lay the ranks out on pods or containers. What there is to run on is not asked here."""
    per_pod = processes_per_pod or 1
    world = number_of_processes or max(_CLUSTER_PROCESSES, per_pod)
    if per_pod > world:
        problem = f"{per_pod} is more than the {world} of number_of_processes"
        raise ConfigError("processes_per_pod", problem, "Lower it, or raise number_of_processes")
    topology = Topology(number_of_processes=world, processes_per_pod=per_pod)
    return dataclasses.replace(run, topology=topology, warnings=_unused_gpus(run))


def _on_cluster(run: Run) -> Run:
    """Make the manifest once, so that what is wrong with it costs nothing."""
    cluster_checks.check_fits(
        JobSpec(
            name=run.name or names.make("", "x" * (names.MAX_LENGTH - len("job-"))),
            label="",
            kind="",
            snapshot="",
            topology=run.topology,
            cuda=run.cuda,
            volumes=run.volumes,
            environment=run.environment,
            image=run.image,
            resources=run.resources,
            cluster=run.cluster,
            policy=run.policy,
        )
    )
    return run


def _unused_gpus(run: Run) -> tuple[str, ...]:
    if run.cuda or not run.resources.gpus:
        return ()
    return (
        f"resources.gpus: {run.resources.gpus} for each process, which trains on the CPU all the same. Add cuda=True",
    )


def _check_local(given: Mapping[str, Any]) -> None:
    """Refuse what only containers have."""
    for argument in _CLUSTER_ONLY:
        if given[argument] is not None:
            problem = f"{show(given[argument])} means nothing on this machine, where processes see it as it is"
            raise ConfigError(argument, problem, 'Leave it out, or run on a cluster with on="kubernetes"')
    extended = cluster_checks.resources(given["resources"]).extended
    if extended:
        problem = f"{extended[0][0]} cannot be asked for on this machine"
        raise ConfigError("resources", problem, 'Leave it out, or run on a cluster with on="kubernetes"')


def check_function(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check what `launch` is to call.

    Raises:
        ConfigError: It cannot be called, cannot be called so, or would return something that is no result.
    """
    if not callable(fn):
        problem = f"{show(fn)} cannot be called"
        raise ConfigError("fn", problem, "Pass the function and its arguments: launch(train, 3), not launch(train(3))")
    check_returns("fn", fn)
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        accepted = inspect.signature(fn).parameters
        near = (closest(name, overrides.SHARED) for name in kwargs if name not in accepted)
        remedy = f"{next(filter(None, near), '')}It is {describe(fn)}. Names that launch() has itself are bound with "
        remedy += "functools.partial"
        raise ConfigError("fn", f"it cannot be called with these arguments ({error})", remedy) from None
    except ValueError:
        pass  # Some functions written in C have no signature.


def check_returns(argument: str, fn: Any) -> None:
    """Refuse functions that only return something to run later."""
    inner = functools.reduce(lambda found, _: getattr(found, "func", found), range(8), fn)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(argument, f"{title(fn)} is asynchronous", "Call it with asyncio.run in a plain function")
    if inspect.isgeneratorfunction(inner):
        raise ConfigError(argument, f"{title(fn)} has a `yield`: it returns a generator", "Return a value instead")


def check_flag(argument: str, value: Any) -> None:
    """Accept True and False alone: the string 'no' would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(argument, f"{value!r} is neither True nor False", "Give a bool")


def check_count(argument: str, value: Any) -> None:
    """Accept whole numbers of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(argument, f"{value!r} is not a whole number", "Give an int of 1 or more")
    if value < 1:
        raise ConfigError(argument, f"{value} is less than 1", "Give an int of 1 or more")


def check_seed(value: Any) -> None:
    """Accept what numpy, random and torch all take as a seed, with room for the ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError("seed", f"{value!r} is not an int from 0 to 2**31 - 1", "Give one, or None for a random seed")


def check_lines(ranks: Any, tail: Any, number_of_processes: int) -> tuple[int, ...] | None:
    """Check which lines of a log are asked for; returns the ranks, None for all.

    Raises:
        ConfigError: There is no such rank, or `tail` is no number of lines.
    """
    if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
        raise ConfigError("tail", f"{tail!r} is not an int of 0 or more", "Give a number of lines, or None for all")
    if ranks is None:
        return None
    asked = (ranks,) if isinstance(ranks, int) else ranks
    there = range(number_of_processes)
    for rank in asked if isinstance(asked, Iterable) else (ranks,):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in there:
            remedy = f"Its ranks are 0 to {there[-1]}" if len(there) > 1 else "Its only rank is 0"
            raise ConfigError("ranks", f"the job has no rank {rank!r}", remedy)
    return tuple(asked)


def check_timeout(timeout: Any) -> None:
    """Accept None and seconds; what is not above 0 only looks."""
    number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if timeout is not None and (not number or math.isnan(timeout)):
        raise ConfigError("timeout", f"{timeout!r} is not a number of seconds", "Give seconds, or None for no limit")


def describe(fn: Any) -> str:
    """A function with its arguments, as its author wrote them."""
    try:
        return f"{title(fn)}{inspect.signature(fn)}"
    except (TypeError, ValueError):
        return title(fn)


def title(fn: Any) -> str:
    """A function's name for people: without the functions around it."""
    inner = functools.reduce(lambda found, _: getattr(found, "func", found), range(8), fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__).rpartition("<locals>.")[2]


def is_model(value: Any) -> bool:
    """Whether this is a module, a class of modules or a dict of either, without importing torch for it."""
    torch = sys.modules.get("torch")
    if isinstance(value, dict) and value:
        return all(map(is_model, value.values()))
    kind = value if isinstance(value, type) else type(value)
    return torch is not None and issubclass(kind, torch.nn.Module)


def _backend(on: Any) -> Backend:
    if isinstance(on, str) and on in backends.NAMES:
        return backends.get(on)
    if not isinstance(on, str) and not isinstance(on, type) and isinstance(on, Backend):
        return on
    known = ", ".join(repr(name) for name in backends.NAMES)
    raise ConfigError("on", f"there is no backend {on!r}", f"{closest(on, backends.NAMES)}Use one of: {known}")


def _volumes(volumes: Any) -> tuple[Volume, ...]:
    if volumes is None:
        return ()
    if isinstance(volumes, Mapping):
        made = tuple(Volume(mount_path=str(mount), source=str(source)) for mount, source in volumes.items())
    elif isinstance(volumes, Sequence) and all(isinstance(volume, Volume) for volume in volumes):
        made = tuple(volumes)
    else:
        raise ConfigError("volumes", f"{show(volumes)} is not a dict", "Write it as {'/data': '/data'}")
    return made


def _check_folder(volume: Volume) -> None:
    """On this machine ranks see the folders as they are: nothing can be mounted somewhere else."""
    if volume.kind not in (None, VolumeKind.FOLDER) or volume.sub_path or volume.read_only:
        what = "that is not simply a folder" if volume.kind in (None, VolumeKind.FOLDER) else f"of kind {volume.kind}"
        remedy = 'Name a folder, or run on a cluster with on="kubernetes"'
        raise ConfigError("volumes", f"there is no volume {what} on this machine ({volume.mount_path!r})", remedy)
    source, mount = pathlib.Path(volume.source).expanduser(), pathlib.Path(volume.mount_path)
    if not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        raise ConfigError("volumes", f"{volume.source!r} {what}", "Name a folder of this machine")
    if source.resolve() != mount.resolve():
        raise ConfigError(
            "volumes",
            f"local ranks cannot see {volume.source!r} at {volume.mount_path!r}: they see this machine's own folders",
            f"Use {str(source.resolve())!r} for both, or make {volume.mount_path!r} a link to it",
        )


def _environment(environment: Any, *, in_pods: bool) -> tuple[tuple[str, str], ...]:
    if environment is None:
        return ()
    if not isinstance(environment, Mapping):
        raise ConfigError("environment", f"{show(environment)} is not a dict", "Write it as {'NAME': 'value'}")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError("environment", f"{name!r} cannot be a variable's name", "Use letters, digits and _")
        if not isinstance(value, str) or "\0" in value:
            remedy = f"Write {str(value)!r}" if "\0" not in str(value) else "Leave out the NUL character"
            raise ConfigError("environment", f"the value {value!r} of {name} is not text", remedy)
        if in_pods and not names.is_variable(name):
            problem = f"{name!r} cannot be a variable's name in a pod"
            raise ConfigError("environment", problem, "Use letters, digits, '_', '-' and '.', and no digit first")
        if name in _SET_BY_US or name.startswith(_OWN_PREFIX):
            raise ConfigError("environment", f"{name} is set in each rank by kale_dist", "Leave it out")
        if name.startswith(LOAD_ONLY_PREFIXES) and not in_pods:
            problem = f"{name} is read when libraries are loaded, which has been done before a rank gets its job"
            raise ConfigError("environment", problem, f"Set os.environ[{name!r}] before the call: a new agent starts")
    return tuple(sorted(environment.items()))
