"""Finds what holds a training up: for a minute each, where the time of its ranks goes.

Ranks that train together wait for the slowest in their exchange. So the rank that waits least there is the slowest, and where
its own time goes is the cause.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any, Self

WINDOW_S = 60.0
"""So long has a cause to hold before it is named."""

DATA, CHECKPOINTS, SLOWEST, EXCHANGE = 0.2, 0.05, 0.2, 0.4
"""From which share of the time on waiting for data, checkpoints, waiting for the slowest rank, and the exchange are named."""

_LATENCY_S = 0.005
"""An exchange that takes less than that is a matter of messages, not of bytes: larger batches have fewer of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Where the time of one rank went between two events, as shares from 0 to 1."""

    data: float
    exchange: float | None
    checkpoints: float
    batches: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The counters of one rank, since its process began."""

    time: float
    data_s: float
    exchange_s: float | None
    """None where it is not known, as on GPUs."""
    checkpoint_s: float
    batches: int
    """Batches that were trained on."""
    batch_samples: float | None
    """Samples of a batch of this rank, as a mean over the epoch; None where another rank reads its batches, as in a pipeline."""
    num_workers: int

    @classmethod
    def of(cls, progress: Mapping[str, Any], before: Self | None) -> Self | None:
        """The counters in an event of kind progress; None where it has none.

        Args:
            progress: The event.
            before: The counters in the one before it: an evaluation counts no batches.
        """
        if progress.get("data_s") is None:
            return None
        batches, samples, step = progress["batches"], progress["samples"], progress["step"]
        return cls(
            time=progress["time"],
            data_s=progress["data_s"],
            exchange_s=progress["exchange_s"],
            checkpoint_s=progress["checkpoint_s"],
            batches=batches if batches is not None else 0 if before is None else before.batches,
            batch_samples=None if samples is None else samples / max(1, step),
            num_workers=progress["num_workers"],
        )

    def since(self, before: Self) -> Share | None:
        """Where the time between two events went; None where there is none between them."""
        seconds = self.time - before.time
        if seconds <= 0:
            return None
        is_known = self.exchange_s is not None and before.exchange_s is not None
        return Share(
            data=(self.data_s - before.data_s) / seconds,
            exchange=((self.exchange_s or 0.0) - (before.exchange_s or 0.0)) / seconds if is_known else None,
            checkpoints=(self.checkpoint_s - before.checkpoint_s) / seconds,
            batches=self.batches - before.batches,
            seconds=seconds,
        )


class Bottlenecks:
    """Names each cause once."""

    def __init__(self) -> None:
        self._first: dict[int, Spent] = {}
        """The counters of each rank when the present minute began."""
        self._last: dict[int, Spent] = {}
        self._named = {""}
        """The causes that were named, and that there is none."""

    def begin_attempt(self) -> None:
        """Other processes begin."""
        self._first, self._last = {}, {}

    def take(self, rank: int, spent: Spent) -> None:
        """Note a rank's counters."""
        self._first.setdefault(rank, spent)
        self._last[rank] = spent

    def sentence(self) -> str:
        """The cause in a minute that has just ended, if it is a new one; else empty."""
        shares = {rank: spent.since(self._first[rank]) for rank, spent in self._last.items()}
        whole = {rank: share for rank, share in shares.items() if share is not None and share.seconds >= WINDOW_S}
        if not whole or len(whole) < len(shares):
            return ""
        self._first = dict(self._last)
        cause, sentence = _judge(whole, self._last)
        if cause in self._named:
            return ""
        self._named.add(cause)
        return sentence


def _judge(shares: Mapping[int, Share], spent: Mapping[int, Spent]) -> tuple[str, str]:
    """The cause of the largest loss in a word, and as a sentence; both empty where there is none to speak of."""
    waits = {rank: share.exchange for rank, share in shares.items() if share.exchange is not None}
    is_known = len(waits) == len(shares)
    slowest = min(waits, key=waits.__getitem__) if is_known else max(shares, key=lambda rank: shares[rank].data)
    one, waited = shares[slowest], waits.get(slowest, 0.0)
    others = [share for rank, share in shares.items() if rank != slowest]
    if one.data >= DATA:
        is_all = all(share.data >= DATA for share in others)
        who = "Ranks wait" if is_all else f"The others wait for rank {slowest}, and it waits"
        workers = spent[slowest].num_workers
        remedy = "more of them, or a faster dataset," if workers else "a DataLoader with num_workers"
        return "data", f"{who} {one.data:.0%} of the time for data: num_workers={workers}. Try {remedy} to read ahead"
    if one.checkpoints >= CHECKPOINTS:
        return (
            "checkpoints",
            f"Checkpoints take {one.checkpoints:.0%} of the time. Write them more rarely: checkpoint_every=",
        )
    # Peers of a pipeline wait for each other's layers, and that is no exchange of gradients.
    if not (is_known and others and all(each.batch_samples is not None for each in spent.values())):
        return "", ""
    loss = statistics.fmean(waits[rank] for rank in waits if rank != slowest) - waited
    if loss >= SLOWEST:
        return "slowest", f"Rank {slowest} is the slowest: the others wait {loss:.0%} of the time for it"
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
