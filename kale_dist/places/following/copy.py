"""Keeps the notebook's copy of what a head sends: `HeadCopy` appends the blocks to the same files here, each once, in order.

A thread (`HeadReader`) reads the blocks from a connection to the head. It reads the head's stdout, a bounded copy of the log, while no
connection is allowed or possible, and once at the end for lines that are missing. The end of a stream means nothing: a copy is
complete with the head's verdict, which has the number of its last line.

Each head counts from 0. Here its attempts, lines and events go on where those of the head before have ended (`records.Life`). The numbers
of the next line and the next event are read from the files: a follower that was killed leaves at most a torn block, which is cut off. In
the place of lines that are lost, one line states how many are missing and why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kale_dist import wire
from kale_dist.errors import BackendError, StoreError
from kale_dist.job.backend import NoConnectionError, Place, PlacedJob
from kale_dist.job.reader import LogReader
from kale_dist.job.records import Life
from kale_dist.places.following.head_client import HeadClient
from kale_dist.wire import Block, BlockReader, EventBlock, JobFiles, LineBlock, OutcomePart, ProgressBlock, Verdict
from kale_dist.wire.blobs import fresh
from kale_dist.wire.events import Event, JobState, Note, RankState

SILENCE_S = 45.0
"""A connection without a byte for so long is opened again: a tunnel that died while a laptop slept reports no error. The head
sends something every 15 s."""

CONNECT_S = 15.0
"""After so long without a connection to the head, its stdout is read until there is one."""

MAX_MISSING_EVENTS = 1_000_000
"""No head leaves out more: an event whose number would make it more was written by somebody else."""

PAUSE_S = 0.5
"""The time between two attempts to connect."""

_DROPPED = "the head keeps only the newest part of a long log"
_ENDED = "the head ended before they could be copied"


class GapError(Exception):
    """Lines or events are missing before the next block, and another stream may still have them."""


class HeadCopy:
    """The copy of one head's words. Only the process that holds the folder's lock may have one; for one thread at a time.

    Args:
        files: The job's files; their folder has to be there.
        life: Where the head's numbers begin in them.
        on_lines: Called when the log has grown.
        on_change: Called when the status may be another one.

    Raises:
        StoreError: The files cannot be read or written.
    """

    def __init__(
        self, files: JobFiles, life: Life, on_lines: Callable[[], None], on_change: Callable[[], None]
    ) -> None:
        self.verdict: Verdict | None = None
        """The head's verdict. Readers do not see it, or events after it, before `release`."""
        self.last_attempt = life.first_attempt
        """The job's newest attempt that was seen."""
        self.free = 0
        """How many of the head's attempts were begun only to have more ranks."""
        self.has_started = False
        """Whether the head's ranks have started."""
        self._files = files
        self._life = life
        self._on_lines = on_lines
        self._on_change = on_change
        self._held: list[bytes] = []
        self._progress: dict[str, Any] = {}
        self._has_new_progress = False
        self._parts: dict[tuple[int, int], list[bytes]] = {}
        self._log_lines: list[bytes] = []
        with _writable(files):
            self._log = files.log.open("ab", buffering=0)
            self._events = files.events.open("ab", buffering=0)
            # Cut off what is torn.
            whole, following = LogReader(files).end()
            self._log.truncate(whole)
            self.next_line = max(0, following - life.first_line)
            self.next_event = self._recover_events()
        self._missing_events = 0

    @property
    def is_complete(self) -> bool:
        """Whether the head's verdict and all its lines are here."""
        return self.verdict is not None and self.next_line >= self.verdict.next_line

    def take(self, blocks: Iterable[Block], *, missing: str = "", is_last: bool = False) -> None:
        """Append the blocks that are new, and write them to the disk.

        Args:
            blocks: From a connection or from the head's stdout.
            missing: Why lines are lost that the blocks skip, as a clause after "because"; empty if another stream may have them.
            is_last: Whether stdout is read for the last time: only then output that no agent wrote is copied.

        Raises:
            GapError: The blocks skip something, and `missing` is empty. Everything before is kept.
            StoreError: The disk is full, or the job was deleted.
        """
        try:
            for block in blocks:
                if isinstance(block, LineBlock):
                    self._take_lines(block, missing)
                elif isinstance(block, EventBlock):
                    self._take_event(block, missing)
                elif isinstance(block, ProgressBlock):
                    event = self._of_job(block.event)
                    name = wire.last_name(event)
                    if name is not None:
                        self._progress[name] = event
                        self._has_new_progress = True
                elif isinstance(block, OutcomePart):
                    self._take_part(block)
                elif is_last and block.text.strip():
                    line = b"pod 0: " + wire.clean(block.text)[: wire.MAX_LINE_BYTES]
                    self._append_own(wire.body_of(wire.Stream.AGENT, [line]), 1)
        finally:
            self.flush()
            self._write_progress()

    def log(self, text: str) -> None:
        """Append lines of this process, which have no number."""
        self._append_own(*wire.own_lines(text))
        self.flush()

    def flush(self) -> None:
        """Write the lines that were taken.

        Raises:
            StoreError: The disk is full, or the job was deleted.
        """
        if not self._log_lines:
            return
        with _writable(self._files):
            _write_all(self._log, b"".join(self._log_lines))
        self._log_lines = []
        self._on_lines()

    def release(self, events: Iterable[dict[str, Any]] | None = None, *, note: str = "") -> None:
        """Write the events that end the head's life, so that readers see them. Nothing is copied afterwards.

        Args:
            events: Written in the place of the head's verdict and the events after it; None for those.
            note: A further sentence for the status; empty for none.
        """
        held = self._held if events is None else [wire.encode_json(event) for event in events]
        if note:
            held.append(wire.encode_json(Event(Note(text=note), time.time(), attempt=self.last_attempt).record()))
        self._held = []
        self.flush()
        with _writable(self._files):
            _write_all(self._events, b"".join(held))
        self._on_change()

    def end(self) -> tuple[int, int]:
        """The numbers within the job of the next line and of the next event.

        Raises:
            StoreError: The files cannot be read.
        """
        with _writable(self._files):
            return self._life.first_line + self.next_line, self._files.events.read_bytes().count(b"\n")

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        self._events.close()

    # -- lines --------------------------------------------------------------------------------------------------------

    def _take_lines(self, block: LineBlock, missing: str) -> None:
        if block.first is None:
            return
        following = block.first + block.count
        if following <= self.next_line:
            return
        if block.first > self.next_line:
            self.skip_lines(block.first, missing)
        new, attempt = block.since(self.next_line), self._attempt(block.attempt)
        first = self._life.first_line + (new.first or 0)
        self._log_lines.append(dataclasses.replace(new, first=first, attempt=attempt).encode())
        self.next_line = following
        self.last_attempt = max(self.last_attempt, attempt)

    def skip_lines(self, following: int, missing: str) -> None:
        """Append a line that names the lines missing before a number, if any are.

        Args:
            following: The number of the next line that there is.
            missing: Why they are lost, as for `take`.
        """
        count = following - self.next_line
        if count <= 0:
            return
        if not missing:
            raise GapError
        lines, first = "1 line is" if count == 1 else f"{count:,} lines are", self._life.first_line + self.next_line
        numbers = f"{first:,}" if count == 1 else f"{first:,} to {first + count - 1:,}"
        self._append_own(*wire.own_lines(f"{lines} missing here (number {numbers}), because {missing}"))
        self.next_line = following

    def _append_own(self, body: bytes, count: int) -> None:
        self._log_lines.append(wire.encode_lines(None, int(time.time() * 1000), self.last_attempt, None, body, count))

    # -- events, progress, outcomes -----------------------------------------------------------------------------------

    def _take_event(self, block: EventBlock, missing: str) -> None:
        count = block.number - self.next_event
        if not 0 <= count <= MAX_MISSING_EVENTS - self._missing_events:
            return
        if count:
            if not missing:
                raise GapError
            self._missing_events += count
            events = "1 event is" if count == 1 else f"{count:,} events are"
            self._append_own(*wire.own_lines(f"{events} missing here (metrics or states of ranks), because {missing}"))
        event = self._of_job(block.event)
        # A reader that sees a rank's end can then read its last line.
        self.flush()
        # Numbers are those of lines in the file; empty lines stand for events that are missing.
        data = b"\n" * count + wire.encode_json(event)
        self.next_event = block.number + 1
        self._note(event)
        self.verdict = self.verdict or Verdict.read(event)
        if self.verdict is not None:
            self._held.append(data)
            return
        with _writable(self._files):
            _write_all(self._events, data)
        self._on_change()

    def _attempt(self, of_head: Any) -> int:
        """The number within the job of an attempt of the head's."""
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return min(self._life.first_attempt + int(of_head or 0), wire.MAX_ATTEMPT)
        return self.last_attempt

    def _of_job(self, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "attempt": self._attempt(event.get("attempt"))}

    def _note(self, record: dict[str, Any]) -> None:
        if (event := Event.read(record)) is None:
            return
        self.last_attempt = max(self.last_attempt, event.attempt)
        if isinstance(event.what, JobState):
            self.free = max(self.free, event.what.free)
        if isinstance(event.what, JobState | RankState) and event.what.state == wire.StateName.RUNNING:
            self.has_started = True

    def _write_progress(self) -> None:
        if not self._has_new_progress:
            return
        with _writable(self._files), fresh(self._files.progress, lasting=False) as file:
            file.write_text(json.dumps(self._progress))
        self._has_new_progress = False
        self._on_change()

    def _recover_events(self) -> int:
        first, data = self._life.first_event, self._files.events.read_bytes()
        whole = data.rfind(b"\n") + 1
        self._events.truncate(whole)
        lines = data[:whole].split(b"\n")[:-1]
        # After a power failure there may be fewer than when the life began.
        self._events.write(b"\n" * (first - len(lines)))
        for event in wire.decode_json_lines(b"\n".join(lines[first:])):
            self._note(event)
        with contextlib.suppress(OSError, ValueError):
            self._progress = dict(json.loads(self._files.progress.read_bytes()))
        return max(0, len(lines) - first)

    def _take_part(self, part: OutcomePart) -> None:
        """Collect the parts of an outcome into its file. Its signature is checked by `job.outcomes`, which reads it."""
        target = self._files.outcome(self._attempt(part.attempt), part.rank)
        if not part.index:
            self._parts[part.attempt, part.rank] = []
        parts = self._parts.get((part.attempt, part.rank), [])
        if part.index != len(parts) or target.exists():
            return
        parts.append(part.data)
        if len(parts) == part.count:
            with _writable(self._files), fresh(target) as file:
                file.write_bytes(b"".join(parts))
            del self._parts[part.attempt, part.rank]


