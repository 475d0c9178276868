"""Reads a job's folder, from any process and for all backends: its status and its log."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import io
import json
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kale_dist import wire
from kale_dist.errors import JobNotFoundError, StoreError
from kale_dist.job import records
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.records import Record
from kale_dist.job.status import JobStatus, ReplicaStatus, closing_events, reduce_events
from kale_dist.wire import BlockReader, FailureCause, JobFiles, LineBlock, LogLine, StateName, Verdict
from kale_dist.wire.events import Event

_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 18
"""How much of a log's end is first searched for its last lines; then eight times more, and so on."""


class LogReader:
    """Reads a job's log, each line once. Of a log that has reached its limit, the newest part is there.

    Args:
        files: Of the job; they may not exist yet.
    """

    def __init__(self, files: JobFiles) -> None:
        self._log, self._older_log = files.log, files.older_log
        self._offset = self._next = 0
        self._begins = b""
        """How the file begins that it has read last: another one may be in its place."""

    def read(self, ranks: Iterable[int] | None = None) -> Iterator[LogLine]:
        """Yield the lines that were written since the last call. Damaged parts (after a full disk) are left out.

        Args:
            ranks: Only these ranks' lines; None for the lines of all ranks and of agents.
        """
        wanted = None if ranks is None else frozenset(ranks)
        for record in self._records():
            if wanted is None or record.rank in wanted:
                yield from record.lines()

    def end(self) -> tuple[int, int]:
        """The offset after the last whole record, and the number of the next line.

        Lines that the notebook has added have no number; the line before them counts.
        """
        for _ in self._read_backwards():
            if self._next:
                break
        return self._offset, self._next

    def tail(self, count: int, ranks: Iterable[int] | None = None) -> Sequence[LogLine]:
        """The last lines so far; `read` then continues after them.

        A long log is read from its end, and whole only for a rank that has written fewer lines.

        Args:
            count: How many lines to return at most.
            ranks: Only these ranks' lines, as for `read`.
        """
        wanted = None if ranks is None else frozenset(ranks)
        records: list[LineBlock] = []
        for found in self._read_backwards():
            records = [record for record in found if wanted is None or record.rank in wanted]
            if sum(record.count for record in records) >= count:
                break
        lines = [line for record in records for line in record.lines()]
        return tuple(lines[-count:] if count else ())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _records(self) -> Iterator[LineBlock]:
        with contextlib.suppress(FileNotFoundError), self._log.open("rb", buffering=0) as file:
            begins = file.readline(100)
            if begins != self._begins if self._begins else not self._offset:
                with contextlib.suppress(FileNotFoundError), self._older_log.open("rb", buffering=0) as older:
                    yield from self._blocks(older)
                    self._offset = 0
            self._begins = begins
            yield from self._blocks(file)

    def _blocks(self, file: io.FileIO) -> Iterator[LineBlock]:
        file.seek(self._offset)
        start, blocks = self._offset, BlockReader()
        while piece := file.read(_PIECE_BYTES):
            for block in blocks.feed(piece):
                self._offset = start + blocks.whole_bytes
                if not isinstance(block, LineBlock):
                    continue
                if block.first is not None:
                    if block.first < self._next:
                        continue
                    self._next = block.first + block.count
                yield block

    def _read_backwards(self) -> Iterator[list[LineBlock]]:
        """Yield the last records, each time more of them; leaves the reader at the end."""
        span = _TAIL_BYTES
        while True:
            self._offset, self._next = _record_before_end(self._log, span), 0
            is_all, self._begins = not self._offset, b""
            yield list(self._records())
            if is_all:
                return
            span *= 8


class EventReader:
    """Reads a file of events, each once.

    Args:
        path: The file, which may not exist yet.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._read = 0

    def read(self) -> list[Event]:
        """The events that were written since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            return [event for record in wire.decode_json_lines(whole) if (event := Event.read(record)) is not None]
        return []


