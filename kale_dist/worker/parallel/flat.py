"""Tensors of several shapes side by side in flat buffers, one for each dtype, which are sent as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor


class Flat:
    """A copy of some tensors in flat buffers.

    Args:
        tensors: The tensors, in an order that is the same on all ranks. Complex numbers are copied as pairs of real ones.
        device: Where the buffers are; None for the device of the tensors.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device | None = None) -> None:
        originals = list(tensors)
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in originals:
            real = _real(tensor)
            groups.setdefault(real.dtype, []).append(real)
        self._groups = list(groups.values())
        self.buffers: list[Tensor] = []
        """One buffer for each dtype."""
        self._views: list[list[Tensor]] = []
        for group in self._groups:
            sizes = [tensor.numel() for tensor in group]
            buffer = torch.empty(sum(sizes), dtype=group[0].dtype, device=device or group[0].device)
            pieces = torch.split(buffer, sizes)
            self.buffers.append(buffer)
            self._views.append([piece.view(tensor.shape) for piece, tensor in zip(pieces, group, strict=True)])
        views = {views[0].dtype: iter(views) for views in self._views}
        self.pieces = [next(views[_real(tensor).dtype]) for tensor in originals]
        """A view of the buffers for each tensor, in its shape; complex numbers are pairs of real ones."""

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    @torch.no_grad()
    def read(self) -> Self:
        """Copy the tensors into the buffers; returns this object."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(views, group)
        return self

    @torch.no_grad()
    def write(self) -> None:
        """Copy the buffers into the tensors."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(group, views)


def _real(tensor: Tensor) -> Tensor:
    data = tensor.detach()
    return torch.view_as_real(data) if data.is_complex() else data
