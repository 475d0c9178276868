"""Checks of the arguments that only `distribute` takes. Nothing is read but the arguments themselves."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

from kale_dist.checks import check_count, check_flag, check_returns, describe
from kale_dist.errors import ConfigError
from kale_dist.strategies import AllReduce, Strategy
from kale_dist.wording import closest, show

STEP_ARGUMENTS = {
    "train_step": ("model", "data_loader", "criterion", "optimizer", "device", "args"),
    "eval_step": ("model", "data_loader", "criterion", "device", "args"),
}
"""What the two step functions are called with, in this order. These are Kale's."""

_PRECISIONS = ("bf16", "fp16")
_EVAL_SHARDINGS = ("samples", "none")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, and how. Fields as arguments of `distribute`; they go to the training loop by these names."""

    model: Any
    train_data_loader: Any
    criterion: Any
    optimizer: Any
    train_step: Callable[..., Any] | None = None
    eval_data_loader: Any = None
    eval_step: Callable[..., Any] | None = None
    epochs: int = 1
    train_args: Any = None
    eval_args: Any = None
    scheduler: Any = None
    accumulate: int = 1
    precision: str | None = None
    clip_norm: float | None = None
    split_batches: bool = False
    shard: bool = True
    eval_sharding: str = "samples"
    checkpoint_every: int | None = 1
    strategy: Strategy = dataclasses.field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_loader("train_data_loader", self.train_data_loader)
        if self.eval_data_loader is not None:
            _check_loader("eval_data_loader", self.eval_data_loader)
        _check_criterion(self.criterion, needed_by=_ready_made(self.train_step, self.eval_data_loader, self.eval_step))
        _check_optimizer(self.optimizer, self.model, self.criterion)
        _check_step("train_step", self.train_step)
        _check_step("eval_step", self.eval_step)
        if self.eval_step is not None and self.eval_data_loader is None:
            raise ConfigError("eval_step", "it was given without eval_data_loader", "Give both, or neither")
        _check_scheduler(self.scheduler, self.optimizer)
        for argument in ("epochs", "accumulate"):
            check_count(argument, getattr(self, argument))
        if self.checkpoint_every is not None:
            check_count("checkpoint_every", self.checkpoint_every)
        for argument in ("split_batches", "shard"):
            check_flag(argument, getattr(self, argument))
        precision, clip_norm = self.precision, self.clip_norm
        if precision is not None and precision not in _PRECISIONS:
            near = closest(precision, _PRECISIONS)
            raise ConfigError("precision", f"there is no precision {precision!r}", f"{near}Use 'bf16', 'fp16' or None")
        if clip_norm is not None:
            number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
            if not number or not math.isfinite(clip_norm) or clip_norm <= 0:
                raise ConfigError("clip_norm", f"{clip_norm!r} is not a positive number", "Give such as 1.0, or None")
        if self.eval_sharding not in _EVAL_SHARDINGS:
            near = closest(self.eval_sharding, _EVAL_SHARDINGS)
            remedy = f"{near}Use 'samples' (each rank evaluates its share) or 'none' (every rank evaluates all)"
            raise ConfigError("eval_sharding", f"there is no way {self.eval_sharding!r}", remedy)
        strategy: Any = self.strategy
        if not isinstance(strategy, AllReduce):
            remedy = "Use kale_dist.AllReduce(), or leave it out"
            raise ConfigError("strategy", f"{strategy!r} is not a strategy of this version", remedy)

    def arguments(self) -> dict[str, Any]:
        """Name to value, as the training loop takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _check_model(model: Any) -> None:
    import torch

    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise ConfigError("model", f"{model.__name__} is a class", f"Make one: {model.__name__}()")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("model", f"{show(model)} is not a torch.nn.Module", "Pass the model object")
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "model", f"it is wrapped in {type(model).__name__}", "Pass model.module: kale_dist needs no wrapper"
        )
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        problem = f"its parameter {empty!r} is on the meta device, which keeps no values"
        raise ConfigError("model", problem, "Give it values: model.to_empty(device='cpu') and its own initialisation")


