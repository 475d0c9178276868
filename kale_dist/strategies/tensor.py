"""Settings of tensor parallelism: each rank has a part of every large weight, and all ranks see the same batch."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from kale_dist.errors import ConfigError
from kale_dist.strategies import base
from kale_dist.wording import closest

WORDS = ("alone", "columns", "columns/3", "rows", "whole")
"""The words of a plan for a Linear or Embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor(base.Settings):
    """Tensor parallelism: every Linear and Embedding is divided over the ranks; the rest of the model is on each.

    Without a plan, each divided layer gives its whole output to the next one, which is right for any `forward`. A plan
    keeps the output of one layer divided up to the next (Shoeybi et al., Megatron-LM, 2019, section 3), which sends
    less. All ranks of a group see the same batch, and draw the same random numbers.

    Bytes that each rank sends in a training step, for n ranks and outputs of `size` bytes (batch and positions
    included), where an all-gather sends (n-1)/n of the whole and an all-reduce 2(n-1)/n (Thakur, Rabenseifner and
    Gropp, 2005, sections 4.1 and 4.5):

    - a Linear alone: (n-1)/n of its output in the forward pass, 2(n-1)/n of its input in the backward pass (unless
      the input needs no gradient);
    - an Embedding alone: (n-1)/n of its output; one that is tied to a Linear: 2(n-1)/n of it;
    - a pair of `columns` and `rows`: 2(n-1)/n of the output, and 2(n-1)/n of the input.
    """

    word: ClassVar[str] = "tensor"
    home: ClassVar[str] = "tensor_parallel.TensorParallel"

    plan: Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    """What to do with layers other than to divide each alone, by name or pattern: `{"blocks.*.fc1": "columns",
    "blocks.*.fc2": "rows", "head": "whole"}`.

    `columns`: divided by outputs, the output stays divided (`columns/3` for three weights in one, such as a fused
    query, key and value). `rows`: divided by inputs, takes such an output and gives a whole one. `whole`: on every
    rank. `alone`: as without a plan.
    """
    compile: bool = False
    """Whether to compile the model's blocks (`torch.compile`); the exchange itself is not compiled."""
    activation_checkpointing: bool = False
    """Whether to compute the blocks' activations again in the backward pass (Chen et al., 2016), to save memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", checked_plan(self.plan))
        base.check_flags(self, "compile", "activation_checkpointing")

    def check(self, given: base.Conditions) -> None:
        """Refuse models that this plan cannot divide.

        Raises:
            ConfigError: A width is not divisible, or the plan names a layer that does not exist.
        """
        check_tensor(self.plan, given, given.number_of_processes)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """All ranks have the same batch, and each has its own part of the weights."""
        return base.Layout.of_parts(rank, world_size, f"part {rank} of {world_size} of the weights")


def checked_plan(plan: Any) -> tuple[tuple[str, str], ...]:
    """Check a plan, and convert it to pairs of a pattern and a word.

    Raises:
        ConfigError: It is not a plan.
    """
    if plan is None:
        return ()
    if isinstance(plan, Mapping):
        plan = tuple(plan.items())
    if not isinstance(plan, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in plan):  # noqa: PLR2004
        raise base.refusal(f"plan={plan!r} is not a dict", 'Write plan={"head": "whole"}')
    for pattern, word in plan:
        if not isinstance(pattern, str) or not pattern:
            raise base.refusal(f"plan names a layer by {pattern!r}", "Use names as in model.named_modules()")
        if word not in WORDS:
            hint = closest(word, WORDS)
            raise base.refusal(f"plan has {pattern!r}: {word!r}", f"{hint}Use one of {', '.join(map(repr, WORDS))}")
    return plan


def check_tensor(plan: Any, given: base.Conditions, degree: int) -> None:
    """Refuse a call whose weights cannot be divided into `degree` parts.

    Args:
        plan: Pairs of a pattern and a word.
        given: The call.
        degree: Parts.

    Raises:
        ConfigError: The reason.
    """
    if degree < 2:  # noqa: PLR2004 - two parts
        remedy = "Give number_of_processes=2 or more, or leave strategy out"
        raise base.refusal(f"weights cannot be divided over {degree} process", remedy)
    check_precision(given)
    base.refuse_optimizers(given, base.WHOLE_WEIGHTS, "updates a weight as a whole, and each rank has a part of it")
    base.refuse_all_weights("tensor", given)
    named = given.model.items() if isinstance(given.model, dict) else [("", given.model)]
    modules = {
        ".".join(part for part in (prefix, name) if part): module
        for prefix, model in named
        for name, module in model.named_modules()
    }
    assign(modules, plan, degree)


def check_precision(given: base.Conditions) -> None:
    """Refuse fp16 where each rank has a part of the gradients: a part may overflow where another does not.

    Raises:
        ConfigError: The call has `precision="fp16"`.
    """
    if given.precision == "fp16":
        problem = "'fp16' skips a step where gradients overflow, and each rank sees only its part of them"
        raise ConfigError("precision", problem, "Use precision='bf16', which needs no scaled loss")


def parameters_of(module: Any) -> dict[str, Any]:
    """A module's own parameters by their names, without its children's; a user's class may have a `parameters()` without `recurse`."""
    return {name: one for name, one in module._parameters.items() if one is not None}  # noqa: SLF001


