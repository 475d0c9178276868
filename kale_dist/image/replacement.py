"""What has to go from a base image when packages of it are replaced. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterable, Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement

from kale_dist.image.installed import Distribution, canonical
from kale_dist.image.inventory import Inventory
from kale_dist.image.layer import Entry, whiteout


def replaced(inventory: Inventory, names: Iterable[str]) -> tuple[Distribution, ...]:
    """The base's packages that give way to new ones.

    Those in other site directories than the one that is written to are not among them: Python looks there later, as it
    does for what Debian's own packages brought.

    Args:
        inventory: Of the base.
        names: Canonical, of what is installed.
    """
    found = (inventory.find(name) for name in names)
    return tuple(one for one in found if one is not None and one.folder == inventory.site_directory and one.metadata)


def removals(inventory: Inventory, gone: Sequence[Distribution], added: Iterable[str]) -> tuple[Entry, ...]:
    """Whiteouts for the files of packages that are replaced: of whole directories where nothing else is in them.

    Args:
        inventory: Of the base, with the packages' files.
        gone: What is replaced.
        added: Paths that the new layer has.
    """
    site = inventory.site_directory
    names = {one.name for one in gone}
    new = set(added)
    kept = {file for one in inventory.distributions if one.name not in names for file in one.files}
    needed = {folder for path in (*new, *kept) for folder in _folders(path)}
    removed = set()
    for one in gone:
        # An empty directory of this name would still count as an installed package, one without a version.
        metadata = f"{site}/{one.metadata}"
        if metadata not in needed:
            removed.add(metadata)
        for file in one.files:
            within = file.startswith((f"{site}/", f"{inventory.scripts_directory}/", f"{inventory.prefix}/"))
            if not within or file in new or file in kept:
                continue
            top = file
            while posixpath.dirname(top).startswith(f"{site}/") and posixpath.dirname(top) not in needed:
                top = posixpath.dirname(top)
            removed.add(top)
    tops = (path for path in removed if not any(folder in removed for folder in _folders(path)))
    return tuple(whiteout(path) for path in sorted(tops))


def broken(inventory: Inventory, installed: Sequence[Distribution]) -> Iterator[str]:
    """A sentence for each package of the base that no longer gets the version of another one that it asks for.

    Args:
        inventory: Of the base.
        installed: What is installed on top of it.
    """
    new = {one.name: one for one in installed}
    for one in inventory.distributions:
        if one.name in new:
            continue
        for text in one.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if "extra" in str(requirement.marker or ""):
                continue
            before, after = inventory.find(requirement.name), new.get(canonical(requirement.name))
            if before is None or after is None or not requirement.specifier.contains(before.version, prereleases=True):
                continue
            if not requirement.specifier.contains(after.version, prereleases=True):
                yield (
                    f"{one.name} {one.version} of the base image asks for {requirement.name}{requirement.specifier}, "
                    f"and gets {after.version}."
                )


def with_installed(inventory: Inventory, installed: Sequence[Distribution]) -> Inventory:
    """The inventory of the image that has these packages on top."""
    new = {one.name: one for one in installed}
    kept = [one for one in inventory.distributions if one.name not in new]
    folders = inventory.site_directories
    if installed and inventory.site_directory not in folders:
        folders = (inventory.site_directory, *folders)
    return dataclasses.replace(
        inventory,
        distributions=tuple(sorted((*kept, *installed), key=lambda one: one.name)),
        site_directories=folders,
    )


def _folders(path: str) -> Iterator[str]:
    """The directories above a path, without the root."""
    while (path := posixpath.dirname(path)) not in {"/", ""}:
        yield path
