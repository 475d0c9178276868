"""Copies a pod's job folder to its stdout as frames (`transport`), in a thread of its own.

The agent never waits for whoever reads its stdout: the thread does, and what it has not copied yet stays in the
files. Of a block of changes the lines go first, then outcomes, then the events that were there before the lines were
looked at: who reads an event has read the lines and outcomes that came before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import threading
import time
from typing import Any

from kale_dist import transport
from kale_dist.contract import JobFiles
from kale_dist.runtime.log_segments import BLOCK_BYTES, LineFile, older

PROGRESS_INTERVAL_S = 0.5
"""Progress is copied at most this often; only each rank's last one counts."""

_OUTCOME = re.compile(r"outcome-(\d{1,6})-(\d{1,6})", re.ASCII)
# Lines are written at once but read in blocks: a pause this short lets many changes become one.
_PAUSE_S = 0.02


class LogCopier:
    """Copies until the process ends or the descriptor breaks.

    Args:
        files: The pod's job folder, which has to be there; its files may appear later.
        key: The job's secret.
        pod: The pod's number.
        descriptor: Where frames go; written to by nobody else.
    """

    def __init__(self, files: JobFiles, key: bytes, pod: int, descriptor: int = 1) -> None:
        self._files = files
        self._key = key
        self._pod = pod
        self._descriptor = descriptor
        self._log: LineFile | None = None
        self._next_line = 0
        self._events: LineFile | None = None
        self._next_event = 0
        self._outcomes: set[str] = set()
        self._progress: dict[str, Any] = {}
        self._progress_at = -PROGRESS_INTERVAL_S
        self._progress_is_due = False
        self._changed = threading.Condition()
        self._wanted = 0
        self._copied = 0
        self._flushing = False
        self._stopped = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="log-copier", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that files have changed. Quick, from any thread."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def drain(self, limit_s: float) -> bool:
        """Wait until everything that is in the files now is written, with a heartbeat behind it.

        Args:
            limit_s: Seconds to wait at most.

        Returns:
            Whether it is written; False if the reader is too slow or gone.
        """
        with self._changed:
            self._wanted += 1
            self._flushing = True
            aim = self._wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._copied >= aim or self._is_over, limit_s) and not self._is_over

    def close(self) -> None:
        """Stop after what is being written now; does not wait for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        heartbeat_at = time.monotonic()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._is_wanted, self._wait_s(heartbeat_at))
                    if self._stopped:
                        return
                    aim, flushing, self._flushing = self._wanted, self._flushing, False
                self._copy(flushing=flushing)
                if flushing or time.monotonic() >= heartbeat_at + transport.HEARTBEAT_S:
                    self._write(transport.heartbeat_frame(self._next_line, self._next_event))
                    heartbeat_at = time.monotonic()
                with self._changed:
                    self._copied = aim
                    self._changed.notify_all()
                    if not self._stopped and not self._flushing:
                        self._changed.wait_for(lambda: self._stopped or self._flushing, _PAUSE_S)
        except OSError:
            # Nobody reads any more. The job goes on, and its files are still served.
            pass
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for file in (self._log, self._events):
                if file is not None:
                    file.close()

    def _is_wanted(self) -> bool:
        return self._stopped or self._flushing or self._wanted > self._copied

    def _wait_s(self, heartbeat_at: float) -> float:
        """Seconds until something is due although nothing changes."""
        due = heartbeat_at + transport.HEARTBEAT_S
        if self._progress_is_due:
            due = min(due, self._progress_at + PROGRESS_INTERVAL_S)
        return max(0.0, due - time.monotonic())

    def _copy(self, *, flushing: bool) -> None:
        if self._events is None:
            self._events = _open(self._files.events)
        end = 0 if self._events is None else self._events.size
        self._copy_lines()
        self._copy_outcomes()
        if self._events is not None:
            self._copy_events(self._events, end)
        self._copy_progress(flushing=flushing)

    def _copy_lines(self) -> None:
        """Copy what the log holds now, through as many of its files as there are."""
        if self._log is None:
            self._log = _open(self._files.log)
        while self._log is not None:
            # A rank that prints without end must not hold back the events.
            self._copy_file(self._log, self._log.size)
            following = self._following(self._log)
            if following is None:
                return
            self._copy_file(self._log, self._log.size)
            self._log.close()
            self._log = following

    def _copy_file(self, file: LineFile, end: int) -> None:
        while file.offset < end and (data := file.read(min(end - file.offset, BLOCK_BYTES))):
            self._write(transport.line_frames(data))
            last = data[data.rfind(b"\n", 0, -1) + 1 :]
            self._next_line = int(last.partition(b" ")[0], 16) + 1

    def _following(self, file: LineFile) -> LineFile | None:
        """The file of the log after this one; None while this one is still written to."""
        newest = _open(self._files.log)
        if newest is None or newest.identity == file.identity:
            if newest is not None:
                newest.close()
            return None
        before = _open(older(self._files.log))
        if before is None or before.identity == file.identity:
            if before is not None:
                before.close()
            return newest
        newest.close()
        return before

    def _copy_outcomes(self) -> None:
        for path in self._files.folder.iterdir():
            named = _OUTCOME.fullmatch(path.name)
            if named is None or path.name in self._outcomes:
                continue
            self._outcomes.add(path.name)
            if path.stat().st_size <= transport.SMALL_OUTCOME_BYTES:
                for frame in transport.outcome_frames(int(named[1]), int(named[2]), path.read_bytes()):
                    self._write(frame)

    def _copy_events(self, events: LineFile, end: int) -> None:
        while events.offset < end and (data := events.read(min(end - events.offset, BLOCK_BYTES))):
            frames = []
            for line in data.split(b"\n")[:-1]:
                frames.append(transport.event_frame(self._key, self._pod, self._next_event, line))
                self._next_event += 1
            self._write(b"".join(frames))

    def _copy_progress(self, *, flushing: bool) -> None:
        now = time.monotonic()
        if not flushing and now < self._progress_at + PROGRESS_INTERVAL_S:
            self._progress_is_due = True
            return
        self._progress_is_due = False
        try:
            progress = json.loads(self._files.progress.read_bytes())
        except FileNotFoundError:
            return
        frames = [
            transport.event_frame(self._key, self._pod, None, event)
            for rank, event in progress.items()
            if event != self._progress.get(rank)
        ]
        if frames:
            self._progress, self._progress_at = progress, now
            self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def _open(path: pathlib.Path) -> LineFile | None:
    """The file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        return LineFile(path)
    return None
