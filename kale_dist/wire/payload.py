"""Packs the part of this library that runs in pods, so that any image with Python and torch will do."""

from __future__ import annotations

import functools
import importlib.resources
import io
import lzma
import zipfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable

_MODULES = ("__init__", "callbacks", "wording")
_PACKAGES = ("errors", "snapshot", "strategies", "wire", "worker")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE = 0o100644 << 16


@functools.cache
def runtime_zip() -> bytes:
    """This library's worker side and cloudpickle as a zip of sources, which pods unpack into a folder of `sys.path`.

    The same installation gives the same bytes.
    """
    return _zipped(_sources(), zipfile.ZIP_DEFLATED)


@functools.cache
def library() -> bytes:
    """All of this library as a zip that is compressed as a whole, so that it fits into the job's Secret."""
    return lzma.compress(
        _zipped(_files(importlib.resources.files("kale_dist"), "kale_dist"), zipfile.ZIP_STORED), preset=9
    )


def _zipped(files: Iterator[tuple[str, Traversable]], compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, source in sorted(files, key=lambda file: file[0]):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = compression
            entry.external_attr = _PLAIN_FILE
            packed.writestr(entry, source.read_bytes(), compresslevel=9)
    return buffer.getvalue()


def _sources() -> Iterator[tuple[str, Traversable]]:
    """Yield the names in the zip and the files."""
    own = importlib.resources.files("kale_dist")
    for module in _MODULES:
        yield f"kale_dist/{module}.py", own / f"{module}.py"
    for package in _PACKAGES:
        yield from _files(own / package, f"kale_dist/{package}", ".py")
    yield from _files(importlib.resources.files("cloudpickle"), "cloudpickle", ".py")


def _files(folder: Traversable, name: str, ending: str = "") -> Iterator[tuple[str, Traversable]]:
    for item in folder.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            yield from _files(item, f"{name}/{item.name}", ending)
        elif item.is_file() and item.name.endswith(ending):
            yield f"{name}/{item.name}", item
