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
because they show whether another rank has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.errors import KaleDistError
from kale_dist.strategies import Layout, Settings
from kale_dist.worker.parallel.buckets import Bucket, average_sparse, fill_buckets, real, sparse_parameters
from kale_dist.worker.parallel.exchanges import AllReduce, DriverExchange, Half, PowerSGD, Ring
from kale_dist.worker.parallel.replica import Replica
from kale_dist.worker.parallel.shared_memory import SharedSum
from kale_dist.worker.training.strategy import Parts

_SLOTS = 8
"""Control numbers that distinguish batches: the batch's number modulo this."""

_SKIPPED, _LEFT = _SLOTS, _SLOTS + 1
_CONTROLS = _SLOTS + 2
_NOTES = 3
"""Bytes of a note in shared memory before those of the parameters: batch, skipped, left."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    """Control numbers of an exchange that this rank has not read yet."""

    batch: int
    numbers: Tensor
    """On the CPU; complete when `arrived` is."""
    arrived: Any
    """An event of the GPU; None without one."""


class DataParallel(Replica):
    """Keeps the gradients of all ranks equal.

    Args:
        settings: Bucket size, exchange and compression.
        layout: This rank's layout.
    """

    meets_in_steps = True

    def __init__(self, settings: Settings, layout: Layout) -> None:
        super().__init__(settings, layout)
        self.average_buffers = self.settings.average_buffers
        self._exchange: AllReduce | None = None
        self._sum: SharedSum | None = None
        self._shares_memory = False
        self._reported_bytes = 0.0
        self._bytes_before = 0
        """Bytes written to memory that was closed since."""
        self._bucket_bytes = max(1, int(self.settings.bucket_mib * 2**20))
        self._trainable: list[torch.nn.Parameter] = []
        self._dense: list[torch.nn.Parameter] = []
        self._flags: list[bool] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._control: Tensor = torch.empty(0, device="cpu")
        self._sent: _Sent | None = None
        self._next_launch = 0
        self._overlap = False
        self._may_overlap = True
        self._fired: set[int] = set()

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Put hooks on all parameters, and choose how to exchange gradients."""
        roots = [root for root in (parts.model, parts.criterion) if isinstance(root, torch.nn.Module)]
        self._sparse_ids = sparse_parameters(module for root in roots for module in root.modules())
        super().prepare(parts, stack)
        if not parts.column.is_alone:
            self._choose(stack)

    def _choose(self, stack: contextlib.ExitStack) -> None:
        """Choose by which way gradients are exchanged; the first exchange finds out whether ranks can share memory."""
        column, wanted, compress = self.parts.column, self.settings.exchange, self.settings.compress
        if wanted == "shared-memory" or (wanted is None and compress is None and column.device.type == "cpu"):
            self._shares_memory = True
            stack.callback(self._close_memory)
        if compress == "powersgd":
            self._exchange = PowerSGD(column)
        elif compress is not None:
            self._exchange = Half(column, compress)
        else:
            self._exchange = {"ring": Ring, "driver": DriverExchange}.get(wanted or "", AllReduce)(column)

    def _close_memory(self) -> None:
        if self._sum is not None:
            self._sum.memory.close()
            self._bytes_before += self._sum.bytes_written
            self._sum = None

    def _refresh(self) -> None:
        """Lay out the buckets again if parameters came, were frozen or unfrozen."""
        flags = [p.requires_grad for p in self.parameters.values()]
        if flags == self._flags:
            return
        self._flags = flags
        self._trainable = [p for p, wanted in zip(self.parameters.values(), flags, strict=True) if wanted]
        self._dense = [p for p in self._trainable if id(p) not in self._sparse_ids]
        self._close_memory()
        self._overlap = False
        self._next_launch = 0
        if self._shares_memory or self._exchange is None:
            return
        controls = _CONTROLS + len(self._trainable)
        self._buckets, self._control = fill_buckets(
            self._dense, self._bucket_bytes, controls, self.parts.column, self._exchange
        )
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

    # -- a backward pass -------------------------------------------------------------------------------------------

    def pass_begins(self, *, nested: bool) -> None:
        """Empty the buckets."""
        if nested:
            if self._next_launch:
                raise _nested_error()
            self._may_overlap = self._overlap = False
        else:
            self._verify()
        self._refresh()
        self._fired.clear()
        for bucket in self._buckets:
            bucket.ready = 0

    def gradient_is_complete(self, parameter: Tensor) -> None:
        """Send each bucket as soon as it is full."""
        if self._shares_memory:
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

    @property
    def _reads_late(self) -> bool:
        """Whether control numbers are read at the next backward pass: where reading them waits for a GPU."""
        return self._control.is_cuda

    # -- the exchange ----------------------------------------------------------------------------------------------

    def reduce(self, *, skipped: bool, left: bool) -> None:
        """Average the gradients of all ranks.

        Raises:
            KaleDistError: The ranks are not at the same place.
        """
        self._verify()
        self._refresh()
        if self._shares_memory and self._sum is None:
            self._share_memory()
        if self._sum is not None:
            self._reduce_in_memory(self._sum, skipped=skipped, left=left)
            return
        with torch.no_grad():
            mine = self._write_controls(skipped=skipped, left=left)
            for bucket in self._buckets[self._next_launch :]:
                bucket.launch()
            self._next_launch = 0
            if not any(bucket.extra is self._control for bucket in self._buckets):
                dist.all_reduce(self._control, group=self.parts.column.world)
            for bucket in self._buckets:
                bucket.wait()
            self._fetch_controls()
            # What this rank has used, some rank has: only where it lacks a gradient do the others' numbers matter now.
            is_certain = all(mine) and not (skipped or left)
            used = mine if self._reads_late and is_certain else self._verify()
            positions = {id(p): number for number, p in enumerate(self._trainable)}
            for bucket in self._buckets:
                bucket.give_back([used[positions[id(p)]] for p in bucket.parameters])
            for number, parameter in enumerate(self._trainable):
                if id(parameter) in self._sparse_ids and used[number]:
                    average_sparse(parameter, self.parts.column)
        # A pass that gave each gradient once has shown that buckets may be sent before its end.
        if self._fired and self._may_overlap and len(self._buckets) > 1:
            self._overlap = True

    def _share_memory(self) -> None:
        """Make the memory for gradients of these parameters; where ranks cannot share any, lay out buckets instead."""
        shapes = [real(parameter.detach()) for parameter in self._dense]
        try:
            self._sum = SharedSum(shapes, _NOTES + len(self._trainable), self.parts.column)
        except OSError as error:
            if self.settings.exchange is not None:
                text = f"exchange='shared-memory' does not work here: {error.strerror}. Leave it out"
                raise KaleDistError(text) from None
            self._shares_memory, self._flags = False, []
            self._refresh()

    @torch.no_grad()
    def _reduce_in_memory(self, shared: SharedSum, *, skipped: bool, left: bool) -> None:
        """Average through the memory that ranks share."""
        tensors = []
        for parameter in self._dense:
            gradient = parameter.grad
            if gradient is None:
                tensors.append(torch.zeros_like(real(parameter.detach()), memory_format=torch.contiguous_format))
            else:
                tensors.append(real(gradient.to_dense() if gradient.is_sparse else gradient).contiguous())
        mine = [parameter.grad is not None for parameter in self._trainable]
        here = self.parts.pace.batches
        notes = shared.average(tensors, bytes((here % _SLOTS, skipped, left, *mine)))
        is_alike = not (skipped or left) and all(note == notes[0] for note in notes)
        used = mine if is_alike else _checked(_sums(notes), here, len(notes))
        is_used = {id(p): one for p, one in zip(self._trainable, used, strict=True)}
        for parameter, tensor in zip(self._dense, tensors, strict=True):
            gradient = parameter.grad
            if gradient is None and not is_used[id(parameter)]:
                continue
            mean = torch.view_as_complex(tensor) if parameter.is_complex() else tensor
            if gradient is None or gradient.is_sparse:
                parameter.grad = mean
            elif not gradient.is_contiguous():
                gradient.copy_(mean)
        for parameter in self._trainable:
            if id(parameter) in self._sparse_ids and is_used[id(parameter)]:
                average_sparse(parameter, self.parts.column)

    def metrics(self) -> dict[str, float]:
        """Return the bytes that were sent, or written into shared memory, since the last call."""
        if self._exchange is None:
            return {}
        written = self._bytes_before + (self._sum.bytes_written if self._sum is not None else 0)
        total = self._exchange.bytes_sent + written
        new, self._reported_bytes = total - self._reported_bytes, total
        return {"bytes_sent": new}

    def own_state(self) -> dict[str, Any]:
        """Return the residuals of the compression."""
        return {} if self._exchange is None else self._exchange.state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore the residuals of the compression."""
        if self._exchange is not None:
            self._exchange.load(state)

    def end_epoch(self) -> None:
        """Check the last control numbers, then average the buffers."""
        self._verify()
        super().end_epoch()

    def _write_controls(self, *, skipped: bool, left: bool) -> list[bool]:
        """Write this rank's control numbers; returns which parameters have a gradient in this rank."""
        numbers = [0.0] * _CONTROLS
        numbers[self.parts.pace.batches % _SLOTS] = 1.0
        numbers[_SKIPPED] = float(skipped)
        numbers[_LEFT] = float(left)
        mine = [p.grad is not None for p in self._trainable]
        is_remote = self._control.is_cuda
        given = torch.tensor(
            [*numbers, *map(float, mine)], dtype=self._control.dtype, device="cpu", pin_memory=is_remote
        )
        self._control.copy_(given, non_blocking=is_remote)
        return mine

    def _fetch_controls(self) -> None:
        """Start to copy the sums of the control numbers to the CPU, without waiting for a GPU."""
        is_remote = self._control.is_cuda
        numbers = torch.empty(self._control.shape, dtype=self._control.dtype, device="cpu", pin_memory=is_remote)
        numbers.copy_(self._control, non_blocking=is_remote)
        arrived = torch.cuda.Event() if is_remote else None  # type: ignore[no-untyped-call]
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self._control.device))
        self._sent = _Sent(self.parts.pace.batches, numbers, arrived)

    def _verify(self) -> list[bool]:
        """Check the control numbers of the last exchange, unless that was done; see `_checked`."""
        sent, self._sent = self._sent, None
        if sent is None:
            return []
        if sent.arrived is not None:
            sent.arrived.synchronize()
        return _checked(sent.numbers.tolist(), sent.batch, self.parts.column.world_size)


