"""Callbacks in the ranks: when to stop, the best weights, averages of weights, functions of the user's after each epoch.

Metrics are averaged over ranks, so all ranks decide alike without another exchange. Averages are made of what each rank
holds, element by element, which is right for divided weights too; the strategy puts them together as it does the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from kale_dist.callbacks import EMA, SWA, Average, Callback, EarlyStopping, ModelCheckpoint, monitors
from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import Layout
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.result import on_cpu
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.strategy import Strategy


class Callbacks:
    """All callbacks of one training in this rank. All ranks call a method at the same place.

    Args:
        training: Has the callbacks, and the model that functions get, or the dict of several.
        model: The model that is trained, as the strategy has left it; several as one.
        strategy: The strategy.
        layouts: The layouts of all ranks.
        group: The ranks.
    """

    def __init__(
        self, training: Training, model: torch.nn.Module, strategy: Strategy, layouts: Sequence[Layout], group: Group
    ) -> None:
        given = training.callbacks
        self._training, self._group, self._strategy = training, group, strategy
        self._needed = monitors(given)
        self._stops = [_Best(one) for one in given if isinstance(one, EarlyStopping)]
        self._kept = next((_Best(one) for one in given if isinstance(one, ModelCheckpoint)), None)
        self._best: dict[str, Any] | None = None
        self._functions = [one for one in given if not isinstance(one, Callback)]
        with_data = [rank for rank, one in enumerate(layouts) if one.shard is not None]
        self._is_divided = any(len(layouts[rank].replicas) < len(with_data) for rank in with_data)
        averages = (
            _Average(one, training.epochs, model, layouts[group.rank], group, is_divided=self._is_divided)
            for one in given
            if isinstance(one, Average)
        )
        self._average = next(averages, None)

    # -- in an epoch -----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Called after a real step of the optimizer. Local."""
        if self._average is not None:
            self._average.stepped()

    def evaluates(self, epoch: int) -> contextlib.AbstractContextManager[None] | None:
        """Called at the end of an epoch: return a context with the averaged weights in place, to evaluate them.

        None where they are not evaluated.
        """
        average = self._average
        if average is None:
            return None
        average.end_epoch(epoch)
        return average.in_place() if average.settings.evaluate and average.count else None

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> str:
        """Look at the metrics of an epoch, by names such as `eval/loss`.

        Returns:
            Why the training ends, as a sentence; empty if it continues.

        Raises:
            ConfigError: A metric that a callback needs is not there.
        """
        lacking = [name for name in self._needed if name not in metrics]
        # Averages begin later than the first epoch.
        if lacking and not (
            self._average is not None and lacking[0].startswith("averaged/") and not self._average.count
        ):
            kind = type(self._needed[lacking[0]]).__name__
            there = ", ".join(map(repr, metrics)) or "none: the steps return nothing"
            problem = f"{kind}(monitor={lacking[0]!r}): there is no such metric after epoch {epoch}"
            raise ConfigError("callbacks", problem, f"The metrics are {there}")
        if self._kept is not None and self._kept.improves(metrics, epoch):
            self._best = _copied(self._strategy.full_state())
        if self._group.rank == 0:
            for function in self._functions:
                with self._guarded():
                    function(epoch, dict(metrics), self._training.model)
        reasons = [
            stop.reason(epoch) for stop in self._stops if not stop.improves(metrics, epoch) and stop.is_over(epoch)
        ]
        if not reasons or epoch == self._training.epochs:
            return ""
        return f"Stopped early, after epoch {epoch} of {self._training.epochs}: {reasons[0]}."

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Refuse a forward pass in rank 0 alone where it needs the other ranks, which would never come."""
        if not self._is_divided:
            yield
            return

        def refuse(*_: Any) -> None:
            raise KaleDistError(
                "A function of callbacks= called the model. It runs in rank 0, which holds only a part of the weights with "
                "this strategy. Evaluate in eval_step, or use strategy='ddp'"
            )

        model = self._training.model
        roots = model.values() if isinstance(model, dict) else [model]
        handles = [one.register_forward_pre_hook(refuse, prepend=True) for one in roots]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- states ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the callbacks' part of a checkpoint; only rank 0's is whole."""
        kept = self._kept
        return {
            "best": None if kept is None else {"epoch": kept.epoch, "value": kept.value, "model": self._best},
            "stops": [[stop.value, stop.epoch] for stop in self._stops],
            "average": None if self._average is None else self._average.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if self._kept is not None and (best := state.get("best")):
            self._kept.epoch, self._kept.value = best["epoch"], best["value"]
            self._best = best["model"]
        for stop, (value, epoch) in zip(self._stops, state.get("stops") or (), strict=False):
            stop.value, stop.epoch = value, epoch
        if self._average is not None and (average := state.get("average")):
            self._average.load(average)

    def results(self) -> dict[str, Any]:
        """Return the callbacks' fields of the `TrainingResult`. Called before the strategy is undone."""
        found: dict[str, Any] = {}
        kept, average = self._kept, self._average
        if kept is not None and kept.epoch:
            found = {"best_epoch": kept.epoch, "best_value": kept.value, "best_state": on_cpu(self._best)}
            name, value = kept.settings.monitor, kept.value or 0.0
            text = f"Epoch {kept.epoch} was the best ({name} {value:.4g}): job.best_state_dict() has its weights."
            self._group.log(text)
        if average is not None and average.count:
            with average.in_place():
                found["averaged_state"] = on_cpu(_copied(self._strategy.full_state()))
        return found


@dataclasses.dataclass(slots=True)
class _Best:
    """The best value of a metric so far."""

    settings: Any
    value: float | None = None
    epoch: int = 0
    """The epoch of the best value; 0 before there is one."""

    def improves(self, metrics: Mapping[str, float], epoch: int) -> bool:
        """Keep this epoch's value if it is the best so far; returns whether it is."""
        value = metrics.get(self.settings.monitor, math.nan)
        if math.isnan(value):
            return False
        if self.value is not None:
            gain = value - self.value if self.settings.mode == "max" else self.value - value
            if not gain > getattr(self.settings, "min_delta", 0.0):
                return False
        self.value, self.epoch = value, epoch
        return True

    def is_over(self, epoch: int) -> bool:
        return epoch - self.epoch >= int(self.settings.patience)

    def reason(self, epoch: int) -> str:
        epochs = f"{epoch - self.epoch} epoch{'s' if epoch - self.epoch > 1 else ''}"
        if self.value is None:
            return f"{self.settings.monitor} has been no number for {epochs}"
        return f"{self.settings.monitor} has not improved for {epochs}; its best was {self.value:.4g}, after epoch {self.epoch}"


class _Average:
    """An average of the weights that this rank holds, by torch's own functions.

    Args:
        settings: `EMA` or `SWA`.
        epochs: Epochs of the training.
        model: The model, as the strategy has left it.
        layout: This rank's.
        group: The ranks.
        is_divided: Whether ranks hold different weights.
    """

    def __init__(
        self,
        settings: EMA | SWA,
        epochs: int,
        model: torch.nn.Module,
        layout: Layout,
        group: Group,
        *,
        is_divided: bool,
    ) -> None:
        self.settings = settings
        self._model, self._group, self._is_divided = model, group, is_divided
        self._source = layout.replicas[0]
        """The first of the ranks that hold the same. The others need the average only where all evaluate."""
        self._keeps = self._source == group.rank or settings.evaluate
        self.count = 0
        """How many times weights were averaged in; equal in all ranks."""
        self._first = settings.first(epochs) if isinstance(settings, SWA) else 1
        made: Any = get_ema_multi_avg_fn if isinstance(settings, EMA) else get_swa_multi_avg_fn
        self._update: Callable[[list[Tensor], list[Tensor], int], None] = made(
            *((settings.decay,) if isinstance(settings, EMA) else ())
        )
        self._values: dict[str, Tensor] = {}

    def stepped(self) -> None:
        if isinstance(self.settings, EMA):
            self._take()

    def end_epoch(self, epoch: int) -> None:
        if isinstance(self.settings, SWA) and epoch >= self._first:
            self._take()

    @torch.no_grad()
    def _take(self) -> None:
        """Average the present weights in."""
        self.count += 1
        if not self._keeps:
            return
        now = self._held()
        if not self._values:
            self._values = {name: tensor.clone() for name, tensor in now.items()}
            return
        floats = [name for name, tensor in now.items() if tensor.is_floating_point() or tensor.is_complex()]
        self._update([self._values[name] for name in floats], [now[name] for name in floats], self.count - 1)

    def _held(self) -> dict[str, Tensor]:
        """Return the parameters that this rank holds, or its parts of them, by name."""
        held = {}
        for name, parameter in self._model.named_parameters():
            # Not `detach()`, which would share the count of changes that strategies look at.
            tensor: Any = parameter.data
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            # One number in the place of many: a parameter of another stage of a pipeline.
            if tensor.numel() <= 1 or any(tensor.stride()):
                held[name] = tensor
        return held

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the place of the weights while the context lasts."""
        if not self._keeps:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, tensor in self._held().items():
            kept = self._values[name]
            weights = tensor.clone()
            tensor.copy_(kept)
            kept.copy_(weights)

    def state(self) -> dict[str, Any]:
        values = on_cpu(self._values) if self._source == self._group.rank else None
        # Of replicas, rank 0's is enough.
        parts = self._group.gather(values) if self._is_divided else [values]
        return {"count": self.count, "parts": parts}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
        parts = state["parts"]
        values = parts[self._source] if self._is_divided else parts[0]
        if self._keeps and values:
            self._values = {name: value.to(self._group.device, copy=True) for name, value in values.items()}


def _copied(state: Any) -> dict[str, Any] | None:
    """Copy the model's part of a full state to the CPU; None in ranks without a full state."""
    if state is None:
        return None
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.model.items()
    }
