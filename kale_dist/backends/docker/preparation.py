"""Prepares a job on an engine: gets its image, checks whether the engine can run it, and examines the engine for the doctor."""

from __future__ import annotations

import dataclasses
import pathlib

from kale_dist import config
from kale_dist.backends.docker import engines
from kale_dist.engine import Engine, ensure_image, find_image
from kale_dist.errors import BackendError, ConfigError, warn
from kale_dist.image import for_job
from kale_dist.spec import JobSpec, VolumeKind

_GIB = 1 << 30

_OK, _WARNING, _FAILED = "ok", "warning", "failed"
_OLDEST_API = (1, 40)

Found = tuple[str, str, str, str]
"""Name of a check, verdict, what was found, what to do."""


def prepare(spec: JobSpec, *, submit: bool) -> JobSpec:
    """Settle a specification.

    Args:
        spec: As the call gave it.
        submit: Whether a submission follows. Otherwise an engine that cannot be reached is done without, and no image is
            pulled.

    Returns:
        The specification with its image, which is made now if it has a recipe.

    Raises:
        ConfigError: There is no image and no way to one, or the engine's machine has less than was asked for.
        ImageError: The image cannot be made.
        BackendError: The engine cannot be reached, or the image cannot be pulled.
    """
    configured = config.load()
    image = spec.image or configured.image
    if spec.recipe is None and not image and not configured.registry:
        # Nothing has to be asked for this to be known.
        for_job.make(None, image="", settings=configured, cuda=spec.cuda, in_engine=True)
    spec = dataclasses.replace(spec, image=image)
    try:
        engine = engines.connect()
        _check_volumes(engine, spec)
        _check_size(engine, spec)
    except BackendError:
        if submit:
            raise
        return spec
    if submit:
        image = for_job.make(spec.recipe, image=image, settings=configured, cuda=spec.cuda, in_engine=True)
        ensure_image(engine, image, say=for_job.say)
        spec = dataclasses.replace(spec, image=image)
        _warn(engine, spec)
    return spec


def _check_volumes(engine: Engine, spec: JobSpec) -> None:
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


def _check_size(engine: Engine, spec: JobSpec) -> None:
    """Refuse what one container cannot have on the engine's machine."""
    asked = spec.resources
    ranks = min(spec.topology.processes_per_pod, spec.topology.number_of_processes)
    cores, there = (asked.cpu_limit or asked.cpu or 0) * ranks, int(engine.info.get("NCPU") or 0)
    if there and cores > there:
        field = "cpu_limit" if asked.cpu_limit else "cpu"
        problem = f"{cores:g} cores for a container of {ranks} processes, and the engine's machine has {there}"
        raise ConfigError(f"resources.{field}", problem, "Lower it, or processes_per_pod")
    memory = int(engine.info.get("MemTotal") or 0) / _GIB
    if memory and (asked.memory_gib or 0) * ranks > memory:
        problem = f"{(asked.memory_gib or 0) * ranks:g} GiB for a container, and the engine's machine has {memory:.1f}"
        raise ConfigError("resources.memory_gib", problem, "Lower it, or processes_per_pod")


def _warn(engine: Engine, spec: JobSpec) -> None:
    cores, world = int(engine.info.get("NCPU") or 0), spec.topology.number_of_processes
    if cores and world > cores and not spec.cuda:
        warn(
            f"number_of_processes: {world} processes share the {cores} cores of the engine's machine. More processes than "
            "cores make training slower, not faster"
        )


# -- for the doctor --------------------------------------------------------------------------------------------------


def examine() -> tuple[Found, ...]:
    """Look at the engine that jobs would go to. Never raises for what it finds."""
    try:
        engine = engines.connect()
        kind = "Podman" if engine.is_podman else "rootless Docker" if engine.is_rootless else "Docker"
        sentence = f"{kind} {engine.version} at {engine.url}"
        return (_version(engine, sentence), _machine(engine), _gpus(engine), _image(engine))
    except BackendError as error:
        sentence, _, remedy = str(error).partition(". ")
        return (("engine", _FAILED, sentence, remedy or "Start it, or set DOCKER_HOST"),)


def _version(engine: Engine, sentence: str) -> Found:
    spoken = tuple(int(part) for part in str(engine.api.api_version).split(".")[:2])
    if spoken < _OLDEST_API:
        return (
            "engine",
            _FAILED,
            f"{sentence} speaks version {engine.api.api_version} of the API",
            "Upgrade it to 19.03",
        )
    if not engine.is_local:
        return "engine", _OK, f"{sentence}: on another machine, so that folders of this one cannot be volumes", ""
    return "engine", _OK, sentence, ""


def _machine(engine: Engine) -> Found:
    cores, memory = int(engine.info.get("NCPU") or 0), int(engine.info.get("MemTotal") or 0)
    sentence = f"{cores} cores and {memory / _GIB:.1f} GiB for all containers"
    if engine.info.get("MemoryLimit") is False:
        return "limits", _WARNING, f"{sentence}; it cannot limit memory", "Have its kernel mount the memory controller"
    return "limits", _OK, sentence, ""


def _gpus(engine: Engine) -> Found:
    if "nvidia" in (engine.info.get("Runtimes") or {}):
        return "GPUs", _OK, "the engine has the NVIDIA runtime", ""
    return "GPUs", _OK, "the engine has no NVIDIA runtime; cuda=True will be refused unless it knows GPUs by CDI", ""


def _image(engine: Engine) -> Found:
    try:
        image = config.load().image
    except ConfigError as error:
        return "image", _FAILED, f"{error.argument}: {error.problem}", error.remedy
    if not image:
        return "image", _OK, "none is configured: name one in each call", ""
    if find_image(engine, image) is not None:
        return "image", _OK, f"{image} is there", ""
    return "image", _WARNING, f"{image} is not there yet", f"The first job pulls it; docker pull {image} does it now"
