"""The agent's end of one rank: its pipes, its control socket, its process group."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kale_dist import contract
from kale_dist.runtime import processes

if TYPE_CHECKING:
    from kale_dist.runtime.fork_pool import End

PIPE_BYTES = 1 << 18
"""Room in each pipe, so that a rank seldom waits for the agent."""

READ_BYTES = 1 << 18

MAX_LAST_READ_BYTES = 4 << 20
"""How much is read of a pipe once its rank has ended: a process it left behind could write for ever."""

SEND_LIMIT_S = 10.0


class RankProcess:
    """A rank that is to be forked, runs, or has ended.

    Raises:
        OSError: No more descriptors are to be had.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.on_forked: Callable[[], None] | None = None
        self.on_end: Callable[[End], None] | None = None
        self._child: list[int] = []
        self._own: list[int] = []
        try:
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
            self._child.append(theirs.detach())
        except OSError:
            for descriptor in self._own + self._child:
                os.close(descriptor)
            raise
        self._control.settimeout(SEND_LIMIT_S)
        self._pending = b""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The rank's ends, in the order of `worker.Descriptors`."""
        return tuple(self._child)

    @property
    def stdout(self) -> int:
        """Where the rank's standard output is read."""
        return self._own[0]

    @property
    def stderr(self) -> int:
        """Where its standard error is read."""
        return self._own[1]

    @property
    def events(self) -> int:
        """Where its events are read."""
        return self._own[2]

    @property
    def stacks(self) -> int:
        """Where its stacks are read."""
        return self._own[3]

    @property
    def control(self) -> int:
        """The control socket's descriptor."""
        return self._control.fileno()

    def close_child_side(self) -> None:
        """Close our copies of the rank's ends, once they are on their way."""
        for descriptor in self._child:
            os.close(descriptor)
        self._child.clear()

    def assign(self, assignment: dict[str, Any], listener: int | None) -> None:
        """Give the rank its work.

        Args:
            assignment: As `worker` reads it.
            listener: The descriptor that rank 0's store listens on.

        Raises:
            OSError: The rank does not take it.
        """
        data = contract.encode_record(assignment)
        sent = socket.send_fds(self._control, [data], [] if listener is None else [listener])
        self._control.sendall(memoryview(data)[sent:])
        self._control.settimeout(0)

    def receive(self) -> list[dict[str, Any]] | None:
        """What the rank has said; None at the end."""
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        whole, _, self._pending = (self._pending + data).rpartition(b"\n")
        return list(contract.decode_records(whole))

    def let_go(self) -> None:
        """Tell a rank that is done to end."""
        with contextlib.suppress(OSError):
            self._control.send(b"g")

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the rank."""
        if self.pid:
            processes.signal_group(self.pid, number)

    def signal_leader(self, number: int) -> None:
        """Send a signal to the rank itself, not to its children."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close our ends. A rank that is still a spare ends by this."""
        self.close_child_side()
        for descriptor in self._own:
            os.close(descriptor)
        self._own.clear()
        self._control.close()


def read_some(descriptor: int) -> bytes | None:
    """What a non-blocking pipe has; empty for nothing now, None at its end."""
    try:
        return os.read(descriptor, READ_BYTES) or None
    except BlockingIOError:
        return b""


def read_rest(descriptor: int) -> bytes:
    """What is in the pipe of a rank that has ended."""
    parts: list[bytes] = []
    size = 0
    while size < MAX_LAST_READ_BYTES and (data := read_some(descriptor)):
        parts.append(data)
        size += len(data)
    return b"".join(parts)
