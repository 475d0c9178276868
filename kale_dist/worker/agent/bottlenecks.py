"""Finds what holds a training up, from where the time of its ranks goes.

Ranks that exchange gradients in each step wait there for the slowest. So the rank that waits least is the slowest, and where its
own time goes is the cause.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Self

from kale_dist.wire import fields_of
from kale_dist.wire.events import Counters, RankProgress

HALF_S = 30.0
"""A cause is named that holds for two such times one after the other."""

DATA, CHECKPOINTS, SLOWEST, EXCHANGE = 0.2, 0.05, 0.2, 0.4
"""From which share of the time on waiting for data, checkpoints, waiting for the slowest rank, and the exchange are named."""

_BUSY_PERCENT = 70
"""A GPU that is busier than that does not wait for the data that its process loads meanwhile."""

_LATENCY_S = 0.005
"""An exchange that takes less than that is a matter of messages, not of bytes: larger batches have fewer of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """Where the time of one rank went between two events, as shares from 0 to 1."""

    seconds: float
    """From one event to the other."""
    data: float
    exchange: float | None
    """None where it is not known, as on GPUs."""
    checkpoints: float
    batches: float
    """Batches and samples that were trained on; None of samples that another rank counts."""
    samples: float | None
    gpu_percent: float | None
    """How busy the GPU was, as a mean; None where that is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spent(Counters):
    """The counters of one rank since its process began, with what its agent has seen until then."""

    time: float
    gpu_percent: float = 0.0
    """How busy the rank's GPU was, added up over the looks at it."""
    gpu_looks: int = 0

    @classmethod
    def of(cls, progress: RankProgress, gpu_percent: float = 0.0, gpu_looks: int = 0) -> Self | None:
        """The counters of a rank's progress; None where it has none that can be used: it comes from a process that runs the user's code.

        Args:
            progress: How far the rank is.
            gpu_percent: How busy its GPU was so far, added up over the looks at it.
            gpu_looks: How many these were.
        """
        if progress.counters is None:
            return None
        counters = {**fields_of(progress.counters), "time": progress.time}
        is_usable = all(
            value is None or number(value) is not None for name, value in counters.items() if name != "meets"
        )
        return cls(**counters, gpu_percent=gpu_percent, gpu_looks=gpu_looks) if is_usable else None

    def since(self, before: Self) -> TimeShare | None:
        """Where the time between two events went; None where there is none between them."""
        seconds, looks = self.time - before.time, self.gpu_looks - before.gpu_looks
        if seconds <= 0:
            return None
        exchange_s, trained = _difference(self.exchange_s, before.exchange_s), _difference(self.trained, before.trained)
        return TimeShare(
            seconds=seconds,
            data=(self.data_s - before.data_s) / seconds,
            exchange=None if exchange_s is None else exchange_s / seconds,
            checkpoints=(self.checkpoint_s - before.checkpoint_s) / seconds,
            batches=self.batches - before.batches,
            samples=trained,
            gpu_percent=(self.gpu_percent - before.gpu_percent) / looks if looks else None,
        )


def number(value: Any) -> float | None:
    """A finite number as a float; None for all else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**63
    return float(value) if is_number and math.isfinite(value) else None


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


class Bottlenecks:
    """Names each cause once."""

    def __init__(self) -> None:
        self._first: dict[int, Spent] = {}
        """The counters of each rank when the present half of a minute began."""
        self._last: dict[int, Spent] = {}
        self._cause = ""
        """The cause in the half before."""
        self._named = {""}
        """The causes that were named, and that there is none."""

    def begin_attempt(self) -> None:
        """Other processes begin."""
        self._first, self._last, self._cause = {}, {}, ""

    def forget(self, rank: int) -> None:
        """A rank is lost, and the others carry on."""
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def take(self, rank: int, spent: Spent) -> None:
        """Note a rank's counters."""
        self._first.setdefault(rank, spent)
        self._last[rank] = spent

    def sentence(self) -> str:
        """The cause in a minute that has just ended, if it is a new one; else empty."""
        shares = {rank: spent.since(self._first[rank]) for rank, spent in self._last.items()}
        whole = {rank: share for rank, share in shares.items() if share is not None and share.seconds >= HALF_S}
        if not whole or len(whole) < len(shares):
            return ""
        self._first, before = dict(self._last), self._cause
        self._cause, sentence = _judge(whole, self._last)
        if any(share.seconds > 2 * HALF_S for share in whole.values()):
            # A rank has stood still, at a breakpoint or for a long evaluation.
            self._cause = ""
        if self._cause != before or self._cause in self._named:
            return ""
        self._named.add(self._cause)
        return sentence


def _judge(shares: Mapping[int, TimeShare], spent: Mapping[int, Spent]) -> tuple[str, str]:
    """The cause of the largest loss in a word, and as a sentence; both empty where there is none to speak of."""
    waits = {rank: share.exchange for rank, share in shares.items() if share.exchange is not None}
    is_known = len(waits) == len(shares)
    slowest = min(waits, key=waits.__getitem__) if is_known else max(shares, key=lambda rank: shares[rank].data)
    one, waited = shares[slowest], waits.get(slowest, 0.0)
    others = [share for rank, share in shares.items() if rank != slowest]
    if one.data >= DATA and (is_known or (one.gpu_percent is not None and one.gpu_percent < _BUSY_PERCENT)):
        is_all = all(share.data >= DATA for share in others)
        who = "Ranks wait" if is_all else f"The others wait for rank {slowest}, and it waits"
        workers = round(spent[slowest].num_workers)
        more = "more of them, persistent_workers=True where epochs are short, or a faster dataset"
        remedy = more if workers else "DataLoader(num_workers=2): workers read ahead"
        return "data", f"{who} {one.data:.0%} of the time for data: num_workers={workers}. Try {remedy}"
    if (taken := max(share.checkpoints for share in shares.values())) >= CHECKPOINTS:
        return "checkpoints", f"Checkpoints take {taken:.0%} of the time. Write them more rarely: checkpoint_every="
    if not (is_known and others and all(each.meets for each in spent.values())):
        return "", ""
    loss = statistics.fmean(waits[rank] for rank in waits if rank != slowest) - waited
    if loss >= SLOWEST:
        return f"rank {slowest}", (
            f"Rank {slowest} is the slowest: the others wait {loss:.0%} of the time for it. Look at its node, and at its share of the work"
        )
    if waited < EXCHANGE or not one.batches:
        return "", ""
    exchange_s = waited * one.seconds / one.batches
    share = f"Gradients are exchanged for {waited:.0%} of the time ({1000 * exchange_s:.3g} ms a batch). Try"
    if exchange_s < _LATENCY_S:
        return "batches", f"{share} larger batches: batch_size= of the DataLoader"
    return (
        "exchange",
        f"{share} accumulate=, a compressed exchange, or a strategy that exchanges less often (local-sgd)",
    )
