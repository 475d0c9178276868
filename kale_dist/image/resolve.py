"""From a recipe to the image that a job pins: found by its tag, else made.

The tag says what the image is made of, the base by its digest. So nothing has to be remembered: the same recipe on the same
base finds the image, from any machine.
"""

from __future__ import annotations

import dataclasses

from kale_dist.errors import ConfigError
from kale_dist.image import auth, builder, cache
from kale_dist.image import base as bases
from kale_dist.image.base import Ask
from kale_dist.image.builder import Progress, Say
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.job import records
from kale_dist.job.spec.recipe import Recipe

NAME = "kale-dist"
"""Last part of the repository's path: images of all recipes lie in one repository, under their tags."""

_PLAIN = "http://"
_PYPI = "https://pypi.org/simple"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The image of a recipe."""

    reference: str
    """What a job pins: `repository@sha256:...`, as nodes pull it; or the engine's own name of an image that lies nowhere
    else."""
    was_built: bool
    """False: it was there."""
    tag: str


def resolve(
    recipe: Recipe,
    *,
    base: str,
    registry: str,
    pull: str = "",
    python: str = "",
    pull_secret_jsons: tuple[str, ...] = (),
    ask: Ask | None = None,
    say: Say,
    progress: Progress = lambda _done, _total: None,
) -> Resolved:
    """Find the recipe's image in the registry, or make it and push it there.

    Args:
        recipe: With the bytes of its files in this user's blobs.
        base: What it is built on, if the recipe does not say so.
        registry: Where images go, as in the configuration: `localhost:5000/team`; with `http://` in front if that has
            no TLS.
        pull: The same place as nodes reach it; empty: the same name.
        python: The minor that the image's Python must have, such as `3.11`; empty for any.
        pull_secret_jsons: Texts of Kubernetes pull secrets, for the registries of base and image.
        ask: Runs the base to learn what it has; None: this machine's Docker engine does.
        say: Takes a line for the user.
        progress: Takes bytes done and bytes in all, of what is being copied or sent at the time.

    Raises:
        ConfigError: There is no registry or base, or one of them is no reference.
        ImageError: A registry refuses, the base does not fit, or the image cannot be made.
        BackendError: The Docker engine is needed and cannot be used.
    """
    home, pulled = repository_of(registry), repository_of(pull or registry, "registry_pull")
    named = bases.name_of(recipe, base)
    reachable = _as_pushed(named, home, pulled)
    is_plain, is_home = registry.startswith(_PLAIN), reachable.registry == home.registry
    with (
        _opened(home, pull_secret_jsons, plain=is_plain) as ours,
        _opened(reachable, pull_secret_jsons, plain=is_plain and is_home) as theirs,
    ):
        pinned = bases.pin(recipe, named, reachable, theirs)
        target = home.with_tag(recipe.tag(pinned.digest, python))

        with cache.alone(target, say), records.keeping_blobs():
            there = "" if recipe.rebuild else ours.head(home.repository, target.tag)
            if there:
                digest = there
            elif recipe.apt:
                say(f"Making the image {target} on {pinned.reference}.")
                with bases.connected(recipe) as engine:
                    # The base may lie in the engine alone, which therefore is asked.
                    facts = bases.facts_of(pinned, recipe, ask=None, python=python, say=say)
                    builder.build_in_engine(engine, recipe, base=pinned, facts=facts, tag=str(target), say=say)
                    digest = builder.push(engine, target, say)
            else:
                say(f"Making the image {target} on {pinned.reference}.")
                digest = builder.build(
                    recipe, target=target, registry=ours, base=pinned, base_registry=theirs, say=say, progress=progress,
                    facts=lambda: bases.facts_of(pinned, recipe, ask=ask, python=python, say=say),
                )  # fmt: skip
    return Resolved(reference=str(pulled.with_digest(digest)), was_built=not there, tag=target.tag)


def resolve_in_engine(recipe: Recipe, *, base: str, python: str = "", say: Say) -> Resolved:
    """Find the recipe's image in the Docker engine, or make it there: for jobs of that engine, without a registry.

    Args:
        recipe: With the bytes of its files in this user's blobs.
        base: What it is built on, if the recipe does not say so.
        python: As in `resolve`.
        say: Takes a line for the user.

    Raises:
        ConfigError: There is no base, or one that is no reference.
        ImageError: The image cannot be made.
        BackendError: The engine cannot be used.
    """
    from kale_dist.image.engine import find_image

    named = bases.name_of(recipe, base)
    with _opened(named) as registry:
        pinned = bases.pin(recipe, named, named, registry, in_engine=True)
    tag = recipe.tag(pinned.digest, python)
    target = Reference(registry="docker.io", repository=f"library/{NAME}", tag=tag)

    with cache.alone(target, say), records.keeping_blobs(), bases.connected() as engine:
        there = None if recipe.rebuild else find_image(engine, f"{NAME}:{tag}")
        if there is not None:
            return Resolved(reference=str(there["Id"]), was_built=False, tag=tag)
        say(f"Making the image {NAME}:{tag} on {pinned.reference}.")
        facts = bases.facts_of(pinned, recipe, ask=None, python=python, say=say)
        image = builder.build_in_engine(engine, recipe, base=pinned, facts=facts, tag=f"{NAME}:{tag}", say=say)
        return Resolved(reference=image, was_built=True, tag=tag)


def repository_of(registry: str, argument: str = "registry") -> Reference:
    """Where images lie in a registry.

    Args:
        registry: As in the configuration.
        argument: What the user calls it.

    Raises:
        ConfigError: It is empty, or is no place in a registry.
    """
    if not registry:
        raise ConfigError(
            "registry",
            "none is configured, and images that are made for jobs lie in one",
            "Set KALE_DIST_REGISTRY or `registry = ...` of the configuration file, such as 'registry.example.com/team'. Or "
            "name an image that has what is needed, by image=",
        )
    try:
        return Reference.parse(f"{registry.removeprefix(_PLAIN)}/{NAME}")
    except ConfigError as error:
        raise ConfigError(argument, error.problem, "Write it as 'registry.example.com/team'") from None


def standard_recipe(recipe: Recipe, *, python: str, torch: str, cuda: bool = False) -> Recipe:
    """A recipe on Debian's slim Python with this torch, for those who have no image to build on.

    Args:
        recipe: What else goes into it; its base is replaced.
        python: A minor: `3.11`.
        torch: A version, with its label if it has one: `2.13.0+cpu`; empty for none.
        cuda: Whether the ranks have GPUs: then a label that says otherwise does not count.
    """
    version, _, label = torch.partition("+")
    ready = not torch or any(bases.names(package, ("torch",)) for package in recipe.packages)
    own = f"https://download.pytorch.org/whl/{label}" if label and not (cuda and label == "cpu") else ""
    urls = recipe.index_urls or ((_PYPI,) if own else ())
    return dataclasses.replace(
        recipe,
        base=f"docker.io/library/python:{python}-slim-bookworm",
        packages=recipe.packages if ready else tuple(sorted((*recipe.packages, f"torch=={version}"))),
        index_urls=(*urls, own) if own and not ready else recipe.index_urls,
    )


def _as_pushed(base: Reference, home: Reference, pulled: Reference) -> Reference:
    """A base that lies where nodes pull, by the name that this machine reaches."""
    if pulled.name == home.name:
        return base
    there, here = (place.name.removesuffix(f"/{NAME}") for place in (pulled, home))
    if base.name.startswith(f"{there}/"):
        moved = Reference.parse(here + base.name.removeprefix(there))
        return dataclasses.replace(moved, tag=base.tag, digest=base.digest)
    if base.registry == pulled.registry:
        return dataclasses.replace(base, registry=home.registry)
    return base


def _opened(place: Reference, pull_secret_jsons: tuple[str, ...] = (), *, plain: bool = False) -> Registry:
    found = auth.find(place.registry, repository=place.repository, pull_secret_jsons=pull_secret_jsons)
    return Registry(place.registry, found, insecure=plain or None)
