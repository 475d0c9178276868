"""The agent's side of the forkserver: starts it, keeps two ranks forked ahead, and reports each rank's end."""

from __future__ import annotations

import asyncio
import collections
import signal
import socket
from typing import Any

from kale_dist import wire
from kale_dist.worker.agent import forkserver_launch, processes
from kale_dist.worker.agent.near_rank import End, NearRank

SPARES = 2
"""Ranks forked ahead of the next job."""

REFILL_AFTER_S = 0.3
"""New spares wait until a job that has just begun is under way: forking beside it would slow its start."""

LEFTOVER_GRACE_S = 0.3
"""What is left of a rank's process group has this long after SIGTERM: trackers of shared memory clean up in it."""

_LOOK_EACH_S = 0.05

MOST_ASKED = 16
"""Ranks that are being forked at once. Descriptors on their way count against the user's limit."""


class ForkPool:
    """Ranks on demand.

    It never waits for the forkserver, nor the forkserver for it: what cannot be sent now is kept by its sender.

    Args:
        loop: The agent's loop.
        spares: How many ranks are forked ahead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, spares: int = SPARES) -> None:
        self.wanted_spares = spares
        """How many ranks `refill` forks ahead; it may be changed."""
        self.packages: tuple[str, ...] = ()
        """Blobs of the packages of a job that the forkserver has imported in place of the image's."""
        self.pid = 0
        """Process id of the forkserver; 0 while there is none."""
        self._loop = loop
        self._socket: socket.socket | None = None
        self._numbers = 0
        self._waiting: collections.deque[NearRank] = collections.deque()
        """Ranks that are not asked for yet."""
        self._asked: dict[int, NearRank] = {}
        self._live: dict[int, NearRank] = {}
        self._spares: list[NearRank] = []
        self._unsent: collections.deque[bytes] = collections.deque()
        self._reaping: dict[int, asyncio.TimerHandle] = {}
        self._refill: asyncio.TimerHandle | None = None
        self._broken = ""

    @property
    def is_clearing(self) -> bool:
        """Whether processes that ranks have left behind are still being ended."""
        return bool(self._reaping)

    async def warm(self) -> None:
        """Wait until a spare is forked, for which torch has to be imported, or until it is known that it cannot be."""
        self._order_spares()
        first = next(iter(self._spares), None)
        while first is not None and not first.pid and first in self._spares:  # noqa: ASYNC110 - it takes seconds, once
            await asyncio.sleep(_LOOK_EACH_S)

    def start(self) -> None:
        """Start the forkserver if there is none, and order spares."""
        if self._socket is not None:
            return
        self.adopt(*forkserver_launch.launch())

    def adopt(self, ours: socket.socket, pid: int) -> None:
        """Work with a forkserver that was launched already, and order spares."""
        self._broken = ""
        self._socket, self.pid = ours, pid
        ours.settimeout(0)
        self._loop.add_reader(ours, self._read)
        self.refill()

    def restart(self, packages: tuple[str, ...], environment: dict[str, str]) -> None:
        """Start the forkserver again. No rank may be at work.

        Args:
            packages: What it will import of a job's packages.
            environment: The variables that it gets.
        """
        self._lost_server()
        self.packages = packages
        self.adopt(*forkserver_launch.launch(environment))

    def take(self) -> NearRank:
        """A rank, forked ahead or asked for now."""
        self.start()
        if self._spares:
            return self._spares.pop(0)
        rank = NearRank(self._loop)
        self._waiting.append(rank)
        self._flush()
        return rank

    def refill(self, delay_s: float = 0.0) -> None:
        """Order what is missing of the spares, after a while."""
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.call_later(delay_s, self._order_spares)

    def close(self) -> None:
        """End the forkserver and with it every rank; does not wait."""
        if self._refill is not None:
            self._refill.cancel()
        for rank in self._disconnect():
            rank.close()

    def _order_spares(self) -> None:
        self._refill = None
        while self._socket is not None and len(self._spares) < self.wanted_spares:
            rank = NearRank(self._loop)
            self._spares.append(rank)
            self._waiting.append(rank)
        self._flush()

    def _flush(self) -> None:
        """Send what can be sent without waiting."""
        if self._socket is None:
            return
        try:
            while self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()
            while self._waiting and len(self._asked) < MOST_ASKED:
                self._ask(self._socket, self._waiting[0])
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            # It has just ended: its last words, which are read next, decide what becomes of its ranks.
            pass
        self._loop.remove_writer(self._socket)

    def _ask(self, server: socket.socket, rank: NearRank) -> None:
        number = self._numbers + 1
        if rank.is_discarded:
            self._waiting.popleft()
            rank.close()
            return
        try:
            descriptors = rank.open()
        except OSError as error:
            self._waiting.popleft()
            self._drop(rank, End(reason=f"no process for it: {error}"))
            return
        try:
            socket.send_fds(server, [wire.encode_json({"fork": number})], list(descriptors))
        except OSError:
            rank.close()
            raise
        self._numbers = number
        self._waiting.popleft()
        self._asked[number] = rank
        rank.close_child_side()

    def _read(self) -> None:
        try:
            data = self._socket.recv(forkserver_launch.MAX_MESSAGE_BYTES) if self._socket is not None else b""
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._lost_server()
        for message in wire.decode_json_lines(data):
            self._handle(message)
        self._flush()

    def _handle(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            rank = self._asked.pop(message["forked"])
            self._live[message["pid"]] = rank
            rank.on_forked(message["pid"])
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

    def _drop(self, rank: NearRank, end: End) -> None:
        if rank in self._spares:
            self._spares.remove(rank)
            # Without a delay, spares would be replaced in a fast loop if the cause of their deaths persists.
            self.refill(delay_s=5.0)
        rank.on_end(end)

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
        self._unsent.append(wire.encode_json({"reap": pid}))
        self._flush()

    def _disconnect(self) -> list[NearRank]:
        """Do without the forkserver; gives the ranks that there were, which are killed."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._socket, self.pid = None, 0
        self._unsent.clear()
        ranks = [*self._live.values(), *self._asked.values(), *self._waiting]
        self._live.clear()
        self._asked.clear()
        self._waiting.clear()
        for rank in ranks:
            if rank.pid:
                processes.signal_group(rank.pid, signal.SIGKILL)
        return ranks

    def _lost_server(self) -> None:
        """The forkserver has ended, and the kernel has killed its ranks."""
        ranks = self._disconnect()
        # The next forkserver does not know these.
        for pid, timer in self._reaping.items():
            timer.cancel()
            processes.signal_group(pid, signal.SIGKILL)
        self._reaping.clear()
        reason = self._broken or "the process that forks ranks was killed"
        self._spares.clear()
        for rank in ranks:
            self._drop(rank, End(signal="SIGKILL" if rank.pid else None, reason=reason))