def _sums(notes: Sequence[bytes]) -> list[float]:
    """Add up notes of shared memory to the control numbers that an exchange by buckets gives."""
    numbers = [0.0] * _CONTROLS
    for batch, skipped, left, *_ in notes:
        numbers[batch] += 1.0
        numbers[_SKIPPED] += skipped
        numbers[_LEFT] += left
    return [*numbers, *map(float, map(sum, zip(*(note[_NOTES:] for note in notes), strict=True)))]


def _checked(numbers: Sequence[float], here: int, world: int) -> list[bool]:
    """Check that all ranks are at the same place; return for each parameter whether any rank had a gradient.

    Args:
        numbers: Sums over ranks of the control numbers.
        here: The number of this rank's batch.
        world: How many ranks there are.

    Raises:
        KaleDistError: The ranks were not at the same place.
    """
    if numbers[_LEFT] not in (0, world):
        raise KaleDistError(
            f"train_step left the loop over its loader on {numbers[_LEFT]:.0f} of {world} ranks only, about batch"
            f" {here} on this one. All ranks must take the same steps: decide on a value that is equal on all,"
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


def _nested_error() -> KaleDistError:
    return KaleDistError(
        "A backward pass gave a parameter's gradient twice after gradients were already on their way. This comes from"
        " torch.utils.checkpoint with use_reentrant=True; use use_reentrant=False"
    )
