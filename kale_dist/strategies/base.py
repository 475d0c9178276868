"""What the settings of all strategies have in common, and what a strategy says about its ranks. Pure; no torch."""

from __future__ import annotations

import abc
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

from kale_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What one rank does among all: a pure function of settings, rank and world size.

    Loaders, the pace and seeds go by `shards` and `shard`, never by rank and world size. Rank 0 always reads the data
    of shard 0, and ranks without data are the last ones.
    """

    shards: int
    """Into how many parts each global batch is divided."""
    shard: int | None
    """The part of this rank; None for a rank without data, in which `Strategy.serve` replaces the training."""
    peers: tuple[int, ...]
    """Ranks that have the same batch, this one among them. The first reads it and sends it to the others."""
    replicas: tuple[int, ...]
    """Ranks that hold the same weights whenever ranks agree, this one among them."""
    part: str
    """For people: `shard 0 of 2, stage 1 of 4`."""
    agree: Literal["step", "epoch"] = "step"
    """When weights are equal over shards: after each step, or only after `Strategy.end_epoch`."""
    exact: bool = True
    """Whether training equals that of one process with the global batch, but for rounding."""

    @classmethod
    def of_replicas(
        cls, rank: int, world_size: int, *, agree: Literal["step", "epoch"] = "step", exact: bool = True
    ) -> Self:
        """Each rank has a shard of its own, and all hold the same weights."""
        return cls(
            shards=world_size,
            shard=rank,
            peers=(rank,),
            replicas=tuple(range(world_size)),
            part=f"shard {rank} of {world_size}",
            agree=agree,
            exact=exact,
        )

    @classmethod
    def of_parts(cls, rank: int, world_size: int, part: str) -> Self:
        """All ranks have the same batch, and each has weights of its own, which `part` names."""
        return cls(shards=1, shard=0, peers=tuple(range(world_size)), replicas=(rank,), part=part)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a call wants to train and where, for `Settings.check`. Objects of torch are looked at by their attributes."""

    number_of_processes: int
    processes_per_pod: int
    """On the local backend, all ranks are on one machine."""
    is_local: bool
    cuda: bool
    model: Any
    """The model, or a dict of several."""
    optimizer: Any
    """The optimizer, or a dict of several."""
    precision: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings(abc.ABC):
    """A strategy as an argument of a call. Each checks its own values when it is made (`__post_init__`)."""

    word: ClassVar[str] = ""
    """What a call may say instead of the object: `strategy="ddp"`."""
    home: ClassVar[str] = ""
    """Module in `kale_dist.worker.parallel` and the class in it that does the work, as `ddp.DataParallel`.

    It is imported in the ranks only, and made with the settings and the rank's layout.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse settings that this strategy does not have.

        Raises:
            ConfigError: There is no such setting.
        """
        own = [field.name for field in dataclasses.fields(cls)]
        foreign = next((name for name in options if name not in own), None)
        if args or foreign is not None:
            problem = (
                f"{cls.__name__} has no setting {foreign!r}" if foreign else "its settings are given without names"
            )
            said = did_you_mean(foreign or "", own)
            remedy = f"Its settings are {', '.join(own)}" if own else f"Write {cls.__name__}(), which has none"
            raise ConfigError("strategy", problem, f"{said}{remedy}")
        return object.__new__(cls)

    def check(self, given: Conditions) -> None:  # noqa: B027 - most demand nothing
        """Check what these settings demand of a call, before anything is read or sent.

        Raises:
            ConfigError: The call cannot be trained so.
        """

    def dispensable(self, world_size: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002 - most have none
        """Sets of ranks of which all but one may die in the middle of the training, and the others carry on. Pure.

        The death of any other rank ends the attempt, and so does that of rank 0 in any case.
        """
        return ()

    @abc.abstractmethod
    def layout(self, rank: int, world_size: int) -> Layout:
        """What a rank does. Pure: each rank knows the layout of all."""


def refuse_optimizers(given: Conditions, kinds: Iterable[str], problem: str) -> None:
    """Refuse optimizers of some classes, and of classes derived from these.

    Args:
        given: The call.
        kinds: Names of classes.
        problem: What they do that ranks cannot; follows the optimizer's name.

    Raises:
        ConfigError: The call has one.
    """
    optimizers = given.optimizer.values() if isinstance(given.optimizer, dict) else (given.optimizer,)
    for optimizer in optimizers:
        if any(base.__name__ in kinds for base in type(optimizer).__mro__):
            problem = f"{type(optimizer).__name__} {problem}"
            raise ConfigError("strategy", problem, "Use an optimizer such as AdamW, or strategy='ddp'")


def refuse_sparse(word: str, given: Conditions) -> None:
    """Refuse embeddings whose gradients are sparse.

    Raises:
        ConfigError: The model has one.
    """
    models = given.model.values() if isinstance(given.model, dict) else (given.model,)
    for name, module in (pair for model in models for pair in model.named_modules()):
        is_embedding = any(base.__name__ in ("Embedding", "EmbeddingBag") for base in type(module).__mro__)
        if is_embedding and getattr(module, "sparse", False):
            raise ConfigError(
                "strategy",
                f"{name or 'the model'} is an embedding with sparse=True, and {word!r} sends gradients as a whole",
                "Make the embedding without sparse=True, or use strategy='ddp'",
            )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question about the known word that is nearest, with a space behind; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def refuse_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that a setting is one of some values.

    Raises:
        ConfigError: It is not.
    """
    if (value is None or isinstance(value, str)) and value in choices:
        return
    said = did_you_mean(str(value), [one for one in choices if isinstance(one, str)])
    raise ConfigError("strategy", f"there is no {setting}={value!r}", f"{said}Use one of: {_listed(choices)}")


def refuse_count(setting: str, value: Any, *, at_least: int = 1) -> None:
    """Check that a setting is a whole number that is large enough.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        problem = f"{setting}={value!r} is not a whole number of {at_least} or more"
        raise ConfigError("strategy", problem, f"Give a number such as {setting}={max(at_least, 2)}")


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, values))
