"""The part of this library that is sent: what runs in a pod, so that any image with Python and torch will do."""

from __future__ import annotations

import functools
import importlib.resources
import io
import zipfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable

_MODULES = (
    "__init__",
    "blobs",
    "callbacks",
    "contract",
    "errors",
    "tracebacks",
    "url_store",
)
_PACKAGES = ("runtime", "strategies", "training")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE = 0o100644 << 16


@functools.cache
def runtime_zip() -> bytes:
    """This library's worker side and cloudpickle as a zip of sources, to be unpacked into a folder of `sys.path`.

    The same installation gives the same bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, source in sorted(_sources()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = _PLAIN_FILE
            packed.writestr(entry, source.read_bytes(), compresslevel=9)
    return buffer.getvalue()


def _sources() -> Iterator[tuple[str, Traversable]]:
    """Names in the zip and the files."""
    own = importlib.resources.files("kale_dist")
    for module in _MODULES:
        if (source := own / f"{module}.py").is_file():
            yield f"kale_dist/{module}.py", source
    for package in _PACKAGES:
        yield from _python_files(own / package, f"kale_dist/{package}")
    yield from _python_files(importlib.resources.files("cloudpickle"), "cloudpickle")


def _python_files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for item in folder.iterdir():
        if item.name.endswith(".py"):
            yield f"{name}/{item.name}", item
        elif item.is_dir() and item.name != "__pycache__":
            yield from _python_files(item, f"{name}/{item.name}")
