"""`packages="auto"`: what a call imports, as the installed packages that it comes from, with their versions."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
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
    """What `packages="auto"` came to."""

    packages: tuple[str, ...]
    """Requirements for a recipe, sorted: `scikit-learn==1.7.2`, without local labels."""
    lines: tuple[str, ...]
    """What was found, a line each."""
    notes: tuple[str, ...]
    """What could not be taken as it is, a sentence or two each."""


def find(imports: Iterable[str]) -> Report:
    """The installed packages behind imports, pinned to the versions that are installed here.

    Left out are the standard library, torch, and what kale_dist brings itself.

    Args:
        imports: Names of modules with their dots, none of them of the notebook's own code.
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
    """A recipe with more packages; those that it names itself stay as they are.

    Args:
        recipe: Its packages in one spelling.
        packages: Requirements of the form `name==version`.
    """
    named = {re.split(r"[^a-z0-9-]", package, maxsplit=1)[0] for package in recipe.packages}
    added = [package for package in packages if package.partition("==")[0] not in named]
    return dataclasses.replace(recipe, packages=tuple(sorted({*recipe.packages, *added})))


def _owners(names: Iterable[str], listed: Iterable[str]) -> list[Distribution]:
    """The packages that have a module; of several that share its name, those that have the part which is imported."""
    candidates = list(_installed(sorted(listed)))
    if len(candidates) < 2:  # noqa: PLR2004 - nothing to choose from
        return candidates
    files = {candidate.name: {str(file) for file in candidate.files or ()} for candidate in candidates}
    chosen = {owner for name in names for owner in _most_specific(name, files)}
    return [candidate for candidate in candidates if candidate.name in chosen] or candidates[:1]


def _by_files(top: str) -> set[str]:
    """Packages that have a module and no Python file in it: Python 3.11 does not list them by what they import as."""
    compiled = re.compile(rf"^{re.escape(top)}[/.][^,]*(so|pyd),", re.MULTILINE)
    return {
        canonicalize_name(distribution.name)
        for distribution in importlib.metadata.distributions()
        if compiled.search(distribution.read_text("RECORD") or "")
    }


def _most_specific(name: str, files: Mapping[str, set[str]]) -> Iterable[str]:
    """Of packages that share a namespace, the first of those that have a module or the nearest module around it."""
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
        try:
            yield importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _is_here(top: str) -> bool:
    if top in sys.modules:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _pinned(top: str, distribution: Distribution) -> tuple[str, str]:
    """A package by its version, empty where that cannot be; and what the user should know."""
    name, shown = canonicalize_name(distribution.name), distribution.version
    origin = _origin(distribution)
    if origin == "editable":
        return "", (
            f"`import {top}`: {name} is installed editable and is not part of the code that is sent with the call. "
            f"Build it, and add it to `packages=` by a URL, or use an image that has it"
        )
    if origin:
        return "", (
            f"`import {top}`: {name} was installed from {origin}, and that its version in an index is the same is not "
            f"certain. Add it to `packages=` as '{name} @ URL' or as '{name}=={shown.partition('+')[0]}'"
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
    """Where a package is from if not from an index: `editable`, or a place without credentials."""
    try:
        link = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""
    if not isinstance(link, dict) or not link.get("url"):
        return ""
    if (link.get("dir_info") or {}).get("editable"):
        return "editable"
    return re.sub(r"(?<=://)[^/@\s]+@", "", str(link["url"]))
