"""What training gives back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The outcome of one rank. States and model are rank 0's alone; the ranks' weights are equal."""

    metrics: dict[str, float]
    """Those of the last epoch, training and evaluation; a name that both have gets `eval_` for the latter."""
    epochs: int
    """Epochs that were finished."""
    stopped_early: bool = False
    """Whether a step asked for the end."""
    model_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    """`model.state_dict()` on the CPU."""
    optimizer_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    scheduler_state: dict[str, Any] | None = dataclasses.field(default=None, repr=False)
    model: torch.nn.Module | None = dataclasses.field(default=None, repr=False)
    """The module itself, where its structure changed in the rank."""
    reason: str = ""
    """Why `model` is set: what changed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What must be equal for a state dict to fit into a module."""

    tensors: dict[str, tuple[tuple[int, ...] | None, str]]
    """Shape (None while it has none) and dtype of each entry of the state dict."""
    classes: dict[str, type]
    """Class of each submodule by name."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Structure:
        """The structure of a module as it is now."""
        tensors: dict[str, tuple[tuple[int, ...] | None, str]] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                shape = None if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
                tensors[name] = (shape, str(value.dtype))
            else:
                tensors[name] = (None, type(value).__name__)
        return cls(tensors=tensors, classes={name: type(module) for name, module in model.named_modules()})

    def difference(self, later: Structure) -> str:
        """What a later structure has changed, as a short sentence; empty if nothing."""
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


def on_cpu(value: Any) -> Any:
    """A state dict with its tensors on the CPU, detached."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return type(value)((key, on_cpu(item)) for key, item in value.items())
    if isinstance(value, list):
        return [on_cpu(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(on_cpu(item) for item in value)
    return value
