"""The training of one call of `distribute`: its objects and its options. It goes as one object from the call to the loop in each rank. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kale_dist import strategies
from kale_dist.snapshot.changes import roots_of_step

_CHANGED = ("model", "criterion", "optimizer", "scheduler", "train_args", "eval_args")
"""The arguments whose objects a training may change."""

SPLIT_BY_NODE = "_distributed"
"""Where a stream of the package `datasets` keeps of which rank it is the part."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Arguments of `distribute`, whose docstring explains each, by the same names and with the same defaults."""

    model: Any
    train_data_loader: Any
    criterion: Any
    optimizer: Any
    train_step: Callable[..., Any] | None = None
    eval_data_loader: Any = None
    eval_step: Callable[..., Any] | None = None
    epochs: int = 1
    train_args: Any = None
    eval_args: Any = None
    scheduler: Any = None
    accumulate: int = 1
    precision: str | None = None
    clip_norm: float | None = None
    stop_on_nan: bool = False
    split_batches: bool = False
    shard: bool = True
    eval_sharding: str = "samples"
    checkpoint_every: int | str | None = "auto"
    """Epochs, or text as `wording.interval` reads it."""
    seed: int | None = None
    """None also where the rank has been seeded."""
    strategy: strategies.Settings = dataclasses.field(default_factory=strategies.DDP)
    """Settings, also where the call gave a word or nothing."""
    state: Sequence[Any] = ()
    callbacks: Sequence[Any] = ()
    save_to: Any = None
    """The call's own value; once it is checked, a path or a URL that rank 0 writes to, a folder for a model in parts, or None."""

    @property
    def makes_model(self) -> bool:
        """Whether the ranks make the model: the call was given a function, or a class."""
        return self.is_made_by(self.model)

    @property
    def in_parts(self) -> bool:
        """Whether no rank has the whole model, not even at first."""
        return self.makes_model and self.strategy.word == "fsdp"

    @staticmethod
    def is_made_by(model: Any) -> bool:
        """Whether this makes a model, and is none."""
        return callable(model) and (isinstance(model, type) or not hasattr(model, "named_parameters"))

    def objects(self) -> dict[str, Any]:
        """The objects that a training may change: those of the call, and those that its steps use, by their names."""
        found = {name: value for name in _CHANGED if (value := getattr(self, name)) is not None}
        for word in ("train_step", "eval_step", "criterion"):
            for name, value in roots_of_step(getattr(self, word)).items():
                found[name if found.get(name, value) is value else f"{word}'s {name}"] = value
        return found

    @property
    def covered(self) -> set[int]:
        """Ids of the objects whose `state_dict` comes back by itself, and of their modules."""
        models, optimizers = (
            [*one.values()] if isinstance(one, dict) else [one] for one in (self.model, self.optimizer)
        )
        modules = [part for one in (*models, *self.state) if hasattr(one, "modules") for part in one.modules()]
        weights = [weight for part in modules for weight in getattr(part, "_parameters", {}).values()]
        return set(map(id, (*modules, *weights, *optimizers, self.scheduler, *self.state)))

    @property
    def datasets(self) -> dict[str, Any]:
        """What the loaders read, by name; changes of it stay in the ranks."""
        loaders = {"train_data_loader": self.train_data_loader, "eval_data_loader": self.eval_data_loader}
        return {f"{name}.dataset": one.dataset for name, one in loaders.items() if hasattr(one, "dataset")}

    def arguments(self) -> list[tuple[str, Any]]:
        """Names and values."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def can_be_state(value: Any) -> bool:
    """Whether `state=` takes an object: what has a state_dict, lists, dicts and sets."""
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_state or isinstance(value, list | dict | set)
