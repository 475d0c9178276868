"""The iterator that a rank's loader gives: batches on the device, counted, weighed, and in step with the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from kale_dist.errors import KaleDistError
from kale_dist.wire import context
from kale_dist.wire.events import Counters, RankProgress
from kale_dist.worker.training.clock import CLOCK, MOVING, time_spent
from kale_dist.worker.training.contents import Position, RankPosition
from kale_dist.worker.training.data.dealing import length
from kale_dist.worker.training.data.generators import (
    OwnGenerators,
    advance_generators,
    generator_states,
    set_generator_states,
    set_torch_states,
    torch_states,
)
from kale_dist.worker.training.data.moving import count, move
from kale_dist.worker.training.data.sharding import Pace, Portion
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.strategy import Strategy


class Meeting(Protocol):
    """Called at the batches of a training, in all ranks."""

    def begin(self, batches: Batches) -> None:
        """Called when the step requests the first batch of the epoch's first pass, whose data is at its position."""

    def meet_between(self, batches: Batches, *, left: bool = False) -> None:
        """Called when the step requests another batch, or has left the loop."""

    def pass_again(self) -> None:
        """Called when the step asks its loader for another iterator in the same epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The use that a training makes of a loader, and the ranks that take part."""

    name: str
    """`train` or `eval`."""
    group: Group
    """The ranks that have different data, in the order of their shards."""
    row: Group
    """The ranks that have the same data as this one. The first reads it and sends it to the others."""
    epochs: int
    loss: Callable[[], float | None]
    """Returns the latest loss, for progress events."""
    pace: Pace | None = None
    """None for a loader that is not trained on."""
    strategy: Strategy | None = None
    is_beside: bool = False
    """Whether the loader is one of the step's own, which has no progress, and whose batches stay where it makes them."""

    @property
    def argument(self) -> str:
        """The argument by which the loader came, for errors."""
        return "loader" if self.is_beside else f"{self.name}_data_loader"

    @property
    def reads(self) -> bool:
        """Whether this rank reads data, rather than gets it from the first of its peers."""
        return not self.row.rank

    @property
    def is_training(self) -> bool:
        """Whether gradients follow from the batches."""
        return self.pace is not None

    @property
    def portion(self) -> Portion | None:
        """The batch that the step trains on; None where there is none."""
        return None if self.pace is None else self.pace.portion

    def end_batch(self, *, left: bool = False) -> None:
        """Called when the step has finished its batch: join what other ranks have exchanged in that batch."""
        if self.strategy is not None and self.portion is not None:
            self.strategy.end_batch(left=left)

    def begin_batch(self) -> None:
        """Pass the batch that `pace` has taken on to the strategy, or that there is none."""
        if self.strategy is not None and self.pace is not None:
            self.strategy.begin_batch(weight=self.pace.factor, due=self.pace.is_due)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How a loader was altered to give this rank its share."""

    sentence: str
    """How the data is divided, for the log."""
    queue: Any = None
    """The `Deal` or `Counter` that notes the samples of each batch; None for a stream."""
    is_agreed: bool = False
    """Whether ranks ask each other before each batch, because their number is not known."""
    shares_seeds: bool = False
    """Whether the workers of all ranks must start from the same seeds."""


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Counts what one epoch has had of a loader, in this rank."""

    epoch: int
    samples: int = 0
    passes: int = 0
    first: Batches | None = None
    """The first pass of the epoch."""
    from_batch: int = 0
    """The first batch that the step's own numbers are of, where the epoch has resumed; 0 for all."""


