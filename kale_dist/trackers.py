"""Experiment trackers: their settings, for `track=`, and how each is sent a job's metrics.

They write in the notebook's process, from the events that every backend sends: images and pods need no tracker's package
and no credentials, and a tracker that fails cannot disturb the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from kale_dist.errors import ConfigError
from kale_dist.wire import MetricRow, StateName
from kale_dist.wording import closest, show

_MLFLOW_BATCH = 1000
"""The most metrics that MLflow's server takes in one request."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackedJob:
    """What a tracker gets about a job before its metrics."""

    name: str
    ref: str
    params: Mapping[str, Any]
    """The training's parameters: epochs, batch size, learning rate, seed and so on."""
    tags: Mapping[str, str]
    """Where the job comes from: snapshot, git commit, hash of uncommitted changes, versions, strategy, processes."""


class Writer(Protocol):
    """Sends one job's metrics to one tracker."""

    run_id: str
    """The tracker's own identifier of the run, by which another writer continues it; empty if it needs none."""

    def log(self, rows: Sequence[MetricRow], first: int) -> None:
        """Send rows of metrics.

        Args:
            rows: New rows, in order.
            first: How many rows were sent before.
        """

    def end(self, state: StateName, model: pathlib.Path | None) -> None:
        """End the run, after the job has ended.

        Args:
            state: The job's final state.
            model: A file with the trained state dict; None without one or without the setting `model`.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoard:
    """Event files for TensorBoard, in a folder for each job. Needs the package `tensorboard`."""

    word: ClassVar[str] = "tensorboard"

    folder: str | os.PathLike[str] = "runs"
    """The folder that `%tensorboard --logdir` gets; each job has a folder of its name in it."""

    def __post_init__(self) -> None:
        _check_text(self, folder="Give a path such as 'runs'")

    @property
    def model(self) -> bool:
        """Whether the trained model is stored; TensorBoard cannot store one."""
        return False

    def open(self, run: TrackedJob, run_id: str) -> Writer:
        """Begin a run, or continue the one of this identifier."""
        return _TensorBoardWriter(self, run, run_id)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLflow:
    """A run of MLflow, on a server or in a local folder. Needs the package `mlflow` or `mlflow-skinny`."""

    word: ClassVar[str] = "mlflow"

    uri: str | None = None
    """The tracking server's URL, or a local one such as `sqlite:///mlflow.db`; None for MLflow's own default (`MLFLOW_TRACKING_URI`)."""
    experiment: str = "kale-dist"
    model: bool = True
    """Whether the trained state dict is stored as the artifact `model.pt`."""

    def __post_init__(self) -> None:
        if self.uri is not None:
            _check_text(self, uri="Give a URL such as 'http://mlflow:5000', or leave it out")
        _check_text(self, experiment="Give its name")
        _check_model(self)

    def open(self, run: TrackedJob, run_id: str) -> Writer:
        """Begin a run, or continue the one of this identifier."""
        return _MLflowWriter(self, run, run_id)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WandB:
    """A run of Weights & Biases. Needs the package `wandb`."""

    word: ClassVar[str] = "wandb"

    project: str = "kale-dist"
    mode: str = "online"
    """`online` (log in with `wandb login` before the call), or `offline`: `wandb sync` sends the folder later."""
    folder: str | os.PathLike[str] = "."
    """Where W&B makes its folder `wandb`."""
    model: bool = True
    """Whether the trained state dict is stored as a file of the run."""

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in ("online", "offline"):
            raise ConfigError("mode", f"{show(self.mode)} is not a mode", "Use 'online' or 'offline'")
        _check_text(self, project="Give its name", folder="Give a path such as '.'")
        _check_model(self)

    def open(self, run: TrackedJob, run_id: str) -> Writer:
        """Begin a run, or continue the one of this identifier."""
        return _WandBWriter(self, run, run_id)


Tracker = TensorBoard | MLflow | WandB

_TRACKERS: dict[str, type[Tracker]] = {one.word: one for one in (TensorBoard, MLflow, WandB)}


def resolve(track: Any) -> tuple[Tracker, ...]:
    """The settings that a call's `track=` means.

    Args:
        track: None, a word, settings, or a list of words and settings.

    Raises:
        ConfigError: A word is unknown, or a tracker's package is not installed here.
    """
    if track is None:
        return ()
    given = list(track) if isinstance(track, list | tuple) else [track]
    found = tuple(_checked(one) for one in given)
    words = [one.word for one in found]
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise ConfigError("track", f"it names {twice} twice", "Name each tracker once")
    return found


def _check_text(settings: Any, **remedies: str) -> None:
    """Refuse settings that are no text, or empty; a folder may also be a path."""
    for name, remedy in remedies.items():
        value = getattr(settings, name)
        is_path = name == "folder" and isinstance(value, os.PathLike)
        if not is_path and (not isinstance(value, str) or not value):
            raise ConfigError(name, f"{show(value)} is not text" if value != "" else "it is empty", remedy)


def _check_model(settings: Any) -> None:
    if not isinstance(settings.model, bool):
        raise ConfigError("model", f"{show(settings.model)} is neither True nor False", "Give a bool")


def _checked(one: Any) -> Tracker:
    if isinstance(one, str) and one in _TRACKERS:
        one = _TRACKERS[one]()
    if not isinstance(one, Tracker):
        near = closest(one, tuple(_TRACKERS)) if isinstance(one, str) else ""
        words = ", ".join(map(repr, _TRACKERS))
        remedy = f"{near}Use one of {words}, or settings such as kale_dist.trackers.MLflow(uri=...)"
        raise ConfigError("track", f"there is no tracker {show(one)}", remedy)
    if importlib.util.find_spec(one.word) is None:
        problem = f"{one.word} needs the package {one.word}, which is not installed here"
        raise ConfigError("track", problem, f"Run: pip install {one.word}")
    return one


def series(rows: Sequence[MetricRow], first: int) -> Iterator[tuple[MetricRow, str, float, int]]:
    """Yield (row, name of the series, value, step) for each value; the step may be the epoch or the row's number."""
    for number, row in enumerate(rows, start=first):
        step = row.step if row.step is not None else row.epoch if row.epoch is not None else number
        # Metrics of steps are averages over ranks.
        rank = f"/rank {row.rank}" if row.source in ("report", "usage") and row.rank else ""
        for name, value in row.values:
            yield row, f"{row.source}/{name}{rank}", value, step


