"""Finds the image of a recipe by its tag, or makes it; the job pins it by its digest.

The tag is a hash of the recipe and the base's digest. Who can push to the registry can foresee it and put another image there, so a
cache of this user knows which image they have made for a tag, by its digest. Other images are used only where tags are shared.
"""

from __future__ import annotations

import contextlib
import dataclasses

from kale_dist.errors import ConfigError
from kale_dist.image import auth, builder, cache
from kale_dist.image import base_image as bases
from kale_dist.image.base_image import Ask
from kale_dist.image.builder import Log, Progress
from kale_dist.image.packages import PYTORCH
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.image.requirements import PYPI
from kale_dist.job import records
from kale_dist.job.spec.recipe import Recipe

NAME = "kale-dist"
"""Last part of the repository's path: one repository has the images of all recipes, by tag."""

_PLAIN = "http://"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The image of a recipe."""

    reference: str
    """The reference that a job pins: `repository@sha256:...` as nodes pull it, or, without a registry, an image ID."""
    was_built: bool
    """Whether this call built the image; False if it existed already."""
    tag: str


def resolve(
    recipe: Recipe,
    *,
    base: str,
    registry: str,
    pull: str = "",
    python: str = "",
    shared: bool = False,
    pull_secret_jsons: tuple[str, ...] = (),
    ask: Ask | None = None,
    log: Log,
    progress: Progress = lambda _done, _total: None,
) -> Resolved:
    """Find the recipe's image in the registry, or make it and push it there.

    Args:
        recipe: The recipe; the bytes of its files are in this user's blobs.
        base: The base image, if the recipe names none.
        registry: Where to push, as in the configuration: `localhost:5000/team`; with `http://` in front if it has no TLS.
        pull: The same place as nodes reach it; empty if they use the same name.
        python: The minor that the image's Python must have, such as `3.11`; empty for any.
        shared: Whether to use the image that the registry has for the recipe's tag, also if this user has not made it.
        pull_secret_jsons: Texts of Kubernetes pull secrets, for the registries of base and image.
        ask: Runs the base to inspect it; None uses this machine's Docker engine.
        log: Takes a line for the user.
        progress: Called with the bytes done and the total bytes of the transfer in progress.

    Raises:
        ConfigError: Registry or base are missing or malformed.
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

        with cache.alone(target, log), records.keeping_blobs():
            there = "" if recipe.rebuild else _there(ours, target, log, shared=shared)
            if there:
                digest = there
            elif recipe.apt:
                log(f"Making the image {target} on {pinned.reference}.")
                with bases.connected(recipe) as engine:
                    # The engine inspects the base, because only the engine may have it.
                    facts = bases.facts_of(pinned, recipe, ask=None, python=python, log=log)
                    builder.build_in_engine(engine, recipe, base=pinned, facts=facts, tag=str(target), log=log)
                    digest = builder.push(engine, target, log)
            else:
                log(f"Making the image {target} on {pinned.reference}.")
                digest = builder.build(
                    recipe, target=target, registry=ours, base=pinned, base_registry=theirs, log=log, progress=progress,
                    facts=lambda: bases.facts_of(pinned, recipe, ask=ask, python=python, log=log),
                )  # fmt: skip
            if not there:
                cache.write(cache.folder("made") / target.tag, digest.encode())
    return Resolved(reference=str(pulled.with_digest(digest)), was_built=not there, tag=target.tag)


def _there(registry: Registry, target: Reference, log: Log, *, shared: bool) -> str:
    """The digest of the image that the registry has for a tag, and that may be used; empty if it has to be made."""
    with contextlib.suppress(OSError):
        made = (cache.folder("made") / target.tag).read_text()
        if registry.head(target.repository, made):
            return made
    there = registry.head(target.repository, target.tag)
    if there and not shared:
        log(
            f"{target} was not made by you on this machine, and is made again. registry_tags = 'shared' uses what others made."
        )
    return there if shared else ""


