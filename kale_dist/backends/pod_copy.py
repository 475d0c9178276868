"""Copies what one pod says into its job's folder: each line and event once, and what is missing is asked for or said."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kale_dist import contract
from kale_dist.backends.journal import Batch, Journal, PodCursor
from kale_dist.contract import EventKind, StateName
from kale_dist.transport import EventItem, Line, Plain

FillLines = Callable[[str, int, int, int], Sequence[Line] | None]
"""Asks for lines that a stream has skipped: UID of the pod, its number, numbers of the first and the last line. Gives
those of them that there are, in order, or as many of the first as it likes; None if nobody can be asked, and nothing if
who has the whole log says that it has none of these and none behind them."""

FillEvents = Callable[[str, int, int, int], Sequence[EventItem] | None]
"""The same for events."""

HEAD = 0
"""The pod whose agent speaks for the whole job."""

FINAL = (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)

# More than a pod can write between two signs of life: such a number is damage and no gap.
_MAX_GAP = 100_000_000
_MAX_PLAIN_BYTES = contract.MAX_LINE_BYTES - 64


class PlainLines:
    """Tells which lines without a number are new.

    A stream that is opened anew repeats the last of what was seen. Its lines are compared with those, at every place
    where the repetition could have begun; while that is open they are held back.

    Args:
        seen: Checksums of the lines that were seen last.
    """

    def __init__(self, seen: Sequence[int]) -> None:
        self._seen = tuple(seen)
        self._places = list(range(len(seen)))
        self._held: list[bytes] = []

    def feed(self, text: bytes) -> list[bytes]:
        """Take the next line; gives those that are new for certain now."""
        if not self._places:
            return [text]
        checksum = zlib.crc32(text)
        self._places = [place + 1 for place in self._places if self._seen[place] == checksum]
        self._held.append(text)
        if not self._places:
            return self.settle()
        if len(self._seen) in self._places:
            self._held.clear()
            self._places.remove(len(self._seen))
        return []

    def settle(self) -> list[bytes]:
        """Something new has come, or the stream has ended: what is held back was no repetition."""
        held, self._held, self._places = self._held, [], []
        return held


class PodCopy:
    """One pod. For one thread at a time, that of who holds `lock`.

    Args:
        uid: The pod's UID.
        cursor: How far it was copied.
        journal: Where to.
        fill: Asks for lines.
        fill_events: Asks for events, if anybody can be asked.
        trusts_all: Whether events are believed that nobody could check.
        on_events: Told of events that readers see now.
    """

    def __init__(
        self,
        uid: str,
        cursor: PodCursor,
        journal: Journal,
        *,
        fill: FillLines,
        fill_events: FillEvents | None,
        trusts_all: bool,
        on_events: Callable[[Sequence[dict[str, Any]]], None],
    ) -> None:
        self.lock = threading.Lock()
        self.number = cursor.number
        self._uid = uid
        self._cursor = cursor
        self._journal = journal
        self._fill = fill
        self._fill_events = fill_events
        self._trusts_all = trusts_all
        self._on_events = on_events
        self._plain = PlainLines(cursor.plain)

    def begin(self) -> None:
        """Another stream of the pod's log begins; it may repeat what was seen."""
        self.settle()
        self._plain = PlainLines(self._cursor.plain)

    def settle(self) -> None:
        """Write lines that may have been repetitions and were not."""
        self._append_plain(self._plain.settle())

    def refuse(self, kind: str) -> None:
        """Say, once for each kind, that something of the pod was not signed."""
        if kind not in self._cursor.refused:
            self._cursor.refused.append(kind)
            what = "a line" if kind == "line" else f"an {kind}"
            why = "the pod's agent has not written" if kind == "line" else "this job has not signed"
            self._say(
                f"Refused {what} in the log of pod {self.number} that {why}: it is damaged, or somebody else wrote it"
            )

    def finish(self, *, is_whole: bool) -> None:
        """The pod is read no more. If that may have been too early, it is said."""
        self.settle()
        if self._cursor.is_finished:
            return
        self._cursor.is_finished = True
        read = self._cursor.next_line
        if is_whole:
            self._journal.save()
        elif read:
            self._say(
                f"The log of pod {self.number} breaks off behind its first {_count(read, 'line')}: the pod was gone before "
                "it was read to its end, and what it said behind them is lost"
            )
        else:
            self._say(f"The log of pod {self.number} is lost: the pod was gone before a line of it could be read")

    # -- lines ---------------------------------------------------------------------------------------------------------

    def take_text(self, text: Iterable[Line | Plain]) -> None:
        """Take lines in the order of the stream."""
        lines: list[bytes] = []
        plain: list[bytes] = []
        expected = self._cursor.next_line
        for item in text:
            if isinstance(item, Plain):
                self._append_lines(lines)
                lines = []
                plain += self._plain.feed(item.text[:_MAX_PLAIN_BYTES])
            elif 0 <= item.sequence - expected < _MAX_GAP:
                if not lines:
                    self._append_plain(plain + self._plain.settle())
                    plain = []
                if item.sequence > expected:
                    self._append_lines(lines)
                    lines = []
                    if not self.close_gap(item.sequence):
                        self.refuse("line")
                        continue
                lines.append(item.framed)
                expected = item.sequence + 1
        self._append_lines(lines)
        self._append_plain(plain)

    def close_gap(self, following: int) -> bool:
        """Fetch the lines that are missing in front of one, and say what cannot be had.

        Returns:
            Whether there may be such a line: False if the pod's agent denies it, and then nothing is missing.
        """
        if following - self._cursor.next_line >= _MAX_GAP:
            return False
        while self._cursor.next_line < following and not self._journal.is_closed:
            first = self._cursor.next_line
            found = self._fill(self._uid, self.number, first, following - 1)
            if found is not None and not found:
                return False
            missing = [line for line in found or () if first <= line.sequence < following]
            run = [line.framed for index, line in enumerate(missing) if line.sequence == first + index]
            if run:
                self._append_lines(run)
            else:
                self._lose(missing[0].sequence if missing else following)
        return True

    def _append_lines(self, framed: Sequence[bytes]) -> None:
        self._journal.append_lines(Batch("log", self._uid, self._cursor.next_line), framed)

    def _append_plain(self, lines: Sequence[bytes]) -> None:
        checksums = tuple(map(zlib.crc32, lines))
        self._journal.append_text(
            Batch("log", self._uid, plain=checksums), [b"pod %d: %s" % (self.number, line) for line in lines]
        )

    def _lose(self, following: int) -> None:
        """Say that lines are lost and go on behind them."""
        text = (
            f"{_lost(following - self._cursor.next_line, 'line')} of pod {self.number}: the cluster has dropped a part "
            "of the pod's log, and the pod's agent could not be asked or has dropped it too"
        )
        # One line that moves the cursor by one, from just in front of what follows.
        self._journal.append_text(Batch("log", self._uid, following - 1), [text.encode()])

    def _say(self, text: str) -> None:
        self._journal.append_text(Batch("log"), [text.encode()])

    # -- events --------------------------------------------------------------------------------------------------------

    def take_events(self, items: Iterable[EventItem]) -> None:
        """Take events that have numbers, in the order of the stream."""
        run: list[dict[str, Any]] = []
        for item in items:
            ahead = (item.number or 0) - self._cursor.next_event - len(run)
            if self._is_usable(item) and 0 <= ahead < _MAX_GAP:
                if ahead:
                    self._append_events(run)
                    run = []
                    self.close_event_gap(item.number or 0, is_signed=True)
                run.append(item.event)
        self._append_events(run)

    def close_event_gap(self, following: int, *, is_signed: bool = False) -> None:
        """Fetch the events that are missing in front of one, and say what cannot be had.

        Args:
            following: The number of that one.
            is_signed: Whether there is such an event for certain. A heartbeat is not signed, and agents can deny it.
        """
        if following - self._cursor.next_event >= _MAX_GAP:
            return
        while self._cursor.next_event < following and not self._journal.is_closed:
            first = self._cursor.next_event
            asked = self._fill_events or (lambda *_: None)
            answer = asked(self._uid, self.number, first, following - 1)
            if answer is not None and not answer and not is_signed:
                return
            found = [item for item in answer or () if self._is_usable(item)]
            run = [item.event for index, item in enumerate(found) if item.number == first + index < following]
            if run:
                self._append_events(run)
            else:
                self._cursor.next_event = following
                self._say(
                    f"{_lost(following - first, 'event')} of pod {self.number}: the cluster has dropped a part of the "
                    "pod's log. States or metrics may be missing"
                )

    def _is_usable(self, item: EventItem) -> bool:
        if item.trusted or self._trusts_all:
            return True
        self.refuse("event")
        return False

    def _append_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Append events that follow those which are here. Final states wait, and only pod 0 speaks for the job."""
        ready: list[dict[str, Any]] = []
        for event in events:
            if event.get("event") == EventKind.STATE and (self.number != HEAD or event.get("state") in FINAL):
                self._append_ready(ready)
                ready = []
                self._keep_back(event)
            else:
                ready.append(event)
        self._append_ready(ready)

    def _append_ready(self, events: Sequence[dict[str, Any]]) -> None:
        self._journal.append_events(Batch("events", self._uid, self._cursor.next_event), events)
        self._on_events(events)

    def _keep_back(self, event: dict[str, Any]) -> None:
        with self._journal.lock:
            is_current = (event.get("attempt") or 0) >= self._journal.first_attempt
            if self.number == HEAD and is_current and self._journal.verdict is None:
                self._journal.verdict = event
            self._cursor.next_event += 1
            self._journal.save()


def _lost(count: int, noun: str) -> str:
    return f"{_count(count, noun)} {'was' if count == 1 else 'were'} lost"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
