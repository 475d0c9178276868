"""Output of ranks: read from their pipes, cut into lines, made fit for a log, and rate-limited.

A carriage return ends a line too, as progress bars use it; of many such lines in a row only some are kept, the first,
about five a second, and the last.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kale_dist.wire import MAX_LINE_BYTES, Stream, body_of, clean

BAR_INTERVAL_S = 0.2
"""Lines that a carriage return ends are kept at most this often, for each rank and stream."""

READ_BYTES = 1 << 16

MAX_LAST_READ_BYTES = 4 << 20
"""How much is read of a pipe once its rank has ended: a process it left behind could write forever."""

TAIL_LINES = 3
TAIL_LINE_BYTES = 200

RATE_BYTES_PER_S = 2 << 20
"""In a pod a rank may write this much, on average."""

BURST_BYTES = 16 << 20
"""It may write this much at once."""

TAIL_BYTES = 64 << 10
"""If there is too much, the end is kept: a rank's last lines."""

_LOOK_AGAIN_S = 0.1
"""How often it is looked whether there is room again."""

_LINE_END = re.compile(rb"\r\n|\n|\r")

_CRASH = b"Fatal Python error:"
_AFTER_CRASH = re.compile(rb"\s*$|  |(Current t|T)hread 0x|Extension modules:|Python runtime state:")

_GLOO_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1"
)
"""Gloo of torch 2.9 and 2.10 prints this line to stdout for each group that is complete, and nothing silences it."""

Body = tuple[bytes, int]
"""Marked lines, and how many they are."""

NOTHING: Body = (b"", 0)


class Sink(Protocol):
    """Where lines and events of a rank go."""

    @property
    def has_room(self) -> bool:
        """Whether more may come; else they stay in the rank's pipes, which it fills and then waits for."""

    def output(self, body: bytes, count: int) -> None:
        """It has written lines; marked as a log has them."""

    def events(self, data: bytes) -> None:
        """It has sent events: whole JSON lines."""


