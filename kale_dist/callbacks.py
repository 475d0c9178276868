"""Settings for `callbacks=[...]` of `distribute`, which also takes functions. The names are those of Lightning and Keras.

The work is done in the ranks, by `training.callbacks`. Pure; no torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kale_dist.errors import ConfigError

__all__ = ["EMA", "SWA", "EarlyStopping", "ModelCheckpoint"]

SOURCES = ("train", "eval", "averaged")
"""Prefixes of metrics' names, before a slash: the step that returned it, or the evaluation of averaged weights."""

_MODES = ("min", "max")


@dataclasses.dataclass(frozen=True, slots=True)
class _Monitor:
    monitor: str = "eval/loss"
    """The metric: `train/` or `eval/` and a name that the step returns; `averaged/` for `EMA` and `SWA` with `evaluate`."""
    mode: str = dataclasses.field(default="min", kw_only=True)
    """`"min"` if smaller is better, `"max"` if larger is."""

    def __post_init__(self) -> None:
        source, slash, name = self.monitor.partition("/") if isinstance(self.monitor, str) else ("", "", "")
        if source not in SOURCES or not slash or not name:
            problem = f"monitor={self.monitor!r} is not the name of a metric"
            given = self.monitor if isinstance(self.monitor, str) else ""
            word = given.removeprefix("val_").removeprefix("eval_").removeprefix("train_") or "loss"
            raise ConfigError("callbacks", problem, f"Write it as 'eval/{word}' or 'train/{word}'")
        if not isinstance(self.mode, str) or self.mode not in _MODES:
            raise ConfigError("callbacks", f"mode={self.mode!r} is not a mode", "Use 'min' or 'max'")


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyStopping(_Monitor):
    """Ends the training, on all ranks after the same epoch, when a metric has not improved for some epochs."""

    patience: int = dataclasses.field(default=3, kw_only=True)
    """Epochs without an improvement after which the training ends. A value that is not a number is no improvement."""
    min_delta: float = dataclasses.field(default=0.0, kw_only=True)
    """A change counts as an improvement if it is larger than this."""

    def __post_init__(self) -> None:
        _Monitor.__post_init__(self)
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            problem = f"patience={self.patience!r} is not a whole number of 1 or more"
            raise ConfigError("callbacks", problem, "Give a number such as patience=3")
        delta = self.min_delta
        if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta < math.inf:
            problem = f"min_delta={delta!r} is not a number of 0 or more"
            raise ConfigError("callbacks", problem, "Give a number such as min_delta=0.001")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCheckpoint(_Monitor):
    """Keeps the weights of the best epoch, for `job.best_state_dict()`. The job's model gets the last epoch's."""


@dataclasses.dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the weights, updated after each step of the optimizer, for `job.averaged_state_dict()`.

    As torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first step sets the average to the weights, each
    further one to `decay * average + (1 - decay) * weights`. Buffers (BatchNorm's statistics) are the model's own.
    """

    decay: float = 0.999
    """Share of the average that a step keeps: between 0 and 1."""
    evaluate: bool = dataclasses.field(default=False, kw_only=True)
    """Whether to evaluate the averaged weights after each epoch, too; their metrics begin with `averaged/`."""

    def __post_init__(self) -> None:
        _check_evaluate(self)
        decay = self.decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
            raise ConfigError(
                "callbacks", f"decay={decay!r} is not between 0 and 1", "Give a number such as EMA(decay=0.999)"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class SWA:
    """Stochastic weight averaging: the mean of the weights after each of the last epochs, for `job.averaged_state_dict()`.

    As torch's `AveragedModel`. The learning rate is your scheduler's (torch's `SWALR`). Buffers (BatchNorm's statistics) are
    the model's own: `torch.optim.swa_utils.update_bn` makes those of the averaged weights.
    """

    start: int | float = 0.75
    """The first epoch that counts (from 1), or the share of the epochs before it, as a float below 1."""
    evaluate: bool = dataclasses.field(default=False, kw_only=True)
    """Whether to evaluate the averaged weights after each epoch, too; their metrics begin with `averaged/`."""

    def __post_init__(self) -> None:
        _check_evaluate(self)
        start = self.start
        is_epoch = isinstance(start, int) and not isinstance(start, bool) and start >= 1
        if not is_epoch and not (isinstance(start, float) and 0 <= start < 1):
            problem = f"start={start!r} is neither an epoch nor a share of them"
            raise ConfigError(
                "callbacks", problem, "Give the first epoch that counts, such as 8, or a share, such as 0.75"
            )

    def first(self, epochs: int) -> int:
        """The first epoch that counts, from 1."""
        return self.start if isinstance(self.start, int) else int(self.start * epochs) + 1


Average = EMA | SWA


def _check_evaluate(one: Average) -> None:
    if not isinstance(one.evaluate, bool):
        raise ConfigError("callbacks", f"evaluate={one.evaluate!r} is neither True nor False", "Give a bool")


Callback = EarlyStopping | ModelCheckpoint | Average
"""The callbacks with settings; anything else in the list is a function."""


def monitors(callbacks: Any) -> dict[str, Any]:
    """The metrics that callbacks monitor, each with one of the callbacks."""
    return {one.monitor: one for one in callbacks if isinstance(one, _Monitor)}
