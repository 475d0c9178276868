"""The ranks of one agent in one attempt of a job: their start and their ends, whoever judges the job."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Callable
from typing import Any

from kale_dist.blobs import FolderStore
from kale_dist.contract import JobFiles, JobOrder
from kale_dist.runtime import ending, loading, memory
from kale_dist.runtime.fork_pool import REFILL_AFTER_S, ForkPool
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.loop import Loop
from kale_dist.runtime.rank_run import RankRun
from kale_dist.runtime.usage_watch import UsageWatch


class LocalRanks:
    """Starts ranks, records how they end and what they use, and tells of every change.

    Args:
        order: The job, with the attempt.
        loop: The agent's loop.
        pool: Where ranks come from.
        writer: The job's files.
        on_change: Called when a rank's `state`, `done`, `end` or `is_gone` has changed.
        on_move: Called with a rank at each sign of progress, with the event or None for a line of output.
        on_refusal: Called with a sentence when a rank does not take its work.
        on_all_forked: Called once all ranks have a process and their work.
        ship: Called with a rank that is done, to bring its outcome away; gives whether that takes time. The rank
            counts as gone after `shipped`. None: nothing is brought anywhere.
    """

    def __init__(
        self,
        order: JobOrder,
        loop: Loop,
        pool: ForkPool,
        writer: JobWriter,
        *,
        on_change: Callable[[RankRun], None],
        on_move: Callable[[RankRun, dict[str, Any] | None], None],
        on_refusal: Callable[[str], None],
        on_all_forked: Callable[[], None],
        ship: Callable[[RankRun], bool] | None = None,
    ) -> None:
        self._order = order
        self._pool = pool
        self._on_change = on_change
        self._on_refusal = on_refusal
        self._on_all_forked = on_all_forked
        self._ship = ship
        self._files = JobFiles(order.folder)
        self._port = order.master_port
        self._seed = 0
        self._listener: socket.socket | None = None
        self._is_ending = False
        self._failed: set[int] = set()
        self._kills = memory.kills()
        first = order.first_rank
        self.ranks = [
            RankRun(
                rank,
                order.attempt,
                loop,
                writer,
                self._changed,
                lambda event, rank=rank: on_move(self.by_number(rank), event),  # type: ignore[misc]
            )
            for rank in range(first, first + order.local_world_size)
        ]
        self._usage = UsageWatch(order, self.ranks, loop, writer)

    def by_number(self, rank: int) -> RankRun:
        """The rank of this number among all ranks of the job."""
        return self.ranks[rank - self._order.first_rank]

    def listen(self) -> int:
        """Open the port of rank 0's store, if rank 0 is here, so that no rank ever finds it closed.

        Returns:
            The port; the order's own if rank 0 is somewhere else.

        Raises:
            OSError: The port is taken. In an attempt after the first another one is opened instead.
        """
        if not self._order.first_rank:
            backlog = max(128, self._order.world_size)
            address = "" if self._port else self._order.master_addr
            try:
                self._listener = open_port(address, self._port, backlog)
            except OSError:
                # A process that the lost rank has left behind may hold it.
                if not self._order.attempt:
                    raise
                self._listener = open_port(address, 0, backlog)
            self._listener.settimeout(0)
            self._port = self._listener.getsockname()[1]
        return self._port

    def start(self, seed: int) -> None:
        """Start the ranks; `listen` has to come before.

        Args:
            seed: That of the job's rank 0.

        Raises:
            OSError: A process is not to be had.
            KaleDistError: The snapshot is damaged, or does not fit this Python and torch.
        """
        self._seed = seed
        store = FolderStore(pathlib.Path(self._order.store))
        loading.stage_modules(store, self._order.snapshot, self._files.modules)
        self._usage.start()
        for rank in self.ranks:
            if self._is_ending:
                break
            rank.start(self._pool, self._assign)

    def end(self) -> None:
        """Nothing is to be started any more."""
        self._is_ending = True

    def shipped(self, rank: RankRun) -> None:
        """The rank's outcome is where it is wanted."""
        rank.is_held = False
        if rank.end is not None:
            self._on_change(rank)

    def close(self) -> None:
        """No rank is left: look at them no more, and close the port of rank 0's store if rank 0 has not taken it over."""
        self._usage.stop()
        self._close_port()

    def _close_port(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _assign(self, rank: RankRun) -> None:
        if self._is_ending:
            rank.kill()
            return
        assignment = {"order": self._order.to_json(), "rank": rank.rank, "port": self._port, "seed": self._seed}
        listener = self._listener.fileno() if self._listener is not None and rank.rank == 0 else None
        try:
            rank.assign(assignment, listener)
        except OSError as error:
            self._on_refusal(f"Rank {rank.rank} did not take its assignment: {error}")
            return
        if listener is not None:
            # From here the port belongs to rank 0 alone: with it, it closes.
            self._close_port()
        if all(other.pid for other in self.ranks):
            self._pool.refill(REFILL_AFTER_S)
            self._on_all_forked()

    def _changed(self, rank: RankRun) -> None:
        if rank.done is not None and rank.end is None and self._ship is not None:
            rank.is_held = self._ship(rank)
        if rank.end is not None:
            self._explain_kill(rank)
            rank.record_end(ending.rank_state(rank, stopped=self._is_ending and rank.rank not in self._failed))
        if (rank.done is not None and not rank.done["ok"]) or (rank.end is not None and not self._is_ending):
            self._failed.add(rank.rank)
        self._on_change(rank)

    def _explain_kill(self, rank: RankRun) -> None:
        if rank.end is not None and rank.end.signal == "SIGKILL" and not rank.end.reason and not self._is_ending:
            kills = memory.kills()
            if kills > self._kills:
                self._kills = kills
                rank.end = dataclasses.replace(rank.end, memory_limit=memory.limit_text())


def open_port(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket.

    Args:
        host: Address to listen on; empty for all, of both IP versions.
        port: Port; 0 for any that is free.
        backlog: Connections that may wait.

    Raises:
        OSError: The port is taken.
    """
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
