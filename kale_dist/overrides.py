"""Arguments that a command line sets in the calls of a notebook: they are the notebook's own, but for those named here.

They reach the kernel as an environment variable, so that a notebook needs no change to train for one epoch, or elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.wording import closest, show

VARIABLE = "KALE_DIST_SET"
"""Environment variable: a JSON object, argument to value."""

TRAINING = (
    "epochs", "accumulate", "precision", "clip_norm", "split_batches", "shard", "eval_sharding", "checkpoint_every",
    "train_args", "eval_args",
)  # fmt: skip
"""Arguments of `distribute` alone that can be set."""

SHARED = (
    "number_of_processes", "cuda", "name", "on", "image", "resources", "processes_per_pod", "volumes", "store", "cluster",
    "environment", "threads", "seed", "timeout_s", "stall_warn_s", "stall_timeout_s", "detach", "max_restarts",
    "packages", "requirements",
)  # fmt: skip
"""Arguments of `distribute` and `launch` that can be set."""


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


def apply(given: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, with those that are set from outside in the place of its own.

    Args:
        given: All arguments of the call by name. What is set and is no argument of this call is passed over.

    Raises:
        ConfigError: The variable holds something else.
    """
    text = os.environ.get(VARIABLE, "")
    values = _decode(text) if text else {}
    return {**given, **{name: value for name, value in values.items() if name in _settable(given)}}


def _decode(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(VARIABLE, f"{show(text)} is not a JSON object", 'Write it as {"epochs": 1}, or unset it')
    check(values)
    return values


def _settable(given: Mapping[str, Any]) -> Iterable[str]:
    return [name for name in (*SHARED, *TRAINING) if name in given]
