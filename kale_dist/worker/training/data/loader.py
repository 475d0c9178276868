"""A DataLoader made to give this rank's share, in place: it keeps its class, its attributes and its identity."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from kale_dist.errors import ConfigError
from kale_dist.snapshot.reducers import LOADERS_ITERATOR
from kale_dist.worker.training.data import dealing, sharding
from kale_dist.worker.training.data.batches import Batches, Feed, Role, Share
from kale_dist.worker.training.data.generators import advance_generators, generator_states
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.settings import SPLIT_BY_NODE, Training
from kale_dist.worker.training.trained import Trained

GET_ITERATOR = "_get_iterator"
"""The method of a loader that is replaced in those that give this rank's share."""


class Loaders:
    """The loaders of a training, divided over the ranks with data.

    Args:
        training: How to divide them.
        trained: Has the loaders.
        group: The ranks with data, for sentences about the division.
        train: What the training loader's passes have in common.
        evaluation: What the passes over the loader for evaluation have in common.
    """

    def __init__(self, training: Training, trained: Trained, group: Group, train: Feed, evaluation: Feed) -> None:
        self.train = train
        self.evaluation = evaluation
        self.running = train
        """The feed of the user's step that runs, or ran last."""
        self.batches_alone = dealing.length(trained.train_loader)
        """Batches of an epoch on one process, as `len(loader)` was in the notebook; None where it is unknown."""
        self.batches: int | None = None
        """Batches of an epoch on this rank; None before `divide`, and where it is unknown."""
        self._training = training
        self._trained = trained
        self._group = group
        self._divided = contextlib.ExitStack()

    def divide(self) -> None:
        """Make the loaders give this rank's share, and log how they are divided. To be repeated when ranks were lost.

        Raises:
            ConfigError: A loader cannot be divided.
        """
        self.restore()
        RUNNING.append(self)
        training, train_loader, eval_loader = self._training, self._trained.train_loader, self._trained.eval_loader
        role, split = self.train.role, training.split_batches
        if role.pace is not None:
            role.pace.world_size = role.group.world_size
        prepare(train_loader, self.train, self._divided, shard=training.shard, split=split)
        self.batches = dealing.length(train_loader)
        self._group.log(self.train.share.sentence)
        if eval_loader is not None:
            shard = training.eval_sharding == "samples"
            prepare(eval_loader, self.evaluation, self._divided, shard=shard, split=split)
            note = "metrics are averaged by samples" if shard else "for metrics that are not means"
            self._group.log(f"{self.evaluation.share.sentence}; {note}")

    def restore(self) -> None:
        """Make the loaders what they were before `divide`."""
        RUNNING.clear()
        self._divided.close()

    @property
    def ranks(self) -> tuple[Group, Group, bool]:
        """The ranks with different data, those with the same, and whether a `batch_size` is that of all ranks together."""
        return self.train.role.group, self.train.role.row, self._training.split_batches

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the samplers and datasets that have it.

        Args:
            epoch: Counted from 0.
        """
        for loader in self._trained.loaders:
            called: set[int] = set()
            batches = loader.batch_sampler
            for part in (loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset):
                method = getattr(part, "set_epoch", None)
                # Views of one sampler share its method.
                owner = id(getattr(method, "__self__", part))
                if callable(method) and owner not in called:
                    called.add(owner)
                    method(epoch)


RUNNING: list[Loaders] = []
"""Those of the training that runs in this process, if one does."""


def prepare(loader: DataLoader[Any], feed: Feed, stack: contextlib.ExitStack, *, shard: bool, split: bool) -> None:
    """Alter a loader in place so that its iterators are `Batches` of this rank's share; the stack restores it.

    Args:
        loader: The loader.
        feed: The iterators report to it; it gets the share.
        stack: Undoes it.
        shard: Whether to divide the data at all.
        split: Whether `batch_size` is that of all ranks together.
    """
    before = dict(loader.__dict__)
    role, state = feed.role, loader.__dict__
    # Out of order, batches would be weighed with each other's numbers of samples.
    state["in_order"] = True
    if isinstance(loader.dataset, IterableDataset):
        feed.share = _share_of_stream(loader, role, shard=shard, split=split)
    else:
        sampler = _undistributed(loader, role)
        if shard and sampler is not None:
            feed.share = _share_of_map(loader, role, sampler, split=split)
        else:
            feed.share = _share_of_whole(loader, role, shards_itself=shard)
    if role.group.rank and loader.generator is not None:
        # Only rank 0 draws the order. From equal seeds, workers of all ranks would augment alike.
        derived = torch.Generator()
        derived.manual_seed((loader.generator.initial_seed() + role.group.rank) % 2**63)
        state["generator"] = derived
    # The seam: the class itself stays.
    make_iterator = getattr(loader, GET_ITERATOR)
    state[LOADERS_ITERATOR] = None

    def get_iterator(self: DataLoader[Any]) -> Batches:
        return Batches(self, feed, make_iterator)

    state[GET_ITERATOR] = types.MethodType(get_iterator, loader)

    def restore() -> None:
        state.clear()
        state.update(before)
        state[LOADERS_ITERATOR] = None

    stack.callback(restore)


def _undistributed(loader: DataLoader[Any], role: Role) -> Any:
    """The sampler or batch sampler to draw from; None where it gives each rank a part by itself.

    Torch's own DistributedSampler is made to give everything, in the order and by the seed it has: ranks then share
    it like any other, without its padding.
    """
    group = role.group
    for candidate in samplers_of_ranks(loader):
        replicas = candidate.num_replicas
        if type(candidate) is DistributedSampler:
            candidate.num_replicas, candidate.rank = 1, 0
            candidate.num_samples = candidate.total_size = dealing.length(candidate.dataset) or 0
        elif replicas == group.size_at_start and replicas > 1:
            # Where ranks were lost, the others keep the shares that they had.
            if replicas == group.world_size:
                candidate.rank = group.rank
            return None
        elif replicas != 1:
            raise ConfigError(
                role.argument,
                f"its {type(candidate).__name__} is made for {replicas} ranks, and there are {group.world_size}",
                f"Make it with num_replicas={group.world_size}, or use a plain sampler, which is shared out for you",
            )
    return loader.sampler if loader.batch_sampler is None or loader.batch_size is not None else loader.batch_sampler


def samplers_of_ranks(loader: DataLoader[Any]) -> Iterator[Any]:
    """The samplers of a loader that are made for one rank of several, as torch's DistributedSampler is."""
    batch_sampler = loader.batch_sampler
    for candidate in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if getattr(candidate, "num_replicas", None) is not None and hasattr(candidate, "rank"):
            yield candidate


