"""Copies the log and events of one run's head to this machine, in a thread: over a connection, else from the head's stdout.

A connection is first, because stdout is only a bounded copy of a fast log. Stdout is read where no connection is allowed
or none stands for a while, and at the end for what is missing. The end of a stream means nothing: the end is the head's
verdict, with the number of its last line.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from kale_dist import contract
from kale_dist.backends.base import NoConnectionError, Place, RunHandle
from kale_dist.contract import BlockReader, EventBlock
from kale_dist.errors import BackendError, StoreError
from kale_dist.following.client import HeadClient
from kale_dist.following.copy import GapError, RunCopy

SILENCE_S = 45.0
"""A connection without a byte for so long is opened again from the last line: a tunnel that died (a laptop that slept)
says nothing. The head says something every 15 s."""

CONNECT_S = 15.0
"""A head that cannot be connected to for so long is read from its stdout until it can."""

PAUSE_S = 0.5
"""Between two tries to connect."""

_PIECE_BYTES = 1 << 20
_DROPPED = "the head keeps only the newest part of a long log"
_ENDED = "the head ended before they could be copied"


class Clock:
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
    """Follows the head of one run until it has ended and all of it that can be had is here.

    Args:
        place: Where the run is.
        handle: The run.
        client: For requests to the head; None where this user has no key.
        copy: Where to write; no other thread appends to it meanwhile.
        has_ended: Whether the head's container has ended or is gone.
        on_change: Called when it has ended, or what it says about itself has changed.
        clock: Time.
    """

    def __init__(
        self,
        *,
        place: Place,
        handle: RunHandle,
        client: HeadClient | None,
        copy: RunCopy,
        has_ended: Callable[[], bool],
        on_change: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.is_drained = False
        """Whether nothing more will come."""
        self.problem = ""
        """Why there is no connection although there should be one, as a sentence."""
        self.error: StoreError | None = None
        """Why it gave up: the disk is full, or the job was deleted here."""
        self._place = place
        self._handle = handle
        self._client = client
        self._copy = copy
        self._has_ended = has_ended
        self._on_change = on_change
        self._clock = clock
        self._stopped = threading.Event()
        self._end_stream: Callable[[], None] | None = None
        # Why lines that stdout lacks are not fetched: empty while a connection may still bring them.
        self._only_stdout = "" if client is not None else "only the user who started the job can connect to its head"
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"kale_dist copy {handle.object}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Read no more; what comes later is found by the next follower."""
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
                # Asked before reading: what a head has said before its end is then read for certain.
                ended = self._has_ended()
                if ended:
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
            self._on_change()

    def _read_once(self) -> None:
        """Read until the stream ends, for any reason."""
        if self._client is None or self._only_stdout:
            with contextlib.suppress(BackendError):
                self._read_stdout(follow=True, missing=self._only_stdout)
            return
        try:
            self._read_connection(self._client)
        except NoConnectionError as error:
            self._only_stdout = (
                f"there is no connection to the head, whose stdout has only a part of a fast log: {error}"
            )
        except BackendError as error:
            now = self._clock.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            elif now - self._failing_since > CONNECT_S:
                self._set_problem(f"{error}")
                with contextlib.suppress(BackendError, GapError):
                    self._read_stdout(follow=False, missing="")

    def _read_connection(self, client: HeadClient) -> None:
        with client.stream(self._copy.next_line, self._copy.next_event, SILENCE_S) as (pieces, end):
            self._end_stream = end
            try:
                self._failing_since = None
                self._set_problem("")
                self._take(pieces, _DROPPED)
            finally:
                self._end_stream = None

    def _read_stdout(self, *, follow: bool, missing: str) -> None:
        with self._place.head_output(self._handle, follow=follow) as pieces:
            self._copy.begin_stdout()
            self._take(pieces, missing)

    def _take(self, pieces: Iterator[bytes], missing: str) -> None:
        blocks = BlockReader()
        for piece in pieces:
            if self._stopped.is_set():
                return
            self._copy.take(blocks.feed(piece), missing=missing)
            if self._copy.is_complete:
                return
        if not self._stopped.is_set():
            self._copy.take(blocks.finish(), missing=missing)

    def _read_the_rest(self) -> None:
        """The head has ended: its folder, where its place still has it, then its stdout, then say what is missing."""
        with contextlib.suppress(BackendError), tempfile.TemporaryDirectory(prefix="kale-dist-") as folder:
            self._read_files(pathlib.Path(folder))
        if not self._copy.is_complete:
            with contextlib.suppress(BackendError):
                self._read_stdout(follow=False, missing=self._only_stdout or _ENDED)
        verdict = self._copy.verdict
        if verdict is not None:
            self._copy.skip_lines(verdict.get("next_line") or 0, _ENDED)
            self._copy.flush()

    def _read_files(self, folder: pathlib.Path) -> None:
        log, events = folder / "log", folder / "events"
        if self._place.fetch(self._handle, "log", log):
            with log.open("rb") as file:
                blocks = BlockReader()
                while (piece := file.read(_PIECE_BYTES)) and not self._stopped.is_set():
                    self._copy.take(blocks.feed(piece), missing=_DROPPED)
        if self._place.fetch(self._handle, "events", events) and not self._stopped.is_set():
            found = contract.decode_json_lines(events.read_bytes())
            self._copy.take((EventBlock(number=at, event=event) for at, event in enumerate(found)), missing=_DROPPED)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_change()
