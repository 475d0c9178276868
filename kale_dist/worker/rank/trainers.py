"""What a rank tells of other people's trainers: progress and metrics as events, like those of our own loop.

transformers (with TRL, Unsloth, sentence-transformers) and Lightning call a callback that is put beside their own; of Accelerate,
`Accelerator.log` is heard, and of anything else the bars of tqdm. All of it is shown only: a version that lacks a name is silent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from kale_dist.snapshot.training_arguments import settle_in_trainers
from kale_dist.wire import TRAINERS_VARIABLE, EventKind, context

_PACE = ("learning_rate", "num_tokens", "num_input_tokens_seen", "total_flos", "lr")
_PACE_ENDS = ("runtime", "per_second", "step_time")
"""Rates, clocks and counters: for tables and trackers, not for curves."""

_PLACES = ("epoch", "step", "trainer/global_step")
"""Where a value belongs, among the values."""

_EVAL = ("eval", "val", "validation", "test")
"""What names of an evaluation's metrics begin with."""

_GROUPS = {
    "lightning.pytorch": "lightning.pytorch.callbacks_factory",
    "pytorch_lightning": "pytorch_lightning.callbacks_factory",
}
"""Entry points by which Lightning finds callbacks, by the packages whose they are."""

_LOGGERS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "TensorBoardLogger": "tensorboard"}
"""Lightning's loggers, by the words of `track=`."""

_BAR_LETTERS = 40


def actions() -> dict[str, Callable[[ModuleType], None]]:
    """What is done to modules once they are imported."""
    if os.environ.get(TRAINERS_VARIABLE) == "0":
        return {"transformers.trainer": settle_in_trainers}
    if any(importlib.util.find_spec(package.partition(".")[0]) for package in _GROUPS):
        sys.meta_path.append(_EntryPoints())
    return {"transformers.trainer": _transformers, "accelerate.accelerator": _accelerate, "tqdm.std": _bars}


def of_our_loop() -> None:
    """The rank runs `distribute`: its loop tells of the progress, and no bar in a step does."""
    _Training.running = _Training(())


