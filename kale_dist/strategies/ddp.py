"""Settings of data parallelism: each rank has the whole model and a part of each batch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kale_dist.errors import ConfigError
from kale_dist.strategies.base import Layout, Settings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DDP(Settings):
    """Synchronous data parallelism: gradients are averaged over all ranks at the end of every backward pass.

    The average is weighted by each rank's share of the global batch, so it equals the gradient of one process that
    sees the whole batch (Li et al., PyTorch Distributed, VLDB 2020, section 3.2, with weights).
    """

    word: ClassVar[str] = "ddp"
    home: ClassVar[str] = "ddp.DataParallel"

    bucket_mib: float = 25.0
    """Gradients are exchanged in buckets of about this size, in MiB."""
    average_buffers: bool = True
    """Whether floating-point buffers (BatchNorm's statistics) are averaged over ranks after each epoch."""

    def __post_init__(self) -> None:
        size = self.bucket_mib
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise ConfigError("strategy", f"bucket_mib={size!r} is not a positive number", "Give such as 25.0")

    def layout(self, rank: int, world_size: int) -> Layout:
        """Every rank has a shard of its own."""
        return Layout(
            shards=world_size,
            shard=rank,
            peers=(rank,),
            replicas=tuple(range(world_size)),
            part=f"shard {rank} of {world_size}",
        )
