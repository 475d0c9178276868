"""Collects the training loss while an epoch runs, for a curve: now and then the mean over the ranks' latest batches."""

from __future__ import annotations

import math
import time

from kale_dist.wire import BatchLoss
from kale_dist.wire.events import RankProgress

SOONEST_S = 0.1
"""At most so often; ranks send their progress no more often, either."""

SHARE = 200
"""The distance of two values is at least the training's time so far over this: a week has 2,500 values."""

_FIRST = 20
"""So many values have no least distance, so that a training of a second has a curve, too."""


class Losses:
    """The losses of one attempt's ranks."""

    def __init__(self) -> None:
        self._began_at = self._written_at = -math.inf
        self._written = 0
        self._epoch = 0
        self._latest: dict[int, float] = {}

    def take(self, rank: int, progress: RankProgress) -> BatchLoss | None:
        """Note the loss of a rank's progress, and return a loss of the job if one is due.

        Args:
            rank: The rank. The lowest one that has a loss sets the pace: rank 0 may be a parameter server, or hold the first layers
                of a pipeline.
            progress: How far it is.
        """
        epoch, loss = progress.epoch, progress.loss
        # With its first batch, an epoch still has the last loss of the epoch before it.
        if progress.phase != "train" or loss is None or not epoch or progress.step <= 1:
            return None
        if epoch != self._epoch:
            self._epoch, self._latest = epoch, {}
        self._latest[rank] = loss
        now = time.monotonic()
        self._began_at = now if self._written == 0 else self._began_at
        is_soon = now - self._written_at < max(SOONEST_S, (now - self._began_at) / SHARE)
        if rank != min(self._latest) or (is_soon and self._written >= _FIRST):
            return None
        self._written_at, self._written = now, self._written + 1
        mean = sum(self._latest.values()) / len(self._latest)
        return BatchLoss(epoch=epoch, step=progress.step, steps=progress.steps, loss=mean)
