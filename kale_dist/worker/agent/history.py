"""What the ranks of a job use and wait for over its whole life: a moment now and then, each later than the one before."""

from __future__ import annotations

import dataclasses
from typing import Any

from kale_dist.wire import HISTORY
from kale_dist.worker.agent.bottlenecks import Bottlenecks, Spent

SOONEST_S = 2.0
"""At most so often: the ranks' use is looked at no more often, either."""

SHARE = 40
"""The distance of two moments is at least the job's time so far over this: a day has 350 of them, a year 590."""

_WHOLE_RANKS = 64
"""Jobs of more ranks have fewer moments, so that their history has as many numbers."""

_GIB = 1 << 30


@dataclasses.dataclass(slots=True)
class _Rank:
    """What is known of one rank since the last moment."""

    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last one that it has sent: it sends none while nothing changes."""
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    """The most of both at any look."""
    gpu_percent: int = 0
    """Added up over the looks that have one."""
    gpu_looks: int = 0
    before: Spent | None = None
    """Its counters at the last moment, at first those that it sent first."""
    spent: Spent | None = None
    """Its counters now; None in a rank that trains nothing."""

    def look(self) -> None:
        """Count the usage of now."""
        self.memory_bytes = _larger(self.memory_bytes, self.usage.get("memory_bytes"))
        self.gpu_memory_bytes = _larger(self.gpu_memory_bytes, self.usage.get("gpu_memory_bytes"))
        if (percent := self.usage.get("gpu_percent")) is not None:
            self.gpu_percent, self.gpu_looks = self.gpu_percent + percent, self.gpu_looks + 1

    def values(self) -> tuple[float | None, ...]:
        """The values of `HISTORY` since the last moment; the next ones count from now."""
        share = None if self.spent is None or self.before is None else self.spent.since(self.before)
        size = None if self.spent is None else self.spent.batch_samples
        percent = round(self.gpu_percent / self.gpu_looks, 1) if self.gpu_looks else None
        found = (
            _gib(self.memory_bytes), percent, _gib(self.gpu_memory_bytes),
            None if share is None else round(100 * share.data, 1),
            None if share is None or share.exchange is None else round(100 * share.exchange, 1),
            None if share is None or size is None else round(size * share.batches / share.seconds, 1),
        )  # fmt: skip
        self.memory_bytes = self.gpu_memory_bytes = None
        self.gpu_percent = self.gpu_looks = 0
        self.before = self.spent
        return found


class History:
    """Collects what ranks send, and gives the moments of a job, and sentences on what holds its training up."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._due_at = 0.0
        self._ranks: list[_Rank] = []
        self._bottlenecks = Bottlenecks()

    def begin_attempt(self, world_size: int) -> None:
        """Other processes begin, whose counters begin at 0."""
        self._ranks = [_Rank() for _ in range(world_size)]
        self._bottlenecks.begin_attempt()

    def take_usage(self, usage: dict[str, Any]) -> None:
        """Note the fields of an event of kind usage."""
        if (rank := self._rank(usage)) is not None:
            rank.usage = usage

    def take_progress(self, progress: dict[str, Any]) -> None:
        """Note an event of kind progress."""
        if (rank := self._rank(progress)) is not None and (spent := Spent.of(progress, rank.spent)) is not None:
            rank.before, rank.spent = rank.before or spent, spent
            self._bottlenecks.take(progress["rank"], spent)

    def _rank(self, event: dict[str, Any]) -> _Rank | None:
        rank = event.get("rank")
        return self._ranks[rank] if isinstance(rank, int) and 0 <= rank < len(self._ranks) else None

    def moment(self, now: float, *, is_last: bool = False) -> dict[str, Any] | None:
        """Look at all ranks, and return the fields of a `history` event if one is due.

        Args:
            now: The time, of any clock that only grows, in seconds.
            is_last: Whether the attempt has ended; then one is due, whenever the last one was.
        """
        for rank in self._ranks:
            rank.look()
        # Nothing is known before the ranks have processes.
        if (now < self._due_at and not is_last) or not any(rank.usage for rank in self._ranks):
            return None
        self._began_at = now if self._began_at is None else self._began_at
        wide = max(1.0, len(self._ranks) / _WHOLE_RANKS)
        self._due_at = now + wide * max(SOONEST_S, (now - self._began_at) / SHARE)
        values = zip(HISTORY, zip(*(rank.values() for rank in self._ranks), strict=True), strict=True)
        known = {name: each for name, each in values if any(value is not None for value in each)}
        first = self._ranks[0].spent
        return {"step": None if first is None else first.batches, **known}

    def bottleneck(self) -> str:
        """What has held the training up for a minute, as a sentence, once for each cause; else empty."""
        return self._bottlenecks.sentence()


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _gib(amount: int | None) -> float | None:
    return None if amount is None else round(amount / _GIB, 3)