def kind_of(module: Any) -> str | None:
    """`Linear` or `Embedding` for a module that can be divided; None for others."""
    kind: Any = type(module)
    for one in kind.__mro__:
        if one.__module__.startswith("torch.nn.modules.") and one.__name__ in ("Linear", "Embedding"):
            # MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear and does not call it.
            is_called = kind.forward is one.forward and kind.__name__[:6] != "NonDyn"
            weight = parameters_of(module).get("weight")  # a parametrized weight is not there
            has_shape = weight is not None and type(weight).__name__ != "UninitializedParameter"
            limits_norm = getattr(module, "max_norm", None) is not None
            return str(one.__name__) if is_called and has_shape and not limits_norm else None
    return None


def assign(modules: Mapping[str, Any], plan: tuple[tuple[str, str], ...], degree: int) -> dict[str, str]:
    """How to divide each Linear and Embedding that is divided: a word of a plan, or `vocabulary`.

    Without a plan, one whose width `degree` does not divide stays whole.

    Args:
        modules: All modules of the model by name.
        plan: Pairs of a pattern and a word; the last that fits counts.
        degree: Parts.

    Raises:
        ConfigError: A pattern fits nothing, a width is not divisible, or nothing can be divided.
    """
    words = {name: "alone" for name, module in modules.items() if kind_of(module)}
    for pattern, word in plan:
        fitting = fitting_names(modules, pattern)
        if not any(name in words for name in fitting):
            raise base.refusal(*_unplanned(pattern, fitting, modules, words))
        words.update({name: word for name in fitting if name in words})
    linear = {id(modules[name].weight) for name in words if kind_of(modules[name]) == "Linear"}
    for name, word in words.items():
        along = 0 if id(modules[name].weight) in linear else 1
        if word == "alone" and modules[name].weight.shape[along] % degree:
            words[name] = "whole"
    _keep_shared(modules, words)
    divided = {name: word for name, word in words.items() if word != "whole"}
    for name, word in divided.items():
        if kind_of(modules[name]) != "Embedding":
            continue
        if word != "alone":
            problem = f"plan has {name!r}: {word!r}, and that is an Embedding"
            raise base.refusal(problem, "Embeddings are divided alone, or stay 'whole'")
        if id(modules[name].weight) in linear:
            divided[name] = "vocabulary"
    dimensions: dict[int, tuple[str, tuple[int, int]]] = {}
    for name, word in divided.items():
        module = modules[name]
        how = dimension(kind_of(module) or "", word)
        size = module.weight.shape[how[0]]
        if size % (degree * how[1]):
            pieces = f"{how[1]} x {degree}" if how[1] > 1 else str(degree)
            width = "inputs" if word == "rows" else "outputs"
            problem = f"{name} has {size} {width}, which {pieces} ranks do not divide"
            remedy = f"Use a number of ranks that divides {size}, or leave it out of the plan"
            raise base.refusal(problem, remedy)
        first = dimensions.setdefault(id(module.weight), (name, how))
        if first[1] != how:
            problem = f"{first[0]} and {name} share one weight, and the plan divides it in two ways"
            raise base.refusal(problem, f"Give both the same word, or plan={{{name!r}: 'whole'}}")
    if not divided:
        problem = f"the model has no Linear or Embedding whose weights can be divided into {degree} parts"
        raise base.refusal(problem, "Use strategy='ddp' or 'fsdp', which take any model")
    return divided


def dimension(kind: str, word: str) -> tuple[int, int]:
    """The dimension along which a weight is divided, and how many fused weights it has along this dimension."""
    if word == "columns/3":
        return 0, 3
    return (1 if word == "rows" or (kind == "Embedding" and word == "alone") else 0), 1


def fitting_names(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match a pattern, in which `*` stands for one part of a name between dots."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if len(own := name.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, own, parts))
    ]


def _keep_shared(modules: Mapping[str, Any], words: dict[str, str]) -> None:
    """Set the word of a layer to `whole` if a module that is not divided shares its weight."""
    whole: set[int] = set()
    for name, module in modules.items():
        kept = words.get(name, "whole") == "whole"
        whole |= {id(parameter) for parameter in parameters_of(module).values() if kept}
    for name in words:
        if id(modules[name].weight) in whole:
            words[name] = "whole"


def _unplanned(pattern: str, fitting: list[str], modules: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    """Yield problem and remedy for a pattern that names no layer that can be divided."""
    if fitting:
        kind = type(modules[fitting[0]]).__name__
        yield f"plan names {pattern!r}, and {fitting[0]} is a {kind}, which is not divided"
        yield f"Name Linear or Embedding layers: {', '.join(list(words)[:5]) or 'this model has none'}"
        return
    yield f"plan names {pattern!r}, and the model has no such layer"
    hint = closest(pattern, words)
    yield f"{hint}Its layers are {', '.join(list(words)[:8]) or 'none that could be divided'}"
