"""The agent's side of the forkserver: starts it, keeps two ranks forked ahead, tells each rank's owner of its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from kale_dist import contract
from kale_dist.runtime import forkserver, processes
from kale_dist.runtime.loop import Loop, Timer
from kale_dist.runtime.rank_process import RankProcess

SPARES = 2
"""Ranks forked ahead of the next job."""

REFILL_AFTER_S = 0.3
"""New spares wait until a job that has just begun is under way: forking beside it would slow its start."""

LEFTOVER_GRACE_S = 0.3
"""What is left of a rank's process group has this long after SIGTERM: trackers of shared memory clean up in it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a rank's process ended."""

    exit_code: int | None = None
    signal: str | None = None
    reason: str = ""
    """Why it never was, or why it went with its forkserver; empty for an end of its own."""
    memory_limit: str = ""
    """What ran out, where the kernel killed it for want of memory: `memory.limit_text`."""


class ForkPool:
    """Ranks on demand.

    Args:
        loop: The agent's loop.
        spares: How many ranks are forked ahead.
    """

    def __init__(self, loop: Loop, spares: int = SPARES) -> None:
        self.wanted_spares = spares
        """How many ranks `refill` forks ahead; it may be changed."""
        self._loop = loop
        self._socket: socket.socket | None = None
        self._numbers = 0
        self._asked: dict[int, RankProcess] = {}
        self._live: dict[int, RankProcess] = {}
        self._spares: list[RankProcess] = []
        self._reaping: dict[int, Timer] = {}
        self._refill: Timer | None = None
        self._broken = ""
        self.pid = 0
        """Process id of the forkserver; 0 while there is none."""

    def start(self) -> None:
        """Start the forkserver if there is none, and order spares."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.set_inheritable(True)
        command = [
            *(sys.executable, "-P", "-m", "kale_dist.runtime", "forkserver"),
            *("--connection", str(theirs.fileno()), "--agent-pid", str(os.getpid())),
        ]
        self._broken = ""
        self.pid = os.posix_spawn(sys.executable, command, forkserver.environment(dict(os.environ)))
        theirs.close()
        self._socket = ours
        self._loop.when_readable(ours.fileno(), self._read)
        self.refill()

    def take(self, on_forked: Callable[[], None], on_end: Callable[[End], None]) -> RankProcess:
        """A rank, forked ahead or asked for now.

        Args:
            on_forked: Called when it has a process id; before this method returns if it was forked ahead.
            on_end: Called when it has ended, or could not be forked.

        Raises:
            OSError: No more descriptors are to be had.
        """
        self.start()
        rank = self._spares.pop(0) if self._spares else self._ask()
        rank.on_forked, rank.on_end = on_forked, on_end
        if rank.pid:
            on_forked()
        return rank

    def discard(self, rank: RankProcess) -> None:
        """Take back a wish for a rank that has not been forked yet: it is ended as soon as it is there."""
        rank.on_forked = lambda: rank.signal_group(signal.SIGKILL)
        rank.on_end = None

    def refill(self, delay_s: float = 0.0) -> None:
        """Order what is missing of the spares, after a while."""
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.call_later(delay_s, self._order_spares)

    def close(self) -> None:
        """End the forkserver and with it every rank; does not wait."""
        if self._refill is not None:
            self._refill.cancel()
        for rank in [*self._live.values(), *self._asked.values()]:
            if rank.pid:
                processes.signal_group(rank.pid, signal.SIGKILL)
            rank.close()
        self._live.clear()
        self._asked.clear()
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _order_spares(self) -> None:
        self._refill = None
        while self._socket is not None and len(self._spares) < self.wanted_spares:
            try:
                self._spares.append(self._ask())
            except OSError:
                return

    def _ask(self) -> RankProcess:
        self._numbers += 1
        rank = RankProcess()
        number = self._numbers
        try:
            if self._socket is not None:
                socket.send_fds(self._socket, [contract.encode_record({"fork": number})], list(rank.descriptors))
        except OSError as error:
            # It has just ended: its last words, which follow in the loop, decide what becomes of this rank.
            if not isinstance(error, BrokenPipeError | ConnectionResetError):
                rank.close()
                raise
        self._asked[number] = rank
        rank.close_child_side()
        return rank

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(forkserver.MAX_MESSAGE_BYTES) if self._socket is not None else b""
        if not data:
            self._lost_server()
        for message in contract.decode_records(data):
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            rank = self._asked.pop(message["forked"])
            rank.pid = message["pid"]
            self._live[rank.pid] = rank
            if rank.on_forked is not None:
                rank.on_forked()
        elif "refused" in message:
            self._drop(self._asked.pop(message["refused"]), End(reason=f"no process for it: {message['error']}"))
        elif "ended" in message:
            pid, status = message["ended"], message["status"]
            rank = self._live.pop(pid)
            self._clear_group(pid)
            if message["by_signal"]:
                self._drop(rank, End(signal=processes.signal_name(status)))
            else:
                self._drop(rank, End(exit_code=status))
        elif "broken" in message:
            self._broken = message["broken"]

    def _drop(self, rank: RankProcess, end: End) -> None:
        if rank in self._spares:
            self._spares.remove(rank)
            # A spare that dies by itself would be replaced for ever if whatever killed it stays.
            self.refill(delay_s=5.0)
        if rank.on_end is not None:
            rank.on_end(end)
        rank.close()

    def _clear_group(self, pid: int) -> None:
        """End what is left of a rank's process group, then let the forkserver reap its leader."""
        members = processes.live_members(pid)
        if not members:
            self._reap(pid)
            return
        processes.signal_group(pid, signal.SIGTERM)

        def finish() -> None:
            processes.signal_group(pid, signal.SIGKILL)
            self._reap(pid)
            processes.remove_shared_memory(members)

        self._reaping[pid] = self._loop.call_later(LEFTOVER_GRACE_S, finish)

    def _reap(self, pid: int) -> None:
        self._reaping.pop(pid, None)
        processes.remove_shared_memory([pid])
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(contract.encode_record({"reap": pid}))

    @property
    def is_clearing(self) -> bool:
        """Whether processes that ranks have left behind are still being ended."""
        return bool(self._reaping)

    def _lost_server(self) -> None:
        """The forkserver has ended, and the kernel has killed its ranks."""
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
        self._socket, self.pid = None, 0
        # The next forkserver has never heard of these.
        for pid, timer in self._reaping.items():
            timer.cancel()
            processes.signal_group(pid, signal.SIGKILL)
        self._reaping.clear()
        reason = self._broken or "the process that forks ranks was killed"
        ranks = [*self._live.values(), *self._asked.values()]
        self._live.clear()
        self._asked.clear()
        self._spares.clear()
        for rank in ranks:
            if rank.pid:
                processes.signal_group(rank.pid, signal.SIGKILL)
            self._drop(rank, End(signal="SIGKILL" if rank.pid else None, reason=reason))