class JobReader:
    """Keeps the status of one job up to date, and reads only what is new. Safe to use from threads.

    Args:
        name: The name of the job's record.
        lives: Whether the process that writes the job's files is alive, according to a record.

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
        self._events_offset = 0
        self._progress_identity: tuple[int, int] | None = None
        self._progress: dict[str, dict[str, Any]] = {}
        spec = self._record.spec
        self._status = JobStatus(
            ref=self._record.ref,
            created=self._record.created,
            replicas=tuple(ReplicaStatus(rank=rank) for rank in range(spec.topology.number_of_processes)),
        )

    @property
    def exists(self) -> bool:
        """Whether the job still exists; False after its deletion, even if its name was taken again."""
        return self._files.folder.exists() and self._identify_job() == self._identity

    def record(self) -> Record:
        """The job's current record: a new agent changes it.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        identity = _identify(self._files.record)
        if identity != self._record_identity:
            self._record = records.read(self._name)
            self._record_identity = identity
        return self._record

    def open_log(self) -> LogReader:
        """A reader at the first line of the job's log."""
        return LogReader(self._files)

    def status(self) -> JobStatus:
        """Read what is new, and return the job's status.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        with self._lock:
            if not self.exists:
                raise JobNotFoundError(f"{self._record.ref} was deleted")
            # Checked before reading: an agent that had ended by then had written everything.
            agent_lives = self._status.is_final or self._lives(self.record())
            self._read_events()
            self._read_progress()
            if self._status.is_final:
                return dataclasses.replace(self._status, is_checkpoint_here=self._files.checkpoint.exists())
            return self._status if agent_lives else self._died()

    def _read_events(self) -> None:
        try:
            if self._files.events.stat().st_size <= self._events_offset:
                return
        except OSError:
            return
        with self._files.events.open("rb") as file:
            file.seek(self._events_offset)
            pending = b""
            while piece := file.read(_PIECE_BYTES):
                whole, newline, pending = (pending + piece).rpartition(b"\n")
                if newline:
                    self._events_offset += len(whole) + 1
                    self._status = reduce_events(self._status, wire.decode_json_lines(whole))

    def _read_progress(self) -> None:
        identity = _identify(self._files.progress)
        if identity is None or identity == self._progress_identity:
            return
        self._progress_identity = identity
        # A damaged file is ignored, because the next one replaces it.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            last: dict[str, dict[str, Any]] = json.loads(self._files.progress.read_bytes())
            before, self._progress = self._progress, last
            self._status = reduce_events(self._status, [one for name, one in last.items() if before.get(name) != one])

    def _died(self) -> JobStatus:
        """The status of a job whose agent was killed: the first process that sees it writes the last events, as a follower does."""
        reason = "The agent that ran the job was killed, and its ranks with it"
        verdict = Verdict(StateName.FAILED, FailureCause.AGENT_DIED, reason)
        ended = (self._files.events if self._files.events.exists() else self._files.record).stat().st_mtime
        closing = closing_events(verdict, self._status, self._status.attempt, ended)
        # Where the disk is full, or another process is at it, the next read writes them.
        with contextlib.suppress(OSError, StoreError), records.opened_lock(self._files) as lock:
            if records.try_lock(lock):
                self._read_events()
                if not self._status.is_final:
                    with self._files.events.open("ab") as file:
                        # The agent may have left a torn line.
                        file.write(b"\n" + b"".join(map(wire.encode_json, closing)))
                    self._read_events()
        return self._status if self._status.is_final else reduce_events(self._status, closing)

    def _identify_job(self) -> tuple[tuple[int, int] | None, int]:
        """Identifies this job among those of its name, by key file and folder: a folder's inode alone may be used again."""
        with contextlib.suppress(OSError):
            return _identify(self._files.key), self._files.folder.stat().st_ino
        return None, 0


def _record_before_end(log: pathlib.Path, span: int) -> int:
    """The offset of a record's beginning in the last `span` bytes of a log; 0 for the whole log."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        offset = file.seek(0, io.SEEK_END) - span
        found = wire.lines_after(file, offset) if offset > 0 else None
        return 0 if found is None else found[0]
    return 0


def _identify(path: pathlib.Path) -> tuple[int, int] | None:
    """Identifies a file among those that had its name; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns)


class FolderBackend(Backend):
    """Base of the backends: reads the jobs' folders on this machine, and notifies waiting callers of changes.

    Args:
        lives: Whether the process that writes a job's files is alive, according to its record.
    """

    def __init__(self, lives: Callable[[Record], bool]) -> None:
        self._lives = lives
        self._lock = threading.RLock()
        self._readers: dict[str, JobReader] = {}
        self._listeners: list[Callable[[JobRef], None]] = []
        self._changed = threading.Condition()
        self._changes = 0

    def listen(self, callback: Callable[[JobRef], None]) -> None:
        """Call `callback` from a thread of this backend whenever a job may have changed."""
        self._listeners.append(callback)

    def logs(
        self,
        ref: JobRef,
        *,
        follow: bool = False,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        on_status: Callable[[JobStatus], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log's lines, or only the last `tail` of those so far; with `follow`, until the job has ended."""
        job = self._reader(ref)
        if not job.status().is_final:
            self._attend(ref)

        def lines() -> Iterator[LogLine]:
            log = job.open_log()
            if tail is not None:
                yield from log.tail(tail, ranks)
            while follow or tail is None:
                # Checked before reading, so that everything is read that the job wrote before its end.
                seen, status = self._changes, job.status()
                yield from log.read(ranks)
                if not follow or status.is_final:
                    return
                if on_status is not None:
                    on_status(status)
                timeout_s = self._attend(ref)
                with self._changed:
                    self._changed.wait_for(lambda seen=seen: self._changes != seen, timeout_s)  # type: ignore[misc]

        return lines()

    @abc.abstractmethod
    def _attend(self, ref: JobRef) -> float:
        """Have changes of an unfinished job reported; returns the seconds after which to read without a report."""

    def _reader(self, ref: JobRef) -> JobReader:
        """The reader of a job's folder, made on first use.

        Raises:
            JobNotFoundError: There is no such job.
        """
        if ref.backend != self.name:
            raise JobNotFoundError(f"{ref} is not a job of the {self.name} backend")
        with self._lock:
            found = self._readers.get(ref.record_name)
            if found is None or not found.exists:
                self._readers.pop(ref.record_name, None)
                found = self._readers[ref.record_name] = JobReader(ref.record_name, self._lives)
            return found

    def _wake_readers(self) -> None:
        """Wake the callers that wait for lines: a log has grown."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _notify(self, ref: JobRef) -> None:
        """Wake the callers that wait for lines, and call the listeners: a job may have changed."""
        self._wake_readers()
        for callback in tuple(self._listeners):
            callback(ref)
