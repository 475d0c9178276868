"""Two kinds of parallelism at once, made of the strategies for one: along columns and along rows of a table of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist.strategies import FSDP, Layout, Mesh
from kale_dist.worker.parallel import tensor_parallel
from kale_dist.worker.parallel.fully_sharded import FullySharded
from kale_dist.worker.parallel.pipeline_parallel import PipelineParallel
from kale_dist.worker.training.strategy import Parts


def made(settings: Mesh, layout: Layout) -> FullySharded | tensor_parallel.TensorParallel | PipelineParallel:
    """Make the strategy for a mesh."""
    if settings.pipeline is not None:
        return PipelineParallel(settings.stages, layout)
    if settings.fsdp is not None and layout.shards > 1:
        return ShardedTensorParallel(settings, layout)
    return tensor_parallel.TensorParallel(settings, layout)


class ShardedTensorParallel(FullySharded):
    """Divides weights by layers over a row of ranks, and each rank's part over its column by `fully_shard`.

    Args:
        settings: The plan.
        layout: This rank's layout.
    """

    division: tensor_parallel.DividedWeights
    divides_weights = True

    def __init__(self, settings: Mesh, layout: Layout) -> None:
        inner = FSDP(compile=settings.compile, activation_checkpointing=settings.activation_checkpointing)
        super().__init__(inner, layout)
        self._plan: Any = settings.plan

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Divide the layers, then shard this rank's parts."""
        tensor_parallel.prepare_without_fast_path(stack)
        peers = tensor_parallel.Peers(parts.row)
        self.division = tensor_parallel.divide_layers(parts.model, self._plan, peers, parts.optimizer, stack)
        super().prepare(parts, stack)

    def _is_divided(self, parameter: Any) -> bool:
        return id(self.old_of(parameter)) in self.division.dimensions

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Return the norm over columns and rows; gradients of weights that all ranks of a row hold count once."""
        if not gradients:
            return super().total_norm(gradients, kind)
        divided = {id(p.grad) for p in self.parameters.values() if self._is_divided(p)}
        counted = [one for one in gradients if id(one) in divided or self.parts.row.rank == 0]
        column = super().total_norm(counted, kind) if counted else None
        like = torch.zeros((), dtype=gradients[0].dtype, device=self.parts.group.device)
        return tensor_parallel.norm_of_parts([] if column is None else [column], kind, self.parts.row, like)

    def whole(self, value: Tensor, parameter: Any) -> Tensor:
        """Gather a tensor over the column, then over the row."""
        return self.division.whole(super().whole(value, parameter), self.old_of(parameter))

    def metrics(self) -> dict[str, float]:
        """Return the bytes sent along columns and rows."""
        sent = super().metrics()
        sent["bytes_sent"] += self.division.peers.bytes_sent
        self.division.peers.bytes_sent = 0.0
        return sent
