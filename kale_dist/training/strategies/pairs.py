"""Connections between two ranks, for threads: one group of two ranks each, and calls that wait in the kernel.

A receive that names its sender ends with an error when that process is gone. One from any sender would wait for ever,
which is why there is none here.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from kale_dist.training.group import Group

_TIMEOUT = dt.timedelta(days=7)
"""Evaluations between two messages may take long; ranks that hang are found by the job's `stall_timeout_s`."""


class Pair:
    """This rank's end of a connection. Both ends send and receive the same sizes in the same order.

    Args:
        group: The group of the two ranks.
        other: The other rank.
    """

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group = group
        self.other = other

    def send(self, *tensors: Tensor) -> None:
        """Send tensors that are on the CPU and contiguous; returns when they may be changed."""
        for tensor in tensors:
            dist.send(tensor, self.other, group=self._group)

    def receive(self, *tensors: Tensor) -> None:
        """Overwrite tensors that are on the CPU and contiguous.

        Raises:
            RuntimeError: The other rank is gone.
        """
        for tensor in tensors:
            dist.recv(tensor, self.other, group=self._group)

    def close(self) -> None:
        """Close the connection. No thread may be using it."""
        dist.destroy_process_group(self._group)


def open_pairs(group: Group, wanted: Iterable[tuple[int, int]]) -> dict[int, Pair]:
    """Open connections; all ranks have to call this with the same.

    Args:
        group: All ranks.
        wanted: Pairs of ranks, each once.

    Returns:
        Those of this rank, by the other rank.
    """
    own = {}
    for first, second in wanted:
        pair = dist.new_group([first, second], timeout=_TIMEOUT, backend="gloo")
        if group.rank in (first, second):
            other = second if group.rank == first else first
            own[other] = Pair(pair, other)
    return own
