"""Ways to sum a flat buffer over ranks. n is the number of ranks, M the bytes of the buffer.

| exchange | bytes that a rank sends | source |
|---|---|---|
| `torch` | 2 (n-1)/n M, of gloo's and NCCL's ring | Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms, 2009 |
| `ring` | 2 (n-1)/n M | the same |
| `driver` | M; the first rank (n-1) M | Li et al.: Scaling Distributed Machine Learning with the Parameter Server, 2014, with one server |

`ring` and `driver` count what they send. Of `torch` the formula is used, as it does not say what it sends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.training.group import Group


class _Done:
    def wait(self) -> None:
        """Nothing is left to do."""


DONE = _Done()
"""An exchange that is over when it has begun."""


class AllReduce:
    """`torch.distributed.all_reduce`: gloo, or NCCL on GPUs. Other ways to sum derive from it.

    Args:
        group: The ranks.
    """

    averages = False
    """Whether the outcome is the mean; otherwise the sum, exact but for rounding."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.bytes_sent = 0.0

    def start(self, bucket: Any) -> Any:
        """Begin the exchange of `bucket.flat`; gives an object whose `wait()` returns when it is done."""
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * bucket.flat.numel() * bucket.flat.element_size()
        return dist.all_reduce(bucket.flat, group=self.group.world, async_op=True)

    def state(self) -> dict[str, Any]:
        """What later exchanges need of earlier ones."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""


class Ring(AllReduce):
    """Each rank sends pieces to the next one: n-1 times to add them up, n-1 times to spread the sums.

    All ranks get the same bits, since one rank has made each sum.
    """

    def start(self, bucket: Any) -> Any:
        """Sum, at once."""
        rank, world = self.group.rank, self.group.world_size
        pieces = list(bucket.flat.tensor_split(world))
        for step in range(2 * (world - 1)):
            is_adding = step < world - 1
            give, take = (rank - step) % world, (rank - step - 1) % world
            arrived = torch.empty_like(pieces[take])
            sending = self._send(pieces[give], (rank + 1) % world)
            dist.recv(arrived, group=self.group.world, group_src=(rank - 1) % world)
            sending.wait()
            if is_adding:
                pieces[take].add_(arrived)
            else:
                pieces[take].copy_(arrived)
        return DONE

    def _send(self, piece: Tensor, to: int) -> Any:
        self.bytes_sent += piece.numel() * piece.element_size()
        return dist.isend(piece, group=self.group.world, group_dst=to)


class Driver(Ring):
    """The first rank receives all buffers, adds them up in the order of the ranks, and sends the sum to all."""

    def start(self, bucket: Any) -> Any:
        """Sum, at once."""
        flat = bucket.flat
        if self.group.rank:
            self._send(flat, 0).wait()
            dist.recv(flat, group=self.group.world, group_src=0)
            return DONE
        arrived = torch.empty_like(flat)
        others = range(1, self.group.world_size)
        for other in others:
            dist.recv(arrived, group=self.group.world, group_src=other)
            flat.add_(arrived)
        for sending in [self._send(flat, other) for other in others]:
            sending.wait()
        return DONE
