"""The base of all strategies' settings, and the layout by which a strategy divides work over ranks. Pure; no torch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

from kale_dist.errors import ConfigError
from kale_dist.wording import closest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank's part of a training: a pure function of settings, rank and world size.

    Loaders, the pace and seeds depend on `shards` and `shard`, never on rank and world size. Rank 0 always reads the data
    of shard 0, and ranks without data are the last ones.
    """

    shards: int
    """Into how many parts each global batch is divided."""
    shard: int | None
    """This rank's part; None for a rank without data, where `Strategy.serve` replaces the training."""
    peers: tuple[int, ...]
    """The ranks with the same batch, including this one. The first of them reads it and sends it to the others."""
    replicas: tuple[int, ...]
    """The ranks with the same weights whenever ranks agree, including this one."""
    part: str
    """A description for people: `shard 0 of 2, stage 1 of 4`."""
    agree: Literal["step", "epoch"] = "step"
    """When weights are equal over shards: after each step, or only after `Strategy.end_epoch`."""

    @classmethod
    def of_replicas(cls, rank: int, world_size: int, *, agree: Literal["step", "epoch"] = "step") -> Self:
        """The layout in which each rank has its own shard, and all have the same weights."""
        return cls(
            shards=world_size,
            shard=rank,
            peers=(rank,),
            replicas=tuple(range(world_size)),
            part=f"shard {rank} of {world_size}",
            agree=agree,
        )

    @classmethod
    def of_parts(cls, rank: int, world_size: int, part: str) -> Self:
        """The layout in which all ranks have the same batch, and each has its own part of the weights."""
        return cls(shards=1, shard=0, peers=tuple(range(world_size)), replicas=(rank,), part=part)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a call trains and where, for `Settings.check`, which examines objects of torch without importing torch."""

    number_of_processes: int
    processes_per_pod: int
    """Ranks of one pod, container or machine."""
    cuda: bool
    model: Any
    """The model, or a dict of several."""
    optimizer: Any
    """The optimizer, or a dict of several."""
    precision: str | None

    @property
    def models(self) -> tuple[Any, ...]:
        """The model, or each of several."""
        return tuple(self.model.values()) if isinstance(self.model, dict) else (self.model,)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizer, or each of several."""
        return tuple(self.optimizer.values()) if isinstance(self.optimizer, dict) else (self.optimizer,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings(abc.ABC):
    """A strategy as an argument of a call. Its subclasses check their values in `__post_init__`."""

    word: ClassVar[str] = ""
    """The word for the strategy with its default settings: `strategy="ddp"`."""
    home: ClassVar[str] = ""
    """The strategy's implementation: a module of `kale_dist.worker.parallel` and a class in it, as `data_parallel.DataParallel`.

    Only ranks import it; it is made with the settings and the rank's layout.
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
            hint = closest(foreign or "", own)
            remedy = f"Its settings are {', '.join(own)}" if own else f"Write {cls.__name__}(), which has none"
            raise refusal(problem, f"{hint}{remedy}")
        return object.__new__(cls)

    def check(self, given: Conditions) -> None:  # noqa: B027 - most demand nothing
        """Check that a call meets these settings' conditions, before anything is read or sent.

        Raises:
            ConfigError: The call cannot be trained with these settings.
        """

    def dispensable(self, world_size: int) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002 - most have none
        """Sets of ranks of which all but one may die during the training while the others continue. Pure.

        The death of any other rank ends the attempt, and that of rank 0 always does.
        """
        return ()

    @abc.abstractmethod
    def layout(self, rank: int, world_size: int) -> Layout:
        """A rank's layout. Pure: each rank knows the layouts of all."""


ALL_WEIGHTS = ("LBFGS", "Prodigy", "DAdapt")
"""What the names of optimizers begin with that take a number of all weights at once; others are noticed after a few steps."""
WHOLE_WEIGHTS = ("Adafactor", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "Lars", "LARS")
"""The same of those that need a whole weight."""


def refusal(problem: str, remedy: str) -> ConfigError:
    """The error of a call whose strategy cannot be as it is, or cannot train what is given."""
    return ConfigError("strategy", problem, remedy)


def refuse_optimizers(given: Conditions, kinds: Iterable[str], problem: str) -> None:
    """Refuse optimizers of some classes and of their subclasses.

    Args:
        given: The call.
        kinds: What the classes' names begin with.
        problem: Why ranks cannot use them, as it follows the optimizer's name in the message.

    Raises:
        ConfigError: The call has such an optimizer.
    """
    for optimizer in given.optimizers:
        if any(base.__name__.startswith(tuple(kinds)) for base in type(optimizer).__mro__):
            problem = f"{type(optimizer).__name__} {problem}"
            raise refusal(problem, "Use an optimizer such as AdamW, or strategy='ddp'")


def refuse_all_weights(word: str, given: Conditions) -> None:
    """Refuse `ALL_WEIGHTS`, SAM and its kin, whose first step takes the norm of all gradients, and optimizers that clip by it.

    Raises:
        ConfigError: The call has such an optimizer.
    """
    refuse_optimizers(given, ALL_WEIGHTS, "looks at all weights at once, and each rank has a part of them")
    for optimizer in given.optimizers:
        kind, norm = type(optimizer).__name__, f"the norm of all gradients, and with {word!r} each rank has a part"
        if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
            raise refusal(f"{kind} takes {norm}", "Use strategy='ddp' or 'fsdp'")
        if any(group.get("max_grad_norm") for group in optimizer.param_groups):
            remedy = "Set max_grad_norm=0, and pass clip_norm= to the call"
            raise refusal(f"{kind} clips by {norm}", remedy)


def refuse_closures(word: str, given: Conditions) -> None:
    """Refuse LBFGS, whose step evaluates the loss itself: its line search would need all ranks.

    Raises:
        ConfigError: The call has such an optimizer.
    """
    refuse_optimizers(
        given, ("LBFGS",), f"evaluates the loss within a step, and {word!r} would need all ranks for that"
    )


def refuse_sparse(word: str, given: Conditions) -> None:
    """Refuse embeddings whose gradients are sparse.

    Raises:
        ConfigError: The model has such an embedding.
    """
    for name, module in (pair for model in given.models for pair in model.named_modules()):
        is_embedding = any(base.__name__ in ("Embedding", "EmbeddingBag") for base in type(module).__mro__)
        if is_embedding and getattr(module, "sparse", False):
            problem = f"{name or 'the model'} is an embedding with sparse=True, and {word!r} sends gradients as a whole"
            raise refusal(problem, "Make the embedding without sparse=True, or use strategy='ddp'")


def check_flags(settings: Any, *names: str) -> None:
    """Check that settings are True or False.

    Raises:
        ConfigError: A setting is something else.
    """
    for name in names:
        if not isinstance(value := getattr(settings, name), bool):
            raise refusal(f"{name}={value!r} is neither True nor False", f"Use {name}=True or leave it")


def refuse_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that a setting is one of some values.

    Raises:
        ConfigError: It is not.
    """
    if (value is None or isinstance(value, str)) and value in choices:
        return
    hint = closest(value, [one for one in choices if isinstance(one, str)])
    raise refusal(f"there is no {setting}={value!r}", f"{hint}Use one of: {', '.join(map(repr, choices))}")


def refuse_count(setting: str, value: Any, *, at_least: int = 1) -> None:
    """Check that a setting is a whole number that is large enough.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        problem = f"{setting}={value!r} is not a whole number of {at_least} or more"
        raise refusal(problem, f"Give a number such as {setting}={max(at_least, 2)}")
