"""Frozen settings of each strategy, as arguments of a call. No torch; the code is in `training.strategies`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """Synchronous data parallelism: gradients are averaged over all ranks at the end of every backward pass.

    The average is weighted by each rank's share of the global batch, so it equals the gradient of one process that
    sees the whole batch (Li et al., PyTorch Distributed, VLDB 2020, section 3.2, with weights).
    """

    bucket_mib: float = 25.0
    """Gradients are exchanged in buckets of about this size, in MiB."""
    average_buffers: bool = True
    """Whether floating-point buffers (BatchNorm's statistics) are averaged over ranks after each epoch."""


Strategy = AllReduce