@dataclasses.dataclass(kw_only=True)
class Feed:
    """The state that all passes over one loader have in common."""

    role: Role
    share: Share = Share(sentence="")
    """Replaced when the loader is divided."""
    seed: int = 0
    """Workers' seeds are made from this, epoch, pass and batch."""
    was_read: bool = False
    """Whether passes were made before the training resumed."""
    start: Position | None = None
    """The place where the first pass of a resumed epoch begins, once; None for its start."""
    mine: RankPosition | None = None
    """This rank's part of `start`, if it has one."""
    within: Meeting | None = None
    """Called between the batches of a loader that is trained on."""
    counts: Counts = dataclasses.field(default_factory=lambda: Counts(epoch=1))
    """Made by `begin` for each epoch."""
    rate: float | None = None
    """Samples a second of this rank, as last known; None where another rank reads its batches and counts them."""
    training: Feed | None = None
    """Of an evaluation, the feed of the training, whose rate its progress goes on to tell."""
    current: Batches | None = None
    """The pass that gave the latest batch, unless it is exhausted."""

    @property
    def step(self) -> int:
        """The number of the batch in its pass, from 1."""
        return self.current.index if self.current is not None else 0

    def begin(self, epoch: int) -> None:
        """Called before the user's step."""
        self.counts = Counts(epoch=epoch)
        self.begin_at(self.start)

    def begin_at(self, start: Position | None) -> None:
        """Have the next pass begin there; None for its beginning."""
        if self.share.queue is not None:
            self.share.queue.begin_at(*((0, "") if start is None else (start.items, start.order)))

    def change_to(self, batches: Batches | None) -> None:
        """Take the next batch from another pass, or from none. The pass before may continue later: loops may be nested.

        Raises:
            KaleDistError: Not all ranks changed at the same batch.
        """
        if self.current is batches:
            return
        if self.current is not None:
            self.current.pause()
        self.current = batches
        self.counts.passes += batches is not None


