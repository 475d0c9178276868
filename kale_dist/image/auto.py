"""`packages="auto"`: finds the installed packages, with their versions, behind the imports of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kale_dist.job.spec.recipe import Recipe

_NEVER_IMPORTS = frozenset({"__main__", "__mp_main__", "kale_dist", "torch", "functorch", "torchgen", "cloudpickle"})
"""Top-level names that are in every rank, or in every image that ranks can run in."""

_NEVER_DISTRIBUTIONS = frozenset({"torch", "cloudpickle", "kale-dist", "pip", "setuptools", "wheel"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of `packages="auto"`."""

    packages: tuple[str, ...]
    """Requirements for a recipe, sorted: `scikit-learn==1.7.2`, without local labels."""
    lines: tuple[str, ...]
    """A line for the user about each package that was found."""
    notes: tuple[str, ...]
    """A note for the user about each import that has no package or another version, a sentence or two each."""


def find_packages(imports: Iterable[str]) -> Report:
    """The installed packages behind imports, pinned to the versions that are installed here.

    The standard library, torch, and kale_dist's own requirements are left out.

    Args:
        imports: Dotted names of modules that are not the notebook's own code.
    """
    by_top: dict[str, set[str]] = {}
    for name in imports:
        top = name.partition(".")[0]
        if top and top not in _NEVER_IMPORTS and top not in sys.stdlib_module_names:
            by_top.setdefault(top, set()).add(name)
    owners = importlib.metadata.packages_distributions() if by_top else {}
    packages, lines, notes, absent = set[str](), list[str](), list[str](), list[str]()
    for top, names in sorted(by_top.items()):
        listed = {canonicalize_name(name) for name in owners.get(top, ())}
        if listed and listed <= _NEVER_DISTRIBUTIONS:
            continue
        distributions = _owners(names, listed - _NEVER_DISTRIBUTIONS or _by_files(top))
        if not distributions and not _is_here(top):
            absent.append(top)
        elif not distributions:
            notes.append(
                f"`import {top}`: no installed package says that it has this module, so that no version of it is known. "
                f"Add the package to `packages=`, or use an image that has it"
            )
        for distribution in distributions:
            requirement, sentence = _pinned(top, distribution)
            notes += [sentence] if sentence else []
            if requirement:
                packages.add(requirement)
                lines.append(f"  import {top}: {requirement}")
    if absent:
        notes.append(
            f"Imported by the call and not installed here, so not put into the image: {', '.join(absent)}. "
            f"Install them here, or add them to `packages=`, if the ranks need them"
        )
    headline = (
        "found in the call:" if lines else "found no installed package in the call but those that every image has."
    )
    return Report(packages=tuple(sorted(packages)), lines=(f'packages="auto" {headline}', *lines), notes=tuple(notes))


def with_packages(recipe: Recipe, packages: Sequence[str]) -> Recipe:
    """Add packages to a recipe; a package that the recipe names already keeps its requirement.

    Args:
        recipe: The recipe, with its packages in canonical spelling.
        packages: Requirements of the form `name==version`.
    """
    named = {re.split(r"[^a-z0-9-]", package, maxsplit=1)[0] for package in recipe.packages}
    added = [package for package in packages if package.partition("==")[0] not in named]
    return dataclasses.replace(recipe, packages=tuple(sorted({*recipe.packages, *added})))


def _owners(names: Iterable[str], listed: Iterable[str]) -> list[Distribution]:
    """The packages that provide a top-level module; of a namespace package, those that provide the imported parts."""
    candidates = list(_installed(sorted(listed)))
    if len(candidates) < 2:  # noqa: PLR2004 - nothing to choose from
        return candidates
    files = {candidate.name: {str(file) for file in candidate.files or ()} for candidate in candidates}
    chosen = {owner for name in names for owner in _most_specific(name, files)}
    return [candidate for candidate in candidates if candidate.name in chosen] or candidates[:1]


def _by_files(top: str) -> set[str]:
    """Packages with a purely compiled module of this name, which `packages_distributions` leaves out in Python 3.11."""
    compiled = re.compile(rf"^{re.escape(top)}[/.][^,]*(so|pyd),", re.MULTILINE)
    return {
        canonicalize_name(distribution.name)
        for distribution in importlib.metadata.distributions()
        if compiled.search(distribution.read_text("RECORD") or "")
    }


def _most_specific(name: str, files: Mapping[str, set[str]]) -> Iterable[str]:
    """Of packages that share a namespace, the one that provides a module, or else the nearest module around it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        wanted = {f"{path}.py", f"{path}/__init__.py"}
        pattern = re.compile(rf"{re.escape(path)}\.[^/]*\.?(so|pyd)")
        for owner, owned in files.items():
            if wanted & owned or any(pattern.fullmatch(file) for file in owned):
                return (owner,)
    return ()


def _installed(names: Iterable[str]) -> Iterator[Distribution]:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield importlib.metadata.distribution(name)


def _is_here(top: str) -> bool:
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return top in sys.modules or importlib.util.find_spec(top) is not None
    return False


def _pinned(top: str, distribution: Distribution) -> tuple[str, str]:
    """A package's requirement, pinned to its version and empty if that is impossible; and a note for the user, or empty."""
    name, shown = canonicalize_name(distribution.name), distribution.version
    origin = _origin(distribution)
    if origin:
        return "", (
            f"`import {top}`: {name} is installed from {origin}, and no index has the same for certain. packages='here' sends it as it is"
        )
    try:
        version = Version(shown).public
    except InvalidVersion:
        return "", (
            f"`import {top}`: the version {shown!r} of {name} is none that an index can have. "
            f"Add the one that is meant to `packages=`"
        )
    is_condas = (distribution.read_text("INSTALLER") or "").strip() == "conda"
    if is_condas or version != str(Version(shown)):
        there = f"{shown} from conda" if is_condas else shown
        return f"{name}=={version}", (
            f"`import {top}`: {name} is {there} here; the image gets {version} as the index has it"
        )
    return f"{name}=={version}", ""


def _origin(distribution: Distribution) -> str:
    """Where a package that is not from an index was installed from, a URL without credentials; else empty."""
    url = re.search(r'"url":\s*"([^"]+)"', distribution.read_text("direct_url.json") or "")
    return re.sub(r"(?<=://)[^/@\s]+@", "", url[1]) if url else ""
