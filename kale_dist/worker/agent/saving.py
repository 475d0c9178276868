"""Has the ranks of an attempt save, before something is done that ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.agent.writer import JobWriter


class Saving:
    """Which ranks of an attempt can save, which have, and what waits for that.

    Args:
        ranks: All of the attempt.
        loop: The agent's.
        writer: The job's files.
    """

    def __init__(self, ranks: Sequence[Rank], loop: asyncio.AbstractEventLoop, writer: JobWriter) -> None:
        self.can_resume = False
        """Whether the ranks write a checkpoint when they are asked to, from which the job resumes by itself."""
        self._ranks = ranks
        self._loop = loop
        self._writer = writer
        self._savers: set[int] = set()
        self._asked: set[int] = set()
        """Those that were asked to and have not answered."""
        self._saved: set[int] = set()
        """Those that have saved since they were last asked to."""
        self.leavers: set[int] = set()
        """Those that were asked to save because they are ended then: they may end by an exit code."""
        self._waiting: list[Callable[[], None]] = []

    @property
    def has_saved(self) -> bool:
        """Whether a rank has saved since they were last asked to."""
        return bool(self._saved)

    @property
    def have_all_saved(self) -> bool:
        """Whether none is left that has not saved. Of `distribute`, rank 0 says so for all."""
        left = {rank.rank for rank in self._ranks if rank.done is None and rank.end is None}
        return self.has_saved and (self.can_resume or left <= self._saved)

    def first(self, then: Callable[[], None], limit_s: float, *, are_leaving: bool, is_decided: bool) -> None:
        """Have the ranks save that can, and call a function once all of them have; arguments as for `RunningAttempt.save_first`."""
        self._saved.clear()
        # A rank at a breakpoint would save only when it has left it.
        if not self._savers or is_decided or any(rank.prompt for rank in self._ranks):
            then()
            return
        self._waiting.append(then)
        self.leavers |= self._savers if are_leaving else set()
        for rank in self._savers:
            self._ask(rank)
        self._loop.call_later(limit_s, self._give_up, then)

    def note(self, rank: int, *, can: bool, has_saved: bool = False) -> None:
        """A rank can save, or has, or cannot any more."""
        if can and rank not in self._savers:
            self._savers.add(rank)
            if self._waiting:
                # It has begun only now.
                self.leavers |= {rank} if self.leavers else set()
                self._ask(rank)
        elif not can:
            self._savers.discard(rank)
        if has_saved:
            self._saved.add(rank)
        if rank in self._asked and (has_saved or not can):
            self._asked.remove(rank)
            if not self._asked:
                self.go_on()

    def go_on(self) -> None:
        """Do what waits for a checkpoint."""
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _ask(self, rank: int) -> None:
        self._asked.add(rank)
        self._ranks[rank].ask_to_save()

    def _give_up(self, then: Callable[[], None]) -> None:
        if then in self._waiting:
            self._writer.log("The ranks have not saved in time after they were asked to")
            self._waiting.remove(then)
            then()
