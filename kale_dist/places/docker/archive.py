"""Files on their way out of a container: tar streams of the engine's API, never whole in memory."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tarfile
import types
from collections.abc import Iterable, Iterator
from typing import IO, Any

from kale_dist.errors import StoreError
from kale_dist.places.following.head_client import writing

_PIECE_BYTES = 1 << 20


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


@contextlib.contextmanager
def _opened(stream: Iterable[bytes]) -> Iterator[IO[bytes]]:
    pieces = filter(None, stream)
    # All that tarfile asks of a stream, and it takes pieces of any size.
    readable: Any = types.SimpleNamespace(read=lambda _: next(pieces, b""))
    try:
        with tarfile.open(fileobj=readable, mode="r|") as packed:
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
