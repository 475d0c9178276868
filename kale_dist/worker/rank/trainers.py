"""What a rank tells of other people's trainers: progress and metrics as events, like those of our own loop.

transformers (with TRL, Unsloth, sentence-transformers) and Lightning call a callback that is put beside their own; of Accelerate,
`Accelerator.log` is heard, and where no trainer has trained, the bars of tqdm. All of it is shown only: a version that lacks a name is
silent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.snapshot.training_arguments import settle_in_trainers
from kale_dist.wire import TRAINERS_VARIABLE, MetricRow, context
from kale_dist.wire.events import RankProgress
from kale_dist.worker.rank.joint_saving import SaveAtOneStep

_PACE = ("learning_rate", "lr", "num_tokens", "num_input_tokens_seen", "total_flos", "model_preparation_time")
_PACE_ENDS = ("runtime", "per_second", "step_time")
"""Rates, clocks and counters: for tables and trackers, not for curves."""

_PLACES = ("epoch", "step")
"""Where a value belongs, among the values."""

_EVAL = ("eval", "val", "valid", "validation", "test")
"""What names of an evaluation's metrics begin with."""

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The two packages of Lightning; the group of entry points by which each finds callbacks is named after it."""

_LOGGERS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "TensorBoardLogger": "tensorboard"}
"""Lightning's loggers, by the words of `track=`."""

_CONNECTOR = "_logger_connector"
"""Where a Trainer of Lightning's keeps what gives its loggers their values."""

_BAR_LETTERS = 40

_WITHIN_EPOCH = (
    "Lightning resumes within an epoch at its step, and reads the epoch's batches from the first one on: the weights will differ from"
    " those of an undisturbed run. Checkpoints of ends of epochs do not have this."
)


def actions() -> dict[str, Callable[[ModuleType], None]]:
    """What is done to modules once they are imported."""
    if os.environ.get(TRAINERS_VARIABLE) == "0":
        return {"transformers.trainer": settle_in_trainers}
    if any(importlib.util.find_spec(package.partition(".")[0]) for package in _LIGHTNING):
        sys.meta_path.append(_EntryPoints())
    found = {f"{package}.strategies.launchers.multiprocessing": _refuse_processes for package in _LIGHTNING}
    return found | {"transformers.trainer": _transformers, "accelerate.accelerator": _accelerate, "tqdm.std": _bars}


def leave_bars_out() -> None:
    """The rank runs `distribute`, whose loop tells of the progress itself."""
    _Training.tells_bars = False


def end_cell() -> None:
    """A cell of a live rank has ended, and with it whatever it trained."""
    if _Training.is_shown:
        context.emit(RankProgress())
    _Training.count, _Training.tells_bars, _Training.is_shown = 0, True, False


