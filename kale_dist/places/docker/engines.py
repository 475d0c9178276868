"""Docker engines: connections to them, what a job needs of one and whether it can have it, and how the doctor examines one."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import pathlib
import threading
from collections.abc import Iterator

import docker.errors

from kale_dist import config
from kale_dist.errors import BackendError, ConfigError, StoreError, log, warn
from kale_dist.image import engine, for_job
from kale_dist.image.engine import Engine, ensure_image, explained, find_image
from kale_dist.job import records
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled, Topology, VolumeKind, size_on_machine
from kale_dist.job.spec.recipe import Recipe
from kale_dist.places.checkup import CheckResult, broken, failed, ok, warning
from kale_dist.places.docker import containers
from kale_dist.places.docker.containers import NETWORK, MachineFacts
from kale_dist.worker.agent.usage import Driver, assigned_gpu

_HOLDING = ("created", "running", "paused", "restarting")
"""States of containers whose GPUs are not free; a container that was just created is about to run."""

_DEFAULT_USER = 1000
_CONFLICT = 409

_lock = threading.Lock()
_engines: dict[str, Engine] = {}

_GIB = 1 << 30

_OLDEST_API = (1, 40)


def connect(url: str = "") -> Engine:
    """The engine at a URL; one connection for each.

    Args:
        url: Such as `unix:///var/run/docker.sock`; empty for the engine that a new job would go to.

    Raises:
        BackendUnavailableError: The engine cannot be reached.
    """
    # A notebook may change these variables.
    name = url or f"as configured by {os.environ.get('DOCKER_HOST', '')} {os.environ.get('DOCKER_CONTEXT', '')}"
    with _lock:
        found = _engines.get(name)
        if found is None:
            made = engine.connect(url or None)
            found = _engines[name] = _engines.setdefault(made.url, made)
            if found is not made:
                made.close()
        return found


def disconnect() -> None:
    """Close all connections; the next call makes new ones."""
    with _lock:
        known = set(_engines.values())
        _engines.clear()
    for found in known:
        found.close()


def ensure_network(engine: Engine) -> None:
    """Create the network of all jobs' containers, unless it is there. It is never removed: another job may be starting.

    Raises:
        BackendError: It cannot be created.
    """
    with explained(f"creating the network {NETWORK}"):
        if any(each["Name"] == NETWORK for each in engine.api.networks(names=[NETWORK])):
            return
        try:
            engine.api.create_network(NETWORK, driver="bridge", check_duplicate=True)
        except docker.errors.APIError as error:
            if error.status_code != _CONFLICT:
                raise


# -- before a job --------------------------------------------------------------------------------------------------------


def settle(request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
    """Check whether the engine can run the job, and make or pull its image; arguments and errors as in `Backend.settle`.

    Without a submission no image is made or pulled, and the engine need not be reachable.
    """
    configured = config.load()
    image = image or configured.image
    if recipe is None and not image and not configured.registry:
        # Raises before the engine is asked for anything.
        for_job.make(None, image="", settings=configured, cuda=request.cuda, in_engine=True)
    topology = request.topology
    try:
        there = connect()
        topology = _on_engine(there, request)
        _check_volumes(there, request)
        _check_size(there, request)
    except BackendError:
        if submit:
            raise
    if submit:
        if not isinstance(request, Settled):
            image = for_job.make(recipe, image=image, settings=configured, cuda=request.cuda, in_engine=True)
        ensure_image(there, image, log=for_job.log)
        _warn(there, request)
    return Settled.of(dataclasses.replace(request, topology=topology), name=name, image=image, recipe=recipe)


def _on_engine(engine: Engine, request: Request) -> Topology:
    """All ranks in one container: of a range of processes, the most that the engine's machine has cores or GPUs for."""
    topology = request.topology
    if not topology.sizes:
        return topology
    room = len(gpus_of(engine)) if request.cuda else int(engine.info.get("NCPU") or 0)
    world, sentence = size_on_machine(topology.sizes, room)
    log(sentence)
    return Topology(number_of_processes=world, processes_per_pod=world)


def _check_volumes(engine: Engine, spec: Request) -> None:
    for volume in spec.volumes:
        if volume.kind is not VolumeKind.FOLDER:
            continue
        if not engine.is_local:
            raise ConfigError(
                "volumes",
                f"{volume.source!r} is a folder of this machine, and the Docker engine at {engine.url} is on another one",
                "Name a volume of that engine (docker volume ls), or put the data into the image or behind a URL",
            )
        if not pathlib.Path(volume.source).is_dir():
            what = "is not a folder" if pathlib.Path(volume.source).exists() else "does not exist"
            raise ConfigError(
                "volumes", f"{volume.source!r} {what}", "Name a folder of this machine, or a named volume"
            )


def _check_size(engine: Engine, spec: Request) -> None:
    """Refuse processes each of which needs more cores or memory than the engine's machine has."""
    asked = spec.resources
    cores, there = asked.cpu_limit or asked.cpu or 0, int(engine.info.get("NCPU") or 0)
    if there and cores > there:
        field = "cpu_limit" if asked.cpu_limit else "cpu"
        raise ConfigError(f"resources.{field}", f"{cores:g} cores, and the engine's machine has {there}", "Lower it")
    memory, wanted = int(engine.info.get("MemTotal") or 0) / _GIB, asked.memory_gib or 0
    if memory and wanted > memory:
        problem = f"{wanted:g} GiB, and the engine's machine has {memory:.1f}"
        raise ConfigError("resources.memory", problem, "Lower it")


