"""Settings of data parallelism: each rank has the whole model and a part of each batch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kale_dist.strategies import base


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DDP(base.Settings):
    """Synchronous data parallelism: gradients are averaged over all ranks at the end of every backward pass.

    The average is weighted by each rank's share of the global batch, so it equals the gradient of one process that
    sees the whole batch (Li et al., PyTorch Distributed, VLDB 2020, section 3.2, with weights).
    """

    word: ClassVar[str] = "ddp"
    home: ClassVar[str] = "data_parallel.DataParallel"

    exchange: str | None = None
    """How gradients are summed: `shared-memory` (CPU ranks of one machine), `torch` (gloo, NCCL), or, for teaching and
    comparison, `ring` and `driver`. None takes shared memory where it can, else torch."""
    compress: str | None = None
    """`fp16`, `bf16` or `powersgd`: fewer bytes, and gradients that are not exact. Needs `exchange="torch"` or None."""
    bucket_mib: float = 25.0
    """Gradients are exchanged in buckets of about this size, in MiB."""
    average_buffers: bool = True
    """Whether floating-point buffers of model and criterion (BatchNorm's statistics) are averaged over ranks after each epoch."""

    def __post_init__(self) -> None:
        base.refuse_choice("exchange", self.exchange, (None, "torch", "shared-memory", "ring", "driver"))
        base.check_flags(self, "average_buffers")
        base.refuse_choice("compress", self.compress, (None, "fp16", "bf16", "powersgd"))
        if self.compress is not None and self.exchange not in (None, "torch"):
            problem = (
                f"compress={self.compress!r} is torch's, and exchange={self.exchange!r} sends gradients as they are"
            )
            raise base.refusal(problem, "Leave out one of them")
        size = self.bucket_mib
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise base.refusal(f"bucket_mib={size!r} is not a positive number", "Give a number of MiB such as 25.0")

    def check(self, given: base.Conditions) -> None:
        """Refuse an exchange that these ranks cannot use."""
        is_one_machine = given.processes_per_pod >= given.number_of_processes
        if self.exchange == "shared-memory" and (given.cuda or not is_one_machine):
            where = "these train on GPUs" if given.cuda else "these are in several pods"
            problem = f"exchange='shared-memory' is for CPU ranks of one machine, and {where}"
            raise base.refusal(problem, "Leave exchange out, or use exchange='torch'")
        if self.exchange in ("ring", "driver") and given.cuda:
            problem = f"exchange={self.exchange!r} is for CPU ranks, and these train on GPUs"
            raise base.refusal(problem, "Leave exchange out, or use exchange='torch'")

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Every rank has its own shard, and all have the same weights."""
        return base.Layout.of_replicas(rank, world_size)
