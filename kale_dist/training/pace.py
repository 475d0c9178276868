"""Where a rank is within its epoch: what the current batch weighs, and whether gradients are due for exchange.

The loader writes it before each batch; the exchange of gradients and the optimizer read it. Nothing here touches a
tensor.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """What one rank gets in one step."""

    index: int
    """Number of the step within the pass over the data, from 0."""
    local: int
    """Samples of this rank; 0 where it repeats one to keep pace."""
    total: int
    """Samples of all ranks together."""
    last: bool
    """Whether no step follows."""
    window: int | None = None
    """Samples of all ranks in this step's accumulation window; None where it is not known beforehand."""


class Pace:
    """The current batch of the training loader and its window of accumulation.

    A window is `accumulate` steps, fewer at the end of a pass. Gradients of a batch are multiplied by `factor` before
    they are added up, so that their mean over ranks, summed over the window, is the gradient of one process that sees
    the window as one batch. `correction` mends what could not be foreseen (data of unknown length, a loop that is
    left early).

    Args:
        world_size: Number of ranks.
        accumulate: Steps of the loader for one step of the optimizer.
    """

    def __init__(self, world_size: int, accumulate: int) -> None:
        self.world_size = world_size
        self.accumulate = accumulate
        self.portion: Portion | None = None
        self.batches = 0
        """Batches given so far in the whole job: a number on which all ranks agree."""
        self.optimizer_steps_of_batch = 0
        self._foreseen = 0
        self._seen = 0

    def take(self, portion: Portion) -> None:
        """Begin a batch."""
        self.portion = portion
        self.batches += 1
        self.optimizer_steps_of_batch = 0
        if self.accumulate == 1 or not self._seen:
            self._foreseen = portion.window or portion.total * self.accumulate
            self._seen = 0
        self._seen += portion.total

    def leave(self) -> None:
        """The loader is exhausted or was left."""
        self.portion = None

    def stepped(self) -> None:
        """The optimizer has made a real step: a new window begins."""
        if self.accumulate > 1:
            self._seen = 0

    @property
    def is_due(self) -> bool:
        """Whether gradients are exchanged at the end of the current batch's backward pass."""
        portion = self.portion
        if self.accumulate == 1 or portion is None:
            return True
        return portion.last or (portion.index + 1) % self.accumulate == 0

    @property
    def factor(self) -> float:
        """What the gradients of this rank's batch are multiplied by."""
        portion = self.portion
        if portion is None or not self._foreseen:
            return 1.0
        return self.world_size * portion.local / self._foreseen

    @property
    def correction(self) -> float:
        """What the window's gradients are multiplied by before the real step; 1 where all was foreseen."""
        if self.accumulate == 1 or not self._seen:
            return 1.0
        return self._foreseen / self._seen
