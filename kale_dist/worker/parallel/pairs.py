"""Connections between two ranks, for threads: one group of two ranks each, and calls that wait in the kernel.

A receive that names its sender ends with an error when that process is gone. A receive from any sender would wait for ever,
so there is none here.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.worker.training.rank_group import Group

_TIMEOUT = dt.timedelta(days=7)
"""Evaluations between two messages may take long; ranks that hang are found by the job's `stall_timeout_s`."""


class LostPeerError(RuntimeError):
    """The rank at the other end of a connection is gone."""


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
        """Send tensors that are on the CPU and contiguous; returns when they may be changed.

        Raises:
            LostPeerError: The other rank is gone.
        """
        self._each(dist.send, tensors)

    def receive(self, *tensors: Tensor) -> None:
        """Overwrite tensors that are on the CPU and contiguous.

        Raises:
            LostPeerError: The other rank is gone.
        """
        self._each(dist.recv, tensors)

    def _each(self, call: Callable[..., Any], tensors: Iterable[Tensor]) -> None:
        try:
            for tensor in tensors:
                call(tensor, self.other, group=self._group)
        except RuntimeError as error:
            raise LostPeerError(f"the connection to rank {self.other} has ended: {error}") from error

    def send_bytes(self, data: bytes) -> None:
        """Send bytes and their number. Raises what `send` raises."""
        self.send(
            torch.tensor([len(data)], device="cpu"),
            *([torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else []),
        )

    def receive_bytes(self) -> bytes:
        """Receive what the other rank sent by `send_bytes`. Raises what `receive` raises."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self.receive(length)
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if length:
            self.receive(data)
        return data.numpy().tobytes()

    def close(self) -> None:
        """Close the connection. No thread may be using it."""
        dist.destroy_process_group(self._group)


def open_pairs(group: Group, wanted: Iterable[tuple[int, int]]) -> dict[int, Pair]:
    """Open connections. All ranks have to call this with the same pairs.

    Args:
        group: All ranks.
        wanted: Pairs of ranks, each once.

    Returns:
        This rank's connections, by the other rank.
    """
    own = {}
    for first, second in wanted:
        pair: Any = dist.new_group([first, second], timeout=_TIMEOUT, backend="gloo")
        if group.rank in (first, second):
            other = second if group.rank == first else first
            own[other] = Pair(pair, other)
    return own
