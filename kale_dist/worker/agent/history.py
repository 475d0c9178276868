"""Keeps what the ranks of a job use and wait for over its whole life: a moment now and then, with ever longer distances."""

from __future__ import annotations

import dataclasses

from kale_dist.wire import HISTORY, Moment
from kale_dist.wire.events import RankProgress, Usage
from kale_dist.worker.agent.bottlenecks import Bottlenecks, Spent, number
from kale_dist.worker.agent.usage import EACH_S

SHARE = 40
"""The distance of two moments is at least the job's time so far over this: a day has 350 of them, a year 590."""

_WHOLE_RANKS = 64
"""Jobs of more ranks have fewer moments, so that their history has as many numbers."""

_GIB = 1 << 30


@dataclasses.dataclass(slots=True)
class _Rank:
    """One rank, as far as it is known since the last moment."""

    memory_bytes: float | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: float | None = None
    """The last values of these three that the rank has sent: it sends none while nothing changes."""
    most_bytes: float | None = None
    most_gpu_bytes: float | None = None
    """The most memory, and memory of the GPU, at any look."""
    busy: float = 0.0
    """Per cent, added up over all looks that had them."""
    looks: int = 0
    before: Spent | None = None
    """The rank's counters at the last moment, at first those that it sent first."""
    spent: Spent | None = None
    """The rank's counters now; None where it trains nothing."""
    counted: tuple[float, int] = (0.0, 0)
    """`busy` and `looks` at the last moment."""

    def look(self) -> None:
        """Count the usage of now."""
        self.most_bytes = _larger(self.most_bytes, self.memory_bytes)
        self.most_gpu_bytes = _larger(self.most_gpu_bytes, self.gpu_memory_bytes)
        if self.gpu_percent is not None:
            self.busy, self.looks = self.busy + self.gpu_percent, self.looks + 1

    def values(self) -> tuple[float | None, ...]:
        """The values of `HISTORY` since the last moment; the next ones count from now."""
        share = None if self.spent is None or self.before is None else self.spent.since(self.before)
        busy, looks = self.busy - self.counted[0], self.looks - self.counted[1]
        found = (
            _rounded(self.most_bytes, 1 / _GIB, 3),
            round(busy / looks, 1) if looks else None,
            _rounded(self.most_gpu_bytes, 1 / _GIB, 3),
            None if share is None else _rounded(share.data, 100),
            None if share is None else _rounded(share.exchange, 100),
            None if share is None else _rounded(share.samples, 1 / share.seconds),
        )
        self.most_bytes = self.most_gpu_bytes = None
        self.counted, self.before = (self.busy, self.looks), self.spent
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

    def forget(self, rank: int) -> None:
        """A rank is lost, and the others carry on."""
        self._ranks[rank] = _Rank()
        self._bottlenecks.forget(rank)

    def take_usage(self, rank: int, usage: Usage) -> None:
        """Note what a rank uses."""
        one = self._ranks[rank]
        for name in ("memory_bytes", "gpu_percent", "gpu_memory_bytes"):
            setattr(one, name, number(getattr(usage, name)))

    def take_progress(self, rank: int, progress: RankProgress) -> None:
        """Note how far a rank is."""
        one = self._ranks[rank]
        if (spent := Spent.of(progress, one.busy, one.looks)) is not None:
            one.before, one.spent = one.before or spent, spent
            self._bottlenecks.take(rank, spent)

    def moment(self, now: float, *, is_last: bool = False) -> Moment | None:
        """Look at all ranks, and return a moment if one is due.

        Args:
            now: The time, of any clock that only grows, in seconds.
            is_last: Whether the attempt has ended; then one is due, whenever the last one was.
        """
        for rank in self._ranks:
            rank.look()
        # Nothing is known before the ranks have processes.
        if (now < self._due_at and not is_last) or all(rank.most_bytes is None for rank in self._ranks):
            return None
        self._began_at = now if self._began_at is None else self._began_at
        wide = max(1.0, len(self._ranks) / _WHOLE_RANKS)
        self._due_at = now + wide * max(EACH_S, (now - self._began_at) / SHARE)
        values = zip(HISTORY, zip(*(rank.values() for rank in self._ranks), strict=True), strict=True)
        return Moment(values=tuple((name, each) for name, each in values if any(value is not None for value in each)))

    def bottleneck(self) -> str:
        """A sentence on what has held the training up for a minute, once for each cause; else empty."""
        return self._bottlenecks.sentence()


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _rounded(value: float | None, factor: float, digits: int = 1) -> float | None:
    return None if value is None else round(value * factor, digits)
