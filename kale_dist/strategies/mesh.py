"""Settings of two kinds of parallelism at once: ranks form a table, with data parallelism along one side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from kale_dist.errors import ConfigError
from kale_dist.strategies.base import Conditions, Layout, Settings, refuse_count
from kale_dist.strategies.fsdp import check_fsdp
from kale_dist.strategies.tensor import check_flags, check_tensor, checked_plan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mesh(Settings):
    """Tensor parallelism within groups of neighbouring ranks, and data parallelism between the groups.

    `Mesh(data=2, tensor=4)` trains on 8 ranks: ranks 0 to 3 share one part of each batch and divide the weights, ranks
    4 to 7 the other part. `Mesh(fsdp=2, tensor=4)` also divides each rank's weights, gradients and optimizer state
    over the two groups. Put the ranks of a group on one machine: they send in every layer.

    Bytes that each rank sends in a training step: those of `Tensor` for the outputs of its part of the batch; and for
    the weights that one rank holds (P bytes: the divided ones count 1/tensor), 2(n-1)/n P for n = data, or 3(n-1)/n P
    for n = fsdp (Narayanan et al., 2021, section 3.2).
    """

    word: ClassVar[str] = "mesh"
    home: ClassVar[str] = "mesh.made"

    data: int | None = None
    """Groups that average gradients; None for as many as there are ranks for."""
    fsdp: int | None = None
    """Groups over which weights are sharded, in place of `data`."""
    tensor: int | None = None
    """Ranks of a group, which divide weights."""
    plan: Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    """How `tensor` divides: see `Tensor.plan`."""
    compile: bool = False
    """Whether to compile the model's blocks."""
    activation_checkpointing: bool = False
    """Whether to compute the blocks' activations again in the backward pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", checked_plan(self.plan))
        check_flags(self, "compile", "activation_checkpointing")
        if self.tensor is None:
            remedy = "Give such as Mesh(data=2, tensor=2), or use strategy='ddp' or 'fsdp'"
            raise ConfigError("strategy", "a mesh has two sides, and tensor= is not given", remedy)
        if self.data is not None and self.fsdp is not None:
            raise ConfigError(
                "strategy", "a mesh has one side for data, and both data= and fsdp= are given", "Keep one"
            )
        for name in ("data", "fsdp", "tensor"):
            if getattr(self, name) is not None:
                refuse_count(name, getattr(self, name), at_least=2 if name == "tensor" else 1)

    def check(self, given: Conditions) -> None:
        """Refuse sides that do not fit the number of processes, and models that cannot be divided.

        Raises:
            ConfigError: The reason.
        """
        inner, processes = self.tensor or 1, given.number_of_processes
        outer = self.data if self.data is not None else self.fsdp
        if processes % inner:
            near = math.ceil(processes / inner) * inner
            problem = f"tensor={inner} does not divide number_of_processes={processes}"
            raise ConfigError("strategy", problem, f"Use number_of_processes={near}, or a divisor of {processes}")
        if outer is not None and outer * inner != processes:
            side = "data" if self.data is not None else "fsdp"
            problem = f"{side}={outer} times tensor={inner} is {outer * inner}, and number_of_processes is {processes}"
            remedy = f"Use number_of_processes={outer * inner}, or {side}={processes // inner}"
            raise ConfigError("strategy", problem, remedy)
        check_tensor(self.plan, given, inner)
        if self.fsdp is not None:
            check_fsdp("blocks", given)

    def layout(self, rank: int, world_size: int) -> Layout:
        """Neighbouring ranks are peers."""
        inner = self.tensor or 1
        shards, shard, index = world_size // inner, rank // inner, rank % inner
        return Layout(
            shards=shards,
            shard=shard,
            peers=tuple(range(shard * inner, (shard + 1) * inner)),
            replicas=(rank,) if self.fsdp is not None else tuple(range(index, world_size, inner)),
            part=f"shard {shard} of {shards}, part {index} of {inner} of the weights",
        )
