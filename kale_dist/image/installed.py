"""Which packages are installed in an image, from what installers leave beside them."""

from __future__ import annotations

import csv
import dataclasses
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from kale_dist.image.base_layers import Tree

_TORCH_VERSION = re.compile(r"^__version__\s*(?::\s*\w+)?\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_EGG_NAME = re.compile(r"^(?P<name>.+?)-(?P<version>\d[^-]*)(-.*)?\.egg-info$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A package that is installed in an image."""

    name: str
    """Canonical: lower case, with dashes."""
    version: str
    requires: tuple[str, ...] = ()
    """Its own requirements, as its metadata has them."""
    folder: str = ""
    """The site directory it lies in."""
    metadata: str = ""
    """Name of its metadata in that directory: `einops-0.8.0.dist-info`."""
    files: tuple[str, ...] = ()
    """Absolute paths of all its files; empty where that is not recorded, or not asked for."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, for what `json.loads` gives (lists for tuples).

        Raises:
            TypeError, KeyError: It is something else.
        """
        return cls(**{**data, "requires": tuple(data["requires"]), "files": tuple(data["files"])})


def canonical(name: str) -> str:
    """A package's name as indexes spell it: `Typing_Extensions` is `typing-extensions`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions_of(tree: Tree, folders: Sequence[str]) -> tuple[Distribution, ...]:
    """What is installed, sorted by name.

    Args:
        tree: The image's layers.
        folders: The directories in which Python looks, in its order: what stands in an earlier one is what it finds.
    """
    found: dict[str, Distribution] = {}
    for folder in folders:
        for distribution in _in_folder(tree, folder):
            found.setdefault(distribution.name, distribution)
        if "torch" not in found and (version := _TORCH_VERSION.search(tree.text(f"{folder}/torch/version.py") or "")):
            # Built from source and copied there, as some vendors' images have it.
            found["torch"] = Distribution(name="torch", version=version[1], folder=folder)
    return tuple(found[name] for name in sorted(found))


def _in_folder(tree: Tree, folder: str) -> Iterator[Distribution]:
    """What is installed in one site directory."""
    texts = {path: text for path, text in tree.under(folder) if path.count("/") < 2}  # noqa: PLR2004 - NAME/FILE
    for path, text in texts.items():
        metadata, _, file = path.partition("/")
        if metadata.endswith(".dist-info") and file == "METADATA":
            record = texts.get(f"{metadata}/RECORD", "")
            listed: Iterable[str] = (row[0] for row in csv.reader(record.splitlines()) if row)
            base = folder
        elif metadata.endswith(".egg-info") and file in {"", "PKG-INFO"}:
            listed = texts.get(f"{metadata}/installed-files.txt", "").splitlines() if file else ()
            base = f"{folder}/{metadata}"
        else:
            continue
        name, version, requires = read_metadata(text)
        if not (name and version) and (named := _EGG_NAME.match(metadata)):
            name, version = named["name"], named["version"]
        if name and version:
            files = tuple(posixpath.normpath(posixpath.join(base, entry)) for entry in listed if entry)
            yield Distribution(
                name=canonical(name), version=version, requires=requires, folder=folder, metadata=metadata, files=files
            )


def read_metadata(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Name, version and requirements from a package's metadata; what it lacks is empty."""
    name = version = ""
    requires = []
    for line in text.splitlines():
        if not line:
            break
        header, _, value = line.partition(":")
        if header == "Name":
            name = value.strip()
        elif header == "Version":
            version = value.strip()
        elif header == "Requires-Dist":
            requires.append(value.strip())
    return name, version, tuple(requires)
