"""Settings of fully sharded data parallelism: each rank keeps a part of every weight, and a part of each batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from kale_dist.strategies import base
from kale_dist.strategies.tensor import check_precision, fitting_names, parameters_of
from kale_dist.wording import closest

_UNIT_BYTES = 1 << 20
"""Smaller blocks are gathered with the module around them: a message costs as much as this many bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FSDP(base.Settings):
    """Fully sharded data parallelism: weights, gradients and the optimizer's state are divided over the ranks.

    Made of torch's `fully_shard`. A unit (a block of the model) is gathered just before it computes, and freed after
    it. Each rank keeps 1/n of the weights, of their gradients and of the optimizer's state, and while a unit computes that
    unit whole (Rajbhandari et al., ZeRO, 2020, stage 3).

    Bytes that each rank sends in a training step, for n ranks and P bytes of weights (each padded so that n divides its
    first dimension): 3 (n-1)/n P: an all-gather in the forward and one in the backward pass, and a reduce-scatter
    (ZeRO, section 7.2.2); with `accumulate=k`, k times that. What is in no unit stays gathered between the two passes, and
    is gathered once. An evaluated batch costs (n-1)/n P.
    """

    word: ClassVar[str] = "fsdp"
    home: ClassVar[str] = "fully_sharded.FullySharded"

    units: Literal["blocks", "whole"] | tuple[str, ...] = "blocks"
    """What is gathered at once: `blocks` (each entry of a ModuleList or Sequential with at least 1 MiB of weights, and
    the rest together), `whole` (all, for models in which ranks may use different layers), or names or patterns of
    modules, such as `("encoder.layers.*", "head")`."""
    compile: bool = False
    """Whether to compile each unit (`torch.compile`); gathering is not compiled."""
    activation_checkpointing: bool = False
    """Whether to compute each unit's activations again in the backward pass (Chen et al., 2016), to save memory."""

    def __post_init__(self) -> None:
        units: Any = self.units
        if isinstance(units, list | tuple):
            if not units or not all(isinstance(name, str) and name for name in units):
                raise base.refusal(f"units={units!r} does not name modules", 'Give names such as ("layers.*",)')
            object.__setattr__(self, "units", tuple(units))
        elif not isinstance(units, str) or units not in ("blocks", "whole"):
            hint = closest(units, ("blocks", "whole"))
            remedy = f"{hint}Use 'blocks', 'whole', or a tuple of names such as ('layers.*',)"
            raise base.refusal(f"there is no units={units!r}", remedy)
        base.check_flags(self, "compile", "activation_checkpointing")

    def check(self, given: base.Conditions) -> None:
        """Refuse models that cannot be sharded.

        Raises:
            ConfigError: The message gives the reason.
        """
        check_fsdp(self.units, given)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Every rank has its own shard of the data, and its own part of the weights."""
        whole = base.Layout.of_replicas(rank, world_size)
        return dataclasses.replace(whole, replicas=(rank,), part=f"{whole.part}, of weights too")


def check_fsdp(units: Any, given: base.Conditions) -> None:
    """Refuse a call whose model `fully_shard` cannot take.

    Raises:
        ConfigError: The reason.
    """
    check_precision(given)
    for argument in ("model", "optimizer"):
        if isinstance(several := getattr(given, argument), dict):
            problem = f"fsdp takes one {argument}, and there are {len(several)}"
            raise base.refusal(problem, "Use strategy='ddp'")
    if (kind := type(given.model).__name__) in ("ModuleList", "ModuleDict"):
        problem = f"a {kind} is never called, and fsdp gathers a module's weights when it is"
        raise base.refusal(problem, "Put it into a module with a forward, or use strategy='ddp'")
    parameters = dict(given.model.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter).__name__ == "UninitializedParameter":
            remedy = "Call the model once before, so that lazy modules get their shapes"
            raise base.refusal(f"{name} has no shape yet, and fsdp cannot divide it", remedy)
        if not parameter.is_contiguous():
            remedy = "Call model.to(memory_format=torch.contiguous_format), or use strategy='ddp'"
            raise base.refusal(f"{name} is not contiguous, and fsdp divides only what is", remedy)
        if not parameter.dim():
            remedy = f"Make it a vector of one element: {name} = nn.Parameter(value.reshape(1))"
            raise base.refusal(f"{name} has no dimensions, and fsdp divides the first one", remedy)
    dtypes = {str(parameter.dtype) for parameter in parameters.values() if parameter.requires_grad}
    if len(dtypes) > 1:
        problem = f"the model's weights have several dtypes ({', '.join(sorted(dtypes))}), and fsdp takes one"
        raise base.refusal(problem, "Convert it (model.float()), and use precision='bf16'")
    # These two are made of operations that torch's DTensor has.
    refused = {*base.ALL_WEIGHTS, *base.WHOLE_WEIGHTS} - {"Prodigy", "Muon"}
    base.refuse_optimizers(given, refused, "needs whole weights, and each rank has a part of them")
    base.refuse_sparse("fsdp", given)
    own = {id(parameter) for parameter in parameters.values()}
    if any(id(p) not in own for group in given.optimizer.param_groups for p in group["params"]):
        problem = "the optimizer trains parameters that are not the model's, and fsdp divides only these"
        raise base.refusal(problem, "Make them parameters of the model, or use strategy='ddp'")
    if not own:
        raise base.refusal("the model has no parameters to divide", "Leave strategy out")
    select_units(dict(given.model.named_modules()), units)


def select_units(modules: Mapping[str, Any], units: Any) -> list[str]:
    """The names of the units, inner ones first; the rest of the model is one more unit.

    Args:
        modules: All modules of the model, by name.
        units: The setting `units`.

    Raises:
        ConfigError: A name fits no module, or a unit shares a weight with a module outside of it.
    """
    if units == "whole":
        return []
    if units == "blocks":
        found = [
            f"{name}.{entry}" if name else entry
            for name, module in modules.items()
            if type(module).__name__ in ("ModuleList", "Sequential")
            for entry, _ in module.named_children()
        ]
        names = [name for name in found if name in modules and _bytes(modules[name]) >= _UNIT_BYTES]
        # A list is never called, so nothing would gather it.
        names = [name for name in names if type(modules[name]).__name__ not in ("ModuleList", "ModuleDict")]
    else:
        names = []
        for pattern in units:
            fitting = [name for name in fitting_names(modules, pattern) if name]
            if not fitting:
                hint = closest(pattern, modules)
                problem = f"units names {pattern!r}, and the model has no such module"
                raise base.refusal(problem, f"{hint}Use names as in model.named_modules()")
            names += [name for name in fitting if name not in names]
    chosen = []
    for name in names:
        shared = _shared_outside(modules, name)
        if shared and units != "blocks":
            problem = f"{name} shares its weight {shared} with a module outside of it"
            raise base.refusal(problem, "Leave both out of units, so that they are gathered together")
        if not shared:
            chosen.append(name)
    return sorted(chosen, key=lambda name: -name.count("."))


def _bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _shared_outside(modules: Mapping[str, Any], name: str) -> str:
    """The name of a module's weight that a module outside of it shares; empty if there is none."""
    inside = set(map(id, modules[name].modules()))
    own: dict[int, str] = {id(parameter): key for key, parameter in modules[name].named_parameters()}
    for module in modules.values():
        if id(module) in inside:
            continue
        for parameter in parameters_of(module).values():
            if id(parameter) in own:
                return own[id(parameter)]
    return ""
