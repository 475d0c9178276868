"""What a call sets, kept in its checkpoints: a call that resumes from one finds out by it what it sets otherwise.

What the later call sets otherwise wins. Everything else continues as the earlier training left it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kale_dist import callbacks, strategies
from kale_dist.worker.training.checkpoint import Checkpoint
from kale_dist.worker.training.result import Optimizers, state_of
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.trained import Trained

_SCHEDULED = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"))
"""Options of an optimizer that schedulers set."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a call sets, before anything is restored or trained. Its values are plain, so that a checkpoint can hold them."""

    optimizer: tuple[str, ...]
    """Name of its class; of several, after their own names."""
    options: tuple[dict[str, Any], ...]
    """Options of the parameter groups."""
    scheduler: tuple[str, ...]
    """Name of the scheduler's class, if there is one."""
    schedule: dict[str, Any]
    """The scheduler's state."""
    frozen: tuple[str, ...]
    """Names of the parameters that are not trained."""
    strategy: str
    """Its settings as JSON."""
    world_size: int
    batch: str
    """How much data a step takes, for people."""
    state: tuple[str, ...]
    """Names of the classes of `state=`, and of a criterion that is trained."""
    callbacks: tuple[str, ...]
    """Names of the callbacks that keep something, each with the metric that it watches."""

    @classmethod
    def of(cls, training: Training, trained: Trained, world_size: int) -> Given:
        """Read the objects of a call.

        Args:
            training: What is trained, and how.
            trained: Its objects.
            world_size: Of the ranks.
        """
        optimizer, scheduler = trained.optimizer, trained.scheduler
        named = optimizer.named if isinstance(optimizer, Optimizers) else {"": optimizer}
        kept = [one for one in training.callbacks if isinstance(one, callbacks.Callback)]
        shards, size = training.strategy.layout(0, world_size).shards, training.train_data_loader.batch_size
        factors = [1 if training.split_batches and size is not None else shards, size or 1, training.accumulate]
        product, shown = math.prod(factors), " x ".join(str(one) for one in factors if one > 1)
        batch = f"{shown} = {product}" if " x " in shown else f"{product}"
        nouns = ("batch", "batches") if size is None else ("sample", "samples")
        batch += f" {nouns[product > 1]}"
        return cls(
            optimizer=tuple(f"{name} {type(one).__name__}".strip() for name, one in named.items()),
            options=tuple(
                {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in group.items()
                    if name != "params"
                }
                for group in optimizer.param_groups
            ),
            scheduler=() if scheduler is None else (type(scheduler).__name__,),
            schedule=state_of(scheduler) if callable(getattr(scheduler, "state_dict", None)) else {},
            frozen=tuple(name for name, one in trained.model.named_parameters() if not one.requires_grad),
            strategy=json.dumps(strategies.to_json(training.strategy), sort_keys=True),
            world_size=world_size,
            batch=batch,
            state=tuple(type(one).__name__ for one in trained.state),
            callbacks=tuple(f"{type(one).__name__} {getattr(one, 'monitor', '')}".strip() for one in kept),
        )


