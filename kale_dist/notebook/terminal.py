"""Whole lines from several threads above one progress bar, on a terminal; the same as plain lines in a pipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"


class Terminal:
    """Writes lines whole, and keeps a progress bar below them.

    A reader that goes away (`| head`) ends the output, not the program. Safe to use from threads.

    Args:
        stream: Where to write.
        step_percent: In a pipe a bar is written anew each time it has grown by so much.
    """

    def __init__(self, stream: TextIO, *, step_percent: int = 10) -> None:
        self._stream = stream
        self._step_percent = step_percent
        self.is_tty = stream.isatty() and os.environ.get("TERM", "") != "dumb"
        self._lock = threading.Lock()
        self._bar = ""
        self._written_percent: dict[str, int] = {}
        self._open = True

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        with self._lock:
            self._write(f"{_ERASE_LINE if self._bar else ''}{text}\n{self._cut(self._bar)}")

    def progress(self, key: str, percent: int | None, bar: str) -> None:
        """Draw the bar, in the place of the last one.

        Args:
            key: What the progress is of; in a pipe each one is written for itself.
            percent: How far it is; None if that is not known (a pipe then shows nothing).
            bar: The whole line: bar, figures, name.
        """
        with self._lock:
            if self.is_tty:
                if bar != self._bar:
                    self._bar = bar
                    self._write(_ERASE_LINE + self._cut(bar))
            elif percent is not None and percent // self._step_percent > self._written_percent.get(key, -1):
                self._written_percent[key] = percent // self._step_percent
                self._write(f"{bar}\n")

    def clear(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._bar:
                self._bar = ""
                self._write(_ERASE_LINE)

    def _cut(self, text: str) -> str:
        # A bar that wraps could not be erased; the last column stays free, for some terminals wrap when it is filled.
        return text[: max(1, shutil.get_terminal_size().columns - 1)]

    def _write(self, text: str) -> None:
        if not self._open:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            with contextlib.suppress(BrokenPipeError):
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
                self._stream.flush()
        except BrokenPipeError:
            self._open = False
