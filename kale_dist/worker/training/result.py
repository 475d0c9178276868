"""The objects that a training changes and gives back: models, optimizers and other state in one form, metrics averaged over ranks."""

from __future__ import annotations

import collections
import copy
import dataclasses
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import ConfigError
from kale_dist.snapshot.changes import Changes, load_state_dict
from kale_dist.snapshot.identity import place_of
from kale_dist.wire import context
from kale_dist.worker.training.rank_group import STEP_ENDS, Group


class Optimizers:
    """Several optimizers as one, for code that reads and writes their states.

    Args:
        named: The optimizers by name.
    """

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all parameters."""
        return {key: value for optimizer in self.named.values() for key, value in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name, and all parameter groups, which show whether a state fits."""
        states = {name: optimizer.state_dict() for name, optimizer in self.named.items()}
        return {
            "named": states,
            "param_groups": [group for state in states.values() for group in state["param_groups"]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, optimizer in self.named.items():
            load_state_dict(optimizer, state["named"][name])


def one_model(model: Any) -> torch.nn.Module:
    """Return a model as it is, and a dict of models as one module whose parameters have the dict's names in front."""
    return torch.nn.ModuleDict(dict(model)) if isinstance(model, dict) else model


def one_optimizer(optimizer: Any) -> Any:
    """Return an optimizer as it is, and a dict of optimizers as one object."""
    return Optimizers(optimizer) if isinstance(optimizer, dict) else optimizer


def optimizers_of(optimizer: Any) -> list[Any]:
    """The torch optimizers behind what `one_optimizer` returned."""
    return list(optimizer.named.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def state_of(value: Any) -> Any:
    """Return the contents of an object of `state=`: its state_dict, or a copy of a list, dict or set."""
    if callable(getattr(value, "state_dict", None)):
        return on_cpu(value.state_dict())
    return copy.copy(value)


def load_state(value: Any, state: Any) -> None:
    """Set an object's contents, in place, to what `state_of` returned."""
    if callable(getattr(value, "load_state_dict", None)):
        load_state_dict(value, state)
    else:
        value.clear()
        # What is changed in place is not the state itself, which may be loaded again.
        (value.extend if isinstance(value, list | collections.deque) else value.update)(copy.deepcopy(state))


def on_cpu(value: Any, copies: dict[Any, tuple[Tensor, Tensor]] | None = None) -> Any:
    """Return a state dict with its tensors detached and on the CPU; tied weights are copied once, and stay tied."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor) and not torch.nn.parameter.is_lazy(value):
        if value.device.type == "cpu" or value.layout is not torch.strided or (place := place_of(value)) is None:
            return value.detach().cpu()
        if place not in copies:
            # With its source, so that the address stays that one's.
            copies[place] = value, value.detach().cpu()
        return copies[place][1]
    if isinstance(value, dict):
        # Not from pairs, which a Counter (milestones of MultiStepLR) would count.
        return type(value)({key: on_cpu(item, copies) for key, item in value.items()})
    if isinstance(value, list):
        return [on_cpu(item, copies) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(on_cpu(item, copies) for item in value)
    return value


STOP = "stop"
"""A step that returns this name with a true value ends the training after the epoch, on all ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """The outcome of one call of a step on all ranks."""

    values: dict[str, float]
    stop: bool
    extras: tuple[Any, ...]
    """The `extra` of each rank."""


def normalise(step: str, returned: Any) -> dict[str, float]:
    """The metrics that a step returned.

    Args:
        step: `train_step` or `eval_step`, for the error.
        returned: A number or a tensor of one element (named `loss`), a mapping of names to such, a tuple of such
            (`loss`, `metric_1`, ...), of which a list of numbers counts as its mean. None and a list are no metrics.

    Raises:
        ConfigError: Something else was returned.
    """
    if returned is None or isinstance(returned, list):
        return {}
    if isinstance(returned, Mapping):
        return {_name(step, key): _number(step, f"[{key!r}]", value) for key, value in returned.items()}
    if isinstance(returned, tuple):
        parts = enumerate(returned)
        return {f"metric_{i}" if i else "loss": _number(step, f"[{i}]", value) for i, value in parts}
    return {"loss": _number(step, "", returned)}


def _name(step: str, key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(step, f"returned a metric whose name is {key!r}", "Name metrics by text")
    context.check_name(step, key)
    return key


def _number(step: str, place: str, value: Any) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, list) and value:
        return sum(_number(step, place, one) for one in value) / len(value)
    item = getattr(value, "item", None)
    if item is not None:
        shape = tuple(getattr(value, "shape", ()))
        try:
            number = item()
        except (RuntimeError, ValueError, TypeError):
            raise ConfigError(
                step,
                f"{f'returned{place} has' if place else 'returned a tensor of'} shape {shape}, not one element",
                "Reduce it first: .mean().item()",
            ) from None
        if isinstance(number, numbers.Real):
            return float(number)
    raise ConfigError(
        step,
        f"{f'returned{place} is' if place else 'returned'} {reprlib.repr(value)}, a {type(value).__name__}",
        "Return a number, or a dict of numbers such as {'loss': 0.5, 'accuracy': 0.9}",
    )


def average(group: Group, values: Mapping[str, float], weight: float, extra: Any = None) -> Averaged:
    """Average metrics over ranks by weight. A rank that lacks a name plays no part in that metric.

    Args:
        group: The ranks; all must call.
        values: This rank's metrics.
        weight: Samples that the loader gave this rank. Where all ranks have 0, they count alike.
        extra: Anything small that all ranks get.
    """
    stop = bool(values.get(STOP, False))
    mine = {name: value for name, value in values.items() if name != STOP}
    everyone = group.meet(STEP_ENDS, (mine, weight, stop, extra))
    equal = not any(weight for _, weight, _, _ in everyone)
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for ranks_values, ranks_weight, _, _ in everyone:
        used = 1.0 if equal else ranks_weight
        # A repeated sample may give nan, which a weight of 0 does not remove.
        if not used:
            continue
        for name, value in ranks_values.items():
            sums[name] = sums.get(name, 0.0) + used * value
            weights[name] = weights.get(name, 0.0) + used
    return Averaged(
        values={name: total / weights[name] for name, total in sums.items()},
        stop=any(stop for _, _, stop, _ in everyone),
        extras=tuple(extra for *_, extra in everyone),
    )


def merge(train: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, float]:
    """Join the metrics of an epoch: a name of the evaluation that training has too gets `eval_` in front."""
    return {**train, **{f"eval_{name}" if name in train else name: value for name, value in evaluation.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The outcome of one rank. Only rank 0's has states and a model; a parameter server's is empty."""

    metrics: dict[str, float]
    """Metrics of the last epoch, of training and evaluation; the evaluation's get `eval_` in front where both have a name."""
    epochs: int
    """Epochs that were finished."""
    stopped_early: bool = False
    """Whether a step or `EarlyStopping` ended the training."""
    best_epoch: int | None = None
    """The epoch of the best value of `ModelCheckpoint`'s metric; None without one."""
    best_value: float | None = None
    """The metric's value in that epoch."""
    model_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    """`model.state_dict()` on the CPU."""
    best_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    """`model.state_dict()` after the best epoch."""
    averaged_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    """`model.state_dict()` with the averaged weights of `EMA` or `SWA`."""
    optimizer_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    scheduler_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    state: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    """Contents of the objects of `state=`."""
    changes: tuple[Changes, ...] = dataclasses.field(default=(), repr=False)
    """What the ranks have changed of the call's objects besides."""
    parts: str = ""
    """The folder of the trained weights, as the ranks see it, where no rank held the whole model; then there is no `model_state`."""
    rest: bytes = dataclasses.field(default=b"", repr=False)
    """Then, the last checkpoint's file: another call continues from it, also where this notebook does not see the folder."""
    model: torch.nn.Module | None = dataclasses.field(default=None, repr=False)
    """The module itself, where its structure changed in the rank."""
    reason: str = ""
    """Why `model` is set: what changed."""
    strategy: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers of the strategy, summed over ranks and epochs, such as `bytes_sent`; of the last epoch where a sum means nothing
    (`consensus_distance`). `collective_s` are the seconds in collectives, a mean over ranks."""

    def __getitem__(self, name: str) -> Any:
        """Refuse a name that is asked of the result itself."""
        raise TypeError(f"The result is no mapping. Its metrics are: write result.metrics[{name!r}]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The properties of a module that must be equal for a state dict to fit into it."""

    tensors: dict[str, tuple[tuple[int, ...] | None, str]]
    """Shape (None while it has none) and dtype of each entry of the state dict."""
    classes: dict[str, type]
    """Class of each submodule by name."""

    @classmethod
    def of(cls, model: torch.nn.Module, state: Mapping[str, Any] | None = None) -> Structure:
        """The structure of a module as it is now; `state` is its state dict where that is not in the module itself."""
        tensors: dict[str, tuple[tuple[int, ...] | None, str]] = {}
        for name, value in (model.state_dict(keep_vars=True) if state is None else state).items():
            if isinstance(value, Tensor):
                shape = None if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
                tensors[name] = (shape, str(value.dtype))
            else:
                tensors[name] = (None, type(value).__name__)
        return cls(tensors=tensors, classes={name: type(module) for name, module in model.named_modules()})

    def difference(self, later: Structure) -> str:
        """Describe what differs in a later structure, as a short sentence; empty if nothing does."""
        for name in (*later.tensors, *self.tensors):
            before, after = self.tensors.get(name), later.tensors.get(name)
            if before == after:
                continue
            if before is None or after is None:
                return f"{name} was {'added' if before is None else 'removed'} in the rank"
            if before[0] is None and after[0] is not None:
                return f"{name} got its shape {after[0]} in the rank"
            return f"{name} changed in the rank from {before[0]} {before[1]} to {after[0]} {after[1]}"
        for name in (*later.classes, *self.classes):
            old, new = self.classes.get(name), later.classes.get(name)
            if old is not new:
                names = [kind.__name__ if kind is not None else "nothing" for kind in (old, new)]
                return f"module {name or 'itself'} changed in the rank from {names[0]} to {names[1]}"
        return ""
