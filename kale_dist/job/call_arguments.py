"""What is recorded of a training's arguments: for trackers, and for comparing jobs."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kale_dist.snapshot.reducers import MILESTONES, SCHEDULERS
from kale_dist.worker.training.settings import Training

_DEPTH = 3
"""Levels of dictionaries and objects in `train_args` and `eval_args` that are recorded."""

_MAX_TEXT = 200

_STATE = frozenset(("base_lrs", "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "mode_worse"))
"""Attributes of schedulers that are no settings."""


def of_training(
    training: Training,
    resume_from: str = "",
    options: Sequence[Mapping[str, Any]] = (),
    schedule: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The plain arguments of a training, and what its objects are set to.

    Args:
        training: What is trained, checked.
        resume_from: Where it resumes from; empty if it begins.
        options: Of the optimizer's parameter groups, as the checkpoint has them; empty where the call's own count.
        schedule: The scheduler's state, likewise.
    """
    found: dict[str, Any] = {"resume_from": resume_from or None}
    for name, value in training.arguments():
        if isinstance(value, bool | int | float | str):
            found[name] = value
        elif name in ("train_step", "eval_step", "train_args", "eval_args"):
            found |= _plain(name, value)
    for name in ("model", "criterion", "optimizer", "scheduler"):
        value = getattr(training, name)
        several = value if isinstance(value, dict) else {"": value}
        made = training.makes_model and name != "criterion"
        kinds = [_function(one) if made else type(one).__name__ for one in several.values() if one is not None]
        found[name] = ", ".join(kinds) or None
    found["batch_size"] = training.train_data_loader.batch_size
    found["num_workers"] = training.train_data_loader.num_workers
    optimizers = training.optimizer.values() if isinstance(training.optimizer, dict) else (training.optimizer,)
    found |= _of_groups(options or [group for one in optimizers for group in getattr(one, "param_groups", ())])
    found |= _of_scheduler("scheduler", training.scheduler, schedule or {})
    return {name: value for name, value in found.items() if value is not None}


def for_trackers(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What trackers get of it: without the texts of `train_args` and `eval_args`, which may hold secrets."""
    own = ("train_args", "eval_args")
    return {
        name: value
        for name, value in recorded.items()
        if name.partition(".")[0] not in own or not isinstance(value, str | list)
    }


def _of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of parameter groups; one that differs between them as text, with the value of each."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for group in groups for name in group if name != "params"):
        values = [next((value for _, value in _plain(name, group.get(name))), None) for group in groups]
        if any(value not in (None, False) for value in values):
            found[name] = values[0] if values.count(values[0]) == len(values) else ", ".join(map(str, values))
    if found.get("initial_lr") == found.get("lr"):
        found.pop("initial_lr", None)
    return found


def _of_scheduler(name: str, scheduler: Any, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a scheduler, and of those that it is made of."""
    found: dict[str, Any] = {}
    settings = {
        **getattr(scheduler, "__dict__", {}),
        **{key: schedule[key] for key in schedule if not key.startswith("_")},
    }
    for key, value in settings.items():
        if key == SCHEDULERS:
            for number, one in enumerate(value):
                place = f"{name}.{number}"
                found |= {place: type(one).__name__, **_of_scheduler(place, one, {})}
        elif key == MILESTONES or (not key.startswith("_") and key not in _STATE and key != "optimizer"):
            found |= _plain(f"{name}.{key.lstrip('_')}", value)
    return found


def _plain(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values: of dictionaries and simple objects for each entry, of anything else nothing."""
    if isinstance(value, collections.Counter):
        value = list(value.elements())
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace | argparse.Namespace):
        value = {key: one for key, one in _attributes(value) if not isinstance(value, type)}
    # A tensor may have no value, as on `meta`; an object of the user's may raise anything that it likes.
    with contextlib.suppress(Exception):
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
            value = value.item()
    if isinstance(value, str):
        yield name, value[:_MAX_TEXT]
    elif isinstance(value, bool | int | float):
        yield name, value
    elif isinstance(value, list | tuple) and all(isinstance(one, bool | int | float | str) for one in value):
        yield name, list(value)
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for key, one in value.items():
            yield from _plain(f"{name}.{key}", one, depth + 1)
    elif inspect.isroutine(value) or isinstance(value, functools.partial):
        yield name, _function(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else vars(value)
    for name in names:
        yield name, getattr(value, name, None)


def _function(value: Any) -> str:
    """A function by its name and a digest of its source, by which an edited cell differs from the one before."""
    while isinstance(value, functools.partial):
        value = value.func
    name = str(getattr(value, "__qualname__", type(value).__name__)).rpartition(".")[2]
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        return f"{name} ({hashlib.sha256(inspect.getsource(value).encode()).hexdigest()[:6]})"
    return name
