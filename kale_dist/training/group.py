"""The ranks as one group: who this rank is, and the small exchanges that are not gradients."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from kale_dist.contract import EventKind
from kale_dist.runtime import context


class Group:
    """This rank among all. Every method that exchanges something must be called by all ranks in the same order.

    Args:
        device: Where model and batches live in this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        place = context.context()
        ready = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if ready else place.rank
        self.world_size: int = dist.get_world_size() if ready else 1
        self._said: set[str] = set()

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to exchange anything with."""
        return self.world_size == 1

    def say(self, text: str) -> None:
        """Print a sentence for the user once in the whole job, and send it as a note. Other ranks stay silent."""
        if self.rank == 0 and text not in self._said:
            self._said.add(text)
            print(text, flush=True)  # noqa: T201 - the rank's output is the job's log
            context.emit(EventKind.NOTE, text=text)

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, in the order of the ranks.

        Args:
            value: Anything that can be pickled; small.
        """
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum_int64(self, values: Sequence[int]) -> list[int]:
        """The sums over ranks, one for each of the values."""
        if self.is_alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(sums)
        return sums.tolist()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a floating-point tensor, which is changed in place."""
        if not self.is_alone:
            dist.all_reduce(value)
            value.div_(self.world_size)
        return value

    def send_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor by the one of the rank `source`."""
        if not self.is_alone:
            data = tensor.detach()
            whole = data.contiguous()
            dist.broadcast(whole, src=source)
            if whole.data_ptr() != data.data_ptr():
                data.copy_(whole)

    def send(self, value: Any, source: int = 0) -> Any:
        """What rank `source` gives as `value`, which the other ranks' own value plays no part in.

        Args:
            value: Whole numbers in a list travel as they are, anything else is pickled.
            source: The rank that speaks.
        """
        if self.is_alone:
            return value
        mine = self.rank == source
        data = torch.empty(0, dtype=torch.int64)
        kind = 0
        if mine:
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                data = torch.tensor(value, dtype=torch.int64)
            else:
                kind = 1
                data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        head = torch.tensor([kind, data.numel()], dtype=torch.int64)
        dist.broadcast(head, src=source)
        kind, size = head.tolist()
        if not mine:
            data = torch.empty(size, dtype=torch.uint8 if kind else torch.int64)
        if size:
            dist.broadcast(data, src=source)
        if mine:
            return value
        return pickle.loads(data.numpy().tobytes()) if kind else data.tolist()
