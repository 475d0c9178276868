"""Gradients averaged over ranks at the end of every backward pass, in place: the model is not wrapped.

Each parameter has a hook that runs when its gradient is complete. Gradients are copied into buckets, which are summed
over ranks in a fixed order, each as soon as it is full (Li et al., PyTorch Distributed, VLDB 2020, section 3.2); what
is left is exchanged when the backward pass ends, however the loss was computed: `model(x)`, `model.loss(x)` or a function of
global names. A parameter that this rank did not use takes part with zeros; one that no rank used keeps `grad` None.

Averaging is idempotent (the mean of equal gradients is that gradient), so any number of backward passes may precede
a step. The weight of a rank's batch is a factor on its gradients before they are added up (`Pace.factor`).

A few control numbers in the last bucket show whether ranks do different things: gradients of different steps are never
averaged without an error. On a GPU these numbers are read when the next backward pass begins (or the
epoch ends), so that no step waits for the GPU; only a rank in which a parameter has no gradient has to wait for them,
because they tell whether another rank has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.errors import KaleDistError
from kale_dist.strategies import AllReduce
from kale_dist.training.group import Group
from kale_dist.training.sharding import Pace
from kale_dist.training.strategies.buckets import Bucket, average_sparse, fill_buckets

_SLOTS = 8
"""Control numbers that tell batches apart: the batch's number modulo this."""

_SKIPPED, _LEFT = _SLOTS, _SLOTS + 1
_CONTROLS = _SLOTS + 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    """Control numbers of an exchange that have not been looked at yet."""

    batch: int
    numbers: Tensor
    """On the CPU; there once `arrived` is."""
    arrived: Any
    """An event of the GPU's."""


