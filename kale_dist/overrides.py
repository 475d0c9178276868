"""Arguments that a command line sets in the calls of a notebook: they are the notebook's own, but for those named here.

They reach the kernel as an environment variable, so that a notebook needs no change to train for one epoch, or elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from kale_dist.errors import ConfigError
from kale_dist.places import Docker, Kubernetes
from kale_dist.wording import closest, show

T = TypeVar("T")

VARIABLE = "KALE_DIST_SET"
"""Environment variable: a JSON object, argument to value."""

TRAINING = (
    "epochs", "accumulate", "precision", "clip_norm", "split_batches", "shard", "eval_sharding", "checkpoint_every",
    "train_args", "eval_args",
)  # fmt: skip
"""Arguments of `distribute` alone that can be set."""

_CALLS = (
    "number_of_processes", "cuda", "name", "on", "environment", "threads", "seed", "timeout_s", "stall_warn_s",
    "stall_timeout_s", "detach", "max_restarts",
)  # fmt: skip
PLACES = tuple(dict.fromkeys(field.name for kind in (Docker, Kubernetes) for field in dataclasses.fields(kind)))
"""Arguments of `kd.Docker` and `kd.Kubernetes`: set, they hold for wherever a call runs that has them."""

SHARED = (*_CALLS, *PLACES)
"""What can be set of every call."""


def check(values: Mapping[str, Any]) -> None:
    """Check names and form; whether a value is right for its argument is found by the call.

    Raises:
        ConfigError: There is no such argument, or its value is no plain value.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("arguments", f"{show(values)} is not a dict", "Write it as {'epochs': 1}")
    known = (*SHARED, *TRAINING)
    for name, value in values.items():
        if name not in known:
            remedy = f"{closest(name, known)}These can be set: {', '.join(sorted(known))}"
            raise ConfigError("set", f"no call has the argument {show(name)}, or it cannot be set", remedy)
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            remedy = "Give text, numbers, True, False, None, or lists and dicts of them"
            raise ConfigError("set", f"{show(value)} of {name} is no plain value", remedy) from None


def encode(values: Mapping[str, Any]) -> str:
    """The variable's value."""
    return json.dumps(dict(values))


def applied(value: T) -> T:
    """A frozen value of a call with those of its fields that are set from outside replaced.

    Raises:
        ConfigError: The variable holds something else, or a value is wrong.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return value
    fields = {field.name for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    changes = {name: given for name, given in _decode(text).items() if name in fields}
    return dataclasses.replace(value, **changes) if changes else value  # type: ignore[type-var]


def _decode(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(VARIABLE, f"{show(text)} is not a JSON object", 'Write it as {"epochs": 1}, or unset it')
    check(values)
    return values
