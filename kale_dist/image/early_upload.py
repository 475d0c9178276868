"""Sends a blob while it is still being written.

A registry wants to know what a blob is called only at the end of its upload. So a layer travels while it is packed; when
its digest is known, the registry is asked whether it has it after all, and if so, the rest is never sent. Whatever goes
wrong on the way is no error here: what is missing is sent again by the ordinary upload, which knows all remedies.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Self

from kale_dist.errors import ImageError
from kale_dist.image.connection import CutError
from kale_dist.image.upload import SINGLE_BYTES
from kale_dist.image.upload_session import Begun, Session

_BLOCK_BYTES = 256 << 10

_LOOK_S = 0.05
"""How often the user is told how much has been sent."""

_ENDING_S = 5.0
"""How long the end of a cancelled upload is waited for."""


class _StoppedError(Exception):
    """Ends a request in its middle."""


class EarlyUpload:
    """The upload of a file that grows; use it in a `with`, at whose end it is cancelled unless it was taken over.

    Args:
        session: Its requests.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._change = threading.Condition()
        self._file: BinaryIO | None = None
        self._written = 0
        self._sent = 0
        self._is_written = False
        self._is_stopped = False
        self._begun: Begun | None = None
        self._thread: threading.Thread | None = None

    def grown(self, path: pathlib.Path, size: int) -> None:
        """Take note that a file has so many bytes; once it is worth it, they are sent.

        Args:
            path: The same each time. It may be renamed afterwards.
            size: Bytes that can be read from it.
        """
        if size <= SINGLE_BYTES:
            return
        if self._file is None:
            # Opened here, where it surely has that name.
            self._file = path.open("rb")
        self.begin()
        with self._change:
            self._written = size
            self._change.notify()

    def begin(self) -> None:
        """Let the registry know that there will be something, before there is. Calling it again does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kale-dist-upload", daemon=True)
            self._thread.start()

    def take(self, progress: Callable[[int, int], None]) -> Begun | None:
        """What the registry has got, when the file is written and what could be sent has been sent.

        Args:
            progress: Takes bytes sent and bytes in all, while they are waited for.

        Returns:
            None: nothing that could be gone on with.
        """
        with self._change:
            self._is_written = True
            self._change.notify()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)
            progress(self._sent, self._written)
        begun, self._begun = self._begun, None
        return begun

    def cancel(self) -> None:
        """End it, and let the registry forget what it has got. Calling it again does nothing."""
        with self._change:
            self._is_stopped = True
            self._change.notify()
        if self._thread is not None:
            self._thread.join(_ENDING_S)
            if self._begun is not None and not self._thread.is_alive():
                begun, self._begun = self._begun, None
                self._session.discard(begun.where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        try:
            self._begun = Begun(self._session.start(), 0)
            sent = -1
            # A registry that keeps nothing of a chunk is asked no further.
            while sent < self._begun.have and self._is_worth(self._begun.have):
                sent = self._begun.have
                self._send(self._begun)
        except _StoppedError:
            pass
        except CutError:
            begun, self._begun = self._begun, None
            if begun is not None:
                # A registry that has forgotten it refuses.
                with contextlib.suppress(ImageError):
                    self._begun = self._session.status(begun.where)
        except (ImageError, OSError):
            # Refused: the ordinary upload begins anew, and meets it again where it is for good.
            if self._begun is not None:
                begun, self._begun = self._begun, None
                self._session.discard(begun.where)

    def _is_worth(self, have: int) -> bool:
        """Wait for a chunk to send: the first as soon as there is anything, the others when they are whole."""
        wanted = have + self._session.chunk if have else 1
        with self._change:
            self._change.wait_for(lambda: self._is_stopped or self._is_written or self._written >= wanted)
            return not self._is_stopped and self._written >= wanted

    def _send(self, begun: Begun) -> None:
        end = begun.have + self._session.chunk
        where, have = self._session.patch(
            begun.where,
            lambda: self._blocks(begun.have, end),
            begun.have,
            # The first has no length: it ends where the file does, if that is sooner.
            end if begun.have else None,
            is_whole=False,
        )
        self._begun = Begun(where, self._sent if have is None else have)

    def _blocks(self, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            there = self._wait_beyond(begin, is_open_ended=begin < self._session.chunk)
            if there <= begin or self._file is None:
                return
            block = os.pread(self._file.fileno(), min(_BLOCK_BYTES, there - begin, end - begin), begin)
            if not block:
                raise OSError("The file is shorter than was said.")
            yield block
            begin += len(block)
            self._sent = begin

    def _wait_beyond(self, begin: int, *, is_open_ended: bool) -> int:
        """How much there is to read: more than `begin`, unless that is all."""
        with self._change:
            self._change.wait_for(lambda: self._is_stopped or self._is_written or self._written > begin)
            if self._is_stopped:
                if is_open_ended:
                    # Ended as it should, the request leaves an upload that the registry can be told to forget.
                    return begin
                raise _StoppedError
            return self._written
