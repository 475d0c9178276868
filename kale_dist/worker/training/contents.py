"""The contents of a checkpoint: the states of a training, and all else that it needs to resume."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kale_dist import callbacks, strategies
from kale_dist.snapshot.changes import Changes
from kale_dist.worker.training.data.generators import GlobalStates, RandomStates
from kale_dist.worker.training.result import Optimizers, state_of
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.trained import Trained


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """One rank's part of a `Position`."""

    began: RandomStates
    """This rank's generators when the epoch began, from which the order of the data is drawn again."""
    buffers: Mapping[str, Tensor]
    """The buffers of model and criterion that differ between ranks until an epoch has ended, such as BatchNorm's."""
    samples: int
    """The samples that this rank has had of the pass."""
    before: GlobalStates | None
    """This rank's generators before it read the batch that is ahead; None where that does not matter."""
    sums: Mapping[str, Any] | None
    """The sums of the ready-made step; None with a step of the user's, which begins again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The place of a training within an epoch. All ranks are at the same batch."""

    batches: int
    """Batches of each rank."""
    items: int
    """Items of the sampler, whose number does not depend on how many ranks there are."""
    order: str
    """A digest of the order of the items; empty where it is not known."""
    scheduler_stepped: bool
    """Whether the step has stepped the scheduler in this epoch."""
    ranks: tuple[RankPosition, ...] = ()
    """Filled in by the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training is."""

    epochs: int = 0
    """Finished epochs."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last finished epoch."""
    stopped: bool = False
    """Whether a step or a callback ended the training in that epoch."""
    position: Position | None = None
    """The place in the next epoch, if that has begun."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The settings of a call, before anything is restored or trained. Its values are plain, so that a checkpoint can hold them."""

    optimizer: tuple[str, ...]
    """The name of the optimizer's class; of several, after their own names."""
    options: tuple[dict[str, Any], ...]
    """Options of the parameter groups."""
    scheduler: tuple[str, ...]
    """Name of the scheduler's class, if there is one."""
    schedule: dict[str, Any]
    """The scheduler's state."""
    frozen: tuple[str, ...]
    """Names of the parameters that are not trained."""
    strategy: str
    """The strategy's settings as JSON."""
    world_size: int
    batch: str
    """How much data a step takes, for people."""
    state: tuple[str, ...]
    """Names of the classes of `state=`."""
    callbacks: tuple[str, ...]
    """Names of the callbacks that keep something, each with the metric that it watches."""
    classes: dict[str, str]
    """Names of the classes of the model, the criterion, the optimizer and the scheduler."""
    snapshot: str
    """The digest of the call's snapshot; empty outside of a job."""

    @classmethod
    def of(cls, training: Training, trained: Trained, world_size: int, snapshot: str = "") -> Given:
        """Read the objects of a call.

        Args:
            training: What is trained, and how.
            trained: Its objects.
            world_size: Of the ranks.
            snapshot: The digest of the call's snapshot.
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
            classes={
                name: type(getattr(training, name)).__name__
                for name in ("model", "criterion", "optimizer", "scheduler")
            },
            snapshot=snapshot,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """All that a training needs to resume from a checkpoint, besides the states."""

    given: Given
    random: Sequence[RandomStates] = ()
    """The generators of each rank."""
    strategy: Sequence[dict[str, Any]] = ()
    """The `own_state` of the strategy in each rank."""
    seeds: Sequence[int] = ()
    """The number of each rank from which its workers' seeds are made."""
    steps: int = 0
    """Real steps of the optimizer so far."""
    position: Position | None = None
    """None between epochs."""
    criterion: dict[str, Any] | None = None
    """The criterion's state, if it is a module."""
    evaluating: Sequence[str] = ()
    """Names of the modules in the mode of evaluation."""
    frozen: Sequence[str] = ()
    """Names of the parameters that are not trained."""
    state: Sequence[Any] = ()
    """Contents of the objects of `state=`."""
    changes: Sequence[Changes] = ()
    """What else the ranks have changed."""
    scaler: dict[str, Any] | None = None
    """The state of the ready-made step's loss scaler."""
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last finished epoch."""
    stopped: bool = False
    """Whether a step or a callback ended the training in that epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint."""

    epoch: int
    """Finished epochs."""
    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    resume: Resume | None = None
    """None where the file holds only what a result needs."""
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the callbacks: the best weights, and what the callbacks need to resume."""
    parts: str = ""
    """The folder of parts, as ranks see it, that has the values of model and optimizer; empty if this file has them."""
    left_out: tuple[str, ...] = ()
    """Places of the values that could not be kept, such as `optimizer.state.0.hook`."""