class GradientExchange:
    """Keeps the gradients of all ranks equal.

    Args:
        group: The ranks.
        pace: Written by the training loader.
        settings: Bucket size.
        parameters: Gives all parameters that are trained, in an order that is the same in all ranks.
        sparse: Identities of parameters whose gradients are sparse.
    """

    def __init__(
        self,
        group: Group,
        pace: Pace,
        settings: AllReduce,
        parameters: Iterable[torch.nn.Parameter],
        sparse: frozenset[int] = frozenset(),
    ) -> None:
        self._group = group
        self._pace = pace
        self._bucket_bytes = max(1, int(settings.bucket_mib * 2**20))
        self._sparse_ids = sparse
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._handles: list[Any] = []
        self._scale_handles: dict[int, Any] = {}
        self._trainable: list[torch.nn.Parameter] = []
        self._flags: list[bool] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._control: Tensor = torch.empty(0)
        self._sent: _Sent | None = None
        self._next_launch = 0
        self._overlap = False
        self._may_overlap = True
        self._fired: set[int] = set()
        self._task: int | None = None
        self._holding = False
        self._marks: dict[int, tuple[int, int]] = {}
        self._exchanges_of_batch = 0
        self.has_pending = False
        """Whether gradients have been added up since the last real step, when accumulating."""
        self._is_held_back = False
        for parameter in parameters:
            self._adopt(parameter)

    # -- parameters ------------------------------------------------------------------------------------------------

    def adopt(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Take in parameters that were not there at the start, with rank 0's values; return the new ones."""
        new = [p for p in parameters if id(p) not in self._parameters and not _is_uninitialized(p)]
        for parameter in new:
            self._group.send_tensor(parameter)
            self._adopt(parameter)
        return new

    def adopt_late(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take in parameters of an optimizer of the user's, whose gradients are there already and unweighted."""
        factor = self._pace.factor
        new = self.adopt(parameters)
        if new and not self._group.is_alone:
            self._group.say(
                f"An optimizer of the step trains {len(new)} tensors that are not the model's: their values are taken"
                " from rank 0 and their gradients are averaged as well."
            )
        for parameter in new:
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

    def _adopt(self, parameter: torch.nn.Parameter) -> None:
        if id(parameter) in self._parameters or _is_uninitialized(parameter):
            return
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        self._parameters[id(parameter)] = parameter
        self._flags = []
        if self._is_passive:
            return
        # A frozen parameter cannot be hooked, and may be unfrozen in the middle of an epoch.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)  # noqa: FBT003 - torch's own signature
        self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]
        if self._scale_handles or self._pace.accumulate > 1:
            self._scale_handles[id(parameter)] = parameter.register_hook(self._weigh)  # type: ignore[no-untyped-call]
        if frozen:
            parameter.requires_grad_(False)  # noqa: FBT003

    @property
    def _is_passive(self) -> bool:
        """Whether there is nothing to do at all: one rank, no accumulation."""
        return self._group.is_alone and self._pace.accumulate == 1

    def close(self) -> None:
        """Take all hooks off."""
        for handle in (*self._handles, *self._scale_handles.values()):
            handle.remove()
        self._handles.clear()
        self._scale_handles.clear()

    def _refresh(self) -> None:
        """Lay out the buckets again if parameters came, were frozen or unfrozen."""
        flags = [p.requires_grad for p in self._parameters.values()]
        if flags == self._flags:
            return
        self._flags = flags
        self._trainable = [p for p, wanted in zip(self._parameters.values(), flags, strict=True) if wanted]
        dense = [p for p in self._trainable if id(p) not in self._sparse_ids]
        controls = _CONTROLS + len(self._trainable)
        self._buckets, self._control = fill_buckets(dense, self._bucket_bytes, controls, self._group)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._overlap = False
        self._next_launch = 0

    # -- the weight of a batch -------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Make the hooks fit the batch that `Pace` has just taken."""
        self._exchanges_of_batch = 0
        if self._is_passive or self._pace.accumulate > 1:
            return
        # Nearly every batch has weight 1: no hook, no cost.
        if self._pace.factor == 1.0:
            for handle in self._scale_handles.values():
                handle.remove()
            self._scale_handles.clear()
        elif not self._scale_handles:
            for key, parameter in self._parameters.items():
                if parameter.requires_grad:
                    self._scale_handles[key] = parameter.register_hook(self._weigh)  # type: ignore[no-untyped-call]

    def _weigh(self, gradient: Tensor) -> Tensor | None:
        factor = self._pace.factor
        if factor == 1.0:
            return None
        # A repeated sample may well give nan, which no factor removes.
        return gradient * factor if factor else torch.zeros_like(gradient)

    # -- a backward pass -------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - what torch.autograd.graph uses itself
        if task != self._task:
            self._begin(task, parameter)
        if self._holding or self._group.is_alone:
            return
        key = id(parameter)
        if not self._overlap:
            if key in self._fired:
                self._may_overlap = False
            self._fired.add(key)
            return
        bucket = self._bucket_of.get(key)
        if bucket is None:
            return
        if bucket.work is not None:
            raise _nested_error()
        bucket.ready += 1
        # The last bucket carries the control numbers, known only at the end.
        while self._next_launch < len(self._buckets) - 1 and self._buckets[self._next_launch].is_full:
            self._buckets[self._next_launch].launch()
            self._next_launch += 1

    def _begin(self, task: int, first: Tensor) -> None:
        """The first gradient of a backward pass, or of one inside another (reentrant checkpointing)."""
        if self._task is not None:
            if self._next_launch:
                raise _nested_error()
            self._may_overlap = self._overlap = False
        else:
            self.verify()
        self._task = task
        self._holding = not self._pace.is_due
        self._refresh()
        self._fired.clear()
        for bucket in self._buckets:
            bucket.ready = 0
        if self._is_held_back:
            self.check_untouched(but=first)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001

    def _end(self) -> None:
        """Runs when the backward pass is over, still within the caller's `backward()`."""
        if self._task is None:
            return
        self._task = None
        if self._pace.accumulate > 1:
            self.has_pending = True
        if self._holding:
            self._is_held_back = True
            self._mark()
            return
        self.exchange()
        if not self._overlap and self._may_overlap and len(self._buckets) > 1:
            self._overlap = True

    @property
    def reads_late(self) -> bool:
        """Whether control numbers are read at the next backward pass: where reading them waits for a GPU."""
        return self._control.is_cuda

    # -- the exchange ----------------------------------------------------------------------------------------------

    def exchange(self, *, skipped: bool = False, left: bool = False) -> None:
        """Average the gradients of all ranks, now. Called by all ranks alike.

        Args:
            skipped: This rank made no backward pass in this batch.
            left: This rank left the loop over its loader early.

        Raises:
            KaleDistError: The ranks are not at the same place.
        """
        self._exchanges_of_batch += 1
        self._is_held_back = False
        if self._group.is_alone:
            self._mark()
            return
        self.verify()
        self._refresh()
        with torch.no_grad():
            mine = self._write_controls(skipped=skipped, left=left)
            for bucket in self._buckets[self._next_launch :]:
                bucket.launch()
            self._next_launch = 0
            if not any(bucket.holds(self._control) for bucket in self._buckets):
                dist.all_reduce(self._control, group=self._group.world)
            for bucket in self._buckets:
                bucket.wait()
            self._fetch_controls()
            # What this rank has used, some rank has: only where it lacks a gradient do the others' numbers matter now.
            is_certain = all(mine) and not (skipped or left)
            used = mine if self.reads_late and is_certain else self.verify()
            positions = {id(p): number for number, p in enumerate(self._trainable)}
            for bucket in self._buckets:
                bucket.give_back([used[positions[id(p)]] for p in bucket.parameters])
            for number, parameter in enumerate(self._trainable):
                if id(parameter) in self._sparse_ids and used[number]:
                    average_sparse(parameter, self._group)
        self._mark()

    def _write_controls(self, *, skipped: bool, left: bool) -> list[bool]:
        """Write this rank's numbers; gives which parameters have a gradient here."""
        numbers = [0.0] * _CONTROLS
        numbers[self._pace.batches % _SLOTS] = 1.0
        numbers[_SKIPPED] = float(skipped)
        numbers[_LEFT] = float(left)
        mine = [p.grad is not None for p in self._trainable]
        is_remote = self._control.is_cuda
        given = torch.tensor([*numbers, *map(float, mine)], dtype=self._control.dtype, pin_memory=is_remote)
        self._control.copy_(given, non_blocking=is_remote)
        return mine

    def _fetch_controls(self) -> None:
        """Have the sums of the control numbers come to the CPU, without waiting for a GPU."""
        is_remote = self._control.is_cuda
        numbers = torch.empty(self._control.shape, dtype=self._control.dtype, pin_memory=is_remote)
        numbers.copy_(self._control, non_blocking=is_remote)
        arrived = torch.cuda.Event() if is_remote else None  # type: ignore[no-untyped-call]
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self._control.device))
        self._sent = _Sent(self._pace.batches, numbers, arrived)

    def verify(self) -> list[bool]:
        """Look at the control numbers of the last exchange, if that has not been done.

        Returns:
            Whether any rank had a gradient, for each parameter.

        Raises:
            KaleDistError: The ranks were not at the same place.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return []
        if sent.arrived is not None:
            sent.arrived.synchronize()
        world, here, numbers = self._group.world_size, sent.batch, sent.numbers.tolist()
        if numbers[_LEFT] not in (0, world):
            raise KaleDistError(
                f"train_step left the loop over its loader on {numbers[_LEFT]:.0f} of {world} ranks only, here after or"
                f" before batch {here}. All ranks must take the same steps: decide on a value that is equal on all,"
                ' or return {"stop": True} at the end of the epoch'
            )
        if numbers[here % _SLOTS] != world:
            raise KaleDistError(
                f"The ranks exchange gradients of different batches (this rank is at batch {here}). Call backward()"
                " equally often on every rank, whatever the data"
            )
        if numbers[_SKIPPED] not in (0, world):
            raise KaleDistError(
                f"train_step made no backward pass in batch {here} on {numbers[_SKIPPED]:.0f} of {world} ranks."
                " Every rank must call backward() in the same steps: multiply the loss by 0 instead of skipping a batch"
            )
        return [number > 0 for number in numbers[_CONTROLS:]]

    def settle(self, *, left: bool = False) -> None:
        """Before the next batch: take part in the exchange that other ranks may have made without this one."""
        if self._group.is_alone:
            return
        portion = self._pace.portion
        skipped = portion is not None and self._pace.is_due and not self._exchanges_of_batch
        if skipped or left:
            self.exchange(skipped=skipped, left=left)

    def ensure(self) -> None:
        """Before a real step of any optimizer: exchange what no backward pass has exchanged.

        Gradients come to be so by `torch.autograd.grad` and assignment, or by a last batch without a backward pass.
        """
        if self._group.is_alone:
            return
        by_hand = any(self._is_unknown(p) for p in self._parameters.values() if p.requires_grad)
        if by_hand and not self._is_held_back:
            self._group.say(
                "Gradients were set by the step itself, not by backward(): they are averaged over the ranks before"
                " the optimizer's step."
            )
        if by_hand or self._is_held_back:
            self.exchange()

    def stepped(self) -> None:
        """A real step of the optimizer was made."""
        self.has_pending = False

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a number."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if factor != 1.0 and gradients:
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(factor)

    # -- gradients changed behind our back -------------------------------------------------------------------------

    def _mark(self) -> None:
        self._marks = {
            key: (id(p.grad), p.grad._version)  # noqa: SLF001 - torch's public name for it
            for key, p in self._parameters.items()
            if p.grad is not None
        }

    def _is_unknown(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient is an object that came after the last exchange."""
        gradient = parameter.grad
        if gradient is None:
            return False
        identity, version = self._marks.get(id(parameter), (0, 0))
        # A new object at an old address has been changed less often than the old one.
        return id(gradient) != identity or gradient._version < version  # noqa: SLF001

    def check_untouched(self, but: Tensor | None = None) -> None:
        """While gradients are held back, the user's code must not have changed or dropped them.

        Raises:
            KaleDistError: It has, so the accumulated gradient would be wrong.
        """
        for key, mark in self._marks.items():
            parameter = self._parameters[key]
            gradient = parameter.grad
            if parameter is but:
                continue
            if gradient is None or (id(gradient), gradient._version) != mark:  # noqa: SLF001
                raise KaleDistError(
                    "train_step changed or dropped gradients while they are accumulated over several batches. Clip by"
                    " `clip_norm=` instead of inside the step, clear gradients by optimizer.zero_grad() only, and leave"
                    " `accumulate` out if the step accumulates by itself"
                )


def _is_uninitialized(parameter: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(parameter)


def _nested_error() -> KaleDistError:
    return KaleDistError(
        "A backward pass gave a parameter's gradient twice after gradients were already on their way. This comes from"
        " torch.utils.checkpoint with use_reentrant=True; use use_reentrant=False"
    )


def follow_lazy_modules(modules: Iterable[torch.nn.Module], exchange: GradientExchange) -> None:
    """Have modules that get their shapes in the first forward pass start from rank 0's values.

    Ranks draw from different seeds, so their own initial values would differ.
    """
    for module in modules:
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            handle: list[Any] = []

            def settle(module: torch.nn.Module, _: Any, handle: list[Any] = handle) -> None:
                if not any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
                    exchange.adopt(module.parameters(recurse=False))
                    handle.pop().remove()

            # Torch's own hook, which makes the parameters, was registered by the constructor and so runs before.
            handle.append(module.register_forward_pre_hook(settle))
