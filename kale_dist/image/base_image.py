"""What an image is built on, pinned: as a registry has it, or, where Docker builds, as its engine has it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kale_dist.errors import BackendUnavailableError, ConfigError, ImageError
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.recipe import DOCKER, Recipe

if TYPE_CHECKING:
    from kale_dist.engine import Engine

RECIPE_LABEL = "dev.kale-dist.recipe"
"""Of images that were made here: what they are made of, as JSON."""

BASE_LABEL = "org.opencontainers.image.base.name"
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What an image is built on."""

    reference: Reference
    """By digest, where it lies in a registry."""
    digest: str
    """Of its manifest; or what the engine calls it, if it lies nowhere else."""

    @property
    def labels(self) -> dict[str, str]:
        """Those that say it of an image."""
        return {BASE_LABEL: str(self.reference), BASE_DIGEST_LABEL: self.digest}

    def labels_with(self, recipe: Recipe) -> dict[str, str]:
        """Those that say it and what was put on top of it."""
        identity = dataclasses.replace(recipe, rebuild=False).to_json()
        return {RECIPE_LABEL: json.dumps(identity, sort_keys=True, separators=(",", ":")), **self.labels}


def named(recipe: Recipe, base: str) -> Reference:
    """The recipe's own base, else the other.

    Raises:
        ConfigError: There is none, or it is no reference.
    """
    text = recipe.base or base
    if not text:
        remedy = (
            "Name one with Python and torch: Recipe(base='registry/name:tag'), or `image = ...` of the configuration"
        )
        raise ConfigError("base", "the recipe names no image that it is built on, and there is no other", remedy)
    return Reference.parse(text)


def find(recipe: Recipe, base: Reference, registry: Registry) -> Base:
    """Pin a base. If Docker builds, what its engine has counts, as with any `docker build`.

    Args:
        recipe: Tells who builds.
        base: The reference.
        registry: Where it lies, as this machine reaches it.

    Raises:
        ImageError: It is not there, or the registry refuses.
        BackendError: Docker is needed and cannot be used.
    """
    if base.digest:
        return Base(reference=base.with_digest(base.digest), digest=base.digest)
    if recipe.chosen_builder == DOCKER:
        with needing_docker(recipe), connected() as engine:
            there = inspect(engine, str(base))
        if there is not None:
            known = {entry.rpartition("@")[2] for entry in there.get("RepoDigests") or () if _is_of(entry, base)}
            if known:
                digest = min(known)
                return Base(reference=base.with_digest(digest), digest=digest)
            return Base(reference=base, digest=str(there["Id"]))
    found = registry.head(base.repository, base.target)
    if found is None:
        raise ImageError(
            f"The base image {base} is not in the registry {base.registry}. Correct its name, or push it there."
        )
    return Base(reference=base.with_digest(found.digest), digest=found.digest)


def check_python(base: str, version: str, interpreter: str, python: str) -> None:
    """Refuse a base with another Python than the notebook's.

    Args:
        base: Its reference.
        version: Of its Python.
        interpreter: That Python's path.
        python: The minor that it must have.

    Raises:
        ImageError: It has another one.
    """
    if ".".join(version.split(".")[:2]) != python:
        raise ImageError(
            f"The base image {base} has Python {version} ({interpreter}), and this notebook has "
            f"{python}: what it sends could not be read there. Name a base image with Python {python}."
        )


def check_torch(base: str, version: str, interpreter: str, recipe: Recipe) -> None:
    """Refuse a base without torch, unless the recipe adds it.

    Args:
        base: Its reference.
        version: Of its Python.
        interpreter: That Python's path.
        recipe: What goes on top.

    Raises:
        ImageError: There would be no torch.
    """
    if not any(names_torch(package) for package in recipe.packages):
        raise ImageError(
            f"The base image {base} has no torch for its {interpreter} (Python {version}). "
            f"Name a base image with torch, or add torch to `packages=`."
        )


def names_torch(package: str) -> bool:
    """Whether a requirement, in the spelling that recipes have, is torch itself."""
    return re.match(r"torch(?![a-z0-9._-])", package) is not None


@contextlib.contextmanager
def needing_docker(recipe: Recipe) -> Iterator[None]:
    """Say why Docker is needed, where the user did not ask for it."""
    try:
        yield
    except (BackendUnavailableError, ConfigError) as error:
        if recipe.builder == DOCKER or (isinstance(error, ConfigError) and error.argument != "builder"):
            raise
        raise ImageError(
            f"Debian packages ({', '.join(recipe.apt)}) need a builder that runs commands in the image, which is "
            f"Docker's: {str(error).rstrip('.')}. Or name a base image that has them, and leave out `apt`."
        ) from error


@contextlib.contextmanager
def connected() -> Iterator[Engine]:
    """A connection to the engine.

    Raises:
        ConfigError: The package `docker` is not installed.
        BackendUnavailableError: No engine answers.
    """
    try:
        from kale_dist import engine
    except ModuleNotFoundError as error:
        problem = f"Docker is used through the package {error.name}, which is not installed"
        raise ConfigError("builder", problem, "pip install 'kale-dist[docker]'") from error
    with contextlib.closing(engine.connect()) as made:
        yield made


def inspect(engine: Engine, name: str) -> dict[str, Any] | None:
    """What the engine knows of an image; None where it does not have it."""
    import docker.errors

    from kale_dist.engine import explained

    with explained(f"looking for the image {name}"):
        try:
            return dict(engine.api.inspect_image(name))
        except docker.errors.ImageNotFound:
            return None


def _is_of(entry: str, base: Reference) -> bool:
    """Whether one of the engine's digests is that of this repository."""
    with contextlib.suppress(ConfigError):
        return Reference.parse(entry).name == base.name
    return False
