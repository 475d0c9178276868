"""Where a training is within an epoch: what a checkpoint there holds besides the states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from kale_dist.wire import fields_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """One rank's part."""

    began: Mapping[str, Any]
    """Its generators when the epoch began, from which the order of the data is drawn again."""
    buffers: Mapping[str, Tensor]
    """The model's buffers that differ between ranks until an epoch has ended, such as BatchNorm's."""
    samples: int
    """What it has had of the pass."""
    before: Mapping[str, Any] | None
    """Its generators before it read the batch that is ahead; None where that does not matter."""
    sums: Mapping[str, Any] | None
    """Those of the ready-made step; None with a step of the user's, which begins again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """That of all ranks. They are at the same batch."""

    batches: int
    """Batches of each rank."""
    items: int
    """Items of the sampler, whose number does not depend on how many ranks there are."""
    order: str
    """A digest of the order of the items; empty where it is not known."""
    scheduler_stepped: bool
    """Whether the step has stepped the scheduler in this epoch."""
    ranks: tuple[RankPosition, ...] = ()
    """Filled in by the checkpoint."""

    def plain(self) -> dict[str, Any]:
        """The values as a checkpoint holds them; tensors are not copied."""
        return {**fields_of(self), "ranks": [fields_of(one) for one in self.ranks]}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """What `plain` was made of.

        Raises:
            TypeError: Another version has made it.
        """
        return cls(**{**plain, "ranks": tuple(RankPosition(**one) for one in plain["ranks"])})