class _Training:
    """One training of a trainer in this rank.

    Args:
        reported_to: Trackers that the trainer itself writes to, by the words of `track=`.
    """

    count = 0
    """How many have begun in this process."""
    running: _Training | None = None
    """The one that has begun last, unless it has ended: bars and `Accelerator.log` say nothing of it."""

    def __init__(self, reported_to: Iterable[str]) -> None:
        self._reported_to = sorted(reported_to)
        self._number = 0
        self._first: tuple[int, float] | None = None

    def begin(self) -> None:
        """It begins."""
        _Training.count += 1
        _Training.running, self._number = self, _Training.count

    def end(self) -> None:
        """It is over."""
        if _Training.running is self:
            _Training.running = None

    def step(
        self, done: int, of: int | None, *, epoch: int, epochs: int, step: int, steps: int | None, samples: int
    ) -> None:
        """One more step is done.

        Args:
            done: Steps of the whole training.
            of: How many it has.
            epoch: From 1.
            epochs: How many.
            step: Within the epoch, from 1.
            steps: Of an epoch.
            samples: What this rank takes in a step.
        """
        now = time.monotonic()
        # Loading, compiling and the first step are no measure.
        first, began = self._first = self._first or (done, now)
        pace = (done - first) / (now - began) if done > first and now > began else None
        context.emit(
            EventKind.PROGRESS, phase="train", epoch=epoch, epochs=epochs, step=step, steps=steps, training=self._number,
            samples=step * samples, samples_per_s=round(pace * samples, 1) if pace and samples else None,
            left_s=round((of - done) / pace, 1) if pace and of else None,
        )  # fmt: skip

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Send what a trainer logs: evaluations apart, rates and summaries not as curves.

        Args:
            values: By name; what is no number is left out.
            step: Of the training, counted as the trainer counts.
        """
        numbers = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        found: dict[str, dict[str, float]] = {"pace": {}, "train": {}, "eval": {}}
        is_summary = "train_runtime" in numbers
        for name, value in numbers.items():
            start, _, rest = name.replace("/", "_", 1).partition("_")
            is_eval = bool(rest) and start in _EVAL
            if name in _PLACES or (is_eval and name.endswith(_PACE_ENDS)):
                continue
            if is_summary and name == "train_samples_per_second":
                found["pace"]["samples_per_s"] = value
            elif name in _PACE or name.endswith(_PACE_ENDS) or is_summary:
                found["pace"][name] = value
            elif is_eval:
                found["eval"][rest] = value
            else:
                found["train"][rest if start == "train" and rest else name] = value
        for source, kept in found.items():
            if kept:
                # Of several trainings, such as folds, each has curves of its own.
                own = f"{source} {self._number}" if self._number > 1 and source != "pace" else source
                context.emit(
                    EventKind.METRICS, rank=None, values=kept, step=step, source=own, reported_to=self._reported_to
                )


def _number(value: Any) -> float | None:
    if isinstance(value, bool | str) or value is None:
        return None
    with contextlib.suppress(Exception):
        return float(value)
    return None


def _shown_only(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a callback that never fails the training."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        with context.only_shown("The progress of this trainer"):
            method(*args, **kwargs)

    return call


# -- transformers ----------------------------------------------------------------------------------------------------


def _transformers(module: ModuleType) -> None:
    settle_in_trainers(module)
    trainer: Any = sys.modules["transformers.trainer"]
    callbacks = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        return
    base: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback

    class KaleDistCallback(base):  # type: ignore[misc]
        """Tells the notebook how far a Trainer is."""

        def __init__(self) -> None:
            self._training = _Training(())

        @_shown_only
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            self._training = _Training(args.report_to or ())
            self._training.begin()

        @_shown_only
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            epochs = 1 if args.max_steps > 0 else max(1, math.ceil(state.num_train_epochs))
            steps = max(1, -(-state.max_steps // epochs))
            epoch = min(epochs, (state.global_step - 1) // steps + 1)
            self._training.step(
                state.global_step, state.max_steps, epoch=epoch, epochs=epochs, step=state.global_step - (epoch - 1) * steps,
                steps=steps, samples=args.train_batch_size * args.gradient_accumulation_steps,
            )  # fmt: skip

        @_shown_only
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            context.mark_progress()

        @_shown_only
        def on_log(self, _: Any, state: Any, *__: Any, logs: Any = None, **___: Any) -> None:
            if state.is_world_process_zero and logs:
                self._training.log(logs, state.global_step)

        @_shown_only
        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._training.end()

    trainer.DEFAULT_CALLBACKS = [*callbacks, KaleDistCallback]


# -- Lightning -------------------------------------------------------------------------------------------------------


class _EntryPoints(importlib.metadata.DistributionFinder):
    """Lightning asks installed packages for callbacks; a rank's kale_dist may be no installed one, but an archive on its path."""

    def find_spec(self, *_: Any) -> None:
        """Nothing is imported from here."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The one with the entry points."""
        return [_Hooks()] if context is None or context.name in (None, _Hooks.TITLE) else []


class _Hooks(importlib.metadata.Distribution):
    TITLE = "kale-dist-in-a-rank"

    def read_text(self, filename: str) -> str | None:
        """The text of a file of its metadata."""
        points = (
            f"[{group}]\nkale_dist = {__name__}:{package.partition('.')[0]}\n" for package, group in _GROUPS.items()
        )
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.TITLE}\nVersion: 0\n",
            "entry_points.txt": "".join(points),
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """It has no files."""
        raise FileNotFoundError(path)


def lightning() -> list[Any]:
    """Callbacks of each `lightning.pytorch.Trainer`."""
    return _of_lightning("lightning.pytorch")


