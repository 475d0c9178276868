"""One thread that waits for descriptors and moments. Standard library only."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable


class Timer:
    """A call that is due at a moment; `cancel` takes it back."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Make sure that the call does not happen (any more)."""
        self.call = None


class Loop:
    """Calls what was asked for when a descriptor is ready or a moment has come; sleeps in between."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def when_readable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call each time a descriptor has something to read."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def also_writable(self, descriptor: int, *, wanted: bool) -> None:
        """Whether to call for room to write, too."""
        key = self._selector.get_key(descriptor)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(descriptor, events, key.data)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor. Has to be done before it is closed."""
        self._selector.unregister(descriptor)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, `delay_s` seconds from now."""
        timer = Timer(time.monotonic() + delay_s, call)
        heapq.heappush(self._timers, (timer.when, next(self._numbers), timer))
        return timer

    def step(self) -> None:
        """Sleep until something is due, and do it."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            # An earlier call of this round may have stopped watching this one.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.data is key.data:
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                call()

    def close(self) -> None:
        """Give the selector's own descriptor back."""
        self._selector.close()