class _Training:
    """One training of a trainer in this rank."""

    count = 0
    """How many have begun in this function or cell."""
    tells_bars = True
    """Whether bars are told of: until one begins."""
    is_shown = False
    """Whether there was any progress in this function or cell."""

    def __init__(self) -> None:
        self._number = 0
        self._save: SaveAtOneStep | None = None
        self._first: tuple[int, int, float] | None = None
        self._last = 0.0
        self._place: dict[str, Any] = {}
        self._evaluated = 0

    def begin(self, world_size: int | None) -> None:
        """It begins, on so many ranks; None if it keeps no checkpoints."""
        _Training.count += 1
        _Training.tells_bars = False
        self._number, self._first = _Training.count, None
        self._save = None if world_size is None else SaveAtOneStep.of(world_size)

    def end(self) -> None:
        """It has ended, or cannot save any more."""
        if self._save is not None:
            self._save.end()
        self._save = None

    def is_to_save(self) -> bool:
        """Whether it is to save, or has not yet although it was; asked once after each step, in all of its ranks."""
        return self._save is not None and (self._save.is_due() or self._save.is_saving)

    def saved(self, path: str, step: int) -> None:
        """A checkpoint is written. If the ranks were asked for it, they may be ended."""
        if self._save is not None and self._save.is_saving:
            if not context.context().rank:
                context.log(f"Saved {path} at step {step:,}, before the ranks are ended")
            self._save.saved()

    def step(self, done: int, of: int | None, *, samples: int, **place: int | None) -> None:
        """One more step is done.

        Args:
            done: Steps of the whole training.
            of: How many it has.
            samples: What this rank has taken so far.
            place: epoch (from 1), epochs, step (within the epoch, from 1), steps. Without epochs: step and steps of the training.
        """
        now = time.monotonic()
        # Loading, compiling and the first step are no measure.
        begun, had, began = self._first = self._first or (done, samples, now)
        steps, seconds = done - begun, now - began
        is_known = steps > 0 and seconds > 0
        self._last, self._evaluated = now, 0
        self._place = {"epoch": 0, "epochs": 0, "training": self._number, "share": done / of if of else None, **place}
        self._emit(
            "train", samples=samples, samples_per_s=round((samples - had) / seconds, 1) if is_known and samples else None,
            left_s=round((of - done) * seconds / steps, 1) if is_known and of else None,
        )  # fmt: skip

    def evaluate(self) -> None:
        """One more batch of an evaluation is done. Its time is none of the steps'."""
        if self._first is not None:
            now = time.monotonic()
            begun, had, began = self._first
            self._first, self._last = (begun, had, began + now - self._last), now
            self._evaluated += 1
            self._emit("eval", step=self._evaluated, steps=None)
        context.mark_progress()

    def _emit(self, phase: str, **fields: Any) -> None:
        _Training.is_shown = True
        context.emit(RankProgress(phase=phase, **{**self._place, **fields}))

    def log(
        self, values: Mapping[Any, Any], step: int | None, reported_to: Iterable[str], *, is_eval: bool | None = None
    ) -> None:
        """Send what a trainer logs: evaluations apart, rates and summaries not as curves.

        Args:
            values: By name; what is no number is left out.
            step: Of the training, counted as the trainer counts.
            reported_to: Trackers that the trainer itself writes to, by the words of `track=`.
            is_eval: Whether they are an evaluation's; None: their names tell.
        """
        numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
        found: dict[str, dict[str, float]] = {"pace": {}, "train": {}, "eval": {}}
        is_summary = "train_runtime" in numbers
        for name, value in numbers.items():
            start, _, rest = name.replace("/", "_", 1).partition("_")
            is_of_eval = bool(rest) and start in _EVAL if is_eval is None else is_eval
            if name in _PLACES or (is_of_eval and name.endswith((*_PACE, *_PACE_ENDS))):
                continue
            if is_summary or name.endswith((*_PACE, *_PACE_ENDS)):
                found["pace"]["samples_per_s" if name == "train_samples_per_second" else name] = value
            else:
                kept = found["eval" if is_of_eval else "train"]
                plain = rest if rest and start in ("train", *_EVAL) else name
                kept[name if plain in kept else plain] = value
        for source, one in found.items():
            # Of several trainings, such as folds, each has curves of its own.
            own = f"{source} {self._number}" if self._number > 1 and source != "pace" else source
            if one:
                row = MetricRow(
                    values=tuple(one.items()), step=step, source=own, reported_to=tuple(sorted(reported_to))
                )
                context.emit(row, is_of_job=True)


def _number(value: Any) -> float | None:
    with contextlib.suppress(Exception):
        return None if isinstance(value, bool | str) else float(value)
    return None


_shown_only = context.only_shown("The progress of this trainer", errors=(Exception,))
"""For methods of a callback: they never fail the training."""


def callback(package: str) -> Any:
    """A callback for the trainers of a package. Pickles make it by this."""
    return (_of_transformers() if package == "transformers" else _of_lightning(package))()


def _refuse_processes(module: Any) -> None:
    """Lightning's strategies for notebooks start processes, which would wait for ever to join the ranks' group."""

    def refuse(*_: Any, **__: Any) -> None:
        problem = "Lightning's ddp_notebook and ddp_spawn start processes of their own in each rank"
        raise ConfigError("strategy", problem, "Write Trainer(strategy='ddp'), which uses the job's ranks")

    if context.context().world_size > 1:
        module._MultiProcessingLauncher.__init__ = refuse  # noqa: SLF001 - there is no public name


