"""The image of a job: the one that is named, with what its recipe puts on top of it."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from typing import TYPE_CHECKING

from kale_dist.config import Config
from kale_dist.errors import ConfigError
from kale_dist.recipe import Recipe
from kale_dist.runtime import loading

if TYPE_CHECKING:
    from kale_dist.image.base import Ask

_MIB = 1 << 20
_SAY_EACH_S = 2.0
_BAR_LENGTH = 24
_MOST_STEPS = 1000
"""Builders that run commands count those; everything else counts bytes."""

_CLIENT_PACKAGES = ("isal", "packaging", "urllib3")


def make(
    recipe: Recipe | None,
    *,
    image: str,
    settings: Config,
    cuda: bool,
    in_engine: bool,
    pull_secret_jsons: tuple[str, ...] = (),
    ask: Ask | None = None,
) -> str:
    """The reference that a job pins, made first where there is a recipe, or where no image is named at all.

    Args:
        recipe: What goes on top; None for nothing.
        image: The base that the job would use without a recipe; empty if there is none.
        settings: Where images go.
        cuda: Whether the ranks have GPUs.
        in_engine: Whether the job runs in this machine's Docker engine, which can keep what has no registry.
        pull_secret_jsons: Texts of Kubernetes pull secrets.
        ask: Runs an image to learn what it has, as a pod of the cluster; None: this machine's Docker engine does.

    Raises:
        ConfigError: There is neither an image nor a registry to make one in, or a package is missing here.
        ImageError: It cannot be made.
        BackendError: The Docker engine is needed and cannot be used.
    """
    python = loading.python_version()
    if not image and (recipe is None or not recipe.base) and not settings.registry:
        raise ConfigError(
            "image",
            "none is named, and there is no registry to make one in",
            f"Name any image with Python {python} and torch: image='registry/name:tag', `image = ...` in the configuration "
            "file, or the variable KALE_DIST_IMAGE. Or configure `registry` (KALE_DIST_REGISTRY), for an image like this "
            "Python",
        )
    if recipe is None and image:
        return image
    try:
        from kale_dist.image import resolve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _CLIENT_PACKAGES:
            raise
        problem = f"to make an image needs the package {package!r}, which is not installed in this Python"
        raise ConfigError("packages", problem, "Install it: pip install 'kale-dist[images]'") from None

    def in_registry(made_of: Recipe, base: str) -> str:
        return resolve.resolve(
            made_of, base=base, registry=settings.registry, pull=settings.registry_pull, python=python, say=say,
            progress=Progress(), pull_secret_jsons=pull_secret_jsons, ask=ask,
        ).reference  # fmt: skip

    if recipe is None or (not image and not recipe.base):
        torch = importlib.metadata.version("torch")
        return in_registry(resolve.standard_recipe(recipe or Recipe(), python=python, torch=torch, cuda=cuda), "")
    if in_engine and not settings.registry:
        return resolve.resolve_in_engine(recipe, base=image, python=python, say=say, progress=Progress()).reference
    return in_registry(recipe, image)


def describe(recipe: Recipe, image: str) -> str:
    """What would be made, in one line, for a plan that makes nothing."""
    parts = [
        *recipe.packages,
        *recipe.apt,
        *(file.path for file in recipe.files),
        *(f"{n}=" for n, _ in recipe.environment),
    ]
    return f"The image is made first: {recipe.base or image or 'an image like this Python'} with {', '.join(parts)}"


def say(text: str) -> None:
    """Tell the user of something that takes time."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Progress:
    """Says how far a step is, with a bar, every two seconds: above and below it come other lines of the build."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Take what is done and what there is: bytes, or a few steps."""
        steps = total < _MOST_STEPS
        if (steps or total > _MIB) and time.monotonic() - self._said > _SAY_EACH_S:
            self._said = time.monotonic()
            full = min(_BAR_LENGTH, _BAR_LENGTH * done // max(total, 1))
            amount = f"step {done} of {total}" if steps else f"{done / _MIB:,.1f} of {total / _MIB:,.1f} MiB"
            say(f"  [{'#' * full}{'.' * (_BAR_LENGTH - full)}] {amount}")
