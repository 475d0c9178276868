"""What the user's steps return, as numbers averaged over ranks."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.training.group import Group

STOP = "stop"
"""A step that returns this name with a true value ends the training after the epoch, on all ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """The outcome of one call of a step on all ranks."""

    values: dict[str, float]
    stop: bool
    extras: tuple[Any, ...]
    """What each rank gave along."""


def normalise(step: str, returned: Any) -> dict[str, float]:
    """The metrics that a step returned.

    Args:
        step: `train_step` or `eval_step`, for the error.
        returned: A number or a tensor of one element (named `loss`), a mapping of names to such, a tuple of such
            (`loss`, `metric_1`, ...), or None.

    Raises:
        ConfigError: Something else was returned.
    """
    if returned is None:
        return {}
    if isinstance(returned, Mapping):
        return {_name(step, key): _number(step, f"[{key!r}]", value) for key, value in returned.items()}
    if isinstance(returned, tuple):
        parts = enumerate(returned)
        return {f"metric_{i}" if i else "loss": _number(step, f"[{i}]", value) for i, value in parts}
    return {"loss": _number(step, "", returned)}


def _name(step: str, key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(step, f"returned a metric whose name is {key!r}", "Name metrics by text")
    return key


def _number(step: str, place: str, value: Any) -> float:
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if item is not None:
        shape = tuple(getattr(value, "shape", ()))
        try:
            number = item()
        except (RuntimeError, ValueError, TypeError):
            raise ConfigError(
                step, f"returned{place} has shape {shape}, not one element", "Reduce it first: .mean().item()"
            ) from None
        if isinstance(number, numbers.Real):
            return float(number)
    raise ConfigError(
        step,
        f"returned{place} is {_shown(value)}, a {type(value).__name__}",
        "Return a number, or a dict of numbers such as {'loss': 0.5, 'accuracy': 0.9}",
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 - a line of an error


def average(group: Group, values: Mapping[str, float], weight: float, extra: Any = None) -> Averaged:
    """Average metrics over ranks by weight. A rank that lacks a name plays no part in that metric.

    Args:
        group: The ranks; all must call.
        values: This rank's metrics.
        weight: Samples that the loader gave this rank. Where all ranks have 0, they count alike.
        extra: Anything small to be handed to all ranks along.
    """
    stop = bool(values.get(STOP, False))
    mine = {name: value for name, value in values.items() if name != STOP}
    everyone = group.gather((mine, weight, stop, extra))
    equal = not any(weight for _, weight, _, _ in everyone)
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for ranks_values, ranks_weight, _, _ in everyone:
        used = 1.0 if equal else ranks_weight
        # A repeated sample may give nan, which a weight of 0 does not remove.
        if not used:
            continue
        for name, value in ranks_values.items():
            sums[name] = sums.get(name, 0.0) + used * value
            weights[name] = weights.get(name, 0.0) + used
    return Averaged(
        values={name: total / weights[name] for name, total in sums.items()},
        stop=any(stop for _, _, stop, _ in everyone),
        extras=tuple(extra for *_, extra in everyone),
    )


def merge(train: Mapping[str, float], evaluation: Mapping[str, float]) -> dict[str, float]:
    """Metrics of an epoch under one roof: a name of the evaluation that clashes with training gets `eval_` in front."""
    return {**train, **{f"eval_{name}" if name in train else name: value for name, value in evaluation.items()}}
