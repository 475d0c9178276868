"""What must be equal in all ranks besides gradients: initial weights, buffers, and the weights after each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.training.group import Group

_TOLERANCE = 1e-3
"""Relative difference of a tensor's sum of absolute values from which ranks are said to have drifted apart.

Processors of different makes round differently; a step that treats ranks differently does far more than that."""


_LARGE = 1 << 18
"""Buffers of more elements are compared before they are sent."""


def fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """The sum of absolute values of each tensor; 0 for those without a shape yet."""
    sums = [torch.zeros(()) if torch.nn.parameter.is_lazy(t) else _sum(t.detach()) for t in tensors]
    return torch.stack(sums).tolist() if sums else []


def _sum(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    total: Tensor = torch.linalg.vector_norm(tensor, 1)
    return total.cpu().double()


def differing(fingerprints: Sequence[Sequence[float]], *, tolerance: float = _TOLERANCE) -> list[int]:
    """Positions of the tensors that are not equal in all ranks.

    Args:
        fingerprints: One of each rank.
        tolerance: Relative difference that counts as equal.
    """
    positions = []
    for position, values in enumerate(zip(*fingerprints, strict=True)):
        # All nan is a loss that diverged, and the same everywhere.
        if all(value != value for value in values):  # noqa: PLR0124 - nan
            continue
        largest, smallest = max(values), min(values)
        if not largest - smallest <= tolerance * max(abs(largest), 1e-12) and largest != smallest:
            positions.append(position)
    return positions


def copy_where_differing(
    group: Group,
    named: Sequence[tuple[str, Tensor]],
    fingerprints: Sequence[Sequence[float]],
    when: str,
    hint: str = "",
) -> None:
    """Copy rank 0's weights to all where they differ, and say so.

    Args:
        group: The ranks.
        named: Names and weights, in the order of the fingerprints.
        fingerprints: One of each rank.
        when: For the sentence: `at the start`, `after epoch 3`.
        hint: What the likely cause is, with a space in front.
    """
    positions = differing(fingerprints) if not group.is_alone else []
    if not positions:
        return
    names = ", ".join(named[p][0] for p in positions[:3]) + (" and others" if len(positions) > 3 else "")  # noqa: PLR2004
    with torch.no_grad():
        for _, tensor in named:
            if not torch.nn.parameter.is_lazy(tensor):
                group.send_tensor(tensor)
    group.say(f"Weights were not equal on all ranks {when} ({names}): rank 0's were copied to all.{hint}")


class Buffers:
    """The model's buffers, which each rank changes by its own data (BatchNorm's statistics).

    Args:
        model: The model.
        group: The ranks.
        average: Whether floating-point buffers are averaged; otherwise they stay each rank's own.
    """

    def __init__(self, model: torch.nn.Module, group: Group, *, average: bool) -> None:
        self._model = model
        self._group = group
        self._average = average

    def synchronise(self) -> None:
        """Make buffers equal in all ranks: floating-point ones by their mean, others by rank 0's value.

        Large ones (tables of positions, masks) are sent only where they differ.
        """
        if self._group.is_alone or not self._average:
            return
        buffers = [b for _, b in sorted(self._model.named_buffers()) if not torch.nn.parameter.is_lazy(b)]
        large = [b for b in buffers if b.numel() > _LARGE]
        if large:
            prints = self._group.gather(fingerprint(large))
            changed = {id(large[position]) for position in differing(prints, tolerance=0.0)}
            buffers = [b for b in buffers if b.numel() <= _LARGE or id(b) in changed]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            if buffer.is_floating_point():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            else:
                self._group.send_tensor(buffer)
        with torch.no_grad():
            for same in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in same])
                dist.all_reduce(flat.div_(self._group.world_size))
                for buffer, piece in zip(same, torch.split(flat, [b.numel() for b in same]), strict=True):
                    buffer.copy_(piece.view(buffer.shape))


def trained_tensors(model: torch.nn.Module, criterion: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters that training may change, by name, each once: the model's, the criterion's, the optimizer's."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), (name, parameter))
    if isinstance(criterion, torch.nn.Module):
        for name, parameter in criterion.named_parameters():
            found.setdefault(id(parameter), (f"criterion.{name}", parameter))
    for i, options in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(options["params"]):
            found.setdefault(id(parameter), (f"optimizer.{i}.{j}", parameter))
    return dict(found.values())