def resolve_in_engine(recipe: Recipe, *, base: str, python: str = "", log: Log) -> Resolved:
    """Find the recipe's image in the Docker engine, or make it there: for jobs of that engine, without a registry.

    Arguments and errors are those of `resolve`.
    """
    from kale_dist.image.engine import find_image

    named = bases.name_of(recipe, base)
    with _opened(named) as registry:
        pinned = bases.pin(recipe, named, named, registry, in_engine=True)
    tag = recipe.tag(pinned.digest, python)
    target = Reference(registry="docker.io", repository=f"library/{NAME}", tag=tag)

    with cache.alone(target, log), records.keeping_blobs(), bases.connected() as engine:
        there = None if recipe.rebuild else find_image(engine, f"{NAME}:{tag}")
        if there is not None:
            return Resolved(reference=str(there["Id"]), was_built=False, tag=tag)
        log(f"Making the image {NAME}:{tag} on {pinned.reference}.")
        facts = bases.facts_of(pinned, recipe, ask=None, python=python, log=log)
        image = builder.build_in_engine(engine, recipe, base=pinned, facts=facts, tag=f"{NAME}:{tag}", log=log)
        return Resolved(reference=image, was_built=True, tag=tag)


def repository_of(registry: str, argument: str = "registry") -> Reference:
    """The repository of a registry in which kale_dist keeps its images.

    Args:
        registry: The setting of the configuration.
        argument: The setting's name, for messages.

    Raises:
        ConfigError: The setting is empty or malformed.
    """
    if not registry:
        raise ConfigError(
            "registry",
            "none is configured, and images that are made for jobs lie in one",
            "Set KALE_DIST_REGISTRY or `registry = ...` of the configuration file, such as 'registry.example.com/team'. Or "
            "name an image that has what is needed, by image=, or send this machine's packages, by packages='here'",
        )
    try:
        return Reference.parse(f"{registry.removeprefix(_PLAIN)}/{NAME}")
    except ConfigError as error:
        raise ConfigError(argument, error.problem, "Write it as 'registry.example.com/team'") from None


def standard_recipe(recipe: Recipe, *, python: str, torch: str, cuda: bool = False) -> Recipe:
    """The recipe on Debian's slim Python with this torch, for users who have no base image.

    Args:
        recipe: What else to install; its base is replaced.
        python: A minor: `3.11`.
        torch: torch's version, with its local label if it has one: `2.13.0+cpu`; empty to leave torch out.
        cuda: Whether the ranks have GPUs: the label `cpu` is then ignored.
    """
    version, _, label = torch.partition("+")
    ready = not torch or any(bases.names(package, ("torch",)) for package in recipe.packages)
    own = f"{PYTORCH}{label}" if label and not (cuda and label == "cpu") else ""
    urls = recipe.index_urls or ((PYPI,) if own else ())
    return dataclasses.replace(
        recipe,
        base=f"docker.io/library/python:{python}-slim-bookworm",
        packages=recipe.packages if ready else tuple(sorted((*recipe.packages, f"torch=={version}"))),
        index_urls=(*urls, own) if own and not ready else recipe.index_urls,
    )


def _as_pushed(base: Reference, home: Reference, pulled: Reference) -> Reference:
    """The name by which this machine reaches a base that is named as nodes pull it."""
    if pulled.name == home.name:
        return base
    there, here = (image.name.removesuffix(f"/{NAME}") for image in (pulled, home))
    if base.name.startswith(f"{there}/"):
        moved = Reference.parse(here + base.name.removeprefix(there))
        return dataclasses.replace(moved, tag=base.tag, digest=base.digest)
    if base.registry == pulled.registry:
        return dataclasses.replace(base, registry=home.registry)
    return base


def _opened(image: Reference, pull_secret_jsons: tuple[str, ...] = (), *, plain: bool = False) -> Registry:
    found = auth.find_credentials(image.registry, repository=image.repository, pull_secret_jsons=pull_secret_jsons)
    return Registry(image.registry, found, insecure=plain or None)