def pytorch_lightning() -> list[Any]:
    """Callbacks of each `pytorch_lightning.Trainer`."""
    return _of_lightning("pytorch_lightning")


def _of_lightning(package: str) -> list[Any]:
    base: Any = importlib.import_module(f"{package}.callbacks").Callback

    class KaleDistCallback(base):  # type: ignore[misc]
        """Tells the notebook how far a Trainer is."""

        def __init__(self) -> None:
            self._training = _Training(())
            self._batches = 0
            self._logged = -1

        @_shown_only
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            kinds = {type(one).__name__ for one in trainer.loggers}
            self._training = _Training(word for name, word in _LOGGERS.items() if name in kinds)
            self._training.begin()
            self._batches, self._logged = 0, -1

        @_shown_only
        def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            steps = int(trainer.num_training_batches) if math.isfinite(trainer.num_training_batches) else None
            epochs, most = trainer.max_epochs or -1, trainer.max_steps
            self._batches = trainer.current_epoch * steps + batch_idx + 1 if steps else self._batches + 1
            of = steps * epochs if steps and epochs > 0 else None
            place: dict[str, Any] = {
                "epoch": trainer.current_epoch + 1,
                "epochs": max(epochs, 0),
                "step": batch_idx + 1,
                "steps": steps,
            }
            done = self._batches
            if most and most > 0 and (of is None or most * trainer.accumulate_grad_batches < of):
                done, of = trainer.global_step, most
                place = {"epoch": 1, "epochs": 1, "step": done, "steps": most}
            samples = getattr(trainer.train_dataloader, "batch_size", None) or 0
            self._training.step(done, of, samples=samples, **place)
            if trainer.global_step != self._logged and trainer.global_step % trainer.log_every_n_steps == 0:
                self._log(trainer, is_eval=False)

        @_shown_only
        def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
            context.mark_progress()

        @_shown_only
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self._log(trainer, is_eval=True)

        @_shown_only
        def on_train_end(self, *_: Any) -> None:
            self._training.end()

        def _log(self, trainer: Any, *, is_eval: bool) -> None:
            self._logged = trainer.global_step
            found = {
                name: value
                for name, value in trainer.callback_metrics.items()
                if name.startswith(_EVAL) == is_eval and not name.endswith(("_step", "_epoch"))
            }
            if trainer.is_global_zero:
                self._training.log(found, trainer.global_step)

    return [KaleDistCallback()]


# -- Accelerate, and bars ----------------------------------------------------------------------------------------------


def _accelerate(_: ModuleType) -> None:
    accelerator: Any = sys.modules["accelerate.accelerator"]
    log = getattr(getattr(accelerator, "Accelerator", None), "log", None)
    if log is None:
        return

    @functools.wraps(log)
    def heard(self: Any, values: Any, step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        with context.only_shown("What Accelerator.log is given"):
            if isinstance(values, Mapping) and self.is_main_process and _Training.running is None:
                _Training(one.name for one in self.trackers).log(values, step)
        return log(self, values, step, *args, **kwargs)

    accelerator.Accelerator.log = heard


def _bars(_: ModuleType) -> None:
    std: Any = sys.modules["tqdm.std"]
    display = getattr(getattr(std, "tqdm", None), "display", None)
    if display is None:
        return

    @functools.wraps(display)
    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context.only_shown("How far a bar of tqdm is"):
            if _Training.running is not None:
                # A trainer closes its bar when it is through.
                self.kale_dist_is_of_a_trainer = True
            elif not hasattr(self, "kale_dist_is_of_a_trainer") and not getattr(self, "pos", 0):
                context.emit(
                    EventKind.PROGRESS, phase=str(self.desc or "").strip(": ")[:_BAR_LETTERS] or "bar", epoch=0, epochs=0,
                    step=int(self.n), steps=None if self.total is None else int(self.total), samples=0,
                )  # fmt: skip
        return display(self, *args, **kwargs)

    std.tqdm.display = heard