class Differences:
    """What a call sets otherwise than the one that has written a checkpoint, and what of the checkpoint is restored.

    Args:
        found: The checkpoint.
        now: What this call sets.
    """

    def __init__(self, found: Checkpoint, now: Given) -> None:
        resume = found.resume or {}
        before = Given(**resume["given"])
        self._before, self._now = before, now
        self.sentences: list[str] = []
        """What does not continue as the earlier training left it, for the user."""
        self.has_optimizer = self._is_alike("optimizer", "It begins without a state, and a scheduler from its start")
        self.has_scheduler = self._is_alike("scheduler", "It begins from its start") and self.has_optimizer
        self.has_state = self._is_alike("state", "These objects begin as this call gives them")
        self.has_callbacks = self._is_alike("callbacks", "They begin without what earlier epochs were like")
        """Whether the states of these objects are restored."""
        self.has_frozen = before.frozen == now.frozen
        """Whether the checkpoint says which parameters are frozen, and not the call."""
        self.has_same_ranks = (before.strategy, before.world_size) == (now.strategy, now.world_size)
        self.has_ranks = self.has_same_ranks and self.has_optimizer
        """Whether each rank gets back what it had of its own."""
        words = [json.loads(one.strategy)["strategy"] for one in (now, before)]
        self.has_average = self.has_same_ranks or words == ["ddp", "ddp"]
        """Whether the average of the weights is restored: one of all ranks, or the part of each rank."""
        if before.strategy != now.strategy:
            self._say(
                f"The strategy is {words[0]!r}{' with other settings' * (words[0] == words[1])}, and was {words[1]!r}"
            )
        if any(resume["strategy"]) and not self.has_ranks:
            self._say("What each rank had of its own (residuals, states of its own optimizer) is left out")
        if (found.callbacks.get("average") or {}).get("parts") and not self.has_average:
            self._say("The average of the weights begins again: the ranks have other parts of it")
        if before.batch.rpartition("= ")[2] != now.batch.rpartition("= ")[2]:
            self._say(
                f"A step takes {now.batch} instead of {before.batch.removesuffix(' samples')}. The learning rate stays"
            )
        self.schedule = self._schedule(found.scheduler or {}) if self.has_scheduler else {}
        """The scheduler's state to be restored."""
        groups = (found.optimizer or {}).get("param_groups", ()) if self.has_optimizer else ()
        self.options = [self._options(*each) for each in zip(groups, before.options, now.options, strict=False)]
        """Of each parameter group, the options that this call sets otherwise."""

    def apply(self, optimizer: Any) -> None:
        """Set the options that this call sets otherwise; needed after all that loads the optimizer's state."""
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            group.update(options)

    def _say(self, sentence: str) -> None:
        if f"{sentence}." not in self.sentences:
            self.sentences.append(f"{sentence}.")

    def _is_alike(self, field: str, otherwise: str) -> bool:
        before, now = (getattr(one, field) for one in (self._before, self._now))
        if before != now and now:
            self._say(
                f"{field}: {', '.join(now)} here, and {', '.join(before) or 'none'} in the checkpoint. {otherwise}"
            )
        return bool(before == now)

    def _schedule(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The scheduler's state with this call's settings, such as `T_max`: what the earlier training has not changed."""
        before, now, schedule = self._before.schedule, self._now.schedule, dict(saved)
        for name in before.keys() & now.keys() & saved.keys() - {"base_lrs"}:
            if not _is_equal(now[name], before[name]) and _is_equal(before[name], saved[name]):
                schedule[name] = now[name]
                if not name.startswith("_"):
                    self._say(f"The scheduler's {name} is {now[name]} instead of {saved[name]}, as this call sets it")
        return schedule

    def _options(self, saved: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """The options of one parameter group that replace those of the checkpoint."""
        scheduled = set(_SCHEDULED if self._now.scheduler else ())
        if scheduled and "base_momentum" in {**saved, **now}:
            scheduled |= {"momentum", "betas"}
        wins = {}
        for name, value in now.items():
            is_set = name not in before or not _is_equal(value, before[name])
            is_other = name not in saved or not _is_equal(value, saved[name])
            if name in scheduled and self.has_scheduler:
                if is_set and is_other and name == "lr":
                    self._say(
                        f"lr stays {saved[name]}, and {value} of this call is not used: the scheduler's state decides"
                    )
            elif is_other and (is_set or name in scheduled):
                wins[name] = value
                if name in saved and name not in scheduled:
                    self._say(f"{name} is {value} instead of {saved[name]}, as this call sets it")
        return wins


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        one, other = torch.as_tensor(one, device="cpu"), torch.as_tensor(other, device="cpu")
        return torch.equal(one, other)
    return bool(one == other)
