"""Files on their way into a container and out of it: tar streams of the engine's API, never whole in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO

from kale_dist.errors import StoreError
from kale_dist.places.following.head_client import writing

_PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveEntry:
    """A folder or a file of an archive."""

    path: str
    """In the container, without a slash in front."""
    mode: int
    data: bytes | pathlib.Path | None = None
    """The bytes, or the file that has them; None for a folder."""
    owner: tuple[int, int] = (0, 0)
    """User and group."""


def pack(entries: Iterable[ArchiveEntry]) -> Iterator[bytes]:
    """A tar of the entries, piece by piece."""
    for entry in entries:
        header = tarfile.TarInfo(entry.path)
        header.mode = entry.mode
        header.uid, header.gid = entry.owner
        if entry.data is None:
            header.type = tarfile.DIRTYPE
        else:
            header.size = len(entry.data) if isinstance(entry.data, bytes) else entry.data.stat().st_size
        yield header.tobuf(tarfile.PAX_FORMAT)
        if entry.data is not None:
            with io.BytesIO(entry.data) if isinstance(entry.data, bytes) else entry.data.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
            yield bytes(-header.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def read_file(stream: Iterable[bytes]) -> bytes:
    """Read the only file of an archive into memory.

    Raises:
        StoreError: There is no file in it.
    """
    with _opened(stream) as file:
        return file.read()


def save_file(stream: Iterable[bytes], path: pathlib.Path) -> None:
    """Write the only file of an archive, whole or not at all.

    Args:
        stream: The archive.
        path: Where to.

    Raises:
        StoreError: There is no file in it, it was cut, or the disk is full.
    """
    with _opened(stream) as source, writing(path) as target:
        shutil.copyfileobj(source, target, _PIECE_BYTES)


class _Stream(io.RawIOBase):
    """Pieces of bytes as a file to read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


@contextlib.contextmanager
def _opened(stream: Iterable[bytes]) -> Iterator[IO[bytes]]:
    pieces = iter(stream)
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Stream(pieces), _PIECE_BYTES), mode="r|") as packed:
            for member in packed:
                file = packed.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield file
                    # Only at the stream's end is the connection free for the next request.
                    for _ in pieces:
                        pass
                    return
    except tarfile.TarError as error:
        raise StoreError(f"What the Docker engine sent of a container's file was cut: {error}") from error
    raise StoreError("The Docker engine sent no file where one was asked for")
