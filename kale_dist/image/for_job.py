"""The image of a job: its recipe as it is when the call is made, and the reference that the job pins."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kale_dist.config import Config
from kale_dist.errors import ConfigError
from kale_dist.job.spec.recipe import Recipe
from kale_dist.snapshot import loading
from kale_dist.wire.blobs import Store, map_file
from kale_dist.wording import needing

if TYPE_CHECKING:
    from kale_dist.image.base_image import Ask

_MIB = 1 << 20
_LOG_EACH_S = 2.0
_BAR_LENGTH = 24
_READING_S = 3.0


def freeze(
    recipe: Recipe, store: Store, *, imports: Iterable[str] | None, log: Callable[[str], None]
) -> tuple[Recipe, tuple[str, ...]]:
    """Copy everything that the recipe names on this machine, so that later changes there cannot alter the image.

    Args:
        recipe: A checked recipe (`image_checks.check`).
        store: Keeps the bytes of the recipe's files.
        imports: Modules that the call imports, whose packages are added to the recipe (`packages="auto"`); None adds none.
        log: Called with each line for the user, such as the packages found for the imports.

    Returns:
        The recipe, and notes for the user of a sentence or two each.

    Raises:
        StoreError: A file cannot be read any more, or the disk is full.
    """
    if imports is None:
        return keep_files(recipe, store), ()
    from kale_dist.image import auto

    report = auto.find_packages(imports)
    for line in report.lines:
        log(line)
    return keep_files(auto.with_packages(recipe, report.packages), store), report.notes


def keep_files(recipe: Recipe, store: Store) -> Recipe:
    """Put the recipe's files into the store; the returned recipe names them by digest.

    Raises:
        StoreError: A file cannot be read any more, or the disk is full.
    """
    kept = (
        dataclasses.replace(file, digest=store.put([map_file(file.source)]), source="") if file.source else file
        for file in recipe.files
    )
    return dataclasses.replace(recipe, files=tuple(kept))


def make(
    recipe: Recipe | None,
    *,
    image: str,
    settings: Config,
    cuda: bool,
    in_engine: bool,
    pull_secret_jsons: tuple[str, ...] = (),
    ask: Ask | None = None,
    adds_torch: bool = True,
) -> str:
    """Make the job's image if it has a recipe or names no image; return the reference that the job pins.

    Args:
        recipe: What to add to the base image; None for nothing.
        image: The base image, which the job uses unchanged if there is no recipe; empty if there is none.
        settings: The configuration, with the registry to push to.
        cuda: Whether the ranks have GPUs.
        in_engine: Whether the job runs in this machine's Docker engine, which can keep what has no registry.
        pull_secret_jsons: Texts of Kubernetes pull secrets.
        ask: Runs the base image in a pod of the cluster to inspect it; None uses this machine's Docker engine.
        adds_torch: Whether an image on Debian's slim Python gets torch.

    Raises:
        ConfigError: There is neither an image nor a registry to make one in, or a package is missing here.
        ImageError: The image cannot be made.
        BackendError: The Docker engine is needed and cannot be used.
    """
    python = loading.python_version()
    if not image and (recipe is None or not recipe.base) and not settings.registry:
        raise ConfigError(
            "image",
            "none is named, and there is no registry to make one in",
            f"Name any image with Python {python}, torch and NumPy: on=kd.{'Docker' if in_engine else 'Kubernetes'}"
            "(image='registry/name:tag'), `image = ...` in the configuration file, or the variable KALE_DIST_IMAGE. Or "
            "configure `registry` (KALE_DIST_REGISTRY), for an image like this Python",
        )
    if recipe is None and image:
        return image
    with needing("images", "packages", "to make an image"):
        from kale_dist.image import resolve

    def in_registry(made_of: Recipe, base: str) -> str:
        return resolve.resolve(
            made_of, base=base, registry=settings.registry, pull=settings.registry_pull, python=python, log=log,
            shared=settings.registry_tags == "shared",
            progress=ProgressBar(), pull_secret_jsons=pull_secret_jsons, ask=ask,
        ).reference  # fmt: skip

    if recipe is None or (not image and not recipe.base):
        torch = importlib.metadata.version("torch") if adds_torch else ""
        return in_registry(resolve.standard_recipe(recipe or Recipe(), python=python, torch=torch, cuda=cuda), "")
    if in_engine and not settings.registry:
        return resolve.resolve_in_engine(recipe, base=image, python=python, log=log).reference
    return in_registry(recipe, image)


def variables_of(image: str) -> dict[str, str]:
    """Return an image's variables from its registry, without a pull; empty if that does not answer within 3 s."""
    found: dict[str, str] = {}

    def read() -> None:
        # Only a warning depends on it: a registry that only nodes reach, or know, is no error.
        with contextlib.suppress(Exception):
            from kale_dist.image import auth, reference, registry

            name = reference.Reference.parse(image)
            shown = auth.find_credentials(name.registry, repository=name.repository)
            with registry.Registry(name.registry, shown) as opened:
                config = opened.image(name.repository, name.target).config["config"]
            found.update(entry.split("=", 1) for entry in config["Env"])

    reading = threading.Thread(target=read, name="kale_dist image", daemon=True)
    reading.start()
    reading.join(_READING_S)
    return dict(found)


def describe(recipe: Recipe, image: str) -> str:
    """Describe in one line the image that would be made, for a plan, which makes none."""
    parts = [
        *recipe.packages,
        *recipe.apt,
        *(file.path for file in recipe.files),
        *(f"{n}=" for n, _ in recipe.environment),
    ]
    return f"The image is made first: {recipe.base or image or 'an image like this Python'} with {', '.join(parts)}"


def log(text: str) -> None:
    """Print a line about the build's progress on stderr, beside the cell's own output, as pip does."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class ProgressBar:
    """Prints a progress bar of one build step every two seconds, as a line of its own among the build's other lines."""

    def __init__(self) -> None:
        self._logged_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Print the bar if two seconds have passed: `done` of `total` bytes."""
        if total > _MIB and time.monotonic() - self._logged_at > _LOG_EACH_S:
            self._logged_at = time.monotonic()
            full = min(_BAR_LENGTH, _BAR_LENGTH * done // max(total, 1))
            bar = f"{'#' * full}{'.' * (_BAR_LENGTH - full)}"
            log(f"  [{bar}] {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB")