class Batches:
    """One pass after another over a loader, for this rank.

    Args:
        loader: The loader, already altered.
        feed: The loader's counts and group.
        make_iterator: The loader's own way of making an iterator.
    """

    def __init__(self, loader: DataLoader[Any], feed: Feed, make_iterator: Callable[[], Any]) -> None:
        self._loader = loader
        self._feed = feed
        self._place()
        # Worker processes are started, which is a wait for data.
        with CLOCK.phase("data"):
            self._inner = _make(loader, feed, make_iterator) if feed.role.reads else iter(())
        self._begin()

    def _place(self) -> None:
        """Leave the pass before, and have the sampler begin at the place of the feed, if this is the epoch's first pass."""
        feed, queue, self._start = self._feed, self._feed.share.queue, None
        # Worker processes are fed at once, and the order is drawn together.
        feed.change_to(None)
        self._started = time.monotonic()
        if feed.counts.first is None:
            feed.counts.first, self._start, feed.start = self, feed.start, None
        else:
            feed.begin_at(None)
            if feed.within is not None:
                feed.within.pass_again()
        if queue is not None and feed.role.reads:
            # Ranks may have been seeded alike by code of the user's.
            place = (feed.seed, feed.role.group.rank, feed.counts.epoch, feed.counts.passes)
            queue.place = place if self._loader.num_workers else ()

    def _begin(self) -> None:
        self._feed.change_to(self)
        queue = self._feed.share.queue
        self._queue = None if queue is None else queue.portions
        self._reported = time.monotonic()
        self._reported_index = self._reported_in_hand = 0
        self.samples = 0
        self._skipped = 0
        self._part = 0
        self.index = 0
        self._is_over = False
        self._has_begun = False
        self.before: Any = None
        """This rank's generators before it read the batch that is ahead; None where that does not matter."""
        self._own: OwnGenerators | None = None
        self._ahead: tuple[int, Any] | None = None
        self._counts: list[int] | None = None
        self._lent: Any = None
        """Another rank's batch, for a rank that has none left."""
        self._steps = self._length()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's
        """Begin the next pass of persistent workers; torch calls this."""
        self._place()
        with CLOCK.phase("data"):
            if self._feed.role.reads:
                self._inner._reset(loader, first_iter)  # noqa: SLF001
        self._begin()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        feed, role, counts = self._feed, self._feed.role, self._feed.counts
        if feed.current is self:
            role.end_batch()
            if feed.within is not None:
                feed.within.meet_between(self)
        else:
            feed.change_to(self)
        if not self._has_begun:
            self._has_begun = True
            self._go_to_start()
        with CLOCK.phase("data"):
            try:
                portion, batch = self._next() if role.row.is_alone else self._next_of_peers()
            except StopIteration:
                self._finish()
                raise
            with CLOCK.phase(MOVING):
                batch = batch if role.is_beside else move(batch, role.group.device)
        self.index += 1
        self.samples += portion.local
        counts.samples += portion.local
        if role.pace is not None:
            role.pace.take(portion)
            role.begin_batch()
        context.mark_progress()
        now = time.monotonic()
        if now - self._reported >= context.context().interval_s or self.index in (1, self._steps):
            self._report(now, in_hand=portion.local)
        return batch

    # -- within an epoch -------------------------------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Items of the sampler that this pass has given to all ranks: the number does not depend on how many ranks there are."""
        return self.index * self._per_chunk + self._part

    @property
    def steps(self) -> int | None:
        """Steps of this pass; None where that is not known, or was not so."""
        return self._steps if self._steps is not None and self.index <= self._steps else None

    @property
    def _per_chunk(self) -> int:
        queue = self._feed.share.queue
        return 1 if queue is None else int(queue.per_chunk)

    @property
    def order(self) -> str:
        """A digest of the order of this pass; empty where it is not known."""
        queue = self._feed.share.queue
        return "" if queue is None else str(queue.order)

    @property
    def obstacle(self) -> str:
        """Why a pass could not begin here again, as the end of a sentence about the step; empty if it can."""
        queue, loader = self._feed.share.queue, self._loader
        if queue is not None:
            return "has a sampler that draws random numbers as it goes" if queue.draws else ""
        if loader.num_workers and loader.persistent_workers and self._feed.counts.epoch > 1:
            return "reads an iterable dataset with persistent workers, whose random numbers no checkpoint holds"
        return ""

    def _length(self) -> int | None:
        """Steps of this pass, with those that it leaves out; None where that is not known."""
        left, queue = length(self._loader), self._feed.share.queue
        return None if left is None or queue is None else left + queue.start // queue.per_chunk

    def begin_again(self) -> None:
        """Count from the pass's beginning: the place where it was to begin is not known."""
        self.index = self._part = self.samples = self._skipped = 0
        self._feed.begin_at(None)
        self._steps = self._length()

    def _go_to_start(self) -> None:
        """Bring the data to its position, before the first batch."""
        feed, share, start = self._feed, self._feed.share, self._start
        if start is not None and feed.role.reads and share.queue is not None:
            if not self._loader.num_workers:
                share.queue.draw()
            if not share.queue.is_expected:
                start = None
        if start is not None:
            # With another number of ranks, the first chunk may begin within what was one.
            self.index, self._part = divmod(start.items, self._per_chunk)
            self.samples = self._skipped = 0 if feed.mine is None else feed.mine.samples
            if feed.role.reads and share.is_agreed:
                for _ in range(self.index if share.queue is None else 0):
                    if self._fetch() is None:
                        break
                if feed.mine is not None and feed.mine.before is not None:
                    set_generator_states(feed.mine.before.states())
                self._ahead = self._fetch()
                self._counts = self._agree(self._ahead)
                self._borrow()
        if feed.within is not None and feed.counts.first is self:
            feed.within.begin(self)

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """Read a stream by random numbers of its own: it can be read again without those that the model has used meanwhile."""
        if self._own is None:
            self._own = OwnGenerators(generator_states())
            # Or the model would use the same numbers.
            advance_generators()
        return self._own.used()

    def _finish(self) -> None:
        self._is_over = True
        self._report_rest()
        self._feed.current = None

    def _report_rest(self) -> None:
        """Send the last progress and end the current batch: this pass gives no batch for now."""
        if self.index and (self._reported_index != self.index or self._reported_in_hand):
            self._report(time.monotonic(), in_hand=0)
        role = self._feed.role
        if role.pace is not None:
            role.pace.leave()
            role.begin_batch()

    def pause(self) -> None:
        """Called when the step leaves this pass, or begins another, before the loader is exhausted.

        Raises:
            KaleDistError: Only some ranks left it after this batch.
        """
        feed, role, is_agreed = self._feed, self._feed.role, self._feed.share.is_agreed
        if role.portion is not None:
            is_early = not role.portion.last
            # Ranks that are in this batch are met there, and those that are done with it between two batches.
            joins_first = is_early and role.strategy is not None and role.strategy.is_awaited
            if joins_first:
                role.end_batch(left=not is_agreed)
            if is_early and feed.within is not None:
                feed.within.meet_between(self, left=True)
            if not joins_first:
                role.end_batch(left=is_early and not is_agreed)
            if is_early and is_agreed and role.reads:
                self._agree(None, left=True)
        self._report_rest()

    def _next(self) -> tuple[Portion, Any]:
        return self._next_agreed() if self._feed.share.is_agreed else self._next_planned()

    def _next_of_peers(self) -> tuple[Portion, Any]:
        """Take the batch that the first of the peers reads, and its generator's state: dropout must be equal on all peers."""
        role, sent = self._feed.role, None
        if role.reads:
            with contextlib.suppress(StopIteration):
                sent = *self._next(), torch_states(role.group.device)
        sent = role.row.send(sent)
        if sent is None:
            raise StopIteration
        portion, batch, random = sent
        set_torch_states(random, role.group.device)
        return portion, batch

    # -- where every rank knows what comes -------------------------------------------------------------------------

    def _next_planned(self) -> tuple[Portion, Any]:
        batch = next(self._inner)
        if self._queue is None:
            raise KaleDistError("the loader's batches come from another sampler than the one it had")
        note = self._queue.popleft()
        if isinstance(note, Portion):
            return note, batch
        return Portion(index=self.index, local=note, total=note, last=False), batch

    # -- where ranks ask one batch ahead ---------------------------------------------------------------------------

    def _next_agreed(self) -> tuple[Portion, Any]:
        if self._counts is None:
            self._ahead = self._fetch()
            self._counts = self._agree(self._ahead)
            self._borrow()
        if not self._feed.role.is_training:
            return self._next_unaligned()
        counts, current = self._counts, self._ahead
        if not sum(counts):
            raise StopIteration
        local, batch = current or (0, self._lent)
        self._ahead = None if current is None else self._fetch()
        self._counts = self._agree(self._ahead)
        self._borrow()
        last = not sum(self._counts)
        return Portion(index=self.index, local=local, total=sum(counts), last=last), batch

    def _next_unaligned(self) -> tuple[Portion, Any]:
        """Take the next batch of an evaluation, which ends with this rank's own data.

        A rank without any data gets one batch of weight 0.
        """
        if self._ahead is not None:
            (local, batch), self._ahead = self._ahead, None
        elif self.index == 0 and self._lent is not None:
            local, batch = 0, self._lent
        else:
            fetched = self._fetch() if self._lent is None else None
            if fetched is None:
                raise StopIteration
            local, batch = fetched
        return Portion(index=self.index, local=local, total=local, last=False), batch

    def _fetch(self) -> tuple[int, Any] | None:
        """Return the next batch of this rank's own loader with its number of samples; None at the end."""
        is_stream, is_here = self._queue is None, not self._loader.num_workers and self._feed.role.is_training
        if is_here and not is_stream:
            self.before = generator_states()
        try:
            with self._apart() if is_here and is_stream else contextlib.nullcontext():
                batch = next(self._inner)
        except StopIteration:
            return None
        if self._queue is not None:
            return self._queue.popleft(), batch
        if self._loader.batch_size is not None:
            local, batch = batch
            return int(local), batch
        return count(batch), batch

    def _agree(self, ahead: tuple[int, Any] | None, *, left: bool = False) -> list[int]:
        """Return how many samples each rank has in its next batch."""
        group = self._feed.role.group
        numbers = [0] * (2 * group.world_size)
        if ahead is not None:
            # A batch without samples is still a batch that must be taken.
            numbers[group.rank] = max(1, ahead[0])
        numbers[group.world_size + group.rank] = int(left)
        numbers = group.sum_int64(numbers)
        leaving = sum(numbers[group.world_size :])
        if leaving not in (0, group.answered):
            raise KaleDistError(
                f"The step left the loop over its loader on {leaving} of {group.answered} ranks only, after batch"
                f" {self.index}. All ranks must take the same steps: decide on a value that is equal on all"
            )
        return numbers[: group.world_size]

    def _borrow(self) -> None:
        """Send a batch to the ranks that have none left; they repeat it with weight 0.

        A batch of their own would not do: it may use parameters that none of the samples use, which then get a gradient.
        """
        counts, group = self._counts, self._feed.role.group
        if counts and any(counts) and not all(counts):
            giver = next(rank for rank, number in enumerate(counts) if number)
            lent = group.send(None if self._ahead is None else self._ahead[1], source=giver)
            if self._ahead is None:
                self._lent = lent

    # -- progress --------------------------------------------------------------------------------------------------

    def _report(self, now: float, *, in_hand: int) -> None:
        """Send a progress event; the step has not yet worked on the `in_hand` samples."""
        # Reading a loss from a GPU waits for it, so this is not done for every batch.
        self._reported, self._reported_index, self._reported_in_hand = now, self.index, in_hand
        feed, role = self._feed, self._feed.role
        if role.is_beside:
            return
        seconds, done = now - self._started, self.samples - in_hand - self._skipped
        # Peers have the same samples: only the rank that reads them counts them, so that every sum over ranks is right.
        if role.reads and done and seconds > 0:
            feed.rate = round(done / seconds, 1)
        context.emit(
            RankProgress(
                phase=role.name,
                epoch=feed.counts.epoch,
                epochs=role.epochs,
                step=self.index,
                steps=self.steps,
                samples=self.samples if role.reads else 0,
                samples_per_s=(feed.training or feed).rate,
                loss=role.loss(),
                counters=self._counters(),
            )
        )

    def _counters(self) -> Counters | None:
        role = self._feed.role
        if role.pace is None or role.strategy is None:
            return None
        return Counters(
            batches=role.pace.batches,
            trained=role.pace.trained if role.reads else None,
            num_workers=self._loader.num_workers,
            meets=role.strategy.meets_in_steps and role.row.is_alone,
            **time_spent(role.group.device),
        )


