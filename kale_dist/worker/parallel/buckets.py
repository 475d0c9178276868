"""Gradients side by side in flat buffers, which an exchange sums over ranks; sparse ones by rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.worker.parallel.exchanges import AllReduce
from kale_dist.worker.training.rank_group import Group


class Bucket:
    """Gradients of some parameters of one dtype and device, side by side in one buffer.

    Args:
        parameters: In the order in which their gradients are expected.
        group: The ranks.
        exchange: Sums the buffer.
        index: The bucket's number in the order of exchange.
        extra: How many numbers follow the gradients, for the caller's own use.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], group: Group, exchange: AllReduce, index: int, extra: int = 0
    ) -> None:
        self.parameters = list(parameters)
        self.index = index
        self.is_last = False
        """Whether it is the last of the exchange."""
        self._group = group
        self._exchange = exchange
        self.ready = 0
        self.work: Any = None
        first = self.parameters[0]
        sizes = [real(p.detach()).numel() for p in self.parameters]
        self.flat = torch.empty(sum(sizes) + extra, dtype=real(first.detach()).dtype, device=first.device)
        pieces = torch.split(self.flat, [*sizes, extra])
        self.views = [piece.view(real(p.detach()).shape) for piece, p in zip(pieces, self.parameters, strict=False)]
        self.extra = pieces[-1]
        self._body = self.flat[: sum(sizes)]
        # Half floats overflow when summed; the others keep the last bit by dividing after.
        self._divide_first = not exchange.averages and self.flat.dtype in (torch.float16, torch.bfloat16)

    @property
    def is_full(self) -> bool:
        """Whether all of its gradients are complete in this backward pass."""
        return self.ready == len(self.parameters)

    @torch.no_grad()
    def launch(self) -> None:
        """Copy the gradients in and start the sum over ranks."""
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(real(gradient.to_dense() if gradient.is_sparse else gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        if self._divide_first:
            self.flat.div_(self._group.world_size)
        self.work = self._exchange.start(self)

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
        if not (self._divide_first or self._exchange.averages):
            self._body.mul_(1 / self._group.world_size)
        gradients, views = [], []
        for parameter, view, is_used in zip(self.parameters, self.views, used, strict=True):
            if not is_used:
                continue
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                whole = torch.view_as_complex(view) if parameter.is_complex() else view
                parameter.grad = whole.clone(memory_format=torch.preserve_format)
            else:
                gradients.append(real(gradient))
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)


def fill_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, controls: int, group: Group, exchange: AllReduce
) -> tuple[list[Bucket], Tensor]:
    """Lay parameters out in buckets, the last parameter first: backward passes make gradients in about that order.

    Args:
        parameters: Parameters with dense gradients.
        bucket_bytes: A bucket that has reached this size is closed.
        controls: Count of numbers to exchange along with the gradients.
        group: The ranks.
        exchange: Sums the buckets.

    Returns:
        The buckets in the order of their exchange, and the tensor of the control numbers on the gradients' device: a
        part of the last bucket where its floats are exact enough, else a tensor of its own.
    """
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[Any, list[torch.nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for parameter in reversed(parameters):
        key = (parameter.device, real(parameter.detach()).dtype)
        if key not in open_groups or sizes[key] >= bucket_bytes:
            open_groups[key] = []
            sizes[key] = 0
            groups.append(open_groups[key])
        open_groups[key].append(parameter)
        sizes[key] += parameter.numel() * parameter.element_size()
    last = real(groups[-1][0].detach()).dtype if groups else None
    fits = not exchange.averages and last in (torch.float32, torch.float64)
    extras = [0] * (len(groups) - 1) + [controls if fits else 0]
    buckets = [Bucket(members, group, exchange, index, extras[index]) for index, members in enumerate(groups)]
    if buckets:
        buckets[-1].is_last = True
    if fits:
        return buckets, buckets[-1].extra
    device = groups[-1][0].device if groups else group.device
    return buckets, torch.empty(controls, dtype=torch.float32, device=device)


def real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, which every backend can sum."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def average_sparse(parameter: torch.nn.Parameter, group: Group) -> None:
    """Replace a parameter's gradient by the mean over ranks, sparse if this rank's is. All ranks call this.

    Args:
        parameter: A parameter for which at least one rank has a gradient; without one, this rank counts as zero.
        group: The ranks.
    """
    gradient = parameter.grad
    was_dense = gradient is not None and not gradient.is_sparse
    if gradient is None:
        rows, values = parameter.new_empty((1, 0), dtype=torch.int64), parameter.detach()[:0]
        gradient = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    elif was_dense:
        gradient = gradient.to_sparse(1)
    gradient = gradient.detach().coalesce()
    values = gradient.values()
    # Torch refuses to sum half-precision sparse tensors, and of complex ones it loses the sum without an error.
    parts = torch.view_as_real(values) if values.is_complex() else values
    shape = (*gradient.shape, *parts.shape[values.dim() :])
    total = torch.sparse_coo_tensor(
        gradient.indices(),
        parts.float() if parts.dtype is torch.float16 else parts,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )
    # NCCL sums no sparse tensors, gloo does.
    total = total.cpu()
    dist.all_reduce(total, group=group.world)
    total = total.coalesce()
    parts = (total.values() / group.world_size).to(parts.dtype)
    values = torch.view_as_complex(parts) if values.is_complex() else parts
    mean = torch.sparse_coo_tensor(
        total.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
    ).to(parameter.device)
    parameter.grad = mean.to_dense() if was_dense else mean


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Return the identities of parameters whose gradients will be sparse: embeddings made with `sparse=True`."""
    return frozenset(
        id(module.weight)
        for module in modules
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    )
