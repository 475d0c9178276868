"""What a training changes, in one form: one model or several, one optimizer or several, and other state that comes back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Optimizers:
    """Several optimizers as one, for all that reads and writes states.

    Args:
        named: The optimizers by name.
    """

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all parameters."""
        return {key: value for optimizer in self.named.values() for key, value in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states by name, and the groups of all, by which it is told whether a state fits."""
        states = {name: optimizer.state_dict() for name, optimizer in self.named.items()}
        return {
            "named": states,
            "param_groups": [group for state in states.values() for group in state["param_groups"]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name, optimizer in self.named.items():
            optimizer.load_state_dict(state["named"][name])


def one_model(model: Any) -> torch.nn.Module:
    """The model, or a dict of models as one module whose parameters have their names in front."""
    return torch.nn.ModuleDict(dict(model)) if isinstance(model, dict) else model


def one_optimizer(optimizer: Any) -> Any:
    """The optimizer, or a dict of them as one."""
    return Optimizers(optimizer) if isinstance(optimizer, dict) else optimizer


def state_of(value: Any) -> Any:
    """What has to travel for an object of `state=`: its state_dict, or the contents of a list, dict or set."""
    if callable(getattr(value, "state_dict", None)):
        return on_cpu(value.state_dict())
    return copy.copy(value)


def load_state(value: Any, state: Any) -> None:
    """The inverse of `state_of`, in place."""
    if callable(getattr(value, "load_state_dict", None)):
        value.load_state_dict(state)
    elif isinstance(value, list):
        value[:] = state
    else:
        value.clear()
        value.update(state)


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