class RankOutput:
    """Reads what one rank writes to stdout and stderr, and its events, until each ends.

    Args:
        loop: The agent's loop.
        pipes: Where each stream is read; they do not block.
        events: Where its events are read; it does not block either.
        sink: Where they go.
        is_limited: Whether the rank is rate-limited.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pipes: Mapping[Stream, int], events: int, sink: Sink, *, is_limited: bool
    ) -> None:
        self._loop = loop
        self._sink = sink
        self._limit = RateLimit() if is_limited else None
        self._cutters = {stream: LineCutter(stream) for stream in pipes}
        self._take: dict[int, Callable[[bytes], None]] = {
            pipe: functools.partial(self._take_output, self._cutters[stream]) for stream, pipe in pipes.items()
        }
        self._take[events] = self._take_events
        self._open = set(self._take)
        self._pending_event = b""
        self._bar_timer: asyncio.TimerHandle | None = None
        self._room_timer: asyncio.TimerHandle | None = None
        """Set while there is no room and the pipes are not read."""
        self._resume()

    def read_rest(self) -> None:
        """Read what is in the pipes without waiting."""
        for pipe, take in self._take.items():
            for _ in range(MAX_LAST_READ_BYTES // READ_BYTES):
                if not (data := read_some(pipe)):
                    break
                take(data)

    def end_lines(self) -> None:
        """The rank, or a cell in it, has ended: last lines without an end count."""
        for cutter in self._cutters.values():
            self._pass(*cutter.finish())

    def finish(self) -> tuple[str, ...]:
        """The rank has ended. Gives its last lines, of stderr if there are any, else of stdout."""
        self.end_lines()
        if self._limit is not None:
            self._put(*self._limit.finish())
        return self._cutters[Stream.STDERR].tail or self._cutters[Stream.STDOUT].tail

    def close(self) -> None:
        """Read no more."""
        self._pause()
        for timer in (self._bar_timer, self._room_timer):
            if timer is not None:
                timer.cancel()

    def _resume(self) -> None:
        """Read the pipes as they fill."""
        for pipe in self._open:
            self._loop.add_reader(pipe, self._read, pipe)

    def _pause(self) -> None:
        for pipe in self._open:
            self._loop.remove_reader(pipe)

    def _read(self, pipe: int) -> None:
        if not self._sink.has_room:
            self._pause()
            self._room_timer = self._loop.call_later(_LOOK_AGAIN_S, self._resume)
            return
        data = read_some(pipe)
        if data is None:
            self._loop.remove_reader(pipe)
            self._open.discard(pipe)
        elif data:
            self._take[pipe](data)
            self._show_bars_later()

    def _take_output(self, cutter: LineCutter, data: bytes) -> None:
        self._pass(*cutter.feed(data))

    def _take_events(self, data: bytes) -> None:
        whole, end, self._pending_event = (self._pending_event + data).rpartition(b"\n")
        if whole:
            self._sink.events(whole + end)

    def _show_bars_later(self) -> None:
        if self._bar_timer is None and any(cutter.holds_bar for cutter in self._cutters.values()):
            self._bar_timer = self._loop.call_later(BAR_INTERVAL_S, self._show_bars)

    def _show_bars(self) -> None:
        self._bar_timer = None
        for cutter in self._cutters.values():
            self._pass(*cutter.show_bar())
        self._show_bars_later()

    def _pass(self, body: bytes, count: int) -> None:
        if count:
            self._put(*((body, count) if self._limit is None else self._limit.admit(body, count)))

    def _put(self, body: bytes, count: int) -> None:
        if count:
            self._sink.output(body, count)


def read_some(pipe: int) -> bytes | None:
    """What a non-blocking pipe has; empty for nothing now, None at its end."""
    try:
        return os.read(pipe, READ_BYTES) or None
    except BlockingIOError:
        return b""


class LineCutter:
    """Cuts one stream of one rank into lines.

    Args:
        stream: Its stdout or stderr.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pending = b""
        self._bar: bytes | None = None
        self._bar_kept_at = -1.0
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._is_crash = False

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return tuple(line[:TAIL_LINE_BYTES].decode("utf-8", "backslashreplace") for line in self._tail)

    def feed(self, data: bytes) -> Body:
        """Take bytes as they were read from the pipe; gives the lines that they complete."""
        data = self._pending + data
        if b"\r" in data:
            lines, self._pending = self._cut_bars(data)
        else:
            *lines, self._pending = data.split(b"\n")
            # What follows a bar's line shows that it was the last one of its bar.
            if lines and self._bar is not None:
                lines.insert(0, self._bar)
                self._bar = None
        if b"[Gloo]" in data:
            lines = [line for line in lines if not _GLOO_CONNECTED.fullmatch(line)]
        return self._marked(lines)

    def show_bar(self) -> Body:
        """The held-back state of a progress bar, if its time has come."""
        if self._bar is not None and time.monotonic() - self._bar_kept_at >= BAR_INTERVAL_S:
            return self._kept_bar()
        return NOTHING

    @property
    def holds_bar(self) -> bool:
        """Whether a state of a progress bar is held back."""
        return self._bar is not None

    def finish(self) -> Body:
        """The stream has ended: a last line without an end counts."""
        bar = self._kept_bar() if self._bar is not None else NOTHING
        rest, self._pending = self._pending, b""
        if rest.endswith(b"\r"):
            rest = rest[:-1] if rest.strip() else b""
        last = self._marked([rest]) if rest else NOTHING
        return bar[0] + last[0], bar[1] + last[1]

    def _cut_bars(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Cut at every line end, and thin out what ends with a bare carriage return."""
        lines: list[bytes] = []
        start = 0
        for match in _LINE_END.finditer(data):
            # A carriage return in the last byte may be half of a line end.
            if match.end() == len(data) and match.group() == b"\r":
                break
            line = data[start : match.start()]
            start = match.end()
            if match.group() == b"\r":
                # With spaces a bar clears itself.
                if line.strip():
                    self._bar = line
                    if time.monotonic() - self._bar_kept_at >= BAR_INTERVAL_S:
                        lines.append(line)
                        self._bar, self._bar_kept_at = None, time.monotonic()
                continue
            # An ordinary line shows that the bar before it has moved for the last time.
            if self._bar is not None:
                lines.append(self._bar)
                self._bar = None
                if not line:
                    continue
            lines.append(line)
        return lines, data[start:]

    def _kept_bar(self) -> Body:
        bar, self._bar, self._bar_kept_at = self._bar, None, time.monotonic()
        return self._marked([bar]) if bar is not None else NOTHING

    def _marked(self, lines: list[bytes]) -> Body:
        """Lines as they stand in a log, and the parts of a pending line that is too long already."""
        joined = b"\n".join(lines)
        self._keep(lines, has_crash=_CRASH in joined)
        whole = clean(joined)
        body, count = NOTHING
        if len(whole) > MAX_LINE_BYTES and max(map(len, whole.split(b"\n"))) > MAX_LINE_BYTES:
            parts = [self._parts(line) for line in whole.split(b"\n")]
            body, count = b"".join(body for body, _ in parts), sum(count for _, count in parts)
        elif lines:
            body, count = body_of(self._stream, whole.split(b"\n")), len(lines)
        while len(self._pending) > MAX_LINE_BYTES:
            cut = _boundary(self._pending)
            more = self._parts(clean(self._pending[:cut]), is_continued=True)
            body, count = body + more[0], count + more[1]
            self._pending = self._pending[cut:]
        return body, count

    def _keep(self, lines: list[bytes], *, has_crash: bool) -> None:
        """Keep the last lines, but not what Python says after a crash: stacks and modules, of which none tells the reason."""
        for line in lines if has_crash or self._is_crash else lines[-TAIL_LINES:]:
            if not (self._is_crash and _AFTER_CRASH.match(line)):
                self._tail.append(line)
                self._is_crash = line.startswith(_CRASH)

    def _parts(self, line: bytes, *, is_continued: bool = False) -> Body:
        """One line of any length, or the start of one."""
        parts = []
        while len(line) > MAX_LINE_BYTES:
            cut = _boundary(line)
            parts.append(body_of(self._stream, [line[:cut]], continued=True))
            line = line[cut:]
        parts.append(body_of(self._stream, [line], continued=is_continued))
        return b"".join(parts), len(parts)


def _boundary(line: bytes) -> int:
    """Where to cut a line that is too long, not within a character."""
    cut = MAX_LINE_BYTES
    while cut > MAX_LINE_BYTES - 4 and line[cut] & 0xC0 == 0x80:  # noqa: PLR2004 - bytes of UTF-8 that continue a character
        cut -= 1
    return cut


class RateLimit:
    """Limits what one rank writes; whole lines are left out, and a line counts them. The first and the last are kept.

    Args:
        now: Seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._in_hand = float(BURST_BYTES)
        self._looked_at = now()
        self._missing = 0
        self._tail = NOTHING

    def admit(self, body: bytes, count: int) -> Body:
        """Those of the lines that may pass now, after the ones that were held back."""
        now = self._now()
        self._in_hand = min(BURST_BYTES, self._in_hand + (now - self._looked_at) * RATE_BYTES_PER_S)
        self._looked_at = now
        body, count = self._tail[0] + body, self._tail[1] + count
        # While lines are missing, enough has to be in hand that the next gap is not the next line's.
        if self._in_hand >= len(body) + (TAIL_BYTES * 16 if self._tail[1] else 0):
            self._tail = body, count
            return self.finish()
        if len(body) > TAIL_BYTES:
            start = body.find(b"\n", len(body) - TAIL_BYTES) + 1
            body = body[start:] or body[body.rfind(b"\n", 0, -1) + 1 :]
        kept = body.count(b"\n")
        self._missing += count - kept
        self._tail = body, kept
        return NOTHING

    def finish(self) -> Body:
        """What was held back last, and how many lines before it are missing."""
        (body, count), self._tail = self._tail, NOTHING
        missing, self._missing = self._missing, 0
        self._in_hand -= len(body)
        if missing:
            limit = f"{RATE_BYTES_PER_S >> 20} MiB a second"
            text = f"{missing:,} lines of this rank are missing here: it wrote more than {limit}"
            body, count = body_of(Stream.AGENT, [text.encode()]) + body, count + 1
        return body, count
