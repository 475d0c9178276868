"""Ways to sum a flat buffer over ranks. n is the number of ranks, M the bytes of the buffer.

| exchange | bytes that a rank sends | source |
|---|---|---|
| `torch` | 2 (n-1)/n M, of gloo's and NCCL's ring | Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms, 2009 |
| `ring` | 2 (n-1)/n M | the same |
| `driver` | M; the first rank (n-1) M | Li et al.: Scaling Distributed Machine Learning with the Parameter Server, 2014, with one server |

`ring` and `driver` count the bytes that they send. `torch` does not report its own, which come from the formula.

Compressed gradients are exchanged by PyTorch's own communication hooks, which take our buckets for those of its DDP. fp16 and bf16
send half the bytes of float32. PowerSGD (Vogels et al., 2019) sends two thin matrices of rank 4 for each matrix, keeps the rest
(the residual), and adds it to the next gradient; so residuals belong to a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from kale_dist.worker.training.clock import timed
from kale_dist.worker.training.rank_group import Group

_RANK = 4
_PLAIN_STEPS = 10
"""Gradients of the first steps are sent whole: they change most, and residuals of them would be late."""


class _Done:
    def wait(self) -> None:
        """Nothing is left to do."""


DONE = _Done()
"""The work of an exchange that is over when `start` returns."""


class AllReduce:
    """Sums by `torch.distributed.all_reduce`: gloo, or NCCL on GPUs. Other exchanges derive from it.

    Args:
        group: The ranks.
    """

    averages = False
    """Whether the exchange gives the mean; otherwise the sum, exact but for rounding."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.bytes_sent = 0.0

    def start(self, bucket: Any) -> Any:
        """Begin the exchange of `bucket.flat`; returns an object whose `wait()` returns when it is done."""
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * bucket.flat.numel() * bucket.flat.element_size()
        return dist.all_reduce(bucket.flat, group=self.group.world, async_op=True)

    def state(self) -> dict[str, Any]:
        """Return what later exchanges need from earlier ones, for a checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class Ring(AllReduce):
    """Each rank sends pieces to the next one: n-1 times to add them up, n-1 times to spread the sums.

    All ranks get the same bits, since each sum is made by one rank.
    """

    def start(self, bucket: Any) -> Any:
        """Sum the bucket before returning."""
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


class DriverExchange(Ring):
    """The first rank receives all buffers, adds them up in the order of the ranks, and sends the sum to all."""

    def start(self, bucket: Any) -> Any:
        """Sum the bucket before returning."""
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


class _TorchBucket:
    """A bucket with the methods that torch's hooks call."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def buffer(self) -> Tensor:
        flat: Tensor = self._bucket.flat
        return flat

    def gradients(self) -> list[Tensor]:
        # PowerSGD asks each for its first dimension.
        return [view.reshape(view.shape or (1,)) for view in self._bucket.views]

    def parameters(self) -> list[Tensor]:
        return list(self._bucket.parameters)

    def index(self) -> int:
        return int(self._bucket.index)

    def is_last(self) -> bool:
        return bool(self._bucket.is_last)

    def set_buffer(self, tensor: Tensor) -> None:
        self._bucket.flat.copy_(tensor)


class _Running:
    def __init__(self, future: Any, flat: Tensor) -> None:
        self._future, self._flat = future, flat

    @timed
    def wait(self) -> None:
        """Wait for the mean, and copy it into the bucket."""
        outcome = self._future.wait()
        outcome = outcome[0] if isinstance(outcome, list) else outcome
        if outcome.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(outcome)


class Half(AllReduce):
    """Sends gradients as 16-bit floats.

    Args:
        group: The ranks.
        kind: `fp16` or `bf16`.
    """

    averages = True

    def __init__(self, group: Group, kind: str) -> None:
        super().__init__(group)
        self._hook: Any = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook

    def start(self, bucket: Any) -> Any:
        """Begin to average the bucket."""
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * bucket.flat.numel() * 2
        return _Running(self._hook(self.group.world, _TorchBucket(bucket)), bucket.flat)


class PowerSGD(AllReduce):
    """Sends thin matrices, with error feedback."""

    averages = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._state = powerSGD_hook.PowerSGDState(
            process_group=group.world, matrix_approximation_rank=_RANK, start_powerSGD_iter=_PLAIN_STEPS
        )

    def start(self, bucket: Any) -> Any:
        """Average the bucket before returning: torch's hook exchanges twice more from its own threads, and must be alone."""
        state: Any = self._state
        before = state.total_numel_after_compression
        is_plain = state.iter < state.start_powerSGD_iter
        _Running(powerSGD_hook.powerSGD_hook(state, _TorchBucket(bucket)), bucket.flat).wait()
        numbers = bucket.flat.numel() if is_plain else state.total_numel_after_compression - before
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * numbers * bucket.flat.element_size()
        return DONE

    def state(self) -> dict[str, Any]:
        """Return the residuals and the last thin matrices of each bucket, and how many steps were made."""
        state: Any = self._state
        return {
            "iter": state.iter,
            "errors": dict(state.error_dict),
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        mine: Any = self._state
        mine.iter = state["iter"]
        kept = ((mine.error_dict, "errors"), (mine.p_memory_dict, "p"), (mine.q_memory_dict, "q"))
        for memory, name in kept:
            # A checkpoint has them on the CPU.
            memory.update({index: tensor.to(self.group.device, copy=True) for index, tensor in state[name].items()})
