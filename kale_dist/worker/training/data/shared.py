"""`kd.share`: a rank's share of any DataLoader, for those that a training does not divide by itself."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from kale_dist.errors import ConfigError
from kale_dist.wire import context
from kale_dist.worker.training.data import loader as loaders
from kale_dist.worker.training.data.batches import Counts, Feed, Role
from kale_dist.worker.training.data.sharding import Pace
from kale_dist.worker.training.rank_group import Group

Loader = TypeVar("Loader", bound=DataLoader[Any])

_numbers = itertools.count(1)


def share(loader: Loader) -> Loader:
    """Return this rank's share of a DataLoader, for one that `distribute` does not divide, or in a function of `launch`.

        for (x, y), (u, _) in zip(data_loader, kd.share(unlabelled)):

    Call it in the step or the function, on all ranks at the same point; calling it again, in each epoch, divides nothing twice. Outside
    of ranks, and with one process, it returns the loader itself. All ranks get equally many batches, in an order that rank 0 draws
    for each pass; where the last samples are too few for all ranks, some are repeated. `batch_size` is that of each process (with
    `split_batches=True`, of all together), the batches of a batch sampler are dealt whole, and of an iterable dataset each
    rank takes every n-th item. Batches are not moved to the device. When a training resumes within an epoch, the share begins from its start.

    Args:
        loader: Stays as it is. One that `distribute` divides already, or whose sampler is made for each rank (`DistributedSampler`),
            is returned itself.

    Returns:
        A DataLoader of the same class, with the same dataset, workers and collate function.

    Raises:
        ConfigError: It is not a DataLoader, cannot be divided, or the ranks have no process group.
    """
    given: Any = loader
    if not isinstance(given, DataLoader):
        problem = f"it is a {type(given).__name__}, not a torch.utils.data.DataLoader"
        raise ConfigError("loader", problem, "Make one: kd.share(DataLoader(dataset, batch_size=32))")
    if loaders.RUNNING:
        # Ranks without data take no part.
        group, row, split = loaders.RUNNING[0].ranks
    else:
        group, split = Group(torch.device("cpu")), False
        row = group.divided([[rank] for rank in range(group.world_size)])
        if group.world_size < context.context().world_size:
            problem = "ranks share it through torch.distributed, whose process group is not there"
            raise ConfigError("loader", problem, "Call kd.share() before destroy_process_group()")
    if (group.is_alone and row.is_alone) or loaders.GET_ITERATOR in vars(loader):
        return loader
    for sampler in loaders.samplers_of_ranks(loader):
        if sampler.num_replicas == group.world_size:
            # One that was made in the notebook has the same rank everywhere.
            sampler.rank = group.rank
            return loader
    # A pace of its own: all ranks take equally many batches, but no gradient is weighed by them.
    pace = Pace(group.world_size, 1)
    role = Role(name="shared", group=group, row=row, epochs=0, loss=lambda: None, pace=pace, is_beside=True)
    # By the number, workers draw other random numbers for each share of the same loader.
    feed = Feed(role=role, seed=torch.initial_seed(), counts=Counts(epoch=next(_numbers)))
    mine = copy.copy(loader)
    loaders.prepare(mine, feed, contextlib.ExitStack(), shard=True, split=split)
    if not (group.rank or row.rank):
        context.log_once(feed.share.sentence)
    return mine
