"""Settings of pipeline parallelism: each rank has a part of the model, and all have the same batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

from kale_dist.errors import ConfigError
from kale_dist.strategies import base
from kale_dist.strategies.recommendation import balanced, blocks_of
from kale_dist.wording import closest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline(base.Settings):
    """Pipeline parallelism: the model is cut into stages, one a rank, and batches go through in micro-batches.

    It equals one process for models whose samples do not see each other (no BatchNorm with several micro-batches) and without
    dropout (Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, NeurIPS 2019).
    """

    word: ClassVar[str] = "pipeline"
    home: ClassVar[str] = "pipeline_parallel.PipelineParallel"

    cut: int | tuple[str, ...] | None = None
    """Names of the modules at which stage 1, 2, ... begin, in the order of their calls, as `named_modules()` has them;
    or the number of stages, cut so that the largest has as few parameters as possible; None: as many as ranks."""
    micro_batches: int = 4
    """How many parts each batch is divided into. Stages wait for each other for (stages - 1) / (micro_batches + stages
    - 1) of the time."""
    compile: bool = False
    """Whether to compile the modules of each stage."""
    activation_checkpointing: bool = False
    """Whether to compute activations again in the backward pass, module by module, rather than keep them."""

    def __post_init__(self) -> None:
        base.refuse_count("micro_batches", self.micro_batches)
        base.check_flags(self, "compile", "activation_checkpointing")
        cut: Any = self.cut
        if isinstance(cut, str):
            cut = (cut,)
        if cut is None or (isinstance(cut, int) and not isinstance(cut, bool)):
            if cut is not None:
                base.refuse_count("cut", cut)
            return
        names = tuple(cut) if isinstance(cut, Iterable) else ()
        if not names or not all(isinstance(name, str) for name in names):
            remedy = "Give names of modules, such as cut=['blocks.4'], or a number of stages"
            raise base.refusal(f"cut={self.cut!r} says nothing about stages", remedy)
        object.__setattr__(self, "cut", names)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Every rank has the whole batch, and its own part of the weights."""
        return base.Layout.of_parts(rank, world_size, f"stage {rank} of {world_size}")

    def check(self, given: base.Conditions) -> None:
        """Refuse a model or training that cannot be cut into stages.

        Raises:
            ConfigError: Stages and ranks differ in number, names do not exist or come in another order, or the training
                needs all of the model at once.
        """
        self.check_model(given, given.number_of_processes)

    def check_model(self, given: base.Conditions, stages: int) -> None:
        """Check a call as `check` does, for a number of stages.

        Raises:
            ConfigError: The message gives the reason.
        """
        model = given.model
        if isinstance(model, dict):
            raise _refusal("it cuts one model, and there are several", 'Use strategy="ddp" or "fsdp"')
        wanted = self.cut if isinstance(self.cut, int) else stages if self.cut is None else len(self.cut) + 1
        if wanted != stages:
            remedy = f"Use number_of_processes={wanted}, or cut the model into {stages} stages"
            raise _refusal(f"{wanted} stages cannot run on {stages} ranks", remedy)
        if type(model).__name__ == "OptimizedModule":
            raise _refusal(
                "torch.compile has made one program of the model", "Pass the model as it was before, and compile=True"
            )
        lazy = next(
            (name for name, p in model.named_parameters() if type(p).__name__.startswith("Uninitialized")), None
        )
        if lazy:
            raise _refusal(f"the parameter {lazy!r} has no shape yet", "Run the model once on a batch before the call")
        self._check_names(model, stages)
        modules = [(name or "the model", module) for name, module in model.named_modules()]
        if self.micro_batches > 1 and (found := _first(modules, "_BatchNorm")):
            problem = (
                f"{found} takes its statistics from the whole batch, and would see {self.micro_batches} parts of it"
            )
            raise _refusal(problem, "Use micro_batches=1, or GroupNorm in the place of BatchNorm")
        base.refuse_all_weights("pipeline", given)
        if given.precision == "fp16":
            problem = "precision='fp16' skips steps by the gradients of each stage, which then disagree"
            raise _refusal(problem, "Use precision='bf16'")

    def _check_names(self, model: Any, stages: int) -> None:
        if not isinstance(self.cut, tuple):
            blocks = blocks_of(model)
            if len(blocks) < stages:
                problem = f"{type(model).__name__} has {len(blocks)} parts that can be told apart, too few for {stages} stages"
                raise _refusal(problem, "Name the modules where stages begin: cut=['encoder.layers.3']")
            return
        known = [name for name, _ in model.named_modules() if name]
        for name in self.cut:
            if name not in known:
                hint = closest(name, known)
                children = ", ".join(repr(child) for child, _ in list(model.named_children())[:6])
                raise _refusal(f"the model has no module {name!r}", f"{hint}Its parts are {children}")
        for earlier, later in zip(self.cut, self.cut[1:], strict=False):
            if earlier == later:
                raise _refusal(f"{earlier!r} is in cut twice", "Name each module once")
            if later.startswith(f"{earlier}."):
                raise _refusal(f"{later!r} is inside {earlier!r}, which begins a stage itself", "Name one of them")
            if known.index(earlier) > known.index(later):
                problem = f"{later!r} comes before {earlier!r} in the model"
                raise _refusal(problem, "Name modules in the order of their calls")
        first = self.cut[0]
        if all(first.startswith(f"{name}.") for name in known[: known.index(first)]):
            raise _refusal(f"nothing comes before {first!r}, so stage 0 is empty", "Name a later module")

    def cuts(self, model: Any, stages: int) -> tuple[str, ...]:
        """The names of the modules at which stages 1, 2, ... begin.

        Args:
            model: The model.
            stages: The number of stages.
        """
        if isinstance(self.cut, tuple):
            return self.cut
        blocks = blocks_of(model)
        return tuple(blocks[i].name for i in balanced([block.bytes for block in blocks], stages))


def _first(modules: list[tuple[str, Any]], kind: str) -> str:
    """The name of the first module whose class has this name; torch is not imported here."""
    return next((name for name, one in modules if any(kin.__name__ == kind for kin in type(one).__mro__)), "")


def _refusal(problem: str, remedy: str) -> ConfigError:
    return base.refusal(f"Pipeline: {problem}", remedy)