class _TensorBoardWriter:
    run_id = ""

    def __init__(self, settings: TensorBoard, run: TrackedJob, _run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(pathlib.Path(settings.folder) / run.name))
        rows = "".join(f"| {name} | {value} |\n" for name, value in (*run.params.items(), *run.tags.items()))
        self._writer.add_text("job", f"{run.ref}\n\n| | |\n|---|---|\n{rows}")

    def log(self, rows: Sequence[MetricRow], first: int) -> None:
        for row, name, value, step in series(rows, first):
            self._writer.add_scalar(name, value, step, row.time)
        self._writer.flush()

    def end(self, _state: StateName, _model: pathlib.Path | None) -> None:
        self._writer.close()


class _MLflowWriter:
    def __init__(self, settings: MLflow, run: TrackedJob, run_id: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = MlflowClient(tracking_uri=settings.uri)
        if run_id:
            self.run_id = run_id
            self._client.set_terminated(run_id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(settings.experiment)
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(_key(name), str(value)) for name, value in run.params.items()]
        tags = [RunTag(_key(name), value) for name, value in {"job": run.ref, **run.tags}.items()]
        self._client.log_batch(self.run_id, params=params, tags=tags)

    def log(self, rows: Sequence[MetricRow], first: int) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), value, int(row.time * 1000), step) for row, name, value, step in series(rows, first)
        ]
        for begin in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[begin : begin + _MLFLOW_BATCH])

    def end(self, state: StateName, model: pathlib.Path | None) -> None:
        if model is not None:
            self._client.log_artifact(self.run_id, str(model))
        words = {StateName.SUCCEEDED: "FINISHED", StateName.CANCELLED: "KILLED"}
        self._client.set_terminated(self.run_id, words.get(state, "FAILED"))


def _key(name: str) -> str:
    """A name with only characters that MLflow allows."""
    return re.sub(r"[^\w\-./: ]", "_", name)


class _WandBWriter:
    def __init__(self, settings: WandB, run: TrackedJob, run_id: str) -> None:
        import wandb

        if settings.mode == "online" and not wandb.api.api_key:
            # W&B would wait for a key to be typed.
            raise ConfigError("track", "Weights & Biases has no login here", "Run `wandb login`, or use mode='offline'")
        self._run = wandb.init(
            project=settings.project, name=run.name, config={**run.params, **run.tags, "job": run.ref},
            mode="offline" if settings.mode == "offline" else "online", dir=settings.folder, id=run_id or None, resume="allow" if run_id else None,
            reinit="create_new", settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.run_id = str(self._run.id)

    def log(self, rows: Sequence[MetricRow], first: int) -> None:
        # What all ranks used at one moment is one row there.
        each = [rows] if rows[0].source == "usage" else [(row,) for row in rows]
        for number, some in enumerate(each, start=first):
            values = {name: value for _, name, value, _ in series(some, number)}
            place = {"epoch": some[0].epoch, "step": some[0].step}
            self._run.log({**values, **{name: count for name, count in place.items() if count is not None}})

    def end(self, state: StateName, model: pathlib.Path | None) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._run.finish, exit_code=int(state is not StateName.SUCCEEDED))
            if model is not None:
                # W&B only links to files outside of its folder, and this one is about to be removed.
                inside = pathlib.Path(self._run.dir) / model.name
                shutil.copyfile(model, inside)
                self._run.save(str(inside), base_path=str(inside.parent), policy="now")
