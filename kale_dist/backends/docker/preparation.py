"""Before a job's containers are made: what its specification leaves open is settled, and the engine is looked at."""

from __future__ import annotations

import dataclasses
import pathlib

from kale_dist import config
from kale_dist.backends.docker import connection, images
from kale_dist.engine import Engine
from kale_dist.errors import BackendError, ConfigError, warn
from kale_dist.image import for_job
from kale_dist.spec import JobSpec, VolumeKind

_GIB = 1 << 30


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
        BackendError: The engine cannot be reached, or the image cannot be had.
    """
    configured = config.load()
    image = spec.image or configured.image
    if spec.recipe is None and not image and not configured.registry:
        # Nothing has to be asked for this to be known.
        for_job.make(None, image="", settings=configured, cuda=spec.cuda, in_engine=True)
    spec = dataclasses.replace(spec, image=image)
    try:
        engine = connection.connect()
        _check_volumes(engine, spec)
        _check_size(engine, spec)
    except BackendError:
        if submit:
            raise
        return spec
    if submit:
        image = for_job.make(spec.recipe, image=image, settings=configured, cuda=spec.cuda, in_engine=True)
        images.ensure(engine, image)
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
