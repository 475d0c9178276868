"""The requests that a blob's upload into a registry is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kale_dist.errors import ImageError
from kale_dist.image.connection import Connection

CHUNK_BYTES = 64 << 20


class Begun(NamedTuple):
    """An upload that a registry knows."""

    where: str
    """Where its bytes go."""
    have: int
    """How many it has."""


class Session:
    """The requests of one upload.

    Args:
        connection: To the registry.
        repository: Where the blob goes.
        access: What a token has to allow.
        doing: For messages: `upload sha256:01234567 into team/train`.
    """

    def __init__(self, connection: Connection, repository: str, access: tuple[str, ...], doing: str) -> None:
        self._connection = connection
        self._repository = repository
        self._access = access
        self.doing = doing
        self.chunk = CHUNK_BYTES
        """Bytes of one request; the registry may want more."""

    def start(self) -> str:
        """Begin an upload; gives where its bytes go."""
        path = f"/v2/{self._repository}/blobs/uploads/"
        answer = self._connection.send(
            "POST", path, doing=self.doing, access=self._access, expect=(202,), headers={"Content-Length": "0"}
        )
        self._connection.done(answer)
        smallest = answer.headers.get("OCI-Chunk-Min-Length", "")
        if smallest.isdecimal():
            self.chunk = max(self.chunk, int(smallest))
        return self._next(answer.headers.get("Location"), path)

    def patch(
        self, where: str, blocks: Callable[[], Iterable[bytes]], begin: int, end: int | None, *, is_whole: bool
    ) -> tuple[str, int | None]:
        """Send one chunk.

        Args:
            where: Where it goes.
            blocks: Makes its bytes, anew for each try.
            begin: Where in the blob it begins.
            end: Where it ends; None: where its blocks do.
            is_whole: Docker sends blobs as one chunk without a range, so that every registry takes that.

        Returns:
            Where the next one goes, and what the registry has; None: it does not say, and there was no `end`.
        """
        headers = {"Content-Type": "application/octet-stream"}
        if end is not None:
            headers["Content-Length"] = str(end - begin)
            if not is_whole:
                headers["Content-Range"] = f"{begin}-{end - 1}"
        answer = self._connection.send(
            "PATCH",
            where,
            doing=self.doing,
            access=self._access,
            expect=(202, 204, 201),
            headers=headers,
            body=blocks,
            repeat=False,
        )
        self._connection.done(answer)
        return self._next(answer.headers.get("Location"), where), _received(answer.headers.get("Range"), end)

    def status(self, where: str) -> Begun:
        """Where to go on, and what the registry has."""
        answer = self._connection.send("GET", where, doing=self.doing, access=self._access, expect=(204, 200, 202))
        self._connection.done(answer)
        return Begun(self._next(answer.headers.get("Location"), where), _received(answer.headers.get("Range"), 0) or 0)

    def discard(self, where: str) -> None:
        """Tell the registry that nobody goes on; where it cannot be told, it forgets by itself one day."""
        with contextlib.suppress(ImageError):
            self._connection.done(
                self._connection.send(
                    "DELETE", where, doing=self.doing, access=self._access, expect=(200, 202, 204), repeat=False
                )
            )

    def _next(self, location: str | None, where: str) -> str:
        return self._connection.absolute(location or where, self._connection.absolute(where))


def _received(header: str | None, otherwise: int | None) -> int | None:
    """Bytes that a `Range` header (`0-99`, `bytes=0-99`) says have arrived.

    Distribution says `0-0` where nothing has. A single byte looks the same: that upload begins again.
    """
    last = (header or "").rpartition("-")[2].strip()
    if not last.isdecimal():
        return otherwise
    return int(last) + 1 if int(last) else 0
