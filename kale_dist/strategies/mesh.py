"""Settings of two kinds of parallelism at once: ranks form a table, with data parallelism along one side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from kale_dist.strategies import base
from kale_dist.strategies.fsdp import check_fsdp
from kale_dist.strategies.pipeline import Pipeline
from kale_dist.strategies.tensor import check_tensor, checked_plan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mesh(base.Settings):
    """Tensor or pipeline parallelism within groups of neighbouring ranks, and data parallelism between the groups.

    `Mesh(data=2, tensor=4)` trains on 8 ranks: ranks 0 to 3 share one part of each batch and divide the weights, ranks
    4 to 7 the other part. `Mesh(fsdp=2, tensor=4)` also divides each rank's weights, gradients and optimizer state
    over the two groups. Put the ranks of a group on one machine: they send in every layer. `Mesh(data=2, pipeline=4)`
    is two pipelines of four stages each.

    Bytes that each rank sends in a training step: those of `Tensor` or `Pipeline` for its part of the batch; and for
    the weights that one rank holds (P bytes: the divided ones count 1/tensor), 2(n-1)/n P for n = data, or 3(n-1)/n P
    for n = fsdp (Narayanan et al., 2021, section 3.2).
    """

    word: ClassVar[str] = "mesh"
    home: ClassVar[str] = "mesh_parallel.made"

    data: int | None = None
    """Number of groups, which average gradients; None for as many as the ranks allow."""
    fsdp: int | None = None
    """Number of groups over which weights are sharded, in place of `data`. Only with `tensor`."""
    tensor: int | None = None
    """Ranks of a group, which divide the weights."""
    pipeline: int | None = None
    """Ranks of a group, which are the stages; in place of `tensor`."""
    plan: Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    """How `tensor` divides the weights: see `Tensor.plan`."""
    cut: int | tuple[str, ...] | None = None
    """Where `pipeline` cuts the model: see `Pipeline.cut`."""
    micro_batches: int | None = None
    """Parts of each group's batch: see `Pipeline.micro_batches`; None for its default."""
    compile: bool = False
    """Whether to compile the model's blocks."""
    activation_checkpointing: bool = False
    """Whether to compute the blocks' activations again in the backward pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", checked_plan(self.plan))
        base.check_flags(self, "compile", "activation_checkpointing")
        if self.tensor is None and self.pipeline is None:
            remedy = "Write Mesh(data=2, tensor=2), or use strategy='ddp' or 'fsdp'"
            raise base.refusal("a mesh has two sides, and neither tensor= nor pipeline= is given", remedy)
        if self.tensor is not None and self.pipeline is not None:
            problem = "a mesh has one side that divides the model, and both tensor= and pipeline= are given"
            raise base.refusal(problem, "Keep one")
        if self.data is not None and self.fsdp is not None:
            raise base.refusal("a mesh has one side for data, and both data= and fsdp= are given", "Keep one")
        if self.fsdp is not None and self.pipeline is not None:
            problem = "stages of a pipeline keep their weights whole, and fsdp= would shard them"
            raise base.refusal(problem, "Use data= with pipeline=, or tensor= with fsdp=")
        for name, side in (("plan", "tensor"), ("cut", "pipeline"), ("micro_batches", "pipeline")):
            if getattr(self, name) not in (None, ()) and getattr(self, side) is None:
                raise base.refusal(f"{name}= is a setting of {side}=, which is not given", f"Leave out {name}")
        for name in ("data", "fsdp", "tensor", "pipeline"):
            if getattr(self, name) is not None:
                base.refuse_count(name, getattr(self, name), at_least=2 if name in ("tensor", "pipeline") else 1)
        if self.pipeline is not None:
            cut = self.stages.cut
            wanted = self.pipeline if cut is None else cut if isinstance(cut, int) else len(cut) + 1
            if wanted != self.pipeline:
                problem = f"cut= makes {wanted} stages, and pipeline={self.pipeline}"
                raise base.refusal(problem, f"Use pipeline={wanted}, or another cut")
            object.__setattr__(self, "cut", cut)

    @property
    def stages(self) -> Pipeline:
        """The settings of each group's pipeline."""
        options: dict[str, Any] = {} if self.micro_batches is None else {"micro_batches": self.micro_batches}
        return Pipeline(
            cut=self.cut,
            compile=self.compile,
            activation_checkpointing=self.activation_checkpointing,
            **options,
        )

    @property
    def _side(self) -> tuple[str, int]:
        """How the ranks of a group divide the model, `tensor` or `pipeline`, and their number."""
        return ("tensor", self.tensor) if self.tensor is not None else ("pipeline", self.pipeline or 1)

    def check(self, given: base.Conditions) -> None:
        """Refuse sides that do not fit the number of processes, and models that cannot be divided.

        Raises:
            ConfigError: The message gives the reason.
        """
        (name, inner), processes = self._side, given.number_of_processes
        outer = self.data if self.data is not None else self.fsdp
        if processes % inner:
            near = math.ceil(processes / inner) * inner
            problem = f"{name}={inner} does not divide number_of_processes={processes}"
            raise base.refusal(problem, f"Use number_of_processes={near}, or a divisor of {processes}")
        if outer is not None and outer * inner != processes:
            side = "data" if self.data is not None else "fsdp"
            problem = f"{side}={outer} times {name}={inner} is {outer * inner}, and number_of_processes is {processes}"
            remedy = f"Use number_of_processes={outer * inner}, or {side}={processes // inner}"
            raise base.refusal(problem, remedy)
        if self.pipeline is not None:
            self.stages.check_model(given, inner)
            return
        check_tensor(self.plan, given, inner)
        if self.fsdp is not None:
            check_fsdp("blocks", given)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Neighbouring ranks form a group and share its batch."""
        name, inner = self._side
        shards, shard, index = world_size // inner, rank // inner, rank % inner
        part = f"stage {index} of {inner}" if name == "pipeline" else f"part {index} of {inner} of the weights"
        return base.Layout(
            shards=shards,
            shard=shard,
            peers=tuple(range(shard * inner, (shard + 1) * inner)),
            replicas=(rank,) if self.fsdp is not None else tuple(range(index, world_size, inner)),
            part=f"shard {shard} of {shards}, {part}",
        )
