"""One rank beside its agent: its work, its pipes and control socket, its process group, its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
from collections.abc import Callable
from typing import Protocol

from kale_dist import wire
from kale_dist.wire import STACKS_SIGNAL, Assignment, Stream, messages
from kale_dist.wire.messages import Answer, Breakpoint, Done, FromRank, PassedOver
from kale_dist.worker.agent import processes, usage
from kale_dist.worker.agent.output import RankOutput, Sink, read_some

PIPE_BYTES = 1 << 18
"""Room in each pipe, so that a rank seldom waits for the agent."""

ANSWER_S = 0.15
"""Time a rank has to write its stacks; it takes a few milliseconds even with the GIL held."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a rank's process ended."""

    exit_code: int | None = None
    signal: str | None = None
    reason: str = ""
    """Why it could not be started, or that it died with the fork server; empty if it ended by itself."""
    memory_limit: str = ""
    """What ran out, where the kernel killed it because memory ran out: `usage.limit_text`."""
    tail: tuple[str, ...] = ()
    """The rank's last lines: of stderr if there are any, else of stdout."""


class Listener(Sink, Protocol):
    """Receives what a rank does: the head's `Rank`, or a relay's link to the head."""

    def forked(self, pid: int) -> None:
        """The rank has a process."""

    def message(self, message: FromRank) -> None:
        """The rank has sent a message over its control socket."""

    def stacks(self, dump: bytes, cpu_ticks: int) -> None:
        """The rank has answered `ask_stacks`; an empty answer if it did not answer in time."""

    def ended(self, end: End) -> None:
        """The rank's process has ended, even if other processes still hold its pipes. No other call follows."""


