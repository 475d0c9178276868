"""The mean over ranks of sparse gradients: rows that no rank touched are never sent."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def average_sparse(parameter: torch.nn.Parameter, world_size: int) -> None:
    """Replace a parameter's gradient by the mean over ranks, sparse if this rank's is. Called by all ranks.

    Args:
        parameter: A parameter for which at least one rank has a gradient; without one, this rank counts as zero.
        world_size: Number of ranks.
    """
    gradient = parameter.grad
    was_dense = gradient is not None and not gradient.is_sparse
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
            parameter.shape,
        )
    elif was_dense:
        gradient = gradient.to_sparse(1)
    gradient = gradient.detach().coalesce()
    indices = _gather(gradient.indices().t().contiguous(), world_size)
    values = _gather(gradient.values().contiguous(), world_size)
    mean = torch.sparse_coo_tensor(indices.t(), values.div_(world_size), parameter.shape).coalesce()
    parameter.grad = mean.to_dense() if was_dense else mean


def _gather(rows: Tensor, world_size: int) -> Tensor:
    """The rows of all ranks, in the order of the ranks."""
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count)
    sizes = [int(c) for c in counts]
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Identities of the parameters whose gradients will be sparse: embeddings made with `sparse=True`."""
    return frozenset(
        id(module.weight)
        for module in modules
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    )