def _make(loader: DataLoader[Any], feed: Feed, make_iterator: Callable[[], Any]) -> Any:
    """Make the loader's own iterator, which counts items and shuffles like the other ranks where the feed asks for it."""
    state = loader.__dict__
    kept = {name: state[name] for name in ("collate_fn", "generator")}
    try:
        if feed.share.queue is None and loader.batch_size is not None:
            state["collate_fn"] = CountedCollate(loader.collate_fn)
        if loader.persistent_workers and feed.was_read:
            # Without the restart these workers would have the seeds that they got in an earlier epoch.
            state["generator"] = torch.Generator()
            feed.was_read = False
        elif feed.share.shares_seeds:
            state["generator"] = _shared_generator(loader, feed.role.group)
        return make_iterator()
    finally:
        state.update(kept)


def _shared_generator(loader: DataLoader[Any], group: Group) -> torch.Generator:
    """Return a generator from which the workers of every rank draw rank 0's seeds."""
    own = loader.generator if loader.generator is not None else torch.default_generator
    states = group.send(own.get_state() if group.rank == 0 else None)
    if group.rank == 0:
        return own
    shared = torch.Generator()
    shared.set_state(states)
    return shared


class CountedCollate:
    """A collate function that returns the number of items with the batch. It is sent to worker processes.

    Args:
        collate: The loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Any) -> tuple[int, Any]:
        """Collate items."""
        return len(items), self.collate(items)
