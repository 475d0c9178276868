"""The optimizer and its schedulers, altered in place: accumulation, clipping, and the exchange before each step.

`step` and `zero_grad` become bound methods of the same names on the optimizer itself. Between the batches of an
accumulation window both do nothing and return None.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kale_dist.errors import ConfigError
from kale_dist.snapshot.reducers import IS_COUNTED, MILESTONES, SCHEDULERS, note_step
from kale_dist.wire import context
from kale_dist.worker.training.data.loader import Loaders
from kale_dist.worker.training.data.sharding import Pace
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.strategy import Strategy
from kale_dist.worker.training.trained import Trained, alter

_TOTALS = ("total_steps", "T_max", "total_iters")
"""Attributes in which torch's schedulers keep the number of calls they are made for."""

_WORDS = ("num_training_steps", "total_steps", "max_steps")
"""Names of that number in functions that `LambdaLR` calls, such as those of transformers."""


@dataclasses.dataclass(kw_only=True)
class Schedules:
    """Decides how far a call of `scheduler.step()` within a batch moves the scheduler.

    A rank takes fewer batches an epoch than one process would. A scheduler that counts the batches of one process is
    moved by the progress through the data, and so ends where it would have ended.
    """

    group: Group
    pace: Pace
    epochs: int
    loaders: Loaders

    def moves(self, scheduler: Any) -> int:
        """How often to step a scheduler that the user's step has stepped once."""
        portion, alone, here = self.pace.portion, self.loaders.batches_alone, self.loaders.batches
        if portion is None or not alone or not here:
            return 1
        steps = -(-here // self.pace.accumulate)
        if steps == alone:
            return 1
        total = total_of(scheduler)
        if total == self.epochs * steps:
            return 1
        name = type(scheduler).__name__
        per_epoch = f"{alone} batches an epoch on one process, {steps} steps of each rank here"
        if not total or total % alone or (total % steps == 0 and total != self.epochs * alone):
            size = f"made for {total} steps" if total else "of unknown length"
            self.group.log(
                f"{name}, {size}, is stepped once in each batch ({per_epoch}): if it counts the batches of one process, it"
                " stops early. Divide its number of steps by number_of_processes."
            )
            return 1
        self.group.log(
            f"{name} was made for {total} steps ({per_epoch}): it is stepped in proportion to the data read,"
            " so the schedule ends where it would on one process."
        )
        index = portion.index // self.pace.accumulate
        return (index + 1) * alone // steps - index * alone // steps

    def mean(self, value: Any) -> float:
        """Average the ranks' values of a metric of the running step, weighted by their samples."""
        everyone = self.group.meet("ReduceLROnPlateau.step()", (float(value), self.loaders.running.counts.samples))
        if not any(weight for _, weight in everyone):
            everyone = [(one, 1) for one, _ in everyone]
        return float(sum(one * weight for one, weight in everyone) / sum(weight for _, weight in everyone))


def total_of(scheduler: Any) -> int | None:
    """Return how many steps a scheduler is made for; None where that is not known."""
    parts, milestones = getattr(scheduler, SCHEDULERS, None), getattr(scheduler, MILESTONES, None)
    if parts and milestones:
        last = total_of(parts[-1])
        return None if last is None else milestones[-1] + last
    if parts:
        totals = [total for total in map(total_of, parts) if total]
        return max(totals, default=None)
    for name in _TOTALS:
        if isinstance(total := getattr(scheduler, name, None), int):
            return total
    for function in getattr(scheduler, "lr_lambdas", ()):
        for word in _WORDS:
            if isinstance(total := _bound(function).get(word), int):
                return total
    return None


def _bound(function: Any) -> dict[str, Any]:
    """Return the values that a closure or `functools.partial` has bound, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
    values = {name: cell.cell_contents for name, cell in cells.items()}
    return {**values, **getattr(function, "keywords", {})}


class OptimizerControl:
    """Decides what a call of `optimizer.step()` does.

    Args:
        trained: Has the optimizer, of several the first, and the model, whose `zero_grad` is held back as well.
        strategy: Completes the gradients.
        schedules: Decides how far a scheduler moves in a batch.
        training: The call's.
        stepped: Called after each real step.
    """

    def __init__(
        self,
        trained: Trained,
        strategy: Strategy,
        schedules: Schedules,
        training: Training,
        stepped: Callable[[], None],
    ) -> None:
        self.optimizer: torch.optim.Optimizer = trained.optimizers[0]
        is_half = training.precision == "fp16"
        self.scaler = (
            torch.amp.GradScaler(schedules.group.device.type) if is_half and training.train_step is None else None
        )
        """The loss scaler of the ready-made step; None with a step of the user's."""
        self.real_steps = 0
        self.other_steps = 0
        """Steps of optimizers for other parameters."""
        self.scheduler_calls: set[int] = set()
        """Identities of the schedulers that the user's step has stepped."""
        self._rates = self._numbers()
        self._are_own: collections.Counter[bool] = collections.Counter()
        """Of the epoch's calls of `step`: whether the learning rate was another one than the call before had left."""
        self._model = trained.model
        self._group, self._pace = schedules.group, schedules.pace
        self._strategy = strategy
        self._schedules = schedules
        self._clip_norm = training.clip_norm
        self._stepped = stepped
        self._needs_scaler = is_half and self.scaler is None
        self._in_step = False
        self._is_stepping = False
        self._in_scheduler = False
        self._in_user_scaler = False
        self._is_held = False

    @property
    def _accumulates(self) -> bool:
        return self._pace.accumulate > 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Alter the optimizer, schedulers and loss scalers of this process, and restore them in the end."""
        with contextlib.ExitStack() as stack:
            self._take_optimizer(stack)
            if self._accumulates:
                _patch(stack, torch.nn.Module, "zero_grad", self._wrap_module_zero_grad)
            for scheduler_class in (ReduceLROnPlateau, LRScheduler, *_subclasses(LRScheduler)):
                if "step" in vars(scheduler_class):
                    _patch(stack, scheduler_class, "step", self._wrap_scheduler_step)
            _patch(stack, torch.amp.GradScaler, "step", self._wrap_scaler_step)
            stack.callback(setattr, clip_grad, "_get_total_norm", clip_grad._get_total_norm)  # noqa: SLF001
            clip_grad._get_total_norm = self._total_norm  # noqa: SLF001 - a name that a step has imported calls it, too
            stack.callback(register_optimizer_step_pre_hook(self._before_any_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_any_step).remove)
            yield

    def _take_optimizer(self, stack: contextlib.ExitStack) -> None:
        optimizer = self.optimizer
        # Objects that were not made by their constructor lack the wrapper that calls hooks.
        optimizer._patch_step_function()  # noqa: SLF001
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad

        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def zero_grad(_: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
            if self._strategy.has_pending:
                self._strategy.keep_gradients()
            else:
                self._zero_grad(set_to_none=set_to_none)

        # Schedulers look for this mark, and wrap or warn where it is missing.
        setattr(step, IS_COUNTED, True)
        step_method, zero_grad_method = types.MethodType(step, optimizer), types.MethodType(zero_grad, optimizer)
        alter(optimizer, stack, step=step_method, zero_grad=zero_grad_method)

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Stands in for `optimizer.step`: hold the step back, or complete the gradients and make it.

        Raises:
            ConfigError: The step does what accumulation cannot be combined with.
        """
        if self._in_step:
            # The loss scaler of the ready-made step calls `optimizer.step` for the real step.
            return self._real_step()
        before, self._rates = self._rates, self._numbers()
        self._are_own[before != self._rates] += 1
        if self._needs_scaler and not self._in_user_scaler:
            raise ConfigError(
                "precision",
                "'fp16' needs a scaled loss, and train_step calls optimizer.step() without a GradScaler",
                "Use 'bf16', leave train_step out, or use a torch.amp.GradScaler in it",
            )
        if self._accumulates:
            self._check_accumulation(closure)
            if not self._pace.is_due:
                self._strategy.check_held()
                self._is_held = True
                return None
        self._is_held = False
        if closure is None:
            self._strategy.complete(self._pace.correction)
        self._is_stepping = True
        try:
            if closure is not None:
                result = self._step(self._averaged(closure))
            elif self.scaler is not None:
                result = self._scaled_step(self.scaler)
            else:
                self._clip()
                result = self._real_step()
        finally:
            self._is_stepping = False
        self._done()
        return result

    def flush(self) -> None:
        """Make the step that was held back in a window that the user's step has left. Called when that has returned.

        Raises:
            ConfigError: The window has gradients, and no step.
        """
        if not (self._strategy.has_pending and self._accumulates):
            return
        if not self._is_held:
            raise ConfigError(
                "accumulate",
                "train_step ended with gradients for which it has not called optimizer.step()",
                "Call optimizer.step() in each batch, or leave accumulate out",
            )
        portion, self._pace.portion = self._pace.portion, None
        self._pace.optimizer_steps_of_batch = 0
        try:
            self.step()
            self._zero_grad()
        finally:
            self._pace.portion = portion

    def note_own_rates(self) -> None:
        """Log that a schedule of the step's own may stop early, where the step set the rate in most batches of an epoch without a scheduler."""
        found, self._are_own, loaders = self._are_own, collections.Counter(), self._schedules.loaders
        here, alone = loaders.batches or 0, loaders.batches_alone or 0
        if found[True] > max(1, found[False]) and 0 < here < alone and not self.scheduler_calls:
            self._group.log(
                f"train_step sets the learning rate in each batch. The notebook's loader has {alone} batches an epoch, and each rank takes"
                f" {here}: a schedule that you made with the notebook's len(loader) stops early. Make it for {here} batches an epoch,"
                " or compute the rate in train_step, from len(data_loader)."
            )

    def _numbers(self) -> list[Any]:
        """The learning rates, but for tensors, which may be on a GPU."""
        return [group["lr"] for group in self.optimizer.param_groups if isinstance(group.get("lr"), numbers.Real)]

    def _done(self) -> None:
        # An optimizer may set a rate itself.
        self._rates = self._numbers()
        self.real_steps += 1
        self._pace.stepped()
        self._strategy.stepped()
        self._stepped()
        context.mark_progress()

    def _real_step(self) -> Any:
        note_step(self.optimizer)
        return self._step()

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> Any:
        self._in_step = True
        try:
            scaler.unscale_(self.optimizer)
            self._clip()
            result = scaler.step(self.optimizer)
            scaler.update()
        finally:
            self._in_step = False
        return result

    def _clip(self) -> None:
        if self._clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)

    def _total_norm(
        self,
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        foreach: bool | None = None,  # noqa: ARG002, FBT001
    ) -> torch.Tensor:
        """Stands in for torch's `_get_total_norm`: `clip_grad_norm_` divides by it, here and in the user's step."""
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        total = self._strategy.total_norm(gradients, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. Pass"
                " error_if_nonfinite=False to clip them all the same"
            )
        return total

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Make a closure return the mean loss of all ranks: a line search must take the same turns everywhere."""

        def averaged() -> Any:
            loss = closure()
            self._strategy.complete(1.0)
            self._clip()
            if loss is None:
                return None
            weighted = torch.as_tensor(loss, device=self._group.device).detach().clone() * self._pace.factor
            mean = self._group.mean(weighted)
            return mean if isinstance(loss, torch.Tensor) else mean.item()

        return averaged

    def _check_accumulation(self, closure: Any) -> None:
        if closure is not None:
            raise ConfigError(
                "accumulate",
                "optimizer.step(closure) computes its own gradients, which cannot be accumulated",
                "Use accumulate=1 with this optimizer",
            )
        self._pace.optimizer_steps_of_batch += 1
        if self._pace.optimizer_steps_of_batch > 1:
            raise ConfigError(
                "accumulate",
                "train_step calls optimizer.step() more than once for a batch",
                "Use accumulate=1, or one step a batch",
            )

    # -- everything else that steps --------------------------------------------------------------------------------

    def _before_any_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Torch calls this before the real step of any optimizer of the process."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer is not self.optimizer:
            if self._accumulates:
                raise ConfigError(
                    "accumulate",
                    f"train_step uses another optimizer ({type(optimizer).__name__}) beside the one it was given",
                    "Use accumulate=1 with more than one optimizer",
                )
            self._strategy.adopt(parameters)
            self._strategy.complete(1.0)
            if self._steps_for_ours(optimizer):
                self._clip()
        elif any(torch.nn.parameter.is_lazy(p) for p in parameters):
            raise ConfigError(
                "model",
                "has parameters without a shape after its first batch",
                "Use all lazy modules in the first forward pass, or give them shapes before the call",
            )
        else:
            self._strategy.adopt(parameters)

    def _after_any_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Torch calls this after the real step of any optimizer of the process."""
        if self._steps_for_ours(optimizer):
            self._done()
        elif optimizer is not self.optimizer:
            self.other_steps += 1

    def _steps_for_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer makes the step of the one that is controlled, which wraps it (as SAM's `second_step`)."""
        if optimizer is self.optimizer or self._is_stepping:
            return False
        ours = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _wrap_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler is self.scaler or optimizer is not self.optimizer:
                return original(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled() and len(self._strategy.layout.replicas) < self._group.world_size:
                raise ConfigError(
                    "strategy",
                    "train_step uses a GradScaler, which skips a step where gradients overflow, and each rank sees only"
                    " its part of them",
                    "Use precision='bf16' without a GradScaler, or strategy='ddp'",
                )
            problem = "train_step uses its own GradScaler, which unscales gradients before they are complete"
            if self._accumulates:
                raise ConfigError("accumulate", problem, "Use precision='bf16' instead of the scaler")
            if self._clip_norm is not None:
                raise ConfigError("clip_norm", problem, "Clip in the step, after scaler.unscale_(optimizer)")
            self._strategy.complete(1.0)
            self._in_user_scaler = True
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_user_scaler = False

        return step

    def _wrap_scheduler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.scheduler_calls.add(id(scheduler))
            if self._in_scheduler or getattr(scheduler, "_is_initial", False):
                return original(scheduler, *args, **kwargs)
            if self._is_held and getattr(scheduler, "optimizer", self.optimizer) is self.optimizer:
                return None
            # A scheduler may be made of others, which it steps itself.
            self._in_scheduler = True
            try:
                if isinstance(scheduler, ReduceLROnPlateau):
                    # Ranks that saw different losses would go on with different learning rates.
                    given = inspect.signature(original).bind(scheduler, *args, **kwargs)
                    given.arguments["metrics"] = self._schedules.mean(given.arguments["metrics"])
                    args, kwargs = given.args[1:], given.kwargs
                for _ in range(1 if args or kwargs else self._schedules.moves(scheduler)):
                    original(scheduler, *args, **kwargs)
            finally:
                self._in_scheduler = False
            return None

        return step

    def _wrap_module_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
            if self._strategy.has_pending and self._shares_parameters(module):
                self._strategy.keep_gradients()
            else:
                original(module, set_to_none)

        return zero_grad

    def _shares_parameters(self, module: torch.nn.Module) -> bool:
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for p in module.parameters())


def _patch(stack: contextlib.ExitStack, owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    setattr(owner, name, wrap(original))
    stack.callback(setattr, owner, name, original)


def _subclasses(of: type) -> Iterator[type]:
    subclasses: list[type] = of.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