def _check_loader(argument: str, loader: Any) -> None:
    from torch.utils.data import DataLoader, Dataset

    if isinstance(loader, DataLoader):
        return
    if loader is None:
        raise ConfigError(argument, "it is None", "Make one: DataLoader(dataset, batch_size=32)")
    if isinstance(loader, type):
        raise ConfigError(argument, f"{loader.__name__} is a class", "Make one: DataLoader(dataset, batch_size=32)")
    if hasattr(loader, "__next__"):
        problem = f"{show(loader)} is an iterator, which can be read only once and on one process"
        raise ConfigError(argument, problem, "Pass the DataLoader itself, without iter() or enumerate()")
    if isinstance(loader, list | tuple):
        remedy = "Make one of it: DataLoader(the_list, batch_size=32) for samples, batch_size=None for ready batches"
        raise ConfigError(argument, f"it is a {type(loader).__name__}, not a torch.utils.data.DataLoader", remedy)
    if isinstance(loader, Dataset):
        raise ConfigError(argument, f"{show(loader)} is a dataset", "Wrap it: DataLoader(dataset, batch_size=32)")
    remedy = "Make one: DataLoader(dataset, batch_size=32)"
    raise ConfigError(argument, f"{show(loader)} is not a torch.utils.data.DataLoader", remedy)


def _ready_made(train_step: Any, eval_data_loader: Any, eval_step: Any) -> str:
    """The ready-made step that is used, if any."""
    if train_step is None:
        return "train_step"
    return "eval_step" if eval_data_loader is not None and eval_step is None else ""


def _check_criterion(criterion: Any, *, needed_by: str) -> None:
    if isinstance(criterion, type):
        raise ConfigError("criterion", f"{criterion.__name__} is a class", f"Make one: {criterion.__name__}()")
    if criterion is None and needed_by:
        raise ConfigError("criterion", f"it is None, and the ready-made {needed_by} calls it", "Pass a loss function")
    if criterion is not None and not callable(criterion):
        raise ConfigError(
            "criterion", f"{show(criterion)} cannot be called", "Pass a loss such as nn.CrossEntropyLoss()"
        )


def _check_optimizer(optimizer: Any, model: Any, criterion: Any) -> None:
    import torch

    if isinstance(optimizer, type):
        remedy = f"Make one: {optimizer.__name__}(model.parameters(), lr=0.1)"
        raise ConfigError("optimizer", f"{optimizer.__name__} is a class", remedy)
    if isinstance(optimizer, list | tuple | dict):
        remedy = "Use launch() for a loop of your own with several optimizers"
        raise ConfigError("optimizer", f"it is a {type(optimizer).__name__}, not one optimizer", remedy)
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "Pass such as torch.optim.SGD(model.parameters(), lr=0.1)"
        raise ConfigError("optimizer", f"{show(optimizer)} is not a torch.optim.Optimizer", remedy)
    mine = {id(parameter) for parameter in model.parameters()}
    if isinstance(criterion, torch.nn.Module):
        mine |= {id(parameter) for parameter in criterion.parameters()}
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(1 for identity in trained if identity not in mine)
    if foreign:
        raise ConfigError(
            "optimizer",
            f"{foreign} of its {len(trained)} parameters are not the model's: training would not change the model",
            "Was the model made anew or replaced? Make the optimizer again from model.parameters()",
        )


def _check_step(argument: str, step: Any) -> None:
    if step is None:
        return
    expected = STEP_ARGUMENTS[argument]
    wanted = f"Write it as def {argument}({', '.join(expected)})"
    if not callable(step):
        raise ConfigError(argument, f"{show(step)} cannot be called", wanted)
    check_returns(argument, step)
    try:
        inspect.signature(step).bind(*expected)
    except TypeError:
        problem = f"{describe(step)} cannot take the {len(expected)} arguments it is called with"
        raise ConfigError(argument, problem, wanted) from None
    except ValueError:
        pass  # Some functions written in C have no signature.


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        remedy = "Pass such as torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        raise ConfigError("scheduler", f"{show(scheduler)} is not a learning-rate scheduler", remedy)
    theirs = getattr(scheduler, "optimizer", optimizer)
    if theirs is not optimizer:
        raise ConfigError("scheduler", "it schedules another optimizer", "Make it from the optimizer you pass")
