"""The base of an image that Docker builds: had on the engine, and asked by running its Python what that is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from kale_dist.engine import Engine, explain
from kale_dist.errors import ImageError
from kale_dist.image import base_image
from kale_dist.recipe import Recipe

_ASK = (
    "import importlib.util as u, platform as p, sys; "
    "print(p.python_version(), u.find_spec('torch') is not None, sys.executable)"
)
_ANSWER = re.compile(r"^(?P<version>\d+\.\d+\.\S+) (?P<torch>True|False) (?P<path>\S+)$", re.MULTILINE)
_NO_PYTHON = re.compile(r"executable file not found|no such file", re.IGNORECASE)
_ASKING_S = 60


def check_platform(base: str, found: Mapping[str, Any], platform: str) -> None:
    """Refuse a base that is for another platform than the image.

    Args:
        base: Its reference.
        found: What the engine knows of it.
        platform: `linux/amd64` and the like; empty for any.

    Raises:
        ImageError: It is for another one.
    """
    has = f"{found['Os']}/{found['Architecture']}"
    if platform and not platform.startswith(has):
        raise ImageError(
            f"the base {base} is for {has}, and the image is to be for {platform}. Take a base for {platform}, or say "
            f"platform={has!r}"
        )


def check_python(
    engine: Engine, base: str, image_id: str, recipe: Recipe, python: str, say: Callable[[str], None]
) -> None:
    """Refuse a base on which the job could not run, before anything is built on it.

    Args:
        engine: Has the base.
        base: Its reference.
        image_id: What the engine calls it.
        recipe: What goes on top.
        python: The minor that its Python must have; empty: nothing is asked.
        say: Takes a line for the user.

    Raises:
        ImageError: It has another Python or none, or no torch.
    """
    if not python:
        return
    said = _ask(engine, base, image_id)
    found = _ANSWER.search(said) if said is not None else None
    if found is None:
        # Of another processor, perhaps: a build that copies files needs no program to run.
        say(f"What Python the base {base} has could not be asked of it.")
        return
    base_image.check_python(base, found["version"], found["path"], python)
    if found["torch"] == "False":
        base_image.check_torch(base, found["version"], found["path"], recipe)


def _ask(engine: Engine, base: str, image_id: str) -> str | None:
    """What the base's `python3` answers; None where it cannot be run here."""
    import docker.errors
    import requests

    container = engine.api.create_container_from_config(
        {
            "Image": image_id, "Entrypoint": ["python3", "-c", _ASK], "Cmd": [],
            "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "json-file", "Config": {}}},
        }
    )["Id"]  # fmt: skip
    try:
        engine.api.start(container)
        engine.api.wait(container, timeout=_ASKING_S)
        return str(engine.api.logs(container, stderr=False).decode(errors="replace"))
    except docker.errors.APIError as error:
        if _NO_PYTHON.search(f"{error.explanation}"):
            raise ImageError(
                f"The base image {base} has no python3 on its PATH. Name a base image with Python and torch."
            ) from error
        if "exec format error" in f"{error.explanation}":
            return None
        raise explain(error, f"asking {base} for its Python") from error
    except requests.exceptions.Timeout:
        return None
    finally:
        with contextlib.suppress(docker.errors.APIError):
            engine.api.remove_container(container, force=True, v=True)