# -- transformers ----------------------------------------------------------------------------------------------------


def _transformers(module: ModuleType) -> None:
    settle_in_trainers(module)
    trainer: Any = sys.modules["transformers.trainer"]
    if isinstance(known := getattr(trainer, "DEFAULT_CALLBACKS", None), list):
        trainer.DEFAULT_CALLBACKS = [*known, _of_transformers()]


@functools.cache
def _of_transformers() -> Any:
    base: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback

    class KaleDistCallback(base):  # type: ignore[misc]
        """Tells the notebook how far a Trainer is."""

        def __init__(self) -> None:
            self._training = _Training()

        def __reduce__(self) -> Any:
            return callback, ("transformers",)

        @_shown_only
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            self._training.begin(None if args.save_strategy == "no" else args.world_size)

        @_shown_only
        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._training.end()

        @_shown_only
        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self._training.saved(f"{args.output_dir}/checkpoint-{state.global_step}", state.global_step)

        @_shown_only
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = self._training.is_to_save() or control.should_save
            done, of = state.global_step, state.max_steps
            place = {"step": done, "steps": of}
            if args.max_steps <= 0:
                steps = max(1, round(of / args.num_train_epochs))
                epoch = min(math.ceil(args.num_train_epochs), (done - 1) // steps + 1)
                before = (epoch - 1) * steps
                place = {
                    "epoch": epoch,
                    "epochs": math.ceil(args.num_train_epochs),
                    "step": done - before,
                    "steps": min(steps, of - before),
                }
            self._training.step(
                done, of, samples=done * args.train_batch_size * args.gradient_accumulation_steps, **place
            )

        @_shown_only
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            self._training.evaluate()

        @_shown_only
        def on_log(self, args: Any, state: Any, *_: Any, logs: Any = None, **__: Any) -> None:
            if state.is_world_process_zero and logs:
                self._training.log(logs, state.global_step, args.report_to or ())

    return KaleDistCallback


# -- Lightning -------------------------------------------------------------------------------------------------------


class _EntryPoints(importlib.metadata.DistributionFinder):
    """Lightning asks installed packages for callbacks; a rank's kale_dist may be no installed one, but an archive on its path."""

    def find_spec(self, *_: Any) -> None:
        """Nothing is imported from here."""

    def find_distributions(self, wanted: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The one with the entry points, where all there are are asked for: it is in no folder that somebody may list."""
        is_all = wanted is None or (wanted.name in (None, _Hooks.TITLE) and wanted.path is sys.path)
        return [_Hooks()] if is_all else []


class _Hooks(importlib.metadata.Distribution):
    TITLE = "kale-dist-in-a-rank"

    def read_text(self, filename: str) -> str | None:
        """The text of a file of its metadata."""
        points = "".join(
            f"[{one}.callbacks_factory]\nkale_dist = {__name__}:{one.replace('.', '_')}\n" for one in _LIGHTNING
        )
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {self.TITLE}\nVersion: 0\n",
            "entry_points.txt": points,
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """A path in no folder: it has no files."""
        return pathlib.Path(path)


def lightning_pytorch() -> list[Any]:
    """Callbacks of each `lightning.pytorch.Trainer`."""
    return [callback("lightning.pytorch")]


def pytorch_lightning() -> list[Any]:
    """Callbacks of each `pytorch_lightning.Trainer`."""
    return [callback("pytorch_lightning")]


@functools.cache
def _of_lightning(package: str) -> Any:
    base: Any = importlib.import_module(f"{package}.callbacks").Callback

    class KaleDistCallback(base):  # type: ignore[misc]
        """Tells the notebook how far a Trainer is."""

        def __init__(self) -> None:
            self._training = _Training()
            self._batches = self._samples = self._steps = 0

        def __reduce__(self) -> Any:
            return callback, (package,)

        @_shown_only
        def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
            connector = getattr(trainer, _CONNECTOR, None)
            if connector is None:
                return
            log = type(connector).log_metrics

            @functools.wraps(log)
            def heard(metrics: Any, step: int | None = None) -> None:
                with context.only_shown("What this trainer logs", errors=(Exception,)):
                    # With a step, an evaluation logs a single batch.
                    if trainer.is_global_zero and not trainer.sanity_checking and (trainer.training or step is None):
                        kinds = {_LOGGERS.get(type(one).__name__, "") for one in trainer.loggers}
                        own = {name.removesuffix("_step"): value for name, value in metrics.items()}
                        self._training.log(own, trainer.global_step, kinds, is_eval=not trainer.training)
                log(connector, metrics, step)

            connector.log_metrics = heard

        @_shown_only
        def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
            vars(getattr(trainer, _CONNECTOR)).pop("log_metrics", None)

        @_shown_only
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self._training.begin(trainer.world_size if trainer.checkpoint_callback is not None else None)
            self._batches = self._samples = 0
            self._steps = trainer.global_step

        @_shown_only
        def on_train_end(self, *_: Any) -> None:
            self._training.end()

        @_shown_only
        def on_exception(self, *_: Any) -> None:
            self._training.end()

        @_shown_only
        def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
            if not self._batches and batch_idx and trainer.is_global_zero:
                context.log_once(_WITHIN_EPOCH)
            self._save(trainer)
            each = trainer.num_training_batches
            steps = int(each) if math.isfinite(each) else None
            epochs, most = max(trainer.max_epochs or 0, 0), max(trainer.max_steps or 0, 0)
            self._batches = trainer.current_epoch * steps + batch_idx + 1 if steps else self._batches + 1
            self._samples += getattr(trainer.train_dataloader, "batch_size", None) or 0
            done, of = self._batches, steps * epochs if steps and epochs else None
            place = {"epoch": trainer.current_epoch + 1, "epochs": epochs, "step": batch_idx + 1, "steps": steps}
            if most and (of is None or most * trainer.accumulate_grad_batches < of):
                done, of = trainer.global_step, most
                place = {"step": done, "steps": most}
            self._training.step(done, of, samples=self._samples, **place)

        def _save(self, trainer: Any) -> None:
            """Save if that is due: between steps of the optimizer, as all ranks have taken part in the last one."""
            before, self._steps = self._steps, trainer.global_step
            if self._steps != before and self._training.is_to_save():
                path = f"{getattr(trainer.checkpoint_callback, 'dirpath', None) or trainer.default_root_dir}/last.ckpt"
                try:
                    trainer.save_checkpoint(path)
                except Exception as error:  # noqa: BLE001 - a full disk, or of the user's own hooks: the training is not to blame
                    context.log(
                        f"{path} could not be saved before the ranks are ended: {type(error).__name__}: {error}"
                    )
                    self._training.end()
                else:
                    self._training.saved(path, trainer.global_step)

        @_shown_only
        def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
            self._training.evaluate()

    return KaleDistCallback


# -- Accelerate, and bars ----------------------------------------------------------------------------------------------


def _accelerate(_: ModuleType) -> None:
    accelerator: Any = sys.modules["accelerate.accelerator"]
    log = getattr(getattr(accelerator, "Accelerator", None), "log", None)
    if log is None:
        return

    @functools.wraps(log)
    def heard(self: Any, values: Any, step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        with context.only_shown("What Accelerator.log is given", errors=(Exception,)):
            if isinstance(values, Mapping) and self.is_main_process:
                _Training().log(values, step, [one.name for one in self.trackers])
        return log(self, values, step, *args, **kwargs)

    accelerator.Accelerator.log = heard


def _bars(_: ModuleType) -> None:
    std: Any = sys.modules["tqdm.std"]
    display = getattr(getattr(std, "tqdm", None), "display", None)
    if display is None:
        return

    @functools.wraps(display)
    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context.only_shown("How far a bar of tqdm is", errors=(Exception,)):
            if _Training.tells_bars and not getattr(self, "pos", 0):
                _Training.is_shown = True
                what = " ".join(str(self.desc or "").split()).strip(": ")[:_BAR_LETTERS]
                total = None if self.total is None else int(self.total)
                context.emit(RankProgress(phase=f"bar {what}".strip(), step=int(self.n), steps=total))
        return display(self, *args, **kwargs)

    std.tqdm.display = heard
