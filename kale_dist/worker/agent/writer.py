"""The one writer of a job's folder: log, events, progress, and a bounded copy on stdout.

A thread writes, so that the agent's loop never waits for a disk. Lines get their numbers as they are written. Nothing is
left out of the files: while a disk is slow, hangs or is full, lines and events wait here, and soon in their ranks' pipes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from kale_dist import wire
from kale_dist.wire import JobFiles, Verdict
from kale_dist.wire.events import DiskProblem, Event

TICK_S = 0.02
"""What comes within this time is written together."""

PROGRESS_INTERVAL_S = 0.25
"""`progress.json` is replaced at most this often."""

LOG_BYTES = 1 << 30
"""How much of a job's log is kept."""

QUEUE_BYTES = 8 << 20
"""While more than this waits for the disk, no rank's pipes are read."""

QUEUED_EVENTS = 10_000
"""The same for events."""

SLOW_DISK_S = 5.0
"""A disk that takes nothing for so long is reported as the reason why the ranks wait."""

RECORD_BYTES = 64 << 10
"""Lines of one rank that come together make one record up to this size."""

STDOUT_BYTES_PER_S = 500_000
STDOUT_IN_HAND_BYTES = 4 << 20

_RETRY_S = 0.5
_CLOSE_LIMIT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """One of the files that a log consists of."""

    first: int
    """Number of its first line."""
    bytes: int = 0
    """Whole blocks only."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What the files hold, whole blocks only: a reader that stops there never sees half of one."""

    log: tuple[LogFile, ...] = (LogFile(first=0),)
    """The files that are kept, oldest first."""
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
        on_change: Called in the loop after anything was written, and when `disk_problem` has changed.
        limit_bytes: How much of the log is kept, at least half of it.
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
        limit_bytes: int = LOG_BYTES,
        stdout: StdoutCopy | None = None,
        observe: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.attempt = 0
        """The attempt that the agent's own lines and events belong to."""
        self.written = Written()
        self.progress: dict[str, bytes] = {}
        """The last progress and usage of each rank, as JSON; replaced as a whole."""
        self.moves: collections.Counter[int] = collections.Counter()
        """Signs of progress that each rank has given so far: its lines, and what `Rank` counts."""
        self.disk_problem = ""
        """Why ranks wait for the disk, as a sentence; empty if they do not."""
        self._files = files
        self._loop = loop
        self._on_change = on_change
        self._limit_bytes = limit_bytes
        self._stdout = stdout
        self._observe = observe
        self._log = open_to_append(files.log)
        self._events = open_to_append(files.events)
        self._names = threading.Lock()
        """Held while the log's files are renamed or opened."""
        # Shared by the two threads, under the condition's lock.
        self._condition = threading.Condition()
        self._lines: list[_Lines] = []
        self._queued = 0
        self._new_events: list[dict[str, Any]] = []
        self._latest: dict[str, bytes] = {}
        self._has_progress = False
        self._then: Callable[[], None] | None = None
        self._give_up_at = math.inf
        self._progress_at = -1.0
        self._began_at: float | None = None
        """Since when the disk has what it has not finished yet."""
        self._refusal = ""
        """Why the disk refuses that write; empty where it only does not answer."""
        threading.Thread(target=self._serve, name="writer", daemon=True).start()

    # -- for the loop ------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more lines and events may come; where the disk takes none they stay in their ranks' pipes."""
        return self._queued < QUEUE_BYTES and len(self._new_events) < QUEUED_EVENTS

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
            self._queued += len(body)
            last = self._lines[-1] if self._lines else None
            if last is not None and last.rank == rank and len(last.body) + len(body) <= RECORD_BYTES:
                last.body += body
                last.count += count
            else:
                self._lines.append(_Lines(rank, self.attempt, now, body, count))
            self._condition.notify()

    def log(self, text: str) -> None:
        """Append lines of the agent's own."""
        self.lines(None, *wire.own_lines(text))

    def event(self, what: Any, rank: int | None = None) -> None:
        """Record an event of the agent's own, of one of the classes of `wire.events`."""
        event = Event(what, time.time(), rank, self.attempt)
        self.record(event.record(), event)

    def record(self, record: dict[str, Any], event: Event | None) -> None:
        """Record an event as it was sent; progress and usage go into a file where only each rank's last one is kept.

        Args:
            record: The event, as an object of JSON.
            event: The same; None if it is of a version that is not known here.
        """
        if event is not None:
            self._observe(event)
        name = wire.last_name(record)
        with self._condition:
            if name is not None:
                # Once: thousands of ranks are written several times a second, most of them as they were.
                self._latest[name] = json.dumps(record, separators=(",", ":")).encode()
                self._has_progress = True
            else:
                self._new_events.append(record)
            self._condition.notify()

    def look_at_disk(self) -> None:
        """Say it if the disk has taken nothing for long, past the disk: by `progress`, stdout and `disk_problem`."""
        began_at, problem = self._began_at, ""
        if began_at is not None and time.monotonic() - began_at >= SLOW_DISK_S:
            why = self._refusal or "its disk is too slow, or does not answer"
            problem = f"The job's folder {self._files.folder} cannot be written: {why}. Ranks that write lines wait until it can"
        if problem == self.disk_problem:
            return
        if self.disk_problem and not problem:
            self.log("The job's folder can be written again. Until then ranks that wrote lines had to wait")
        self.disk_problem = problem
        self.event(DiskProblem(problem=problem))
        if problem:
            event = self._latest["disk"]
            self.progress = {**self.progress, "disk": event}
            if self._stdout is not None:
                self._stdout.offer(wire.encode_progress(event), always=True)
                self._stdout.log(problem)
        self._on_change()

    def close(self, then: Callable[[], None]) -> None:
        """Write what is left, if that can be, and close; then call in the loop."""
        with self._condition:
            self._give_up_at = time.monotonic() + _CLOSE_LIMIT_S
            self._then = then
            self._condition.notify()

    # -- for readers, in any thread -----------------------------------------------------------------------------------

    def open_log(self, first: int) -> BinaryIO:
        """Open one of the log's files.

        Args:
            first: Number of its first line.

        Raises:
            FileNotFoundError: It is no longer kept.
        """
        with self._names:
            kept = [file.first for file in self.written.log]
            if first not in kept:
                raise FileNotFoundError
            return (self._files.log if first == kept[-1] else self._files.older_log).open("rb")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._condition:
                while not (self._lines or self._new_events or self._then):
                    due_s = self._progress_at + PROGRESS_INTERVAL_S - time.monotonic() if self._has_progress else None
                    if (due_s is not None and due_s <= 0) or not self._condition.wait(due_s):
                        break
                then = self._then
                lines, self._lines, self._queued = self._lines, [], 0
                events, self._new_events = self._new_events, []
                latest = dict(self._latest) if self._has_progress else None
            self._began_at = time.monotonic()
            if latest is not None and (then or events or self._progress_at + PROGRESS_INTERVAL_S <= time.monotonic()):
                self._write_progress(latest)
            self._write_log(lines)
            self._write_events(events)
            self._began_at = None
            if then is not None:
                self.written = dataclasses.replace(self.written, is_last=True)
                self._log.close()
                self._events.close()
                self._call(self._on_change)
                self._call(then)
                return
            self._call(self._on_change)
            time.sleep(TICK_S)

    def _call(self, function: Callable[[], None]) -> None:
        # The loop has ended where an agent received SIGTERM.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _append(self, file: io.FileIO, data: bytes, size: int) -> bool:
        """Append all of it, however long the disk takes; not, if the job ends meanwhile and the disk still refuses it.

        Args:
            file: Where to.
            data: What.
            size: What the file holds so far, which stays if this gives up.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[file.write(view) :]
                self._refusal = ""
            except OSError as error:
                self._refusal = error.strerror or f"{error}"
                if time.monotonic() > self._give_up_at:
                    with contextlib.suppress(OSError):
                        file.truncate(size)
                    break
                time.sleep(_RETRY_S)
        return not view

    def _write_log(self, lines: list[_Lines]) -> None:
        if not lines:
            return
        *older, file = self.written.log
        number, blocks = self.written.next_line, []
        for one in lines:
            blocks.append(wire.encode_lines(number, one.ms, one.attempt, one.rank, one.body, one.count))
            number += one.count
        data = b"".join(blocks)
        if not self._append(self._log, data, file.bytes):
            return
        log = (*older, dataclasses.replace(file, bytes=file.bytes + len(data)))
        self.written = dataclasses.replace(self.written, log=log, next_line=number)
        if self._stdout is not None:
            for one, block in zip(lines, blocks, strict=True):
                self._stdout.offer(block, always=one.rank is None)
        if log[-1].bytes > self._limit_bytes // 2:
            self._begin_file()

    def _begin_file(self) -> None:
        """Put the log's file aside, in the place of the one before it, and begin another one."""
        with self._names:
            try:
                self._files.log.replace(self._files.older_log)
                fresh = open_to_append(self._files.log)
            except OSError:
                # Lines go into the same file; the next ones are another chance.
                with contextlib.suppress(OSError):
                    self._files.older_log.replace(self._files.log)
                return
            self._log.close()
            self._log = fresh
            log = (self.written.log[-1], LogFile(first=self.written.next_line))
            self.written = dataclasses.replace(self.written, log=log)

    def _write_events(self, events: list[dict[str, Any]]) -> None:
        written, encoded = self.written, []
        for event in events:
            if event.get("event") == "state" and Verdict.read(event) is not None:
                event = {**event, "next_line": written.next_line}  # noqa: PLW2901 - as it is written
            encoded.append(wire.encode_json(event))
            if self._stdout is not None:
                number = written.events + len(encoded) - 1
                # Its numbers would fill a pod's log; without the event itself a reader of that log would miss one.
                is_history = event.get("event") == "history"
                shown = wire.encode_json({"event": "history"}) if is_history else encoded[-1]
                self._stdout.offer(wire.encode_event(number, shown), always=True)
        data = b"".join(encoded)
        if self._append(self._events, data, written.event_bytes):
            event_bytes, count = written.event_bytes + len(data), written.events + len(encoded)
            self.written = dataclasses.replace(written, event_bytes=event_bytes, events=count)

    def _write_progress(self, latest: dict[str, bytes]) -> None:
        with self._condition:
            self._has_progress = False
        self._progress_at = time.monotonic()
        if self._stdout is not None:
            for name, data in latest.items():
                if self.progress.get(name) != data:
                    self._stdout.offer(wire.encode_progress(data))
        self.progress = latest
        temporary = self._files.progress.with_suffix(".new")
        # A full disk costs only this; the next progress, a quarter of a second later, is another chance.
        with contextlib.suppress(OSError):
            temporary.write_bytes(
                b"{%s}\n" % b",".join(b'"%s":%s' % (name.encode(), data) for name, data in latest.items())
            )
            temporary.replace(self._files.progress)


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

    def log(self, text: str) -> None:
        """Write lines of the agent's own that stand in no file, and so have no number."""
        body, count = wire.own_lines(text)
        self.offer(wire.encode_lines(None, time.time_ns() // 1_000_000, 0, None, body, count), always=True)

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


def open_to_append(path: pathlib.Path) -> io.FileIO:
    """Open a file of the job's; tests put a disk that hangs in its place."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "wb")
