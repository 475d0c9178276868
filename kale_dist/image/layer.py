"""One layer of an image: a reproducible tar of files, compressed with gzip.

The same entries give the same bytes, so the same digest: entries are sorted, belong to root and have no times. Folders
that are not among them are left out: a runtime makes those that are missing, and leaves those of the base as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import posixpath
import tarfile
from collections.abc import Iterable
from typing import IO, Any

from isal import igzip_threaded

from kale_dist.blobs import fresh
from kale_dist.errors import ImageError
from kale_dist.image import cache

_BLOCK_BYTES = 1 << 20
"""What is compressed at once: other blocks would give other bytes."""

_THREADS = min(4, os.cpu_count() or 1)
_LEVEL = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file or folder of a layer."""

    path: str
    """Absolute, in the image; its parent is no symbolic link there."""
    content: pathlib.Path | bytes | None
    """A file on this machine, the bytes themselves, or None for a folder."""
    executable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer on this machine's disk."""

    path: pathlib.Path
    """The compressed tar."""
    digest: str
    """`sha256:...` of the compressed tar: its name in a registry."""
    size: int
    """Bytes, compressed."""
    diff_id: str
    """`sha256:...` of the tar itself: its name in an image's configuration."""


def make_layer(entries: Iterable[Entry], out: pathlib.Path) -> Layer:
    """Write a layer.

    Args:
        entries: In any order; each path once.
        out: The file to write; replaced whole, or not at all.

    Raises:
        ImageError: A path is given twice, is not a plain absolute path, or the disk is full.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    _check(ordered)
    try:
        with fresh(out) as temporary, temporary.open("wb") as file:
            packed = _Hashing(file)
            with (
                igzip_threaded.open(  # type: ignore[no-untyped-call]
                    packed, "wb", compresslevel=_LEVEL, threads=_THREADS, block_size=_BLOCK_BYTES
                ) as compressed,
                io.BufferedWriter(compressed, _BLOCK_BYTES) as blocks,
            ):
                plain = _Hashing(blocks)
                with tarfile.TarFile(
                    fileobj=plain, mode="w", format=tarfile.PAX_FORMAT, copybufsize=_BLOCK_BYTES
                ) as archive:
                    for entry in ordered:
                        _add(archive, entry)
    except OSError as error:
        raise cache.no_room(out.parent, error) from error
    return Layer(path=out, digest=packed.digest, size=packed.size, diff_id=plain.digest)


def _check(ordered: list[Entry]) -> None:
    for before, entry in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.path == entry.path:
            raise ImageError(
                f"{entry.path} would be in the image's new layer twice. Let only one package or file bring it."
            )
        plain = "/" + posixpath.normpath(entry.path).lstrip("/")
        if plain == "/" or plain != entry.path or "\0" in entry.path:
            raise ImageError(f"{entry.path!r} cannot be put into an image: give an absolute path without `..`.")


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    """One entry, with nothing in its header that tells when or by whom it was made."""
    header = tarfile.TarInfo(entry.path.lstrip("/"))
    header.mode = 0o755 if entry.executable or entry.content is None else 0o644
    if entry.content is None:
        header.type = tarfile.DIRTYPE
        archive.addfile(header)
    elif isinstance(entry.content, bytes):
        header.size = len(entry.content)
        archive.addfile(header, io.BytesIO(entry.content))
    else:
        with entry.content.open("rb") as source:
            header.size = os.fstat(source.fileno()).st_size
            archive.addfile(header, source)


class _Hashing(io.RawIOBase):
    """A stream that hashes and counts what passes through it."""

    def __init__(self, stream: IO[bytes] | Any) -> None:
        self._stream = stream
        self._hasher = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        """Of all that has passed."""
        return f"sha256:{self._hasher.hexdigest()}"

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """How much has passed; `tarfile` asks at its beginning."""
        return self.size

    def write(self, data: Any) -> int:
        """Pass the bytes on."""
        self._stream.write(data)
        self._hasher.update(data)
        self.size += len(data)
        return len(data)
