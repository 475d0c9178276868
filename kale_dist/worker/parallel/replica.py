"""A rank that has the whole model: hooks weight, hold back and watch its gradients before any exchange.

Each parameter has a hook that runs when its gradient is complete, so the hooks see the end of a backward pass however the
loss was computed: `model(x)`, `model.loss(x)` or a function of global names. They multiply gradients by the weight of the
rank's batch before these are added up, hold them back within an accumulation window, and mark them, to notice gradients
that the step sets or changes by itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kale_dist.errors import KaleDistError
from kale_dist.snapshot.identity import times_changed
from kale_dist.strategies import Layout, Settings
from kale_dist.worker.parallel.early_agreement import Agreement, Numbers, local_part
from kale_dist.worker.training.strategy import Parts, Strategy

_LOOKED_AT = 3
"""So many held passes show by their sums, too, whether a step changes gradients: `p.grad.data.mul_()` is not counted. A step's code is the same
in all batches, and a sum waits for the GPU."""


class Replica(Strategy):
    """One replica and its gradients. Strategies derive from it and exchange in `reduce`, or after steps.

    Args:
        settings: The strategy's settings.
        layout: This rank's layout.
    """

    reduces = True
    """Whether gradients are exchanged at the end of each backward pass that is due."""

    divides_weights = False
    """Whether ranks with the same batch have parts of the same weights."""

    def __init__(self, settings: Settings, layout: Layout) -> None:
        super().__init__(settings, layout)
        self.parameters: dict[int, torch.nn.Parameter] = {}
        """All trained parameters by identity, in an order that is equal on all ranks."""
        self._weight = 1.0
        self._due = True
        self._handles: list[Any] = []
        self._weight_handles: dict[int, Any] = {}
        self._task: int | None = None
        self._holding = False
        self._marks: dict[int, tuple[int, int, str]] = {}
        self._late: set[int] = set()
        """Parameters that had no hooks when `backward()` gave them their gradients."""
        self._reductions_of_batch = 0
        self._passes_of_batch = 0
        self._is_cleared = False
        self._is_weighed = False
        self._is_held_back = False
        self._held_passes = 0

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Put hooks on all parameters."""
        super().prepare(parts, stack)
        stack.callback(self._take_hooks_off)
        self._agreement = Agreement(parts.row, of_each=self.divides_weights)
        self._numbers = Numbers(parts.optimizer, parts.group) if self.divides and not parts.group.is_alone else None
        for parameter in parts.named.values():
            self._add(parameter)

    # -- for strategies to override --------------------------------------------------------------------------------

    def reduce(self, *, skipped: bool, left: bool) -> None:
        """Exchange the gradients of all ranks. All ranks call this at the same place.

        Args:
            skipped: This rank made no backward pass in this batch.
            left: This rank left the loop over its loader early.
        """

    def pass_begins(self, *, nested: bool) -> None:
        """Called when the first gradient of a backward pass is complete.

        Args:
            nested: The pass is inside another one (reentrant checkpointing).
        """

    def gradient_is_complete(self, parameter: Tensor) -> None:
        """Called when a parameter's gradient is complete, in a pass that is due."""

    # -- parameters ------------------------------------------------------------------------------------------------

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Add new parameters with the values of shard 0, and weight the gradients that they have already."""
        new: list[Any] = [p for p in parameters if id(p) not in self.parameters and not torch.nn.parameter.is_lazy(p)]
        column = self.parts.column
        with_gradient = [parameter for parameter in new if parameter.grad is not None]
        if with_gradient and not column.is_alone:
            self.parts.group.log(
                f"An optimizer of the step trains tensors that are not the model's ({len(new)}): their values are taken from rank 0"
                " and their gradients are averaged over the ranks, too."
            )
        for parameter in new:
            column.send_tensor(parameter)
            self._add(parameter)
            self._late.add(id(parameter))
        for parameter in with_gradient:
            if self._weight != 1.0:
                self._is_weighed = True
                parameter.grad.mul_(self._weight)

    def _add(self, parameter: Any) -> None:
        if id(parameter) in self.parameters or torch.nn.parameter.is_lazy(parameter):
            return
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        self.parameters[id(parameter)] = parameter
        if self._is_passive:
            return
        # A frozen parameter cannot be hooked, and may be unfrozen in the middle of an epoch.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's own signature
        self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        if self._weight_handles or self._accumulates:
            self._add_weight_hook(parameter)
        if frozen:
            parameter.requires_grad_(False)  # noqa: FBT003

    def _take_hooks_off(self) -> None:
        for handle in (*self._handles, *self._weight_handles.values()):
            handle.remove()
        self._handles.clear()
        self._weight_handles.clear()

    @property
    def _accumulates(self) -> bool:
        return self.parts.pace.accumulate > 1

    @property
    def _is_passive(self) -> bool:
        """Whether there is nothing to do at all: one shard, no accumulation."""
        return self.parts.column.is_alone and not self._accumulates

    @property
    def _exchanges(self) -> bool:
        return self.reduces and not self.parts.column.is_alone

    # -- a batch ---------------------------------------------------------------------------------------------------

    def begin_batch(self, *, weight: float, due: bool) -> None:
        """Put on or take off the hooks that weight gradients, as the batch needs them."""
        self._weight, self._due = weight, due
        self._reductions_of_batch = self._passes_of_batch = 0
        self._is_cleared = False
        self._is_weighed = False
        if self._is_passive or self._accumulates:
            return
        # Nearly every batch has weight 1: no hook, no cost.
        if weight == 1.0:
            for handle in self._weight_handles.values():
                handle.remove()
            self._weight_handles.clear()
        else:
            # Each time, because the step may have unfrozen parameters since.
            for key, parameter in self.parameters.items():
                if parameter.requires_grad and key not in self._weight_handles:
                    self._add_weight_hook(parameter)

    def _add_weight_hook(self, parameter: Any) -> None:
        self._weight_handles[id(parameter)] = parameter.register_hook(functools.partial(self._on_weighing, parameter))

    def _on_weighing(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if torch.is_grad_enabled() and _is_returned(parameter):
            # By `torch.autograd.grad(create_graph=True)`: it goes into a loss, whose own gradients are weighed.
            return None
        self._is_weighed = True
        return self._weigh(gradient)

    def _weigh(self, gradient: Tensor) -> Tensor | None:
        weight = self._weight
        if weight == 1.0:
            return None
        # A repeated sample may well give nan, which no factor removes.
        return gradient * weight if weight else torch.zeros_like(gradient)

    @property
    def is_awaited(self) -> bool:
        """Whether the other ranks may be exchanging gradients in this batch without this rank."""
        return self._exchanges and self._due and not self._reductions_of_batch

    def end_batch(self, *, left: bool) -> None:
        """Join the exchange that other ranks have made, if this rank made no backward pass or left the loop."""
        skipped = self._due and not self._reductions_of_batch
        if self._exchanges and (skipped or left):
            self._reduce(skipped=skipped, left=left)

    # -- a backward pass -------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        task = backward_pass()
        if task != self._task:
            self._begin(task, parameter)
        if not self._holding and self._exchanges:
            self.gradient_is_complete(parameter)

    def _begin(self, task: int, first: Tensor | None) -> None:
        nested = self._task is not None
        self._task = task
        self._holding = not self._due
        if self._is_cleared:
            raise KaleDistError(
                "train_step clears gradients between two backward passes of one batch, and gradients that are accumulated over"
                " several batches cannot be cleared. Leave `accumulate` out"
            )
        if self._exchanges:
            self.pass_begins(nested=nested)
        if self._is_held_back:
            self.check_held(but=first)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001

    def _end(self) -> None:
        """Torch calls this when the backward pass is over, still within the caller's `backward()`."""
        if self._task is None:
            return
        self._task = None
        self._passes_of_batch += 1
        if self._accumulates:
            self.has_pending = True
        if self._holding:
            self._is_held_back = True
            self._held_passes += 1
            self._mark()
            return
        self._reduce()

    def _reduce(self, *, skipped: bool = False, left: bool = False) -> None:
        self._reductions_of_batch += 1
        self._is_held_back = False
        if self._exchanges:
            self.reduce(skipped=skipped, left=left)
        self._mark()

    def passed(self, root: Tensor) -> None:
        """Keep what ranks of the row have to agree on."""
        self._agreement.passed(root, self.parameters.values())

    # -- before a step ---------------------------------------------------------------------------------------------

    def complete(self, correction: float) -> None:
        """Exchange the gradients that no backward pass has exchanged, and correct the window's.

        Such gradients come from `torch.autograd.grad` and assignment, or from a last batch without a backward pass.
        """
        if not self.parts.column.is_alone:
            by_hand = [p for p in self.parameters.values() if p.requires_grad and self._is_unknown(p)]
            # Those of `torch.autograd.grad` have been through the hooks; those of `torch.func`, or of a copy of the model, not.
            if self._weight != 1.0 and not (self._is_weighed or self._accumulates):
                for parameter in by_hand:
                    if (gradient := parameter.grad) is not None:
                        parameter.grad = self._weigh(gradient)
            if self._exchanges and any(id(p) not in self._late for p in by_hand) and not self._is_held_back:
                self.parts.group.log(
                    "Gradients were assigned by the step, such as those of torch.autograd.grad or of a copy of the model: they"
                    " are averaged over the ranks before the optimizer's step."
                )
            if by_hand or self._is_held_back:
                self._reduce()
            self._late.clear()
        self._agreement.check()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None] if correction != 1.0 else []
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(correction)

    def stepped(self) -> None:
        """Compare what ranks have to agree on."""
        super().stepped()
        if self._numbers is not None:
            self._numbers.check()

    # -- gradients changed behind our back -------------------------------------------------------------------------

    def keep_gradients(self) -> None:
        """Remember that the step has cleared gradients after a backward pass: another pass in the same batch is refused."""
        self._is_cleared = self._passes_of_batch > 0

    def _mark(self) -> None:
        self._marks = {
            key: (id(p.grad), _version_of(p.grad), self._sum_of(p.grad) if self._is_held_back else "")
            for key, p in self.parameters.items()
            if p.grad is not None
        }

    def _sum_of(self, gradient: Tensor) -> str:
        """Return the sum of a gradient, as text, so that NaN equals NaN; empty for a whole one after the first passes.

        What changes many parts at once, as torch's own clipping, is not counted by any of them.
        """
        part = local_part(gradient)
        return "" if part is gradient and self._held_passes > _LOOKED_AT else str(part.sum().item())

    def _is_unknown(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter's gradient is another object than at the last exchange."""
        gradient = parameter.grad
        if gradient is None:
            return False
        identity, version, _ = self._marks.get(id(parameter), (0, 0, ""))
        # A new object at an old address has been changed less often than the old one.
        return id(gradient) != identity or _version_of(gradient) < version

    def check_held(self, but: Tensor | None = None) -> None:
        """Refuse gradients that the user's code has changed while they are held back, except the one of `but`."""
        for key, parameter in self.parameters.items():
            gradient, mark = parameter.grad, self._marks.get(key)
            if parameter is but or gradient is None is mark:
                continue
            if gradient is None or (id(gradient), _version_of(gradient), self._sum_of(gradient)) != mark:
                raise KaleDistError(
                    "train_step changed or dropped gradients while they are accumulated over several batches. Clip by"
                    " `clip_norm=` instead of inside the step, clear gradients by optimizer.zero_grad() only, and leave"
                    " `accumulate` out if the step accumulates by itself"
                )


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 where none does."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 - what torch.autograd.graph uses itself


def _version_of(gradient: Tensor) -> int:
    """Return how often a gradient was changed; of a part of one (`DTensor`), the part counts."""
    return times_changed(local_part(gradient))


def refuse_gradients(model: torch.nn.Module, word: str, stack: contextlib.ExitStack) -> None:
    """Refuse `torch.autograd.grad` of weights that are divided over ranks: the engine does not reach them, and returns None.

    Args:
        model: Has the weights, in a step perhaps whole ones in their place.
        word: The strategy's.
        stack: Undoes it.
    """
    divided = {id(parameter) for parameter in model.parameters()}
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # noqa: SLF001 - both `grad`, by any name, and `backward` call it

    def checked(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        refused = divided.union(map(id, model.parameters())) if options.get("accumulate_grad") is False else ()
        if any(id(one) in refused for one in inputs):
            raise KaleDistError(
                f"train_step takes gradients of weights by torch.autograd.grad, and with strategy={word!r} ranks have parts of"
                " them. Call loss.backward(), which sets p.grad, or use strategy='ddp'"
            )
        return run(outputs, gradients, retain, create, inputs, *rest, **options)

    stack.callback(setattr, torch.autograd, "_engine_run_backward", run)
    torch.autograd._engine_run_backward = checked  # type: ignore[attr-defined,assignment]  # noqa: SLF001


def _is_returned(parameter: Tensor) -> bool:
    """Whether `torch.autograd.grad` is running and returns this gradient, rather than `backward()`, which adds it to `grad`."""
    try:
        return not torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)  # noqa: SLF001
    except RuntimeError:  # what torch raises for the leaves that are asked for
        return True
