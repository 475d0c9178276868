"""How ranks share a training: `strategy="ddp"` in a call, or an object of one of these classes with its settings.

Settings are frozen and check themselves. What a strategy does is in `kale_dist.worker.parallel`, in a module of its
own, which only ranks import.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.strategies.base import Conditions, Layout, Settings
from kale_dist.strategies.ddp import DDP
from kale_dist.strategies.fsdp import FSDP
from kale_dist.strategies.gossip import Gossip
from kale_dist.strategies.local_sgd import LocalSGD
from kale_dist.strategies.mesh import Mesh
from kale_dist.strategies.pipeline import Pipeline
from kale_dist.strategies.recommendation import Recommendation, recommend
from kale_dist.strategies.server import ParameterServer
from kale_dist.strategies.tensor import Tensor
from kale_dist.wire import decode, encode
from kale_dist.wording import closest

__all__ = [
    "ALL",
    "DDP",
    "FSDP",
    "Conditions",
    "Gossip",
    "Layout",
    "LocalSGD",
    "Mesh",
    "ParameterServer",
    "Pipeline",
    "Recommendation",
    "Settings",
    "Tensor",
    "from_json",
    "recommend",
    "resolve",
    "to_json",
]

ALL: tuple[type[Settings], ...] = (DDP, FSDP, Pipeline, Tensor, Mesh, ParameterServer, LocalSGD, Gossip)
"""All strategies."""

_CLASSES = {settings.word: settings for settings in ALL}


def resolve(value: Any) -> Settings:
    """The settings that a call's `strategy=` means.

    Args:
        value: None for the default, a word, or settings.

    Raises:
        ConfigError: The value is something else.
    """
    if value is None:
        return DDP()
    if isinstance(value, Settings):
        return value
    if isinstance(value, type) and issubclass(value, Settings):
        raise ConfigError("strategy", f"{value.__name__} is a class", f"Make one: kd.strategies.{value.__name__}()")
    if isinstance(value, str) and value in _CLASSES:
        return _CLASSES[value]()
    words = ", ".join(map(repr, _CLASSES))
    near = closest(value, _CLASSES) if isinstance(value, str) else ""
    remedy = f"{near}Use one of {words}, or an object such as kd.strategies.DDP()"
    raise ConfigError("strategy", f"there is no strategy {value!r}", remedy)


def owner_of(setting: str) -> type[Settings] | None:
    """The first strategy with a setting of this name; None if there is none."""
    return next((one for one in ALL if any(setting == field.name for field in dataclasses.fields(one))), None)


def to_json(settings: Settings) -> dict[str, Any]:
    """The settings as a JSON object for a record: the strategy's word, and its settings."""
    return {"strategy": settings.word, **encode(settings)}


def from_json(data: dict[str, Any]) -> Settings:
    """The inverse of `to_json`; accepts lists, which JSON has in place of tuples."""
    options = dict(data)
    settings = _CLASSES[options.pop("strategy")]
    return decode(settings, options)
