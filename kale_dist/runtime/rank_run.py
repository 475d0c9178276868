"""One rank of a running job, as its agent sees it: output, events, how it ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Protocol

from kale_dist import contract
from kale_dist.contract import EventKind, RankStateName, Stream
from kale_dist.runtime import context, processes, rank_process
from kale_dist.runtime.fork_pool import End, ForkPool
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.loop import Loop
from kale_dist.runtime.output import BAR_INTERVAL_S, LineCutter
from kale_dist.runtime.watchdog import Sample, parse_main_thread
from kale_dist.runtime.worker import STACKS_SIGNAL


class Rank(Protocol):
    """What a job's judge knows of a rank and can do to it, wherever it runs."""

    rank: int
    state: RankStateName
    done: dict[str, Any] | None
    """Its own account of how the call went, once the outcome is written."""
    end: End | None
    """How its process ended."""

    @property
    def tail(self) -> list[str]:
        """Its last lines of output."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether nothing more will come of it."""
        ...

    @property
    def stacks(self) -> bytes:
        """The answer to `ask_stacks`; empty if there is none."""
        ...

    def ask_stacks(self) -> None:
        """Ask for the stacks; `stacks` and `sample` have the answer a moment later."""
        ...

    def sample(self) -> Sample:
        """What the answer to `ask_stacks` shows."""
        ...

    def let_go(self) -> None:
        """Tell a rank that is done to end."""
        ...

    def terminate(self) -> None:
        """End a rank that is at work; it may still clean up."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class RankRun:
    """Reads everything a rank says and keeps what is known of it.

    Args:
        rank: The rank.
        attempt: The job's attempt.
        loop: The agent's loop.
        writer: The job's files.
        on_change: Called when the rank's `state`, `done` or `end` has changed.
        on_move: Called at each sign of progress.
    """

    def __init__(
        self,
        rank: int,
        attempt: int,
        loop: Loop,
        writer: JobWriter,
        on_change: Callable[[RankRun], None],
        on_move: Callable[[dict[str, Any] | None], None],
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self.state = RankStateName.PENDING
        self.received = False
        """Whether it has its assignment, and so answers the signal for its stacks."""
        self.done: dict[str, Any] | None = None
        """Its own account of how the call went, once the outcome is written."""
        self.end: End | None = None
        """How its process ended."""
        self.moves = 0
        self.process: rank_process.RankProcess | None = None
        self.is_held = False
        """Whether its outcome is still on its way to where it is wanted: till then the rank is not gone."""
        self._pool: ForkPool | None = None
        self._loop = loop
        self._writer = writer
        self._on_change = on_change
        self._on_move = on_move
        self._pending_events = b""
        self._stacks = b""
        self._bar_due = False
        self._watched: list[int] = []
        self._cutters = {stream: LineCutter(writer.log, rank, stream) for stream in (Stream.STDOUT, Stream.STDERR)}

    @property
    def pid(self) -> int:
        """Process id, 0 before the fork."""
        return self.process.pid if self.process is not None else 0

    @property
    def tail(self) -> list[str]:
        """Its last lines of output: of stderr if there are any, else of stdout."""
        return self._cutters[Stream.STDERR].tail or self._cutters[Stream.STDOUT].tail

    @property
    def is_gone(self) -> bool:
        """Whether nothing more will come of it."""
        return self.process is None or (self.end is not None and not self.is_held)

    def let_go(self) -> None:
        """Tell a rank that is done to end."""
        if self.process is not None and self.end is None:
            self.process.let_go()

    def terminate(self) -> None:
        """End a rank that is at work; one that has not been forked yet never will be."""
        if self.process is None or self.end is not None:
            return
        if not self.pid and self._pool is not None:
            self._pool.discard(self.process)
            self.process = None
            return
        self.process.signal_group(signal.SIGTERM)
        # A stopped process gets no other signal before it goes on.
        self.process.signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.end is None:
            self.process.signal_group(signal.SIGKILL)

    def start(self, pool: ForkPool, on_forked: Callable[[RankRun], None]) -> None:
        """Get a process.

        Raises:
            OSError: None is to be had.
        """

        def forked() -> None:
            # The pool calls this before `take` returns if the rank was forked ahead.
            if self.process is not None:
                on_forked(self)

        self._pool = pool
        process = pool.take(forked, self._ended)
        self.process = process
        if process.pid:
            on_forked(self)

    def assign(self, assignment: dict[str, Any], listener: int | None) -> None:
        """Hand the rank its work and begin to read it.

        Raises:
            OSError: It does not take it.
        """
        if self.process is None:
            return
        self.process.assign(assignment, listener)
        process = self.process
        for descriptor, read in (
            (process.stdout, lambda: self._read_output(Stream.STDOUT, process.stdout)),
            (process.stderr, lambda: self._read_output(Stream.STDERR, process.stderr)),
            (process.events, self._read_events),
            (process.stacks, self._read_stacks),
            (process.control, self._read_control),
        ):
            self._loop.when_readable(descriptor, read)
            self._watched.append(descriptor)
        self.state = RankStateName.STARTING
        self._writer.event(EventKind.RANK, self.rank, state=str(self.state), pid=self.pid, exit_code=None, signal=None)

    def ask_stacks(self) -> None:
        """Ask for the stacks; `stacks` and `sample` have the answer a moment later."""
        self._stacks = b""
        if self.process is not None and self.received and self.end is None:
            self.process.signal_leader(STACKS_SIGNAL)

    @property
    def stacks(self) -> bytes:
        """The answer to `ask_stacks`; empty if there is none."""
        return self._stacks

    def sample(self) -> Sample:
        """What the answer to `ask_stacks` shows."""
        frames = parse_main_thread(self._stacks)
        return Sample(frames=frames, cpu_ticks=processes.cpu_ticks(self.pid), moves=self.moves)

    def _read_output(self, stream: Stream, descriptor: int) -> None:
        data = rank_process.read_some(descriptor)
        if data is None:
            self._forget(descriptor)
        elif data:
            self._moved(None)
            cutter = self._cutters[stream]
            cutter.feed(data)
            if not self._bar_due and cutter.show_bar():
                self._bar_due = True
                self._loop.call_later(BAR_INTERVAL_S, self._show_bars)

    def _show_bars(self) -> None:
        self._bar_due = False
        held = [cutter.show_bar() for cutter in self._cutters.values()] if self.end is None else []
        if any(held):
            self._bar_due = True
            self._loop.call_later(BAR_INTERVAL_S, self._show_bars)

    def _read_events(self) -> None:
        if self.process is None:
            return
        data = rank_process.read_some(self.process.events)
        if data is None:
            self._forget(self.process.events)
        elif data:
            self._take_events(data)

    def _take_events(self, data: bytes) -> None:
        whole, _, self._pending_events = (self._pending_events + data).rpartition(b"\n")
        for event in contract.decode_records(whole):
            self._moved(event)
            if event.get("event") != context.ALIVE:
                self._writer.record(event)

    def _read_stacks(self) -> None:
        if self.process is None:
            return
        data = rank_process.read_some(self.process.stacks)
        if data is None:
            self._forget(self.process.stacks)
        else:
            self._stacks += data

    def _read_control(self) -> None:
        messages = self.process.receive() if self.process is not None else None
        if messages is None:
            if self.process is not None:
                self._forget(self.process.control)
            return
        for message in messages:
            self._take_message(message)

    def _take_message(self, message: dict[str, Any]) -> None:
        if "received" in message:
            self.received = True
        elif "running" in message:
            self._set_state(RankStateName.RUNNING)
        elif "done" in message and self.done is None:
            # Everything the rank has sent before is in the pipes already; the order in the files shall be the same.
            self._read_all()
            self.done = message
            error = {} if message["ok"] else {name: message.get(name, "") for name in ("error_type", "error_text")}
            self._writer.event(EventKind.OUTCOME, self.rank, ok=message["ok"], **error)
            self._on_change(self)

    def _set_state(self, state: RankStateName) -> None:
        self.state = state
        self._moved(None)
        self._writer.event(EventKind.RANK, self.rank, state=str(state), pid=self.pid, exit_code=None, signal=None)
        self._on_change(self)

    def _read_all(self) -> None:
        """Read what is in the pipes without waiting."""
        if self.process is None or not self._watched:
            return
        for stream, descriptor in ((Stream.STDOUT, self.process.stdout), (Stream.STDERR, self.process.stderr)):
            if data := rank_process.read_rest(descriptor):
                self._cutters[stream].feed(data)
        if data := rank_process.read_rest(self.process.events):
            self._take_events(data)

    def _ended(self, end: End) -> None:
        """The process is over, whoever still holds its pipes."""
        if self.process is not None and self.done is None and self._watched:
            for message in self.process.receive() or []:
                self._take_message(message)
        self._read_all()
        for cutter in self._cutters.values():
            cutter.finish()
        for descriptor in list(self._watched):
            self._forget(descriptor)
        self.end = end
        self._on_change(self)

    def record_end(self, state: RankStateName) -> None:
        """Write the rank's last event."""
        self.state = state
        end = self.end or End()
        self._writer.event(
            EventKind.RANK,
            self.rank,
            state=str(state),
            pid=self.pid or None,
            exit_code=end.exit_code,
            signal=end.signal,
        )

    def _moved(self, event: dict[str, Any] | None) -> None:
        self.moves += 1
        self._on_move(event)

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._watched:
            self._watched.remove(descriptor)
            self._loop.forget(descriptor)