# -- the thread ----------------------------------------------------------------------------------------------------------


class FollowerClock:
    """Time and waiting, as a follower uses them; tests have one of their own."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def wait(self, woken: threading.Event, seconds: float) -> None:
        """Wait until the event is set, so long at most."""
        woken.wait(seconds)


class HeadReader:
    """Follows one head until it has ended and all of it that can be had is here.

    Args:
        place: Where the job is.
        handle: The job.
        client: For requests to the head; None if this user has no key.
        copy: Appended to by this reader's thread alone until it has ended.
        has_ended: Whether the head's container has ended or is gone.
        on_end: Called when the thread ends, and once when it is current.
        clock: The follower's.
    """

    def __init__(
        self,
        *,
        place: Place,
        handle: PlacedJob,
        client: HeadClient | None,
        copy: HeadCopy,
        has_ended: Callable[[], bool],
        on_end: Callable[[], None],
        clock: FollowerClock,
    ) -> None:
        self.is_drained = False
        """Whether the thread has read everything that the head and its place still had."""
        self.is_current = False
        """Whether all is here that the head had when it was asked."""
        self.error: StoreError | None = None
        """Why the thread gave up: the disk is full, or the job was deleted here."""
        self._place = place
        self._handle = handle
        self._client = client
        self._copy = copy
        self._has_ended = has_ended
        self._on_end = on_end
        self._clock = clock
        self._stopped = threading.Event()
        self._end_stream: Callable[[], None] | None = None
        # Why lines that stdout lacks are not fetched: empty while a connection may still bring them.
        self._only_stdout = "" if client is not None else "only the user who started the job can connect to its head"
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"kale_dist copy {handle.object}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; the next follower continues where it stopped."""
        self._stopped.set()
        self.hurry()
        self._thread.join(timeout_s)

    def hurry(self) -> None:
        """End a connection that may wait for a head that is gone."""
        end = self._end_stream
        if end is not None:
            with contextlib.suppress(OSError, BackendError):
                end()

    # -- inside, in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._copy.is_complete:
                # Asked before reading, so that everything a head wrote before its end is read.
                if self._has_ended():
                    break
                self._read_once()
                if not self._copy.is_complete:
                    self._clock.wait(self._stopped, PAUSE_S)
            if not self._stopped.is_set() and not self._copy.is_complete:
                self._read_the_rest()
        except StoreError as error:
            self.error = error
        finally:
            self.is_drained = not self._stopped.is_set() and self.error is None
            self._on_end()

    def _read_once(self) -> None:
        """Read until the stream ends, for any reason."""
        if self._client is None or self._only_stdout:
            with contextlib.suppress(BackendError):
                if not self.is_current:
                    self._read_stdout(follow=False, missing=self._only_stdout)
                    self.is_current = True
                    self._on_end()
                self._read_stdout(follow=True, missing=self._only_stdout)
            return
        try:
            self._read_connection(self._client)
        except NoConnectionError as error:
            self._only_stdout = (
                f"there is no connection to the head, whose stdout has only a part of a fast log: {error}"
            )
        except BackendError:
            now = self._clock.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            elif now - self._failing_since > CONNECT_S:
                with contextlib.suppress(BackendError, GapError):
                    self._read_stdout(follow=False, missing="")

    def _read_connection(self, client: HeadClient) -> None:
        with client.stream(self._copy.next_line, self._copy.next_event, SILENCE_S) as (pieces, end):
            self._end_stream = end
            try:
                self._failing_since = None
                self._take(pieces, _DROPPED)
            finally:
                self._end_stream = None

    def _read_stdout(self, *, follow: bool, missing: str, is_last: bool = False) -> None:
        with self._place.head_output(self._handle, follow=follow) as pieces:
            self._take(pieces, missing, is_last=is_last)

    def _take(self, pieces: Iterator[bytes], missing: str, *, is_last: bool = False) -> None:
        blocks = BlockReader()
        for piece in pieces:
            if self._stopped.is_set():
                return
            self._copy.take(blocks.feed(piece), missing=missing, is_last=is_last)
            if self._copy.is_complete:
                return
            # An empty line: what comes now was written since the stream began.
            if not self.is_current and (b"\n\n" in piece or piece.startswith(b"\n")):
                self.is_current = True
                self._on_end()
        if not self._stopped.is_set():
            self._copy.take(blocks.finish(), missing=missing, is_last=is_last)

    def _read_the_rest(self) -> None:
        """Read what the place still has of an ended head's output, then append which lines are missing."""
        with contextlib.suppress(BackendError):
            self._read_stdout(follow=False, missing=self._only_stdout or _ENDED, is_last=True)
        verdict = self._copy.verdict
        if verdict is not None:
            self._copy.skip_lines(verdict.next_line, _ENDED)
            self._copy.flush()


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
