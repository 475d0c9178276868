"""Output of ranks: cut into whole lines, numbered and framed for the job's log. Never waits for a reader.

A carriage return ends a line too, as progress bars use it; of many such lines in a row only some are kept, the first,
about five a second, and the last.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import time
from collections.abc import Callable

from kale_dist import contract
from kale_dist.contract import MAX_LINE_BYTES, Stream
from kale_dist.runtime.log_segments import older

BAR_INTERVAL_S = 0.2
"""Lines that a carriage return ends are kept at most this often, for each rank and stream."""

POD_LOG_BYTES = 1 << 30
"""How much of its log a pod keeps."""

TAIL_LINES = 3
TAIL_LINE_BYTES = 200

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_UNWRITTEN_BYTES = 16 << 20


class LogWriter:
    """Appends frames to a job's log and numbers them.

    Args:
        path: The log; made if it is not there.
        attempt: The attempt that the lines belong to.
        on_lines: Called after lines were written.
        limit_bytes: How much of the log is kept on disk, in two files (`log_segments`): beyond it the oldest half
            goes, and a line says so. None: all of it.
    """

    def __init__(
        self, path: pathlib.Path, attempt: int, on_lines: Callable[[], None], limit_bytes: int | None = None
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._descriptor = self._open(path)
        self._size = os.fstat(self._descriptor).st_size
        self._attempt = attempt
        self._on_lines = on_lines
        self._sequence = 0
        self._unwritten = bytearray()
        self._lost = 0

    @property
    def has_unwritten(self) -> bool:
        """Whether a full disk keeps something out; `retry` tries again."""
        return bool(self._unwritten) or self._lost > 0

    def begin_attempt(self, attempt: int) -> None:
        """What comes from here on belongs to another attempt."""
        self._attempt = attempt

    def lines(self, rank: int | None, stream: Stream, lines: list[bytes]) -> None:
        """Append whole lines, none longer than `MAX_LINE_BYTES`."""
        if lines:
            self._append(
                contract.frame_lines(self._sequence, _now_ms(), self._attempt, rank, stream, lines), len(lines)
            )

    def continued(self, rank: int, stream: Stream, part: bytes) -> None:
        """Append a part of a line whose rest follows."""
        self._append(contract.frame_continued(self._sequence, _now_ms(), self._attempt, rank, stream, part), 1)

    def say(self, text: str) -> None:
        """Append lines of the agent's own."""
        self.lines(None, Stream.AGENT, [line.encode() for line in text.splitlines()])

    def retry(self) -> bool:
        """Try again to write what a full disk kept out.

        Returns:
            Whether something is still unwritten.
        """
        if self._unwritten:
            self._write()
        if self._lost and not self._unwritten:
            lost, self._lost = self._lost, 0
            self.say(f"{lost} lines of output were lost because the disk was full")
        return bool(self._unwritten)

    def close(self) -> None:
        """Write what is left if that can be, and close the file."""
        self.retry()
        os.close(self._descriptor)

    def _append(self, frames: bytes, count: int) -> None:
        if len(self._unwritten) + len(frames) > _MAX_UNWRITTEN_BYTES:
            self._lost += count
            self._on_lines()
            return
        self._sequence += count
        if not self._unwritten:
            frames = frames[self._try_write(frames) :]
            self._unwritten += frames
        else:
            self._unwritten += frames
            self._write()
        if self._limit_bytes is not None and self._size >= self._limit_bytes // 2 and not self._unwritten:
            self._begin_anew(self._limit_bytes)
        self._on_lines()

    @staticmethod
    def _open(path: pathlib.Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _begin_anew(self, limit_bytes: int) -> None:
        """Put the full file aside and begin another; what was put aside before is gone."""
        aside, fresh = older(self._path), self._path.with_suffix(".new")
        drops = aside.exists()
        try:
            descriptor = self._open(fresh)
            self._path.replace(aside)
            fresh.replace(self._path)
        except OSError:
            # Better a log that is too long than one that ends; the next line is another chance.
            return
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, 0
        if drops:
            self.say(f"only the last {limit_bytes:,} bytes of this log are kept: older lines that nobody read are lost")

    def _write(self) -> None:
        del self._unwritten[: self._try_write(bytes(self._unwritten))]

    def _try_write(self, data: bytes) -> int:
        """Write as much as the disk takes; its size in bytes."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, memoryview(data)[done:])
        except OSError:
            pass
        self._size += done
        return done


class LineCutter:
    """Cuts one stream of one rank into lines and hands them to the log.

    Args:
        log: Where lines go.
        rank: The rank.
        stream: Its stdout or stderr.
    """

    def __init__(self, log: LogWriter, rank: int, stream: Stream) -> None:
        self._log = log
        self._rank = rank
        self._stream = stream
        self._pending = b""
        self._bar: bytes | None = None
        self._bar_kept_at = -1.0
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> list[str]:
        """The last lines, for the sentence that reports a rank's death."""
        return [line[:TAIL_LINE_BYTES].decode("utf-8", "backslashreplace") for line in self._tail]

    def feed(self, data: bytes) -> None:
        """Take bytes as they were read from the pipe."""
        data = self._pending + data
        if b"\r" in data:
            lines, self._pending = self._cut_bars(data)
        else:
            *lines, self._pending = data.split(b"\n")
            # What follows a bar's line shows that it was the last one of its bar.
            if lines and self._bar is not None:
                lines.insert(0, self._bar)
                self._bar = None
        self._tail.extend(lines[-TAIL_LINES:])
        if len(data) > MAX_LINE_BYTES:
            self._put_long(lines)
        else:
            self._log.lines(self._rank, self._stream, lines)

    def show_bar(self) -> bool:
        """Put the held-back state of a progress bar into the log if its time has come.

        Returns:
            Whether one is still held back.
        """
        if self._bar is not None and time.monotonic() - self._bar_kept_at >= BAR_INTERVAL_S:
            self._keep_bar()
        return self._bar is not None

    def finish(self) -> None:
        """The stream has ended: a last line without an end counts."""
        if self._bar is not None:
            self._keep_bar()
        rest, self._pending = self._pending.removesuffix(b"\r"), b""
        if rest:
            self._tail.append(rest)
            self._log.lines(self._rank, self._stream, [rest])

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
                if line:
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

    def _keep_bar(self) -> None:
        bar, self._bar, self._bar_kept_at = self._bar, None, time.monotonic()
        if bar is not None:
            self._put_long([bar])

    def _put_long(self, lines: list[bytes]) -> None:
        """Put lines of any length, and begin to put a pending one that is too long already."""
        for whole in lines:
            line = whole
            while len(line) > MAX_LINE_BYTES:
                self._log.continued(self._rank, self._stream, line[:MAX_LINE_BYTES])
                line = line[MAX_LINE_BYTES:]
            self._log.lines(self._rank, self._stream, [line])
        while len(self._pending) > MAX_LINE_BYTES:
            self._log.continued(self._rank, self._stream, self._pending[:MAX_LINE_BYTES])
            self._pending = self._pending[MAX_LINE_BYTES:]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