def _warn(engine: Engine, spec: Request) -> None:
    cores, world = int(engine.info.get("NCPU") or 0), spec.topology.number_of_processes
    if cores and world > cores and not spec.cuda:
        warn(
            f"number_of_processes: {world} processes share the {cores} cores of the engine's machine. More processes than "
            "cores make training slower, not faster"
        )


def facts_of(engine: Engine) -> MachineFacts:
    """The values of an engine's machine for all jobs; those of GPUs are left to `gpus_held`."""
    cores = int(engine.info.get("NCPU") or 0) or None
    submitter = records.identity()
    if engine.is_rootless or engine.is_podman:
        # Root in such a container is the engine's own user outside; any other number owns no files there.
        return MachineFacts(user="0:0", cores=cores, submitter=submitter)
    if engine.is_local:
        groups = tuple(sorted(set(os.getgroups()) - {os.getgid()}))
        return MachineFacts(user=f"{os.getuid()}:{os.getgid()}", groups=groups, cores=cores, submitter=submitter)
    return MachineFacts(user=f"{_DEFAULT_USER}:{_DEFAULT_USER}", cores=cores, submitter=submitter)


@contextlib.contextmanager
def gpus_held(engine: Engine, spec: JobSpec, facts: MachineFacts) -> Iterator[MachineFacts]:
    """Choose a job's GPUs, the first that no other job holds; this user's other kernels choose none until the `with` ends.

    Args:
        engine: Where the job is started.
        spec: The job.
        facts: The values so far.

    Raises:
        StoreError: The lock cannot be taken.
        BackendError: The engine does not list its containers.
    """
    wanted = containers.gpus_of(spec) * spec.topology.number_of_processes
    if not wanted:
        yield facts
        return
    path = records.state_dir() / "gpus.lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise StoreError(f"{path} could not be written ({error.strerror or error}). Set XDG_STATE_HOME") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with explained("looking which GPUs are held"):
            found = engine.api.containers(all=True, filters={"label": containers.GPUS_LABEL, "status": list(_HOLDING)})
        numbers = ",".join(item["Labels"][containers.GPUS_LABEL] for item in found).split(",")
        taken = {int(number) for number in numbers if number.isdecimal()}
        numbers_there = gpus_of(engine)
        free = (number for number in numbers_there or itertools.count() if number not in taken)
        chosen = tuple(itertools.islice(free, wanted))
        if len(chosen) < wanted:
            problem = f"The job needs {wanted} GPUs, and {len(chosen)} of {len(numbers_there)} are free here"
            raise BackendError(
                f"{problem}. Wait for the jobs that hold them, or ask for fewer processes", retryable=True
            )
        yield dataclasses.replace(facts, gpus=chosen)


def gpus_of(engine: Engine) -> list[int]:
    """Numbers of the GPUs that jobs may have, the emptiest first; empty where they are not known: on another machine."""
    found = Driver().read() if engine.is_local else ()
    visible = (assigned_gpu(len(found), os.environ, place) for place in range(len(found)))
    return sorted(
        (number for number in visible if number is not None), key=lambda number: found[number].used_bytes or 0
    )


# -- for the doctor --------------------------------------------------------------------------------------------------


def examine() -> tuple[CheckResult, ...]:
    """Check the engine that new jobs go to. What is wrong is returned, not raised."""
    try:
        there = connect()
        kind = "Podman" if there.is_podman else "rootless Docker" if there.is_rootless else "Docker"
        sentence = f"{kind} {there.version} at {there.url}"
        return (_version(there, sentence), _machine(there), _gpus(there), _image(there))
    except BackendError as error:
        return (broken("engine", error, "Start it, or set DOCKER_HOST"),)


def _version(engine: Engine, sentence: str) -> CheckResult:
    spoken = tuple(int(part) for part in str(engine.api.api_version).split(".")[:2])
    if spoken < _OLDEST_API:
        problem = f"{sentence} speaks version {engine.api.api_version} of the API"
        return failed("engine", problem, "Upgrade it to 19.03")
    if not engine.is_local:
        return ok("engine", f"{sentence}: on another machine, so that folders of this one cannot be volumes")
    return ok("engine", sentence)


def _machine(engine: Engine) -> CheckResult:
    cores, memory = int(engine.info.get("NCPU") or 0), int(engine.info.get("MemTotal") or 0)
    sentence = f"{cores} cores and {memory / _GIB:.1f} GiB for all containers"
    if engine.info.get("MemoryLimit") is False:
        return warning("limits", f"{sentence}; it cannot limit memory", "Have its kernel mount the memory controller")
    return ok("limits", sentence)


def _gpus(engine: Engine) -> CheckResult:
    if "nvidia" in (engine.info.get("Runtimes") or {}):
        return ok("GPUs", "the engine has the NVIDIA runtime")
    return ok("GPUs", "the engine has no NVIDIA runtime; cuda=True will be refused unless it knows GPUs by CDI")


def _image(engine: Engine) -> CheckResult:
    try:
        settings = config.load()
    except ConfigError as error:
        return failed("image", f"{error.argument}: {error.problem}", error.remedy)
    image = str(settings.docker.image or settings.image)
    if not image:
        return ok("image", "none is configured: name one in each call")
    if find_image(engine, image) is not None:
        return ok("image", f"{image} is there")
    return warning("image", f"{image} is not there yet", f"The first job pulls it; docker pull {image} does it now")
