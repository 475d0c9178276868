"""Writes what becomes of a job into its folder: log, events, progress. Never stops because a disk is full."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from kale_dist import contract
from kale_dist.contract import EventKind, JobFiles
from kale_dist.runtime.loop import Loop, Timer
from kale_dist.runtime.output import LogWriter

PROGRESS_INTERVAL_S = 0.25
RETRY_S = 1.0


class JobWriter:
    """The files of a job, as far as its agent writes them.

    Args:
        files: Names of the files; the folder has to be there.
        attempt: The attempt that they begin with.
        loop: The agent's loop.
        on_change: Called after anything was written.
        log_limit_bytes: How much of the log is kept; None: all of it.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        files: JobFiles,
        attempt: int,
        loop: Loop,
        on_change: Callable[[], None],
        log_limit_bytes: int | None = None,
    ) -> None:
        self._files = files
        self._attempt = attempt
        self._loop = loop
        self._on_change = on_change
        self._progress: dict[str, Any] = {}
        self._progress_due: Timer | None = None
        self._unwritten = bytearray()
        self._retry: Timer | None = None
        self.log = LogWriter(files.log, attempt, self._log_changed, log_limit_bytes)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._events = os.open(files.events, flags, 0o600)

    def begin_attempt(self, attempt: int) -> None:
        """What comes from here on belongs to another attempt."""
        self.flush_progress()
        self._attempt = attempt
        self._progress = {}
        self.log.begin_attempt(attempt)

    def event(self, kind: EventKind, rank: int | None = None, **fields: Any) -> None:
        """Record an event of the agent's own."""
        self.record({"event": str(kind), "time": time.time(), "rank": rank, "attempt": self._attempt, **fields})

    def record(self, event: dict[str, Any]) -> None:
        """Record an event as it is; progress and usage go into a file where only each rank's last one is kept."""
        name = contract.last_name(event)
        if name is not None:
            self._progress[name] = event
            if self._progress_due is None:
                self._progress_due = self._loop.call_later(PROGRESS_INTERVAL_S, self._write_progress)
            return
        self._unwritten += contract.encode_record(event)
        self._write_events()
        self._on_change()

    def close(self) -> None:
        """Write what is left if that can be, and close."""
        if self._progress_due is not None:
            self._progress_due.cancel()
            self._write_progress()
        if self._retry is not None:
            self._retry.cancel()
        self._write_events()
        self.log.close()
        os.close(self._events)

    def flush_progress(self) -> None:
        """Write progress now, before an event that closes the account."""
        if self._progress_due is not None:
            self._progress_due.cancel()
            self._write_progress()

    def _write_progress(self) -> None:
        self._progress_due = None
        temporary = self._files.progress.with_suffix(".new")
        # A full disk costs only this; the next progress, a quarter of a second later, is another chance.
        with contextlib.suppress(OSError):
            temporary.write_bytes(contract.encode_record(self._progress))
            temporary.replace(self._files.progress)
            self._on_change()

    def _write_events(self) -> None:
        with contextlib.suppress(OSError):
            while self._unwritten:
                del self._unwritten[: os.write(self._events, self._unwritten)]
        if self._unwritten:
            self._try_later()

    def _log_changed(self) -> None:
        if self.log.has_unwritten:
            self._try_later()
        self._on_change()

    def _try_later(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if self.log.retry():
            self._try_later()
        self._write_events()
        self._on_change()