class NearRank:
    """A rank that is to be forked, runs, or has ended.

    Args:
        loop: The agent's loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = 0
        self.is_discarded = False
        self._loop = loop
        self._listener: Listener | None = None
        self._assignment: tuple[bytes, int | None] | None = None
        self._child: list[int] = []
        self._own: list[int] = []
        self._control: socket.socket | None = None
        self._unsent = b""
        self._pending_message = b""
        self._stacks = b""
        self._readers: set[int] = set()
        self._was_signalled = False
        self._kills = 0
        self._is_limited = False
        self._output: RankOutput | None = None

    # -- the pool's side ---------------------------------------------------------------------------------------------

    def open(self) -> tuple[int, ...]:
        """Make pipes and socket; gives the rank's ends, in the order of `rank_main.Descriptors`.

        Raises:
            OSError: No more descriptors are to be had.
        """
        for size in (PIPE_BYTES, PIPE_BYTES, 0, 0):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self._own.append(reader)
            self._child.append(writer)
            os.set_blocking(reader, False)
            if size:
                # Beyond the user's share of pipe memory the usual 64 KiB have to do.
                with contextlib.suppress(PermissionError):
                    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
        self._control, theirs = socket.socketpair()
        self._control.settimeout(0)
        self._child.append(theirs.detach())
        return tuple(self._child)

    def close_child_side(self) -> None:
        """Close our copies of the rank's ends, once they are on their way."""
        for descriptor in self._child:
            os.close(descriptor)
        self._child.clear()

    def on_forked(self, pid: int) -> None:
        """The fork server has forked the rank: send it its assignment, if there is one already."""
        self.pid = pid
        if self.is_discarded:
            self.signal(signal.SIGKILL)
        elif self._assignment is not None:
            self._begin()

    def on_end(self, end: End) -> None:
        """The rank's process has ended, or there never was one."""
        if self._listener is not None and not self.is_discarded:
            if self._readers:
                for message in self._receive() or []:
                    self._take_message(message)
            tail: tuple[str, ...] = ()
            if self._output is not None:
                self._output.read_rest()
                tail = self._output.finish()
            # With a reason, it went with the process that forks ranks.
            was_killed = (end.signal == "SIGKILL" or end.reason) and not self._was_signalled
            if was_killed and usage.kills() > self._kills:
                end = dataclasses.replace(end, memory_limit=usage.limit_text())
            self._listener.ended(dataclasses.replace(end, tail=tail))
        self.close()

    def close(self) -> None:
        """Close our ends. A rank that is still a spare ends by this."""
        for descriptor in list(self._readers):
            self._forget(descriptor)
        if self._output is not None:
            self._output.close()
            self._output = None
        self.close_child_side()
        for descriptor in self._own:
            os.close(descriptor)
        self._own.clear()
        if self._control is not None:
            self._loop.remove_writer(self._control)
            self._control.close()
            self._control = None
        if self._assignment is not None and self._assignment[1] is not None:
            os.close(self._assignment[1])
            self._assignment = None

    # -- its owner's side --------------------------------------------------------------------------------------------

    def start(self, listener: Listener, assignment: Assignment, store: int | None, *, is_limited: bool = False) -> None:
        """Give the rank its assignment, as soon as it has a process.

        Args:
            listener: Gets its output and events.
            assignment: What it is to do.
            store: Descriptor by which the rank opens the ranks' store: what it listens on, or the file that it is; closed here once it is
                the rank's. None: it connects to rank 0's.
            is_limited: Whether its output is rate-limited.
        """
        self._listener = listener
        self._is_limited = is_limited
        self._assignment = (wire.encode_json(assignment), store)
        if self.pid:
            # Not at once: the caller is still starting others.
            self._loop.call_soon(self._begin)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the rank; one that was not forked yet never will be."""
        if not self.pid:
            if not self.is_discarded:
                self.is_discarded = True
                if self._listener is not None:
                    end = End(signal="SIGKILL", reason="the job ended before it was started")
                    self._loop.call_soon(self._listener.ended, end)
            return
        self._was_signalled = True
        processes.signal_group(self.pid, number)
        if number == signal.SIGTERM:
            # A stopped process gets no other signal before it continues.
            processes.signal_group(self.pid, signal.SIGCONT)

    def ask_stacks(self) -> None:
        """Ask for the stacks; the listener has the answer `ANSWER_S` later."""
        self._stacks = b""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
        self._loop.call_later(ANSWER_S, self._answer)

    def _answer(self) -> None:
        if self._listener is not None and self._readers:
            self._listener.stacks(self._stacks, processes.cpu_ticks(self.pid))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Hand over the assignment and begin to read."""
        if self._assignment is None or self._control is None or self._listener is None:
            return
        (data, store), self._assignment = self._assignment, None
        self._kills = usage.kills()
        sent = 0
        # A rank that has just been killed does not take it; its end follows.
        with contextlib.suppress(OSError):
            sent = socket.send_fds(self._control, [data], [store] if store is not None else [])
        if store is not None:
            # From here a port belongs to rank 0 alone: with it, it closes.
            os.close(store)
        stdout, stderr, events, stacks = self._own
        pipes = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self._output = RankOutput(self._loop, pipes, events, self._listener, is_limited=self._is_limited)
        self._read(stacks, lambda: self._read_stacks(stacks))
        self._read(self._control.fileno(), self._read_control)
        if sent:
            self.send(data[sent:])
        self._listener.forked(self.pid)

    def send(self, line: bytes) -> None:
        """Send the rank a message, or the rest of one, without ever waiting for it."""
        self._unsent += line
        if self._control is None:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[self._control.send(self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self._control, lambda: self.send(b""))
            return
        except OSError:
            self._unsent = b""
        self._loop.remove_writer(self._control)

    def _read(self, descriptor: int, call: Callable[[], None]) -> None:
        self._readers.add(descriptor)
        self._loop.add_reader(descriptor, call)

    def _forget(self, descriptor: int) -> None:
        self._readers.discard(descriptor)
        self._loop.remove_reader(descriptor)

    def _read_stacks(self, descriptor: int) -> None:
        data = read_some(descriptor)
        if data is None:
            self._forget(descriptor)
        else:
            self._stacks += data

    def _read_control(self) -> None:
        received = self._receive()
        if received is None and self._control is not None:
            self._forget(self._control.fileno())
        for message in received or []:
            self._take_message(message)

    def _receive(self) -> list[FromRank] | None:
        """The messages that have come from the rank; None at the end."""
        try:
            data = self._control.recv(1 << 16) if self._control is not None else b""
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        whole, _, self._pending_message = (self._pending_message + data).rpartition(b"\n")
        return list(messages.read(whole))

    def _take_message(self, message: FromRank) -> None:
        if isinstance(message, Done | Breakpoint | PassedOver | Answer) and self._output is not None:
            # Everything the rank has sent before is in the pipes already; the order in the files shall be the same.
            self._output.read_rest()
            if isinstance(message, Answer):
                self._output.end_lines()
        if self._listener is not None:
            self._listener.message(message)
