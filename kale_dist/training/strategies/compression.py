"""Compressed gradients, by PyTorch's own communication hooks, which take our buckets for those of its DDP.

fp16 and bf16 send half of what float32 takes. PowerSGD (Vogels et al., 2019) sends two thin matrices of rank 4 for each
matrix, keeps what that leaves out, and adds it to the next gradient; so its residuals belong to a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from kale_dist.training.group import Group
from kale_dist.training.profiling import timed
from kale_dist.training.strategies.exchanges import DONE, AllReduce

_RANK = 4
_PLAIN_STEPS = 10
"""Gradients of the first steps are sent whole: they change most, and residuals of them would be late."""


class _TorchBucket:
    """A bucket as torch's hooks know it."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def buffer(self) -> Tensor:
        flat: Tensor = self._bucket.flat
        return flat

    def gradients(self) -> list[Tensor]:
        return list(self._bucket.views)

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
        """Wait, and have the outcome in the bucket."""
        outcome = self._future.wait()
        outcome = outcome[0] if isinstance(outcome, list) else outcome
        if outcome.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(outcome)


class Half(AllReduce):
    """16-bit floats.

    Args:
        group: The ranks.
        kind: `fp16` or `bf16`.
    """

    averages = True

    def __init__(self, group: Group, kind: str) -> None:
        super().__init__(group)
        self._hook: Any = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook

    def start(self, bucket: Any) -> Any:
        """Begin to average."""
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * bucket.flat.numel() * 2
        return _Running(self._hook(self.group.world, _TorchBucket(bucket)), bucket.flat)


class PowerSGD(AllReduce):
    """Thin matrices with error feedback."""

    averages = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._state = powerSGD_hook.PowerSGDState(
            process_group=group.world, matrix_approximation_rank=_RANK, start_powerSGD_iter=_PLAIN_STEPS
        )

    def start(self, bucket: Any) -> Any:
        """Average, at once: torch's hook exchanges twice more from threads of its own, and so must be alone."""
        state: Any = self._state
        before = state.total_numel_after_compression
        is_plain = state.iter < state.start_powerSGD_iter
        _Running(powerSGD_hook.powerSGD_hook(state, _TorchBucket(bucket)), bucket.flat).wait()
        numbers = bucket.flat.numel() if is_plain else state.total_numel_after_compression - before
        world = self.group.world_size
        self.bytes_sent += 2 * (world - 1) / world * numbers * bucket.flat.element_size()
        return DONE

    def state(self) -> dict[str, Any]:
        """Residuals and the last thin matrices of each bucket, and how many steps were made."""
        state: Any = self._state
        return {
            "iter": state.iter,
            "errors": dict(state.error_dict),
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        mine: Any = self._state
        mine.iter = state["iter"]
        kept = ((mine.error_dict, "errors"), (mine.p_memory_dict, "p"), (mine.q_memory_dict, "q"))
        for memory, name in kept:
            memory.update({index: torch.clone(tensor) for index, tensor in state[name].items()})
