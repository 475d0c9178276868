"""Reads a local job's files piece by piece, from any process: its status and its log."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kale_dist import contract, records
from kale_dist.contract import FailureCause, LogLine, RankStateName, StateName
from kale_dist.errors import JobNotFoundError
from kale_dist.records import Record
from kale_dist.status import JobStatus, ReplicaStatus, reduce_events

_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 18
"""What is read first for the end of a log."""


class LineReader:
    """Reads whole lines of a growing file, each once.

    Args:
        path: The file; it may not be there yet.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset = 0
        self._size = -1

    def skip_to_last(self, size: int) -> bool:
        """Go on from the first whole line of the file's last `size` bytes.

        Returns:
            Whether that is the file's first line.
        """
        self._offset = 0
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end > size:
                file.seek(end - size)
                # Where no line begins there, all are read: half a line would be worse.
                if file.readline().endswith(b"\n"):
                    self._offset = file.tell()
        return self._offset == 0

    def blocks(self) -> Iterator[bytes]:
        """Whole lines that came since the last call, in blocks of about 1 MiB."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            pending = b""
            while data := file.read(_READ_BYTES):
                whole, newline, pending = (pending + data).rpartition(b"\n")
                if newline:
                    self._offset += len(whole) + 1
                    yield whole

    @property
    def has_more(self) -> bool:
        """Whether the file has grown since the last time that this was asked."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return False
        changed, self._size = size != self._size, size
        return changed


class LogReader:
    """Reads a job's log, each line once.

    Args:
        path: The log.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._lines = LineReader(path)

    def read(self) -> Iterator[LogLine]:
        """The lines that came since the last call. What is not a frame (a disk was full) is passed over."""
        for block in self._lines.blocks():
            for framed in block.split(b"\n"):
                with contextlib.suppress(ValueError):
                    yield contract.parse_line(framed)

    def tail(self, count: int, wanted: Callable[[LogLine], bool] = lambda _: True) -> Sequence[LogLine]:
        """The last lines of those there are, read from the end: a long log costs no more than a short one.

        Args:
            count: How many lines at most.
            wanted: Which lines count.
        """
        size = _TAIL_BYTES
        while True:
            all_read = self._lines.skip_to_last(size)
            found = collections.deque(filter(wanted, self.read()), maxlen=count)
            if all_read or len(found) == count:
                return tuple(found)
            size *= 8


def lines(
    log: LogReader,
    wanted: Callable[[LogLine], bool],
    tail: int | None,
    is_final: Callable[[], bool],
    wait: Callable[[], None] | None,
) -> Iterator[LogLine]:
    """Lines of a log, of those there are only the last `tail`.

    Args:
        log: At its first line.
        wanted: Which lines.
        tail: How many of those there are; None for all.
        is_final: Whether no more will come.
        wait: Waits for more; None: those there are will do.
    """
    if tail is not None:
        yield from log.tail(tail, wanted)
    while wait is not None or tail is None:
        # Asked before reading: what a job has written before it ended is then read for certain.
        final = wait is None or is_final()
        yield from filter(wanted, log.read())
        if final or wait is None:
            return
        wait()


class JobReader:
    """The status of one job, kept up to date with as little reading as can be. Safe to use from threads.

    Args:
        name: The name of its record.
        lives: Tells from the record whether whoever writes the job's files still does.

    Raises:
        JobNotFoundError: There is no such job.
    """

    def __init__(self, name: str, lives: Callable[[Record], bool]) -> None:
        self._name = name
        self._lives = lives
        self._files = records.files(name)
        self._lock = threading.Lock()
        self._record = records.read(name)
        self._identity = self._identify_job()
        self._record_identity = _identify(self._files.record)
        self._events = LineReader(self._files.events)
        self._progress_identity: tuple[int, int] | None = None
        spec = self._record.spec
        self._status = JobStatus(
            ref=self._record.ref,
            created=self._record.created,
            replicas=tuple(ReplicaStatus(rank=rank) for rank in range(spec.topology.number_of_processes)),
        )

    @property
    def exists(self) -> bool:
        """Whether this very job is still there; false after its deletion, even if its name was taken again."""
        return self._files.folder.exists() and self._identify_job() == self._identity

    def record(self) -> Record:
        """The job's record as it is now: a replaced agent changes it.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        identity = _identify(self._files.record)
        if identity != self._record_identity:
            self._record = records.read(self._name)
            self._record_identity = identity
        return self._record

    def open_log(self) -> LogReader:
        """A reader of the log, from its first line."""
        return LogReader(self._files.log)

    def status(self) -> JobStatus:
        """What is known now.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        with self._lock:
            if not self.exists:
                raise JobNotFoundError(f"{self._record.ref} was deleted")
            # Asked first: an agent that has ended since has written all that it had to say by then.
            agent_lives = self._status.is_final or self._lives(self.record())
            self._read_events()
            self._read_progress()
            return self._status if agent_lives or self._status.is_final else self._died()

    def _read_events(self) -> None:
        if self._events.has_more:
            for block in self._events.blocks():
                self._status = reduce_events(self._status, contract.decode_records(block))

    def _read_progress(self) -> None:
        identity = _identify(self._files.progress)
        if identity is None or identity == self._progress_identity:
            return
        self._progress_identity = identity
        # A damaged file tells nothing; the next one replaces it.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            last: dict[str, dict[str, Any]] = json.loads(self._files.progress.read_bytes())
            self._status = reduce_events(self._status, last.values())

    def _died(self) -> JobStatus:
        ended = None
        with contextlib.suppress(OSError):
            ended = max(path.stat().st_mtime for path in (self._files.record, self._files.events) if path.exists())
        running = (RankStateName.PENDING, RankStateName.STARTING, RankStateName.RUNNING)
        return dataclasses.replace(
            self._status,
            state=StateName.FAILED,
            cause=FailureCause.AGENT_DIED,
            reason="The agent that ran the job was killed, and its ranks with it",
            ended=ended,
            replicas=tuple(
                dataclasses.replace(replica, state=RankStateName.STOPPED) if replica.state in running else replica
                for replica in self._status.replicas
            ),
        )

    def _identify_job(self) -> tuple[tuple[int, int] | None, int]:
        """Tells this job from a later one of the same name: its key is written once, and the folder's inode recurs."""
        with contextlib.suppress(OSError):
            return _identify(self._files.key), self._files.folder.stat().st_ino
        return None, 0


def _identify(path: pathlib.Path) -> tuple[int, int] | None:
    """Tells one file of a name from another that replaced it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns)
