"""One rank of an attempt, as the head sees it, in its own pod or in another: records its events, and how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kale_dist import wire
from kale_dist.wire import RankStateName, events, messages
from kale_dist.wire.messages import (
    Answer,
    Breakpoint,
    CellFailed,
    Done,
    FromRank,
    Go,
    Numbered,
    PassedOver,
    PassOver,
    Received,
    Running,
    Save,
    ToAgent,
    ToLive,
    Typed,
    Visit,
)
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.agent.writer import JobWriter


class Process(Protocol):
    """What can be done to a rank's process: a `NearRank`, or one that a relay looks after."""

    def send(self, line: bytes) -> None:
        """Send the rank a message over its control socket, as `messages.encode` makes it."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the rank."""

    def ask_stacks(self) -> None:
        """Ask the rank for its stacks."""


class Rank:
    """Records what a rank sends and keeps what is known of it.

    Args:
        rank: The rank.
        writer: The job's files.
        on_change: Called when the rank's `state`, `done` or `end` has changed.
        on_event: Called with each event that it sends.
        on_answer: Called with each answer of a live rank.
    """

    def __init__(
        self,
        rank: int,
        writer: JobWriter,
        on_change: Callable[[Rank], None],
        on_event: Callable[[events.Event], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        self.rank = rank
        self.state = RankStateName.PENDING
        self.pid = 0
        """Process id on its machine; 0 before the fork."""
        self.done: Done | None = None
        """The rank's own account of how the call went, once its outcome is written."""
        self.end: End | None = None
        """How the rank's process ended; None before."""
        self.process: Process | None = None
        self.dump = b""
        """The rank's last answer to `ask_stacks`; empty if there is none."""
        self.cpu_ticks = 0
        """Processor time that the rank had used at that answer, in clock ticks."""
        self.exchanges: tuple[int, ...] = ()
        """Collectives of each backend in which the rank has taken part; empty where it does not count them (CPUs)."""
        self.prompt = ""
        """At a breakpoint, what the debugger's next answer has to name, also while a step runs; else empty."""
        self.attended_at = 0.0
        """When the prompt came, or a person last typed something (of `time.monotonic`)."""
        self.is_visited = False
        """Whether a person has come to this breakpoint."""
        self.is_idle = False
        """Whether it is a live rank that runs no cell."""
        self.idle_s: float | None = None
        """Seconds without a cell after which live ranks end."""
        self._passed: set[str] = set()
        self._received = False
        self._writer = writer
        self._on_change = on_change
        self._on_event = on_event
        self._on_answer = on_answer

    @property
    def is_gone(self) -> bool:
        """Whether nothing more will come from the rank."""
        return self.process is None or self.end is not None

    def is_beyond(self, exchanges: Iterable[int]) -> bool:
        """Whether it has taken part in more collectives than that, of any backend."""
        return any(mine > theirs for mine, theirs in zip(self.exchanges, exchanges, strict=False))

    def let_go(self) -> None:
        """Tell a rank that is done to end."""
        self._send(Go())

    def terminate(self) -> None:
        """Send SIGTERM to a rank that is at work: it may still clean up."""
        if self.process is not None and self.end is None:
            self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the rank."""
        if self.process is not None and self.end is None:
            self.process.signal(signal.SIGKILL)

    def ask_stacks(self) -> None:
        """Ask for the stacks; `dump` and `cpu_ticks` have the answer a moment later."""
        self.dump = b""
        if self.process is not None and self._received and self.end is None:
            self.process.ask_stacks()

    def send(self, message: ToAgent | CellFailed) -> None:
        """Pass a message on, and note whether a person is at the debugger, and whether a live rank has something to do."""
        if isinstance(message, Visit | Typed):
            self.is_visited, self.attended_at = True, time.monotonic()
        elif isinstance(message, Numbered) and message.is_for(self.rank):
            self.is_idle = False
        if isinstance(message, Typed | ToLive):
            self._send(message)

    def ask_to_save(self) -> None:
        """Have the rank save."""
        self._send(Save())

    def pass_over(self) -> None:
        """Have the rank go on at its breakpoint, and at those to come: no person has answered."""
        self._send(PassOver(prompt=self.prompt))
        # A step that still runs is not asked again each second.
        self.attended_at = time.monotonic()

    def moved(self) -> None:
        """The rank has given a sign of progress."""
        self._writer.moves[self.rank] += 1

    def record(self, state: RankStateName) -> None:
        """Write the rank's new state into an event."""
        self.state = state
        end = self.end or End()
        made = events.RankState(state=state, pid=self.pid or None, exit_code=end.exit_code, signal=end.signal)
        self._writer.event(made, self.rank)

    # -- what it does: the methods of `near_rank.Listener` ------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more events may come."""
        return self._writer.has_room

    def forked(self, pid: int) -> None:
        """The rank has a process, which has its assignment."""
        self.pid = pid
        self._set_state(RankStateName.STARTING)

    def output(self, body: bytes, count: int) -> None:
        """The rank has written lines."""
        self._writer.lines(self.rank, body, count)

    def events(self, data: bytes) -> None:
        """The rank has sent events."""
        for record in wire.decode_json_lines(data):
            event = events.Event.read(record)
            what = None if event is None else event.what
            if not isinstance(what, events.Usage):
                self.moved()
            if isinstance(what, events.Alive):
                self.exchanges = what.exchanges or self.exchanges
            if event is not None:
                self._on_event(event)
            if not isinstance(what, events.Alive | events.Dispensable | events.Saves):
                self._writer.record(record, event)

    def message(self, message: FromRank) -> None:
        """The rank has sent a message over its control socket."""
        match message:
            case Received():
                self._received = True
            case Running():
                self._set_state(RankStateName.RUNNING)
            case Breakpoint():
                self._record_prompt(message)
            case PassedOver():
                self._record_passed_over(message.where)
            case Answer():
                self._record_answer(message)
            case Done() if self.done is None:
                self.done = message
                self.exchanges = message.exchanges or self.exchanges
                self._writer.event(message, self.rank)
                self._on_change(self)

    def stacks(self, dump: bytes, cpu_ticks: int) -> None:
        """The rank has answered `ask_stacks`."""
        self.dump, self.cpu_ticks = dump, cpu_ticks

    def ended(self, end: End) -> None:
        """The rank's process has ended."""
        self.end = end
        self._on_change(self)

    def _send(self, message: Go | Save | Typed | PassOver | ToLive) -> None:
        if self.process is not None and self.end is None:
            self.process.send(messages.encode(message))

    def _record_prompt(self, at: Breakpoint) -> None:
        """The rank waits at a prompt of its debugger, or has left it."""
        self.moved()
        if at.prompt and not self.prompt:
            self.is_visited = False
            self._writer.log(f"Rank {self.rank} waits in breakpoint() at {at.where}")
        self.prompt, self.attended_at = at.prompt, time.monotonic()
        self._writer.event(at, self.rank)

    def _record_passed_over(self, where: str) -> None:
        self.moved()
        if where not in self._passed:
            self._passed.add(where)
            why = "there is no person to answer"
            self._writer.log(f"Rank {self.rank} has passed over breakpoint() at {where}: {why}")
            # Without the rank, so that the many of a job are one note.
            self._writer.event(events.Note(text=f"breakpoint() at {where} was passed over: {why}", warns=True))

    def _record_answer(self, answer: Answer) -> None:
        """A live rank has answered a message, or has begun to wait for the first one."""
        self.moved()
        self.is_idle = True
        if not answer.number:
            self.idle_s = answer.idle_s
        self._writer.event(answer, self.rank)
        self._on_answer(answer)

    def _set_state(self, state: RankStateName) -> None:
        self.moved()
        self.record(state)
        self._on_change(self)
