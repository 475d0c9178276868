"""Files that arrive in pieces over connections that may be cut: appended, hashed on the way, renamed when whole."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import socket
import tempfile
import threading
from typing import Any

from kale_dist.errors import StoreError

_CHUNK_BYTES = 1 << 20


class Conflict(Exception):  # noqa: N818 - an answer, which becomes a status code
    """A piece does not start where the last one ended.

    Args:
        received: Where that was, in bytes.
    """

    def __init__(self, received: int) -> None:
        super().__init__(received)
        self.received = received


class WrongDigest(Exception):  # noqa: N818 - an answer, which becomes a status code
    """The whole does not have the digest that it should; what was received is gone."""


class Body:
    """The body of one request.

    Args:
        source: Where it comes from.
        size: Its bytes.
    """

    def __init__(self, source: io.BufferedIOBase, size: int) -> None:
        self._source = source
        self.left = size
        """Bytes that have not been read yet."""

    def read_into(self, view: memoryview) -> int:
        """Read some bytes, at least one.

        Raises:
            OSError: The connection was cut or is silent for too long.
        """
        count = self._source.readinto1(view[: self.left])
        if not count:
            raise ConnectionResetError
        self.left -= count
        return count

    def pass_over(self) -> None:
        """Read the rest for nothing: a peer that is still sending would not see the reply otherwise."""
        view = memoryview(bytearray(min(self.left, _CHUNK_BYTES)))
        while self.left:
            self.read_into(view)


class _Part:
    """A file that is not whole yet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: socket.socket | None = None
        self.descriptor = -1
        self.path = ""
        self.received = 0
        self.hasher: Any = hashlib.sha256()


class Uploads:
    """Files on their way into one folder, by name. Any thread may call.

    Args:
        folder: Where they go; made, for the user alone, with the first one.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._parts: dict[str, _Part] = {}

    def received(self, name: str) -> int:
        """Bytes that are there of a file that is not whole."""
        with self._lock:
            part = self._parts.get(name)
            return 0 if part is None else part.received

    def settled(self, name: str) -> int:
        """The same, for a sender that was cut off: an earlier call that still waits for bytes is ended first.

        What was under way then would arrive after the answer, and the sender go on at the wrong place.
        """
        with self._lock:
            part = self._parts.get(name)
            if part is None:
                return 0
            _end(part)
        with part.lock:
            return self.received(name)

    def take(
        self, name: str, offset: int, size: int, connection: socket.socket, body: Body, *, digest: str | None, mode: int
    ) -> tuple[int, bool]:
        """Append a request's body to a file, and make the file appear when it is whole.

        An earlier call for the same name that still waits for bytes is ended: its connection is dead, or its sender
        has given up.

        Args:
            name: The file's name.
            offset: Where the body belongs in the file.
            size: Bytes of the whole file.
            connection: Of the request.
            body: Bytes to append.
            digest: SHA-256 that the whole must have, in hexadecimal; None: any.
            mode: Of the whole file.

        Returns:
            Bytes that are there now, and whether this call has made the file whole.

        Raises:
            Conflict: Something else is wanted next.
            WrongDigest: The whole is not what it should be.
            StoreError: The disk is full or the folder cannot be written.
            OSError: The connection was cut; what came before that is kept.
        """
        with self._lock:
            part = self._parts.setdefault(name, _Part())
            _end(part)
        with part.lock:
            with self._lock:
                if (self.folder / name).exists():
                    return size, False
                current = self._parts.get(name)
                if current is not part:
                    # It was dropped while this call waited.
                    raise Conflict(0 if current is None else current.received)
                part.connection = connection
            try:
                if offset != part.received:
                    raise Conflict(part.received)
                self._append(name, part, body)
                is_whole = part.received == size
                if is_whole:
                    self._complete(name, part, digest, mode)
                return part.received, is_whole
            finally:
                with self._lock:
                    part.connection = None

    def _append(self, name: str, part: _Part, body: Body) -> None:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, body.left))))
        with self._writing(name, part):
            if part.descriptor < 0:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                part.descriptor, part.path = tempfile.mkstemp(prefix=".", suffix=".part", dir=self.folder)
        while body.left:
            piece = buffer[: body.read_into(buffer)]
            with self._writing(name, part):
                rest = piece
                while rest:
                    rest = rest[os.write(part.descriptor, rest) :]
            part.hasher.update(piece)
            part.received += len(piece)

    def _complete(self, name: str, part: _Part, digest: str | None, mode: int) -> None:
        if digest is not None and part.hasher.hexdigest() != digest:
            self._drop(name, part)
            raise WrongDigest(f"the bytes that arrived are not those of blob {digest}")
        with self._writing(name, part):
            os.fchmod(part.descriptor, mode)
            pathlib.Path(part.path).rename(self.folder / name)
        os.close(part.descriptor)
        part.descriptor = -1
        with self._lock:
            self._parts.pop(name, None)

    @contextlib.contextmanager
    def _writing(self, name: str, part: _Part) -> Any:
        """Whatever goes wrong with the disk drops the part."""
        try:
            yield
        except OSError as error:
            self._drop(name, part)
            raise StoreError(
                f"{name} could not be written in {self.folder} of the pod: {error.strerror}. Give the pod more disk "
                "(ephemeral storage, or a larger volume)."
            ) from error

    def _drop(self, name: str, part: _Part) -> None:
        with self._lock:
            self._parts.pop(name, None)
        if part.descriptor >= 0:
            os.close(part.descriptor)
            pathlib.Path(part.path).unlink(missing_ok=True)
        part.descriptor, part.received, part.hasher = -1, 0, hashlib.sha256()


def _end(part: _Part) -> None:
    """End the call that waits for a file's next bytes, if there is one."""
    if part.connection is not None:
        with contextlib.suppress(OSError):
            part.connection.shutdown(socket.SHUT_RDWR)
