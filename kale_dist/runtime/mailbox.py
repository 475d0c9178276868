"""Calls from other threads into an agent's loop. Standard library only."""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import Callable

from kale_dist.runtime.loop import Loop


class Mailbox:
    """Calls wait here until the loop comes to them, in their order.

    Args:
        loop: The agent's loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        loop.when_readable(self._reader.fileno(), self._read)

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call something soon. From any thread; after `close` nothing comes of it."""
        self._calls.append(call)
        # A full buffer wakes the loop as well as another byte would.
        with contextlib.suppress(OSError):
            self._writer.send(b"c")

    def close(self) -> None:
        """Take no more calls."""
        self._loop.forget(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(1 << 12)
        while self._calls:
            self._calls.popleft()()
