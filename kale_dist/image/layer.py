"""One layer of an image: a reproducible tar of files, compressed with gzip while it is sent.

The same entries give the same bytes, so the same digest: entries are sorted, belong to root and have no times. Folders
that are not among them are left out: a runtime makes those that are missing, and leaves those of the base as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import posixpath
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from isal import isal_zlib

from kale_dist.errors import ImageError
from kale_dist.image.tar import TarEntry

_LEVEL = 1
_WITH_GZIP_HEADER = 31


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The names and the size of a layer."""

    digest: str
    """`sha256:...` of the compressed tar: its name in a registry."""
    size: int
    """Bytes, compressed."""
    diff_id: str
    """`sha256:...` of the tar itself: its name in an image's configuration."""


def in_order(entries: Iterable[TarEntry]) -> list[TarEntry]:
    """Sort entries by path and check their paths.

    Raises:
        ImageError: A path is given twice, or is not a plain absolute path.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    for before, entry in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.path == entry.path:
            raise ImageError(
                f"{entry.path} would be in the image's new layer twice. Let only one package or file bring it."
            )
        plain = "/" + posixpath.normpath(entry.path).lstrip("/")
        if plain == "/" or plain != entry.path or "\0" in entry.path:
            raise ImageError(f"{entry.path!r} cannot be put into an image: give an absolute path without `..`.")
    return ordered


def script(path: pathlib.Path, head: bytes) -> bytes:
    """A script with another first line, in place of the one (or three, where the path is long) by which an installer names its Python."""
    data = path.read_bytes()
    found = re.match(rb"#!/bin/sh\n'''exec' .*\n' '''\n|#!.*\n", data)
    return data if found is None or b"python" not in found[0] else head + data[found.end() :]


def packed(blocks: Iterable[bytes], hasher: hashlib._Hash) -> Iterator[bytes]:
    """Compress blocks of bytes with gzip.

    Args:
        blocks: The uncompressed bytes.
        hasher: Updated with the uncompressed bytes, so that one pass gives both digests of a layer.
    """
    compressor = isal_zlib.compressobj(_LEVEL, wbits=_WITH_GZIP_HEADER)
    for block in blocks:
        hasher.update(block)
        if made := compressor.compress(block):
            yield made
    yield compressor.flush()


def ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same blocks; while the caller uses one, another thread produces the next."""
    with ThreadPoolExecutor(1, "kale-dist-pack") as thread:
        coming = thread.submit(next, blocks, b"")
        while block := coming.result():
            coming = thread.submit(next, blocks, b"")
            yield block
