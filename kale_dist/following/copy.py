"""The copy of one run here: the head's blocks are appended to the same files, each once, in their order.

Where the next line and the next event belong is read from the files themselves: a follower that was killed leaves at most
a torn block, which is cut off. Lines that will never come are replaced by one line that says how many are missing and why.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from kale_dist import contract
from kale_dist.blobs import fresh
from kale_dist.contract import (
    INDEX_AGENT,
    Block,
    BlockReader,
    EventBlock,
    EventKind,
    Foreign,
    JobFiles,
    OutcomePart,
    ProgressBlock,
    Record,
    StateName,
    Stream,
)
from kale_dist.errors import StoreError
from kale_dist.following.reader import INDEX_ENTRY, read_index

PROGRESS_S = 0.2
"""Readers look at progress five times a second at most."""

_UNNUMBERED = (1 << 64) - 1
_PIECE_BYTES = 1 << 20
_FOREIGN = b"#pod 0: "
_FINAL = (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)


class GapError(Exception):
    """Lines or events are missing before the next block, and may yet be had in another way."""


class RunCopy:
    """The copy of one run. Only the process that holds the folder's lock may have one; for one thread at a time.

    Args:
        files: The run's files; their folder has to be there.
        world_size: Ranks of the job.
        on_change: Called when readers would find something new.

    Raises:
        StoreError: The files cannot be read or written.
    """

    def __init__(self, files: JobFiles, world_size: int, on_change: Callable[[], None]) -> None:
        self.verdict: dict[str, Any] | None = None
        """The head's final state event. Readers do not see it, or what follows it, before `release`."""
        self.last_attempt = 0
        """The head's newest attempt that was seen."""
        self.has_started = False
        """Whether ranks have started."""
        self._files = files
        self.world_size = world_size
        """Ranks of the job."""
        self._on_change = on_change
        self._held: list[bytes] = []
        self._progress: dict[str, Any] = {}
        self._progress_written = 0.0
        self._parts: dict[tuple[int, int], list[bytes]] = {}
        self._foreign_seen = self._foreign_copied = 0
        self._log_lines: list[bytes] = []
        self._index: list[bytes] = []
        with _writable(files):
            self._log = files.log.open("ab", buffering=0)
            self._events = files.events.open("ab", buffering=0)
            self._index_file = files.log_index.open("ab", buffering=0)
            self.next_line = self._recover_log()
            self.next_event = self._recover_events()

    @property
    def is_complete(self) -> bool:
        """Whether all that the head had to say is here."""
        return self.verdict is not None and self.next_line >= (self.verdict.get("next_line") or 0)

    def begin_stdout(self) -> None:
        """The head's stdout is about to be read from its beginning: what was copied before is left out."""
        self._foreign_seen = 0
        self._parts.clear()

    def take(self, blocks: Iterable[Block], *, missing: str = "") -> None:
        """Append what is new, and write it to the disk.

        Args:
            blocks: From a connection or from the head's stdout.
            missing: Why lines are missing that were skipped, as a clause after "because"; empty if they may still be had.

        Raises:
            GapError: Something was skipped, and `missing` is empty. What came before is kept.
            StoreError: The disk is full, or the job was deleted.
        """
        try:
            for block in blocks:
                if isinstance(block, Record):
                    self._take_record(block, missing)
                elif isinstance(block, EventBlock):
                    self._take_event(block, missing)
                elif isinstance(block, ProgressBlock):
                    name = contract.last_name(block.event)
                    if name is not None:
                        self._progress[name] = block.event
                elif isinstance(block, OutcomePart):
                    self._take_part(block)
                else:
                    self._take_foreign(block)
        finally:
            self.flush()

    def say(self, text: str) -> None:
        """Append a line of our own, which has no number."""
        self._append_own(f"#{text}".encode())
        self.flush()

    def flush(self) -> None:
        """Write what was taken.

        Raises:
            StoreError: The disk is full, or the job was deleted.
        """
        is_due = bool(self._progress) and time.monotonic() - self._progress_written >= PROGRESS_S
        if not self._log_lines and not is_due:
            return
        with _writable(self._files):
            if self._log_lines:
                # The index last: its entries never point behind the log's end.
                _write_all(self._log, b"".join(self._log_lines))
                _write_all(self._index_file, b"".join(self._index))
                self._log_lines, self._index = [], []
            if is_due:
                self._write_progress()
        self._on_change()

    def release(self, events: Iterable[dict[str, Any]] | None = None) -> None:
        """Let readers see how the run ended. Nothing is copied after it.

        Args:
            events: In the place of the head's verdict and what followed it; None for those.
        """
        held = self._held if events is None else [contract.encode_json(event) for event in events]
        self._held = []
        self.flush()
        with _writable(self._files):
            if self._progress:
                self._write_progress()
            _write_all(self._events, b"".join(held))
        self._on_change()

    def close(self) -> None:
        """Close the files."""
        for file in (self._log, self._events, self._index_file):
            file.close()

    # -- lines --------------------------------------------------------------------------------------------------------

    def _take_record(self, record: Record, missing: str) -> None:
        if record.first is None:
            return
        following = record.first + record.count
        if following <= self.next_line:
            return
        if record.first > self.next_line:
            self.skip_lines(record.first, missing)
        self._append(record.since(self.next_line), record.rank)
        self.next_line = following
        self.last_attempt = max(self.last_attempt, record.attempt)

    def skip_lines(self, following: int, missing: str) -> None:
        """Say that the lines before a number are missing; nothing if they are not.

        Args:
            following: The number of the next line that there is.
            missing: As in `take`.
        """
        count = following - self.next_line
        if count <= 0:
            return
        if not missing:
            raise GapError
        lines = "1 line is" if count == 1 else f"{count:,} lines are"
        numbers = f"{self.next_line:,}" if count == 1 else f"{self.next_line:,} to {following - 1:,}"
        self._append_own(f"#{lines} missing here (number {numbers}), because {missing}".encode())
        self.next_line = following

    def _take_foreign(self, block: Foreign) -> None:
        self._foreign_seen += 1
        if self._foreign_seen <= self._foreign_copied or not block.text.strip():
            return
        self._foreign_copied = self._foreign_seen
        text = contract.clean(block.text)[: contract.MAX_LINE_BYTES]
        self._append_own(_FOREIGN + text)

    def _append_own(self, line: bytes) -> None:
        ms = int(time.time() * 1000)
        body = contract.body_of(Stream.AGENT, [line.removeprefix(b"#")])
        self._append(Record(first=None, count=1, ms=ms, attempt=self.last_attempt, rank=None, body=body), None)

    def _append(self, record: Record, rank: int | None) -> None:
        data = record.encode()
        first = _UNNUMBERED if record.first is None else record.first
        self._index.append(INDEX_ENTRY.pack(first, self._size, record.count, INDEX_AGENT if rank is None else rank))
        self._log_lines.append(data)
        self._size += len(data)

    def _recover_log(self) -> int:
        """Cut off what is torn, complete the index; gives the number of the next line."""
        index = read_index(self._files)
        start = index[-1][1] if index else 0
        self._index_file.truncate(INDEX_ENTRY.size * max(0, len(index) - 1))
        following = max((first + count for first, _, count, _ in index if first != _UNNUMBERED), default=0)
        self._size = start
        blocks = BlockReader()
        with self._files.log.open("rb") as file:
            self._foreign_copied = self._count_foreign(
                file, [entry[1] for entry in index[:-1] if entry[0] == _UNNUMBERED]
            )
            file.seek(start)
            while piece := file.read(_PIECE_BYTES):
                for block in blocks.feed(piece):
                    if isinstance(block, Record):
                        self._append(block, block.rank)
                        self._foreign_copied += block.first is None and block.body.startswith(_FOREIGN)
                        following = max(following, block.next or 0)
        self._size = start + blocks.whole_bytes
        self._log.truncate(self._size)
        _write_all(self._index_file, b"".join(self._index))
        self._log_lines, self._index = [], []
        return following

    @staticmethod
    def _count_foreign(file: io.BufferedReader, offsets: Iterable[int]) -> int:
        count = 0
        for offset in offsets:
            file.seek(offset)
            file.readline()
            count += file.read(len(_FOREIGN)) == _FOREIGN
        return count

    # -- events, progress, outcomes -----------------------------------------------------------------------------------

    def _take_event(self, block: EventBlock, missing: str) -> None:
        if block.number < self.next_event:
            return
        if block.number > self.next_event:
            if not missing:
                raise GapError
            count = block.number - self.next_event
            events = "1 event is" if count == 1 else f"{count:,} events are"
            self._append_own(f"#{events} missing here (metrics or states of ranks), because {missing}".encode())
        event = block.event
        # Lines before an event are on the disk before it: who sees a rank's end can read its last line.
        self.flush()
        # Numbers are those of lines in the file; empty lines stand for events that are missing.
        data = b"\n" * (block.number - self.next_event) + contract.encode_json(event)
        self.next_event = block.number + 1
        self._note(event)
        if self.verdict is None and event.get("event") == EventKind.STATE and event.get("state") in _FINAL:
            self.verdict = event
        if self.verdict is not None:
            self._held.append(data)
            return
        with _writable(self._files):
            _write_all(self._events, data)
        self._on_change()

    def _note(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(TypeError, ValueError):
            self.last_attempt = max(self.last_attempt, int(event.get("attempt") or 0))
        if event.get("event") in (EventKind.STATE, EventKind.RANK) and event.get("state") == StateName.RUNNING:
            self.has_started = True

    def _write_progress(self) -> None:
        self._progress_written = time.monotonic()
        with fresh(self._files.progress) as file:
            file.write_text(json.dumps(self._progress))

    def _recover_events(self) -> int:
        data = self._files.events.read_bytes()
        whole = data.rfind(b"\n") + 1
        self._events.truncate(whole)
        for event in contract.decode_json_lines(data[:whole]):
            self._note(event)
        with contextlib.suppress(OSError, ValueError):
            self._progress = dict(json.loads(self._files.progress.read_bytes()))
        return data.count(b"\n")

    def _take_part(self, part: OutcomePart) -> None:
        """Outcomes are signed themselves: one that is not this job's is refused when it is read."""
        target = self._files.outcome(part.attempt, part.rank)
        parts = self._parts.setdefault((part.attempt, part.rank), [])
        if part.index != len(parts) or part.rank >= self.world_size or target.exists():
            return
        parts.append(part.data)
        if len(parts) == part.count:
            with _writable(self._files), fresh(target) as file:
                file.write_bytes(b"".join(parts))
            del self._parts[part.attempt, part.rank]


def _write_all(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextlib.contextmanager
def _writable(files: JobFiles) -> Any:
    try:
        yield
    except OSError as error:
        if not files.folder.exists():
            raise StoreError(f"{files.folder} is gone: the job was deleted on this machine") from error
        raise StoreError(
            f"{files.folder} could not be written: {error.strerror or error}. Free some space; the job keeps running, and what is "
            "missing here is copied once there is room"
        ) from error
