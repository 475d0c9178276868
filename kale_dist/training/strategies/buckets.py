"""Flat buffers in which gradients travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    """Gradients of some parameters of one dtype and device, side by side in one buffer.

    Args:
        parameters: In the order in which their gradients are expected.
        extra: Numbers after the gradients, for the caller's own use.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], extra: int = 0) -> None:
        self.parameters = list(parameters)
        self.ready = 0
        self.work: Any = None
        first = self.parameters[0]
        sizes = [_real(p.detach()).numel() for p in self.parameters]
        self._flat = torch.empty(sum(sizes) + extra, dtype=_real(first.detach()).dtype, device=first.device)
        pieces = torch.split(self._flat, [*sizes, extra])
        self._views = [piece.view(_real(p.detach()).shape) for piece, p in zip(pieces, self.parameters, strict=False)]
        self.extra = pieces[-1]
        self._body = self._flat[: sum(sizes)]
        # Half floats overflow when summed; the others keep the last bit by dividing after.
        self._divide_first = self._flat.dtype in (torch.float16, torch.bfloat16)

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come in this backward pass."""
        return self.ready == len(self.parameters)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is this bucket's `extra`."""
        return tensor is self.extra

    @torch.no_grad()
    def launch(self) -> None:
        """Copy the gradients in and start the sum over ranks."""
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(_real(gradient.to_dense() if gradient.is_sparse else gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        if self._divide_first:
            self._flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self._flat, async_op=True)

    def wait(self) -> None:
        """Wait for the sum."""
        self.work.wait()
        self.work = None

    @torch.no_grad()
    def give_back(self, used: Sequence[bool]) -> None:
        """Turn the sums into means and write them into the gradients.

        Args:
            used: For each parameter, whether any rank has a gradient; where none has, none is made.
        """
        if not self._divide_first:
            scale = 1 / dist.get_world_size()
            self._body.mul_(scale)
        gradients, views = [], []
        for parameter, view, is_used in zip(self.parameters, self._views, used, strict=True):
            if not is_used:
                continue
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                whole = torch.view_as_complex(view) if parameter.is_complex() else view
                parameter.grad = whole.clone(memory_format=torch.preserve_format)
            else:
                gradients.append(_real(gradient))
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)


def fill_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, controls: int
) -> tuple[list[Bucket], Tensor]:
    """Lay parameters out in buckets, last parameter first, as backward passes make gradients in about that order.

    Args:
        parameters: Parameters with dense gradients.
        bucket_bytes: A bucket that has reached this size is closed.
        controls: Count of numbers to exchange along with the gradients.

    Returns:
        The buckets in the order of their exchange, and the tensor of the control numbers: a part of the last bucket
        where that is exact and costs no synchronisation with a GPU, else one of its own on the CPU.
    """
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[Any, list[torch.nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for parameter in reversed(parameters):
        key = (parameter.device, _real(parameter.detach()).dtype)
        if key not in open_groups or sizes[key] >= bucket_bytes:
            open_groups[key] = []
            sizes[key] = 0
            groups.append(open_groups[key])
        open_groups[key].append(parameter)
        sizes[key] += parameter.numel() * parameter.element_size()
    if groups:
        last = groups[-1][0]
        if last.device.type == "cpu" and _real(last.detach()).dtype in (torch.float32, torch.float64):
            carrier = Bucket(groups[-1], extra=controls)
            return [*(Bucket(group) for group in groups[:-1]), carrier], carrier.extra
    return [Bucket(group) for group in groups], torch.empty(controls, dtype=torch.float32)


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every backend can sum."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
