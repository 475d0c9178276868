"""Reads the log and the events of a job's folder while an agent appends to them.

A bounded log (`output.LogWriter`) lies in two files: `log`, and before it `log.old`. When `log` is full it takes the
place of `log.old`, whose lines are gone then. A reader that still has a replaced file open reads it to its end.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

BLOCK_BYTES = 1 << 20


def older(log: pathlib.Path) -> pathlib.Path:
    """The file with the lines before those in `log`; it exists once the log has reached half of its bound."""
    return log.with_suffix(".old")


class LineFile:
    """One file of lines, read in order and only in whole lines.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.offset = 0
        """Where the next line starts, in bytes."""

    @property
    def identity(self) -> tuple[int, int]:
        """Tells this file from one that has taken its name."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino

    @property
    def size(self) -> int:
        """Bytes that are there now."""
        return os.fstat(self._descriptor).st_size

    def read(self, limit: int = BLOCK_BYTES) -> bytes:
        """The next whole lines, about `limit` bytes of them but at least one line; empty if there is none now."""
        while True:
            data = os.pread(self._descriptor, limit, self.offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < limit:
                self.offset += end
                return data if end == len(data) else data[:end]
            limit *= 2

    def seek_line(self, sequence: int) -> None:
        """Go to the first line of a log whose number is at least `sequence`, or behind the last whole line."""
        _, end = self._last_line()
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            start = self._line_start(middle, end)
            if start >= end or self._number_at(start) >= sequence:
                high = middle
            else:
                low = start + 1
        self.offset = self._line_start(low, end)

    def last_number(self) -> int | None:
        """Number of the last whole line of a log; None if there is none."""
        start, end = self._last_line()
        return self._number_at(start) if start < end else None

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _last_line(self) -> tuple[int, int]:
        """Where the last whole line starts and ends; the same offset twice if there is none."""
        size, span = self.size, 4096
        while True:
            begin = max(0, size - span)
            data = os.pread(self._descriptor, size - begin, begin)
            end = data.rfind(b"\n") + 1
            start = data.rfind(b"\n", 0, max(0, end - 1)) + 1
            if begin == 0 or (end and start):
                return begin + start, begin + end
            span *= 4

    def _line_start(self, offset: int, limit: int) -> int:
        """Where the first line starts that does so at `offset` or later; at least `limit` if none does before it."""
        if offset == 0:
            return 0
        position = offset - 1
        while position < limit:
            data = os.pread(self._descriptor, 4096, position)
            if not data:
                break
            found = data.find(b"\n")
            if found >= 0:
                return position + found + 1
            position += len(data)
        return limit

    def _number_at(self, start: int) -> int:
        return int(os.pread(self._descriptor, 32, start).partition(b" ")[0], 16)


def read_from(log: pathlib.Path, sequence: int, limit: int) -> bytes:
    """Whole lines of a job's log from a number on.

    Args:
        log: The log.
        sequence: Number of the first line that is wanted; lines that are gone are passed over.
        limit: About how many bytes at most.

    Returns:
        Framed lines; empty if there are none.
    """
    # The newer file first: one that takes the older's place in between is then read twice rather than missed.
    collected: list[bytes] = []
    files = []
    for path in (log, older(log)):
        with contextlib.suppress(FileNotFoundError):
            files.append(LineFile(path))
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        if len(files) > 1 and files[0].identity == files[1].identity:
            files.pop()
        for file in reversed(files):
            file.seek_line(sequence)
            while limit > 0 and (data := file.read(min(limit, BLOCK_BYTES))):
                collected.append(data)
                limit -= len(data)
    return b"".join(collected)


def next_line(log: pathlib.Path) -> int:
    """The number that the next line of a job's log will have."""
    for path in (log, older(log)):
        with contextlib.suppress(FileNotFoundError), contextlib.closing(LineFile(path)) as file:
            last = file.last_number()
            if last is not None:
                return last + 1
    return 0
