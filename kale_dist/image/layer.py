"""One layer of an image: a reproducible tar of files and of whiteouts, compressed with gzip or zstd.

The same entries give the same bytes, so the same digest: entries are sorted, belong to root, have no times, and parent
directories are left out. A runtime makes the parents that are missing and leaves those of the base as they are, with
their owners and modes. What the base has and must not have is hidden by a whiteout, an empty file `.wh.NAME` beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import posixpath
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, cast

from kale_dist.errors import ImageError
from kale_dist.image.gzip_stream import BLOCK_BYTES, Gzip, Writable
from kale_dist.image.zstd import Zstd
from kale_dist.recipe import GZIP, ZSTD

WHITEOUT = ".wh."
"""What the name of an entry begins with that removes, rather than adds, a name."""

OPAQUE = ".wh..wh..opq"
"""Name of the entry that removes all that lower layers have in its directory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of a layer."""

    path: str
    """Absolute, in the image; its parent is no symbolic link there."""
    content: pathlib.Path | bytes
    """A file on this machine, or the bytes themselves."""
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
    compression: str = GZIP


def whiteout(path: str) -> Entry:
    """The entry that removes a file or a whole directory of lower layers.

    Args:
        path: Absolute, in the image.
    """
    folder, name = posixpath.split(path)
    return Entry(path=posixpath.join(folder, WHITEOUT + name), content=b"")


def make_layer(
    entries: Iterable[Entry],
    out: pathlib.Path,
    compression: str = GZIP,
    *,
    grown: Callable[[pathlib.Path, int], None] = lambda _path, _size: None,
) -> Layer:
    """Write a layer.

    Args:
        entries: In any order; each path once.
        out: The file to write; replaced whole, or not at all.
        compression: `gzip` or `zstd`.
        grown: Told now and then how many bytes can be read already, and of which file; it gets the name `out` in the end.

    Returns:
        The layer, at `out`.

    Raises:
        ImageError: A path is given twice, is not a plain absolute path, or the disk is full.
        ConfigError: zstd is wanted, and this Python cannot write it.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    _check(ordered)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=".layer-", delete=False) as file:
            temporary = pathlib.Path(file.name)
            try:
                layer = _write(ordered, _Growing(file.file, temporary, grown), out, compression)
                temporary.replace(out)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ImageError(
            f"The layer for the image could not be written to {out}: {error.strerror or error}. "
            f"Make room there, or set XDG_CACHE_HOME to a folder that has some, and call again."
        ) from error
    return layer


def _check(ordered: list[Entry]) -> None:
    """Refuse what a runtime would unpack differently from what was meant."""
    for before, entry in zip([None, *ordered], ordered, strict=False):
        if before is not None and before.path == entry.path:
            raise ImageError(
                f"{entry.path} would be in the image's new layer twice. Let only one package or file bring it."
            )
        plain = "/" + posixpath.normpath(entry.path).lstrip("/")
        if plain == "/" or plain != entry.path or "\0" in entry.path:
            raise ImageError(f"{entry.path!r} cannot be put into an image: give an absolute path without `..`.")


def _write(ordered: list[Entry], file: _Growing, out: pathlib.Path, compression: str) -> Layer:
    """Write the compressed tar, counting and hashing both it and what is in it."""
    packed = _Hashing(file)
    with (Zstd if compression == ZSTD else Gzip)(packed) as compressed:
        plain = _Hashing(compressed)
        stream = cast("IO[bytes]", plain)
        with tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, copybufsize=BLOCK_BYTES) as archive:
            for entry in ordered:
                _add(archive, entry)
    file.flush()
    return Layer(path=out, digest=packed.digest, size=packed.size, diff_id=plain.digest, compression=compression)


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    """One entry, with nothing in its header that tells when or by whom it was made."""
    header = tarfile.TarInfo(entry.path.lstrip("/"))
    header.mode = 0o755 if entry.executable else 0o644
    if isinstance(entry.content, bytes):
        header.size = len(entry.content)
        archive.addfile(header, io.BytesIO(entry.content))
        return
    with entry.content.open("rb") as source:
        header.size = os.fstat(source.fileno()).st_size
        archive.addfile(header, source)


class _Growing:
    """A file that others read while it is written."""

    def __init__(self, file: IO[bytes], path: pathlib.Path, grown: Callable[[pathlib.Path, int], None]) -> None:
        self._file = file
        self._path = path
        self._grown = grown
        self._written = 0
        self._told = 0

    def write(self, data: bytes) -> int:
        """Add bytes."""
        self._file.write(data)
        self._written += len(data)
        if self._written - self._told >= BLOCK_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Let others read all that there is."""
        self._file.flush()
        self._told = self._written
        self._grown(self._path, self._told)


class _Hashing:
    """A stream that hashes and counts what passes through it."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self._hasher = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        """Of all that has passed."""
        return f"sha256:{self._hasher.hexdigest()}"

    def tell(self) -> int:
        """How much has passed; `tarfile` asks at its beginning."""
        return self.size

    def write(self, data: bytes) -> int:
        """Pass the bytes on."""
        self._stream.write(data)
        self._hasher.update(data)
        self.size += len(data)
        return len(data)
