"""The ranks as one group: who this rank is, small exchanges, and weights and buffers that must be equal on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kale_dist.errors import KaleDistError
from kale_dist.snapshot.identity import checksum, sum_of_bits
from kale_dist.wire import context, events
from kale_dist.wording import listed

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's function by its name since 2.13, or by the one before."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Torch's function by its name since 2.13, or by the one before."""

_AS_BYTES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that neither NCCL nor gloo sends."""

_NAMED = 3
"""At most so many weights that differ are named."""

STEP_ENDS = "the end of the step"
"""The place where ranks meet after the user's step."""


class Group:
    """This rank among all. Every method that exchanges something must be called by all ranks in the same order.

    Args:
        device: Where model and batches live in this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        place = context.context()
        ready = dist.is_available() and dist.is_initialized()
        self.world: Any = dist.group.WORLD if ready else None
        """The process group, by reference: a step may call `destroy_process_group`, which hides the default one."""
        self.rank: int = dist.get_rank() if ready else place.rank
        self.world_size: int = dist.get_world_size() if ready else 1
        self.size_at_start = self.world_size
        """The world size before any rank was lost."""
        self._logged: set[str] = set()
        self._exchange: Callable[[Any], dict[int, Any]] | None = None
        self._members = self._living = list(range(self.world_size))

    def exchange_by(self, exchange: Callable[[Any], dict[int, Any]]) -> None:
        """Replace torch's collectives by a function that keeps working when ranks are lost.

        Args:
            exchange: All ranks that are left call it, each with its value; returns their values by rank.
        """
        self._exchange = exchange
        self._members = self._living = list(range(self.world_size))

    def renumber(self) -> bool:
        """Number the ranks that are left from 0, if some were lost; returns whether some were. Rank 0 never is."""
        if self._exchange is None:
            return False
        own, before, self._members = self._members[self.rank], self._members, self._living
        self.rank, self.world_size = self._members.index(own), len(self._members)
        return len(self._members) < len(before)

    def _everyones(self, value: Any) -> dict[int, Any] | None:
        """Exchange values among the ranks that are left; returns None where torch's collectives do that."""
        if self._exchange is None:
            return None
        found = self._exchange(value)
        self._living = sorted(found)
        return found

    def divided(self, parts: Sequence[Sequence[int]]) -> Group:
        """Divide the ranks into groups, and return this rank's; this very group if there is only one part.

        Args:
            parts: The ranks of each group, in its order; each rank in one part. The same on all ranks.
        """
        if len(parts) == 1:
            return self
        mine = copy.copy(self)
        for ranks in parts:
            # Every rank has to make every group.
            # Before torch 2.13 groups are always sorted.
            order: Any = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
            made = dist.new_group(list(ranks), **order) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine.world, mine.rank, mine.world_size = made, ranks.index(self.rank), len(ranks)
                mine.size_at_start = mine.world_size
        return mine

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world_size == 1

    def log(self, text: str, *, ranks: int = 1, warns: bool = False) -> None:
        """Print a sentence for the user once in the whole job, and send it as a note.

        Args:
            text: The sentence.
            ranks: How many ranks send the note; rank 0 alone prints it.
            warns: Whether it is a warning.
        """
        if self.rank < ranks and text not in self._logged:
            self._logged.add(text)
            if self.rank:
                context.emit(events.Note(text=text, warns=warns))
            else:
                context.log(text, warns=warns)

    def gather(self, value: object, *, in_first: bool = False) -> list[Any]:
        """Return every rank's value, in the order of the ranks, without those of lost ranks.

        Args:
            value: Anything that can be pickled; small.
            in_first: Rank 0 alone gets all, and the others, which need no memory for them, their own.
        """
        if self.is_alone:
            return [value]
        if (found := self._everyones(value)) is not None:
            return [found[rank] for rank in self._living]
        values: list[Any] = [None] * self.world_size
        if in_first:
            dist.gather_object(value, values if self.rank == 0 else None, group=self.world, group_dst=0)
            return values if self.rank == 0 else [value]
        dist.all_gather_object(values, value, group=self.world)
        return values

    def meet(self, place: str, value: Any = None) -> list[Any]:
        """Gather values at a place that ranks reach through the user's code, and so perhaps not all of them.

        Args:
            place: Where this rank is, as it stands after "at" in a sentence.
            value: This rank's value.

        Raises:
            KaleDistError: Other ranks are in another place.
        """
        everyone = self.gather((self.rank, place, value))
        first = everyone[0]
        for other in everyone:
            if other[1] != first[1]:
                raise KaleDistError(
                    f"Rank {first[0]} is at {first[1]}, and rank {other[0]} at {other[1]}. All ranks have to take the same"
                    " way through the step: take what exchanges numbers out of conditions such as `if rank == 0:`"
                )
        return [value for *_, value in everyone]

    def sum_int64(self, values: Sequence[int]) -> list[int]:
        """Return the sum over ranks of each of the values."""
        if self.is_alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.int64, device="cpu")
        self.sum(sums)
        return sums.tolist()

    def sum(self, value: torch.Tensor) -> None:
        """Overwrite a tensor by its sum over ranks."""
        if self.is_alone:
            return
        if self._exchange is None:
            dist.all_reduce(value, group=self.world)
        else:
            value.copy_(torch.stack(self.gather(value.cpu())).sum(0))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks of a floating-point tensor, which is changed in place."""
        value.div_(self.world_size)
        self.sum(value)
        return value if self.answered == self.world_size else value.mul_(self.world_size / self.answered)

    @property
    def answered(self) -> int:
        """How many ranks took part in the last exchange: fewer than the world size once some were lost."""
        return self.world_size if self._exchange is None else len(self._living)

    def send_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor by the one of the rank `source`."""
        if self._exchange is not None:
            tensor.detach().copy_(self.send(tensor.detach().cpu(), source))
        elif not self.is_alone:
            data = tensor.detach()
            whole = data.contiguous()
            sent = whole.reshape(-1).view(torch.uint8) if data.dtype in _AS_BYTES else whole
            dist.broadcast(sent, group_src=source, group=self.world)
            if whole.data_ptr() != data.data_ptr():
                data.copy_(whole)

    def send(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on all ranks; the other ranks' own is not used.

        Args:
            value: Anything that can be pickled.
            source: The rank that sends.

        Raises:
            KaleDistError: That rank was lost.
        """
        if self.is_alone:
            return value
        mine = self.rank == source
        if (found := self._everyones(value if mine else None)) is not None:
            if self._members[source] not in found:
                raise KaleDistError(f"Rank {self._members[source]} was lost when its data was needed by the others")
            return found[self._members[source]]
        sent = [value if mine else None]
        dist.broadcast_object_list(sent, group_src=source, group=self.world)
        return sent[0]


_TOLERANCE = 1e-3
"""Relative difference of a tensor's sum of absolute values from which on ranks count as drifted apart.

Processors of different makes round differently; a step that treats ranks differently does far more than that."""


LARGE = 1 << 18
"""Buffers of more elements are tables (positions, masks), which steps seldom change."""


def fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sum of absolute values of each tensor; 0 for a tensor without a shape yet."""
    sums = [torch.zeros((), device="cpu") if torch.nn.parameter.is_lazy(t) else _sum(t.detach()) for t in tensors]
    return torch.stack(sums).tolist() if sums else []


def _sum(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    total: Tensor = torch.linalg.vector_norm(tensor, 1)
    return total.cpu().double()


def own_part(tensor: Tensor) -> Tensor:
    """Of a divided tensor this rank's part, so that nothing is exchanged: ranks look at different times, or rank 0 alone."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor, of a divided one this rank's part, the sum of its bits as whole numbers: any change shows."""
    return [sum_of_bits(own_part(tensor.detach())) for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]


def differing(fingerprints: Sequence[Sequence[float]], *, tolerance: float = _TOLERANCE) -> list[int]:
    """Return the positions of the tensors that are not equal in all ranks.

    Args:
        fingerprints: Those of all ranks.
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
    group: Group, named: Sequence[tuple[str, Tensor]], fingerprints: Sequence[Sequence[float]]
) -> str:
    """Copy rank 0's weights to all ranks where they differ; returns the names of those that did.

    Args:
        group: The ranks.
        named: Names and weights, in the order of the fingerprints.
        fingerprints: Those of all ranks.
    """
    positions = differing(fingerprints) if not group.is_alone else []
    with torch.no_grad():
        for _, tensor in named if positions else ():
            if not torch.nn.parameter.is_lazy(tensor):
                group.send_tensor(tensor)
    return listed([named[p][0] for p in positions], _NAMED)


def buffers_of(trained: Any) -> dict[str, Tensor]:
    """Return the buffers of `trained.model`, and of `trained.criterion` where it is a module, by names such as `criterion.center`."""
    criterion = trained.criterion if isinstance(trained.criterion, torch.nn.Module) else torch.nn.Module()
    return dict(torch.nn.ModuleDict({"model": trained.model, "criterion": criterion}).named_buffers())


class Buffers:
    """The buffers which each rank changes by its own data (BatchNorm's statistics, the centre of a loss).

    Args:
        trained: Has model and criterion.
        group: The ranks.
        average: Whether floating-point buffers are averaged; otherwise they stay each rank's own.
    """

    def __init__(self, trained: Any, group: Group, *, average: bool) -> None:
        self._trained = trained
        self._group = group
        self._average = average

    def synchronise(self) -> None:
        """Make buffers that differ between ranks equal: floating-point buffers by their mean, others by rank 0's value.

        Equal ones keep their bits, which a sum that is divided does not. Those whose shapes differ, as tables that grow with
        a rank's longest sample do, stay each rank's own.
        """
        if self._group.is_alone or not self._average:
            return
        # Sparse ones are tables (a graph's edges), which no step changes.
        own = {
            (name, b.shape, b.dtype): b
            for name, b in sorted(buffers_of(self._trained).items())
            if not torch.nn.parameter.is_lazy(b) and b.layout is torch.strided
        }
        everyone = self._group.meet(
            STEP_ENDS, {kind: checksum(own_part(buffer.detach())) for kind, buffer in own.items()}
        )
        alike = set(own).intersection(*everyone)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for kind, buffer in own.items():
            if kind not in alike or len({sums[kind] for sums in everyone}) == 1:
                continue
            if buffer.is_floating_point():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            else:
                self._group.send_tensor(buffer)
        with torch.no_grad():
            for same in by_dtype.values():
                flat = self._group.mean(torch.cat([buffer.reshape(-1) for buffer in same]))
                for buffer, piece in zip(same, torch.split(flat, [b.numel() for b in same]), strict=True):
                    buffer.copy_(piece.view(buffer.shape))
