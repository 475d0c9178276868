"""The one writer of a job's folder: log, events, progress, and a bounded copy on stdout.

A thread writes, so that the agent's loop never waits for a disk. Lines get their numbers as they are written. If a disk is
slow or full, lines are dropped before they have numbers, and a line says how many of which rank. Events are never dropped.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kale_dist import wire
from kale_dist.wire import EventKind, JobFiles, StateName, Stream

TICK_S = 0.02
"""What comes within this time is written together."""

PROGRESS_INTERVAL_S = 0.25
"""`progress.json` is replaced at most this often."""

POD_LOG_BYTES = 1 << 30
"""How much of its log a head keeps in a pod."""

QUEUE_BYTES = 64 << 20
"""Lines that wait for the disk; what comes beyond is dropped and counted."""

EVENTS_IN_HAND_BYTES = 8 << 20
"""While more than this waits, ranks' events are not read."""

RECORD_BYTES = 64 << 10
"""Lines of one rank that come together make one record up to this size."""

STDOUT_BYTES_PER_S = 500_000
STDOUT_IN_HAND_BYTES = 4 << 20

_RETRY_S = 0.5
_CLOSE_LIMIT_S = 5.0
_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""

_FINAL = (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What the files hold, whole blocks only: who reads no further never sees half of one."""

    log_bytes: int = 0
    log_start: int = 0
    """Offset of the first record that is kept."""
    next_line: int = 0
    event_bytes: int = 0
    events: int = 0
    is_last: bool = False
    """Whether nothing more will come."""


@dataclasses.dataclass(slots=True)
class _Lines:
    rank: int | None
    attempt: int
    ms: int
    body: bytes
    count: int


class JobWriter:
    """The files of a job, as far as its agent writes them. Its methods are for the loop's thread.

    Args:
        files: Names of the files; the folder has to be there.
        loop: The agent's loop.
        on_change: Called in the loop after anything was written.
        limit_bytes: How much of the log is kept; None: all of it.
        stdout: Where a copy goes; None: nowhere.
        observe: Called with each event, in the loop's thread.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        files: JobFiles,
        loop: asyncio.AbstractEventLoop,
        on_change: Callable[[], None],
        *,
        limit_bytes: int | None = None,
        stdout: StdoutCopy | None = None,
        observe: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.attempt = 0
        """The attempt that the agent's own lines and events belong to."""
        self.written = Written()
        self.progress: dict[str, bytes] = {}
        """The last progress and usage of each rank, as JSON; replaced as a whole."""
        self.moves: collections.Counter[int] = collections.Counter()
        """Signs of progress that each rank has given so far: its lines, and what `Rank` counts."""
        self._files = files
        self._loop = loop
        self._on_change = on_change
        self._limit_bytes = limit_bytes
        self._stdout = stdout
        self._observe = observe
        self._log = _open(files.log)
        self._events = _open(files.events)
        self._log_bytes = os.fstat(self._log).st_size
        self._log_start = 0
        self._next_line = 0
        self._event_count = 0
        self._event_bytes = os.fstat(self._events).st_size
        # Shared by the two threads, under the condition's lock.
        self._condition = threading.Condition()
        self._lines: list[_Lines] = []
        self._queued = 0
        self._lost: collections.Counter[int | None] = collections.Counter()
        self._new_events: list[dict[str, Any]] = []
        self._events_waiting = 0
        self._latest: dict[str, dict[str, Any]] = {}
        self._has_progress = False
        self._then: Callable[[], None] | None = None
        self._unwritten: list[bytes] = []
        self._progress_at = -1.0
        threading.Thread(target=self._serve, name="writer", daemon=True).start()

    # -- for the loop ------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more events may come; where a full disk keeps them waiting they stay with their ranks."""
        return self._events_waiting < EVENTS_IN_HAND_BYTES

    def begin_attempt(self, attempt: int) -> None:
        """What comes from here on belongs to another attempt."""
        self.attempt = attempt
        with self._condition:
            self._latest = {}
            self._has_progress = False

    def lines(self, rank: int | None, body: bytes, count: int) -> None:
        """Append marked lines of a rank, or of the agent."""
        now = time.time_ns() // 1_000_000
        if rank is not None:
            self.moves[rank] += 1
        with self._condition:
            if self._queued + len(body) > QUEUE_BYTES:
                self._lost[rank] += count
                return
            self._queued += len(body)
            last = self._lines[-1] if self._lines else None
            if last is not None and last.rank == rank and len(last.body) + len(body) <= RECORD_BYTES:
                last.body += body
                last.count += count
            else:
                self._lines.append(_Lines(rank, self.attempt, now, body, count))
            self._condition.notify()

    def say(self, text: str) -> None:
        """Append lines of the agent's own."""
        lines = [part for line in text.splitlines() for part in _short(wire.clean(line.encode("utf-8", "replace")))]
        self.lines(None, wire.body_of(Stream.AGENT, lines), len(lines))

    def event(self, kind: EventKind, rank: int | None = None, **fields: Any) -> None:
        """Record an event of the agent's own."""
        self.record({"event": str(kind), "time": time.time(), "rank": rank, "attempt": self.attempt, **fields})

    def record(self, event: dict[str, Any]) -> None:
        """Record an event as it is; progress and usage go into a file where only each rank's last one is kept."""
        self._observe(event)
        name = wire.last_name(event)
        with self._condition:
            if name is not None:
                self._latest[name] = event
                self._has_progress = True
            else:
                self._new_events.append(event)
            self._condition.notify()

    def close(self, then: Callable[[], None]) -> None:
        """Write what is left, if that can be, and close; then call in the loop."""
        with self._condition:
            self._then = then
            self._condition.notify()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        close_by = None
        while True:
            with self._condition:
                while not (self._lines or self._new_events or self._lost or self._then):
                    due_s = self._due_s()
                    if due_s == 0 or not self._condition.wait(due_s):
                        break
                then = self._then
                lines, self._lines, self._queued = self._lines, [], 0
                lost, self._lost = self._lost, collections.Counter()
                events, self._new_events = self._new_events, []
                latest = dict(self._latest) if self._has_progress else None
            if latest is not None and (then or events or self._progress_at + PROGRESS_INTERVAL_S <= time.monotonic()):
                self._write_progress(latest)
            self._write_log(lost, lines)
            self._write_events(events)
            if then is not None:
                close_by = close_by or time.monotonic() + _CLOSE_LIMIT_S
                if not self._unwritten or time.monotonic() > close_by:
                    self._publish(is_last=True)
                    self._close_files()
                    self._call(then)
                    return
            self._publish()
            time.sleep(TICK_S if then is None or self._unwritten else 0.0)

    def _due_s(self) -> float | None:
        """Seconds until there is something to do without news; None for never."""
        waits = []
        if self._has_progress:
            waits.append(max(0.0, self._progress_at + PROGRESS_INTERVAL_S - time.monotonic()))
        if self._unwritten:
            waits.append(_RETRY_S)
        return min(waits, default=None)

    def _publish(self, *, is_last: bool = False) -> None:
        self.written = Written(
            log_bytes=self._log_bytes, log_start=self._log_start, next_line=self._next_line,
            event_bytes=self._event_bytes, events=self._event_count, is_last=is_last,
        )  # fmt: skip
        self._call(self._on_change)

    def _call(self, function: Callable[[], None]) -> None:
        # The loop has ended where an agent received SIGTERM.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _write_log(self, lost: collections.Counter[int | None], lines: list[_Lines]) -> None:
        if lost:
            gap = "\n".join(
                f"{count:,} lines of {'the agent' if rank is None else f'rank {rank}'} are missing here: the disk was "
                "full or too slow"
                for rank, count in lost.items()
            ).encode()
            body = wire.body_of(Stream.AGENT, gap.split(b"\n"))
            lines.insert(0, _Lines(None, self.attempt, time.time_ns() // 1_000_000, body, len(lost)))
        if not lines:
            return
        number, offset = self._next_line, self._log_bytes
        blocks = []
        for one in lines:
            blocks.append(wire.encode_lines(number, one.ms, one.attempt, one.rank, one.body, one.count))
            number += one.count
            offset += len(blocks[-1])
        if not _append(self._log, b"".join(blocks), self._log_bytes):
            with self._condition:
                self._lost.update(lost)
                for one in lines[bool(lost) :]:
                    self._lost[one.rank] += one.count
            time.sleep(_RETRY_S)
            return
        self._next_line, self._log_bytes = number, offset
        if self._stdout is not None:
            for one, block in zip(lines, blocks, strict=True):
                self._stdout.offer(block, always=one.rank is None)
        if self._limit_bytes is not None and self._log_bytes - self._log_start > self._limit_bytes:
            self._forget_oldest(self._limit_bytes // 2)

    def _forget_oldest(self, keep_bytes: int) -> None:
        """Give the disk back what the oldest records take; the offsets of the others stay as they are."""
        start = self._log_start
        with contextlib.suppress(OSError), self._files.log.open("rb") as log:
            start, _ = wire.lines_after(log, self._log_bytes - keep_bytes) or (start, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_long(start - self._log_start)
        if start > self._log_start and not libc.fallocate(self._log, _PUNCH_HOLE, ctypes.c_long(self._log_start), size):
            self._log_start = start

    def _write_events(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event.get("event") == EventKind.STATE and event.get("state") in _FINAL:
                event = {**event, "next_line": self._next_line}  # noqa: PLW2901 - as it is written
            self._unwritten.append(wire.encode_json(event))
            if self._stdout is not None:
                number = self._event_count + len(self._unwritten) - 1
                self._stdout.offer(wire.encode_event(number, self._unwritten[-1]), always=True)
        data = b"".join(self._unwritten)
        if data and _append(self._events, data, self._event_bytes):
            self._event_count += len(self._unwritten)
            self._event_bytes += len(data)
            self._unwritten.clear()
            data = b""
        self._events_waiting = len(data)

    def _write_progress(self, latest: dict[str, dict[str, Any]]) -> None:
        with self._condition:
            self._has_progress = False
        self._progress_at = time.monotonic()
        encoded = {name: json.dumps(event, separators=(",", ":")).encode() for name, event in latest.items()}
        if self._stdout is not None:
            for name, data in encoded.items():
                if self.progress.get(name) != data:
                    self._stdout.offer(wire.encode_progress(data))
        self.progress = encoded
        temporary = self._files.progress.with_suffix(".new")
        # A full disk costs only this; the next progress, a quarter of a second later, is another chance.
        with contextlib.suppress(OSError):
            temporary.write_bytes(wire.encode_json(latest))
            temporary.replace(self._files.progress)

    def _close_files(self) -> None:
        os.close(self._log)
        os.close(self._events)


class StdoutCopy:
    """A bounded copy of what is written, on the container's stdout: a thread of its own, for stdout may block.

    Args:
        descriptor: Where to.
        bytes_per_s: What is let through on average; events and the agent's own lines always are.
        in_hand_bytes: What is let through at once.
    """

    def __init__(
        self, descriptor: int = 1, bytes_per_s: float = STDOUT_BYTES_PER_S, in_hand_bytes: int = STDOUT_IN_HAND_BYTES
    ) -> None:
        self._descriptor = descriptor
        self._bytes_per_s = bytes_per_s
        self._limit = in_hand_bytes
        self._in_hand = float(in_hand_bytes)
        self._looked_at = time.monotonic()
        self._condition = threading.Condition()
        self._blocks: list[bytes] = []
        self._waiting = 0
        self._is_broken = False
        threading.Thread(target=self._serve, name="stdout", daemon=True).start()

    def offer(self, block: bytes, *, always: bool = False) -> None:
        """Write a block, unless it is too much. From any thread; never waits."""
        with self._condition:
            now = time.monotonic()
            self._in_hand = min(self._limit, self._in_hand + (now - self._looked_at) * self._bytes_per_s)
            self._looked_at = now
            if self._is_broken or (not always and (self._in_hand < len(block) or self._waiting > self._limit)):
                return
            self._in_hand -= len(block)
            self._waiting += len(block)
            self._blocks.append(block)
            self._condition.notify_all()

    def drain(self, limit_s: float) -> None:
        """Wait until all is written."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_broken or not self._waiting, limit_s)

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._blocks)
                blocks, self._blocks = self._blocks, []
            data = b"".join(blocks)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                self._is_broken = True
            with self._condition:
                self._waiting -= len(data)
                self._condition.notify_all()


def _open(path: pathlib.Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _append(descriptor: int, data: bytes, size: int) -> bool:
    """Append all or nothing; whether it was all."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        return False
    return True


def _short(line: bytes) -> list[bytes]:
    """A line of the agent's own, in parts that a log may hold."""
    limit = wire.MAX_LINE_BYTES
    return [line[at : at + limit] for at in range(0, len(line), limit)] or [b""]
