"""The objects that a training alters, taken together."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from kale_dist.strategies.tensor import parameters_of
from kale_dist.worker.training.result import one_model, one_optimizer, optimizers_of
from kale_dist.worker.training.settings import Training


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The objects of one training in this rank: several models are one module, several optimizers one object."""

    model: torch.nn.Module
    criterion: Any
    optimizer: Any
    """An optimizer, or `Optimizers`."""
    scheduler: Any
    state: tuple[Any, ...]
    """Other objects that come back to the notebook."""
    train_loader: Any
    eval_loader: Any
    """None without an evaluation; never the same object as `train_loader`."""

    @classmethod
    def of(cls, training: Training) -> Trained:
        """Take the objects of a call."""
        train, evaluation = training.train_data_loader, training.eval_data_loader
        return cls(
            model=one_model(training.model),
            criterion=training.criterion,
            optimizer=one_optimizer(training.optimizer),
            scheduler=training.scheduler,
            state=tuple(training.state),
            train_loader=train,
            # One object cannot give two different shares.
            eval_loader=copy.copy(evaluation) if evaluation is train else evaluation,
        )

    @property
    def loaders(self) -> tuple[Any, ...]:
        """The training loader, and the one for evaluation if there is one."""
        return tuple(data for data in (self.train_loader, self.eval_loader) if data is not None)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the call, in its order."""
        return optimizers_of(self.optimizer)

    def parts(self) -> list[Any]:
        """All objects whose states a checkpoint holds, with their modules and tensors."""
        modules = [one for one in (self.model, self.criterion) if isinstance(one, torch.nn.Module)]
        found = [part for module in modules for part in (*module.modules(), *module.parameters(), *module.buffers())]
        return [*found, self.optimizer, *self.optimizers, self.scheduler, *self.state]

    def tensors(self) -> dict[str, Tensor]:
        """All parameters that training may change, by name, each once: the model's, the criterion's, the optimizer's."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
        if isinstance(self.criterion, torch.nn.Module):
            for name, parameter in self.criterion.named_parameters():
                found.setdefault(id(parameter), (f"criterion.{name}", parameter))
        for i, options in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(options["params"]):
                found.setdefault(id(parameter), (f"optimizer.{i}.{j}", parameter))
        return dict(found.values())

    def move_to(self, device: torch.device) -> None:
        """Bring modules and the optimizer's state to a device."""
        if device.type == "cpu":
            return
        for part in (self.model, self.criterion, *self.state):
            if isinstance(part, torch.nn.Module):
                part.to(device)
        states = self.optimizer.state
        for options in self.optimizer.param_groups:
            # Other optimizers keep step counts on the CPU, as torch's own `load_state_dict` does.
            stays = () if options.get("fused") or options.get("capturable") else ("step",)
            for state in (states.get(parameter, {}) for parameter in options["params"]):
                for name in state.keys() - set(stays):
                    state[name] = _moved(state[name], device)


def _moved(value: Any, device: torch.device) -> Any:
    """A state of an optimizer on a device: a tensor, or lists of them (LBFGS)."""
    if isinstance(value, Tensor):
        return value.to(device)
    return [_moved(one, device) for one in value] if type(value) is list else value


def own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A module's parameters without its children's."""
    return list(parameters_of(module).values())


def alter(target: Any, stack: contextlib.ExitStack, **attributes: Any) -> None:
    """Set attributes of an object past its own `__setattr__`; the stack puts back what the object had before.

    Args:
        target: The object. A method of it has to be bound to it (`types.MethodType`): a step may copy a module, and what
            the copy computes has to come from the copy's weights.
        stack: Undoes it.
        **attributes: Values by name.
    """
    state = target.__dict__
    before = {name: state[name] for name in attributes if name in state}

    def restore() -> None:
        for name in attributes:
            state.pop(name, None)
        state.update(before)

    state.update(attributes)
    stack.callback(restore)
