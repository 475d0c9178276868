"""One blob's way into a registry, in chunks, gone on with where it was cut.

A blob travels in PATCH requests of 64 MiB and is then named by its digest. After a cut the registry is asked how much
it has. What it then says decides (tried on Distribution 2.8):

- it has whole chunks: the next one follows. So it is where a proxy in front of the registry takes whole requests in
  first, as nginx does, and where the cut fell between two chunks.
- it has part of a chunk: the rest follows, at registries that follow the specification.
- it knows the upload no more: Distribution forgets an upload whose chunk was cut. It begins again.

Registries that take one chunk only (Google's) refuse the second; then the blob is sent as one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from kale_dist.errors import ImageError
from kale_dist.image.connection import Connection, CutError, RefusedError
from kale_dist.image.network import BLOCK_BYTES
from kale_dist.image.upload_session import Begun, Session

Progress = Callable[[int, int], None]
"""Bytes sent, bytes in all; the first falls back after a cut."""

_SMALL_CHUNK_BYTES = 8 << 20
"""Where a proxy refuses large requests."""

SINGLE_BYTES = 1 << 20
"""Up to here a blob goes with the request that names it."""

_CUTS = 5
"""In a row, without a byte having arrived in between."""

_RESTARTS = 3
_BETWEEN_S = 0.2
_TOO_LARGE, _BAD_RANGE = 413, 416
_UNKNOWN = (400, 404, 405, 416, 501)
"""Answers of registries that do not know the upload any more, or take no further chunk."""


class _LostError(ImageError):
    """The registry has no use for what it got so far."""


class Upload:
    """Sends one blob.

    Args:
        connection: To the registry.
        repository: Where the blob goes.
        file: Its bytes; seekable.
        size: How many.
        digest: Their name; the registry checks it.
        access: What a token has to allow.
        progress: Called for each block, in this thread.
        begun: What has been sent of it already.
    """

    def __init__(
        self,
        connection: Connection,
        repository: str,
        file: BinaryIO,
        *,
        size: int,
        digest: str,
        access: tuple[str, ...],
        progress: Progress,
        begun: Begun | None = None,
    ) -> None:
        self._connection = connection
        self._repository = repository
        self._file = file
        self._size = size
        self._digest = digest
        self._access = access
        self._progress = progress
        self._begun = begun
        self._doing = f"upload {digest[:19]} into {repository}"
        self._session = Session(connection, repository, access, self._doing)

    def run(self) -> None:
        """Send it.

        Raises:
            RefusedError: The registry refuses; also, retryable, where it got other bytes than the digest names.
            ImageError: It was cut too often (retryable), or the bytes are not what the digest names.
        """
        for restart in range(_RESTARTS + 1):
            try:
                self._send()
            except _LostError as error:
                if restart == _RESTARTS:
                    raise ImageError(
                        f"{error} Given up after {_RESTARTS} more tries. Try again later.", retryable=True
                    ) from error
                time.sleep(_BETWEEN_S * 2**restart)
            else:
                return

    def _send(self) -> None:
        (where, have), cuts = self._begun or Begun(self._session.start(), 0), 0
        # A second try begins anew.
        self._begun = None
        if self._size <= SINGLE_BYTES:
            return self._finish(where, 0)
        while have < self._size:
            chunk = self._session.chunk
            try:
                where, arrived = self._patch(where, have, min(have + chunk, self._size))
                if arrived <= have and self._session.chunk == chunk:
                    raise _LostError(f"Could not {self._doing}: the registry keeps no bytes.", retryable=True)
                have, cuts = arrived, 0
            except CutError as error:
                cuts += 1
                if cuts > _CUTS:
                    raise
                time.sleep(_BETWEEN_S * cuts)
                where, arrived = self._status(where, error)
                if arrived > have:
                    cuts = 0
                have = arrived
        if have > self._size:
            raise _LostError(f"Could not {self._doing}: the registry has more bytes than were sent.", retryable=True)
        return self._finish(where, self._size)

    def _patch(self, where: str, begin: int, end: int) -> Begun:
        """Send one chunk; gives where the next goes and how many bytes the registry has."""
        is_whole = (begin, end) == (0, self._size)
        try:
            where, have = self._session.patch(where, lambda: self._blocks(begin, end), begin, end, is_whole=is_whole)
            return Begun(where, end if have is None else have)
        except RefusedError as error:
            if error.status == _TOO_LARGE and self._session.chunk > _SMALL_CHUNK_BYTES:
                self._session.chunk = _SMALL_CHUNK_BYTES
                return Begun(where, begin)
            if error.status == _BAD_RANGE:
                return self._status(where, error)
            if error.status in _UNKNOWN and not is_whole:
                if begin and self._session.chunk < self._size:
                    self._session.chunk = self._size
                raise _LostError(str(error), retryable=True) from error
            raise

    def _status(self, where: str, error: ImageError) -> Begun:
        """Where to go on after `error`, and how many bytes the registry has."""
        try:
            return self._session.status(where)
        except RefusedError as refused:
            if refused.status in _UNKNOWN:
                raise _LostError(str(error), retryable=True) from refused
            raise

    def _finish(self, where: str, begin: int) -> None:
        """Name the upload by its digest, with the bytes from `begin` on."""
        url = f"{where}{'&' if '?' in where else '?'}digest={self._digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(self._size - begin)}
        try:
            answer = self._connection.send(
                "PUT",
                url,
                doing=self._doing,
                access=self._access,
                expect=(201, 204),
                headers=headers,
                body=(lambda: self._blocks(begin, self._size)) if begin < self._size else None,
                repeat=False,
            )
        except CutError as error:
            # The answer alone may have been lost: a new upload begins with a look whether the blob is there.
            if self._is_there():
                return
            raise _LostError(str(error), retryable=True) from error
        except RefusedError as error:
            if error.code == "DIGEST_INVALID":
                self._check_source(error)
            elif error.status not in _UNKNOWN or not begin:
                raise
            raise _LostError(str(error), retryable=True) from error
        self._connection.done(answer)

    def _is_there(self) -> bool:
        path = f"/v2/{self._repository}/blobs/{self._digest}"
        answer = self._connection.send("HEAD", path, doing=self._doing, access=self._access, expect=(200, 404))
        self._connection.done(answer)
        return answer.status == 200  # noqa: PLR2004 - HTTP's own number

    def _check_source(self, refused: RefusedError) -> None:
        """Tell bytes damaged on their way from a file that has others than its digest says."""
        algorithm = self._digest.partition(":")[0]
        hasher = hashlib.new(algorithm)
        for block in self._blocks(0, self._size):
            hasher.update(block)
        found = f"{algorithm}:{hasher.hexdigest()}"
        if found != self._digest:
            text = f"{refused} Its bytes here have the digest {found[:19]}: the file has been changed. Make it again."
            raise ImageError(text) from refused

    def _blocks(self, begin: int, end: int) -> Iterator[bytes]:
        self._file.seek(begin)
        while begin < end:
            block = self._file.read(min(BLOCK_BYTES, end - begin))
            if not block:
                raise ImageError(f"Could not {self._doing}: the file ends {end - begin} bytes early. Make it again.")
            yield block
            begin += len(block)
            self._progress(begin, self._size)
