"""One container's log, from its first line to its last, into the job's mirror: streams that break are taken up again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import docker.errors

from kale_dist.backends.gathering import gathered
from kale_dist.backends.mirror import Mirror
from kale_dist.engine import Engine
from kale_dist.errors import JobNotFoundError
from kale_dist.transport import EventItem, FrameReader, Item, Line

_SILENCE_S = 45.0
"""An agent says something every 15 s: after three times that, the connection is dead although nobody says so."""

_AGAIN_S = 0.5
_OVERLAP_S = 5.0
"""A stream that is taken up again begins this much before it broke; what was seen is dropped by its number."""


class ContainerLog:
    """Follows one container in a thread of its own.

    Args:
        engine: Where the container is.
        container: Its id.
        number: Which of the job's containers it is.
        mirror: Where lines, events and outcomes go.
        key: The job's secret bytes; None if this user has none.
        ahead_s: By how much the engine's clock is ahead of this machine's, in seconds.
        has_ended: Whether the container has ended or is gone.
        on_items: Called after something was taken.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        container: str,
        number: int,
        mirror: Mirror,
        key: bytes | None,
        ahead_s: float,
        has_ended: Callable[[], bool],
        on_items: Callable[[], None],
    ) -> None:
        self.is_drained = False
        """Whether the container has ended and all of its log was read."""
        self._engine = engine
        self._container = container
        self._number = number
        self._mirror = mirror
        self._key = key
        self._ahead_s = ahead_s
        self._has_ended = has_ended
        self._on_items = on_items
        self._stopped = threading.Event()
        self._last_read = 0.0
        self._last_sign = time.monotonic()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kale_dist log {container[:12]}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()
        self._cut()

    def join(self, timeout_s: float) -> None:
        """Wait until it reads no more."""
        self._thread.join(timeout_s)

    def look(self) -> None:
        """Cut a connection that has been silent for too long; it is taken up again."""
        if time.monotonic() - self._last_sign > _SILENCE_S:
            self._last_sign = time.monotonic()
            self._cut()

    def _cut(self) -> None:
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Asked before reading: what a container has written before it ended is then read for certain.
            ended = self._has_ended()
            try:
                self._follow()
            except docker.errors.NotFound:
                break
            except JobNotFoundError:
                break
            except Exception:  # noqa: BLE001 - whatever broke the stream, it is taken up again
                ended = False
            if ended:
                break
            self._on_items()
            self._stopped.wait(_AGAIN_S)
        self.is_drained = True
        self._on_items()

    def _follow(self) -> None:
        """Read until the log ends or breaks: the library does not say which."""
        since = None
        if self._last_read:
            since = self._last_read + self._ahead_s - _OVERLAP_S
        self._last_sign = time.monotonic()
        self._stream = self._engine.api.logs(self._container, stream=True, follow=True, since=since)
        reader = FrameReader(self._key, self._number)
        rejected = 0
        self._mirror.begin(self._container, self._number)
        try:
            for data in gathered(self._stream):
                if self._stopped.is_set():
                    return
                self._last_sign = time.monotonic()
                self._take(reader.feed_block(data))
                if reader.rejected > rejected:
                    rejected = reader.rejected
                    self._mirror.refuse(self._container, self._number)
            self._take(reader.finish())
        finally:
            self._cut()
            self._stream = None

    def _take(self, items: list[Item]) -> None:
        self._last_read = time.time()
        self._mirror.take(self._container, self._number, items)
        self._on_items()


def lines_between(engine: Engine, container: str, number: int, first: int, last: int) -> Sequence[Line]:
    """Lines that a stream has skipped, from the container's whole log."""
    return [
        item
        for item in _whole(engine, container, None, number)
        if isinstance(item, Line) and first <= item.sequence <= last
    ]


def events_between(
    engine: Engine, container: str, key: bytes | None, number: int, first: int, last: int
) -> Sequence[EventItem]:
    """The same for events."""
    return [
        item
        for item in _whole(engine, container, key, number)
        if isinstance(item, EventItem) and item.number is not None and first <= item.number <= last
    ]


def _whole(engine: Engine, container: str, key: bytes | None, number: int) -> list[Item]:
    reader = FrameReader(key, number)
    items: list[Item] = []
    for data in engine.api.logs(container, stream=True, follow=False):
        items += reader.feed_block(data)
    return items