def divides_itself(loader: DataLoader[Any], *groups: Group) -> bool:
    """Whether a loader gives this rank a part, by its sampler or its dataset, without having been prepared."""
    places = [(group.world_size, group.rank) for group in groups]
    if any((one.num_replicas, one.rank) in places for one in samplers_of_ranks(loader)):
        return True
    is_stream = isinstance(loader.dataset, IterableDataset)
    return bool(getattr(loader.dataset, SPLIT_BY_NODE, None)) or (is_stream and _asks_for_rank(loader.dataset))


def _share_of_map(loader: DataLoader[Any], role: Role, sampler: Any, *, split: bool) -> Share:
    """Alter a map-style loader so that a `Deal` divides what its sampler or batch sampler gives."""
    group, state, aligned = role.group, loader.__dict__, role.is_training
    world = group.world_size
    total = dealing.length(sampler)
    accumulate = 1 if role.pace is None else role.pace.accumulate
    dealt = functools.partial(dealing.Deal, source=sampler, group=group, aligned=aligned, accumulate=accumulate)
    if loader.batch_sampler is not None and loader.batch_size is None:
        items = "split" if split else "batches"
        deal = dealt(sampler, per_chunk=1 if split else world, items=items)
        sentence = _describe_batches(role.name, total, world, split=split)
        known = dealing.length(loader.dataset)
        estimate = max(1, ((total or 0) if known is None else known) // world)
        counted = lambda: estimate if deal.samples is None else max(1, deal.samples)  # noqa: E731
        share: Any = None if group.is_alone else counted
        fits = True
        name, shown = "batch_sampler", loader.sampler
    else:
        size = loader.batch_size or 1
        chunk = size if split and loader.batch_size else size * world
        unit = 1
        share, fits = None, dealing.length(loader.dataset) == total
        if total is not None:
            used = sharding.divide(
                role.argument, total, size, world, drop_last=loader.drop_last, aligned=aligned, split=chunk == size
            )
            unit = (used.chunk if aligned else size) if loader.drop_last else 1

            def share() -> int:
                left = dataclasses.replace(used, samples=(dealing.length(sampler) or 0) - deal.start)
                return max(1, left.share(group.rank)) if total else 0

            sentence = sharding.describe(role.name, used, dropped=total - used.samples)
            if loader.batch_size is None and world > 1:
                sentence += (
                    f"; batch_size=None: each rank gets every {sharding.ordinal(world)} item, so a step that carries"
                    " state from one item to the next (a hidden state) needs shard=False"
                )
        else:
            sentence = (
                f"{role.name}: samples without a known end, drawn by rank 0 in chunks of {chunk} for"
                f" {sharding.ranks(world)}"
            )
        source = loader.batch_sampler if loader.batch_size else sampler
        deal = dealt(source, per_chunk=chunk, single=loader.batch_size is None, drop_unit=unit)
        name, shown = "batch_sampler" if loader.batch_size else "sampler", sampler
    state["sampler"] = dealing.View(dealing.Shown(shown, share))
    state[name] = dealing.View(deal)
    made = dealing.SeededView if loader.num_workers else dealing.View
    state["dataset"] = made(dealing.Shown(loader.dataset, _dataset_share(loader.dataset, share, group, fits=fits)))
    return Share(sentence=sentence, queue=deal)


def _dataset_share(dataset: Any, share: Any, group: Group, *, fits: bool) -> Any:
    """The length that a rank's dataset shows: a sum over the rank's samples divided by it is a mean, as on one process.

    None for the dataset's own length; `fits` is whether the loader's share is the dataset's.
    """
    size = dealing.length(dataset)
    if size is None or (group.is_alone and not fits):
        return None
    return share if fits else max(1, sharding.portion(size, group.rank, group.world_size))


def _describe_batches(name: str, batches: int | None, world: int, *, split: bool) -> str:
    if batches is None:
        return f"{name}: batches without a known end, from the batch sampler, for {sharding.ranks(world)}"
    if split:
        return f"{name}: {batches:,} batches of the batch sampler, each divided over {sharding.ranks(world)}"
    parts = [sharding.portion(batches, rank, world) for rank in range(world)]
    text = f"{name}: {batches:,} batches of the batch sampler, {sharding.ranks(world)} x {sharding.extremes(parts)}"
    if batches % world:
        idle = world - batches % world
        text += f", in the last step {sharding.ranks(idle)} without a batch"
    return text


def _share_of_whole(loader: DataLoader[Any], role: Role, *, shards_itself: bool) -> Share:
    """Alter a map-style loader whose sampler each rank uses as it is: only count the samples of its batches."""
    single = loader.batch_sampler is None
    name = "sampler" if single else "batch_sampler"
    kind = type(loader.sampler).__name__
    counter = dealing.Counter(getattr(loader, name), single=single)
    loader.__dict__[name] = dealing.View(counter)
    if loader.num_workers:
        loader.__dict__["dataset"] = dealing.SeededView(dealing.Shown(loader.dataset))
    sentence = f"{role.name}: not sharded, every rank takes all samples its loader gives"
    if shards_itself:
        sentence = f"{role.name}: {kind} is already distributed and is taken as it is"
    return Share(sentence=sentence, queue=counter, is_agreed=role.is_training)


def _share_of_stream(loader: DataLoader[Any], role: Role, *, shard: bool, split: bool) -> Share:
    """Alter a loader of an iterable dataset so that this rank gets its share of the stream."""
    group, state = role.group, loader.__dict__
    if split and loader.batch_size:
        if loader.batch_size % group.world_size:
            # Ranks take the items of a stream in turn, so that unequal parts would be of other batches and end apart.
            raise ConfigError(
                role.argument,
                f"a stream's batches of {loader.batch_size} cannot be split equally over {group.world_size} ranks",
                f"Use a batch size that is a multiple of {group.world_size}, or leave split_batches out",
            )
        size = loader.batch_size // group.world_size
        state["batch_size"] = size
        state["batch_sampler"] = type(loader.batch_sampler)(loader.sampler, size, loader.drop_last)  # type: ignore[call-arg, misc]
    sharing = shard and not isinstance(loader.dataset, IterDataPipe)
    if sharing and not group.is_alone:
        draw = None if loader.num_workers else lambda: _shared_states(group)
        stream = loader.dataset
        share = dealing.StreamShare(stream, rank=group.rank, world_size=group.world_size, share_randomness=draw)
        state["dataset"] = (dealing.View if hasattr(loader.dataset, "__len__") else dealing.StreamView)(share)
        taken = f"each takes 1 of every {group.world_size} items"
        if _asks_for_rank(stream):
            taken += f" ({type(stream).__name__} asks for its rank: if it leaves out data by that, pass shard=False)"
    elif group.is_alone:
        taken = "all items"
    elif sharing is not shard:
        taken = "a data pipe, which shards itself where it has a sharding_filter"
    else:
        taken = "the dataset shards itself"
    batch = "ready-made batches" if loader.batch_size is None else f"batch {loader.batch_size} a rank"
    sentence = f"{role.name}: iterable dataset, {sharding.ranks(group.world_size)}, {taken}, {batch}"
    return Share(sentence=sentence, is_agreed=True, shares_seeds=sharing and not group.is_alone)


def _asks_for_rank(dataset: Any) -> bool:
    """Whether the code of a dataset's class names `get_rank` or `RANK`, by which it can find out this rank."""
    methods = [method for kind in type(dataset).__mro__ for method in vars(kind).values()]
    codes = [code for method in methods if (code := getattr(method, "__code__", None))]
    return any({*code.co_names, *code.co_consts} & {"get_rank", "RANK"} for code in codes)


def _shared_states(group: Group) -> Any:
    """Send all ranks rank 0's generator states for a pass over a stream; then advance rank 0's own generators."""
    states = group.send(generator_states() if group.rank == 0 else None)
    if group.rank == 0:
        # Or every epoch would be shuffled alike.
        advance_generators()
    return states
