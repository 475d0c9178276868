"""What the doctor says of a Docker engine. Nothing is made there, and nothing is pulled."""

from __future__ import annotations

from kale_dist import config
from kale_dist.backends.docker import connection, images
from kale_dist.engine import Engine
from kale_dist.errors import BackendError, ConfigError

_GIB = 1 << 30
_OK, _WARNING, _FAILED = "ok", "warning", "failed"
_OLDEST_API = (1, 40)

Found = tuple[str, str, str, str]
"""Name of the check, verdict, what was found, what to do."""


def examine() -> tuple[Found, ...]:
    """Look at the engine that jobs would go to. Never raises for what it finds."""
    try:
        engine = connection.connect()
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
    if images.is_there(engine, image):
        return "image", _OK, f"{image} is there", ""
    return "image", _WARNING, f"{image} is not there yet", f"The first job pulls it; docker pull {image} does it now"
