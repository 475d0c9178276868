"""Examines a dataset before it is sent: its bytes in memory, and the paths of local files that it will try to read."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_DEPTH = 5
_LOOKED_AT = 20
"""Items of a list that are examined; lists of paths may have millions."""

_LONGEST_PATH = 4096
_NAMES = ("root", "path", "dir", "folder", "file")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatasetContent:
    """What a dataset holds."""

    memory_bytes: int = 0
    """Bytes of the dataset's tensors and arrays."""
    paths: tuple[str, ...] = ()
    """Files and folders that exist on this machine, spelt as in the dataset."""


def examine(dataset: Any) -> DatasetContent:
    """Examine a dataset's attributes, and those of datasets within it. Reads no file.

    A dataset that has as many rows in memory as it has samples reads no files, even if it has paths.
    """
    seen: dict[int, Any] = {}
    paths: dict[str, None] = {}
    holds_samples = False
    memory = 0
    for owner, name, value in _walk(dataset, "", dataset, 0, seen):
        size = getattr(value, "nbytes", 0)
        if isinstance(size, int) and size:
            memory += size
            holds_samples = holds_samples or _length(value) == _length(owner) is not None
        elif isinstance(value, str | pathlib.PurePath) and _is_local(name, value):
            paths.setdefault(str(value), None)
    return DatasetContent(memory_bytes=memory, paths=() if holds_samples else tuple(paths))


def uncovered(paths: Iterable[str], mounts: Iterable[str]) -> list[str]:
    """The paths that are below none of the volumes' mount paths."""
    roots = [pathlib.PurePosixPath(mount) for mount in mounts]
    return [path for path in paths if not any(pathlib.PurePosixPath(path).is_relative_to(root) for root in roots)]


def _walk(owner: Any, name: str, value: Any, depth: int, seen: dict[int, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute's name, value) for values in the dataset's attributes and in collections there."""
    if id(value) in seen:
        return
    if not isinstance(value, str | int | float | bool):
        # The reference keeps the id from being used again.
        seen[id(value)] = value
    yield owner, name, value
    if depth >= _DEPTH or isinstance(value, str | bytes | type) or hasattr(value, "nbytes"):
        return
    if isinstance(value, Mapping):
        inner: Iterable[tuple[str, Any]] = ((name, one) for one in itertools.islice(value.values(), _LOOKED_AT))
    elif isinstance(value, list | tuple | set | frozenset):
        inner = ((name, one) for one in itertools.islice(value, _LOOKED_AT))
    elif hasattr(value, "__dict__") and not callable(value):
        owner, inner = value, vars(value).items()
    else:
        return
    for inner_name, one in inner:
        yield from _walk(owner, str(inner_name), one, depth + 1, seen)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - it is the user's own, and may not have one
        return None


def _is_local(name: str, value: str | pathlib.PurePath) -> bool:
    text = str(value)
    named = isinstance(value, pathlib.PurePath) or os.sep in text or any(word in name.lower() for word in _NAMES)
    if not named or not 1 < len(text) <= _LONGEST_PATH or "\0" in text:
        return False
    try:
        return pathlib.Path(text).exists()
    except OSError:
        return False
