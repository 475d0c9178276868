"""Stand-ins for a loader's dataset and samplers: they have this rank's share, and otherwise behave like the original."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import SequentialSampler, get_worker_info

from kale_dist.worker.training.data import sharding
from kale_dist.worker.training.data.generators import OwnGenerators, generator_states
from kale_dist.worker.training.data.sharding import Portion
from kale_dist.worker.training.rank_group import Group


@dataclasses.dataclass(eq=False)
class Shown:
    """The object behind a `View`, and what the view has in its place: a length and an iterator."""

    inner: Any
    """A dataset, a sampler or a batch sampler."""
    length: int | Callable[[], int] | None = None
    """The view's length, or a function that returns it; None for the inner object's own."""

    def __len__(self) -> int:
        if self.length is None:
            return len(self.inner)
        return int(self.length() if callable(self.length) else self.length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process of the DataLoader gets the length as a number: the function stays in the rank.
        return {**vars(self), "length": length(self)}


class StreamView:
    """Stands in for an object without a length: passes attributes, indexing and `isinstance` on to it, and takes the rest from `Shown`.

    Args:
        shown: The object and the view's length and iterator. The view's only attribute of its own.
    """

    _kale: Shown

    def __init__(self, shown: Shown) -> None:
        object.__setattr__(self, "_kale", shown)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before there is an object behind.
        if name == "_kale":
            raise AttributeError(name)
        return getattr(self._kale.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kale.inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._kale.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the object behind, so that `isinstance` holds."""
        return type(self._kale.inner)

    def __dir__(self) -> list[str]:
        return dir(self._kale.inner)

    def __repr__(self) -> str:
        return repr(self._kale.inner)

    def __bool__(self) -> bool:
        return bool(self._kale.inner)

    def __getitem__(self, index: Any) -> Any:
        return self._kale.inner[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kale)

    def __contains__(self, item: object) -> bool:
        return item in self._kale.inner

    def __add__(self, other: Any) -> Any:
        return self._kale.inner + other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self._kale,)


class View(StreamView):
    """Stands in for an object with a length."""

    def __len__(self) -> int:
        return len(self._kale)


class SeededBatch(list[Any]):
    """Indices of a batch with the seed from which a worker makes it: its random numbers depend on nothing before it."""

    seed = 0

    def begin(self) -> list[Any]:
        """Seed this worker's generators; returns the indices."""
        random.seed(self.seed)
        torch.default_generator.manual_seed(self.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self.seed % 2**32)
        return list(self)


def numbered(indices: Any, place: tuple[int, ...], index: int) -> Any:
    """Number the indices of a batch for a worker process; `place` is empty where there are none."""
    if not place:
        return indices
    made = SeededBatch(indices if isinstance(indices, list) else [indices])
    made.seed = int.from_bytes(hashlib.blake2b(repr((*place, index)).encode(), digest_size=7).digest())
    return made


class SeededView(View):
    """Stands in for a map-style dataset whose workers make each batch from a seed of its own."""

    def __getitem__(self, index: Any) -> Any:
        return self._kale.inner[index.begin()[0] if isinstance(index, SeededBatch) else index]

    def __getitems__(self, indices: Any) -> Any:
        """Return the items of a batch, as torch's workers ask for them."""
        given = indices.begin() if isinstance(indices, SeededBatch) else indices
        together = getattr(self._kale.inner, "__getitems__", None)
        return together(given) if together else [self._kale.inner[index] for index in given]


@dataclasses.dataclass(eq=False, kw_only=True)
class Passes(Shown):
    """Stands behind a sampler or batch sampler: where the next pass begins, and what is known of the latest one."""

    start: int = 0
    """Items of the sampler that the next pass leaves out, if its order is the `expected` one."""
    expected: str = ""
    """The digest that the order must have; empty for any."""
    place: tuple[int, ...] = ()
    """Seed, rank, epoch and pass from which workers' seeds are made; empty without workers."""
    order: str = ""
    """A digest of the order of the latest pass; empty where it is not known."""
    draws: bool = False
    """Whether the sampler draws random numbers as it goes, and not all at its beginning."""

    per_chunk = 1
    """Items of the sampler in the chunk of one step."""

    @property
    def is_expected(self) -> bool:
        """Whether the latest pass has the expected order, and so leaves out items."""
        return self.expected in ("", self.order)

    def begin_at(self, start: int, order: str) -> None:
        """Have the next pass leave out the first items, if their order has this digest. Its length is that of the others.

        Args:
            start: How many.
            order: The digest; empty for any.
        """
        self.start, self.expected = start, order

    def draw(self) -> None:
        """Draw the order of the next pass now."""

    def watched(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items, and note whether the second or third one takes random numbers."""
        for number in itertools.count():
            before = _marks() if number in (1, 2) else None
            try:
                item = next(items)
            except StopIteration:
                return
            self.draws = self.draws or (before is not None and before != _marks())
            yield item


def _marks() -> tuple[Any, ...]:
    """A mark of the global generators that changes when they are used."""
    python, numpy_state, torch_state = generator_states()
    return (
        hash(python),
        None if numpy_state is None else (numpy_state[2], numpy_state[1][0]),
        bytes(torch_state.numpy()),
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class StreamShare(Shown):
    """An iterable dataset of which this rank takes every n-th item.

    Without worker processes the stream draws from generators that start equal in all ranks: a dataset that shuffles
    itself must give all ranks the same order, or items would be doubled and lost. In worker processes the seeds are
    made equal when the workers start.
    """

    rank: int
    """The rank takes the items whose number is `rank` modulo `world_size`."""
    world_size: int
    share_randomness: Callable[[], Any] | None = None
    """Returns the states from which the stream's generators start; called once a pass, by all ranks."""

    def __len__(self) -> int:
        items = len(self.inner)
        return max(min(1, items), int(-(-(items - self.rank) // self.world_size)))

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None or self.share_randomness is None:
            return itertools.islice(iter(self.inner), self.rank, None, self.world_size)
        return _seeded(self.inner, self.rank, self.world_size, self.share_randomness())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "share_randomness": None}


def _seeded(stream: Any, rank: int, world_size: int, states: Any) -> Iterator[Any]:
    """Iterate over every n-th item of a stream, which runs on generator states of its own."""
    own = OwnGenerators(states)
    with own.used():
        items = iter(stream)
        for _ in itertools.islice(items, rank):
            pass
    while True:
        with own.used():
            pulled = list(itertools.islice(items, world_size))
        if not pulled:
            return
        yield pulled[0]


_DRAWN_WHOLE = 1 << 24
"""A sampler that gives more is drawn chunk by chunk: minGPT asks for 10,000,000,000 samples with replacement."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Deal(Passes):
    """Stands behind a loader's sampler or batch sampler, and gives this rank's part of every chunk.

    Rank 0 draws the order of a pass once, at the first batch (so rank 0's generators are used as one process would use
    them), and sends it to all ranks. Without a length it draws and sends chunk by chunk.
    """

    source: Any
    """The sampler or batch sampler that rank 0 draws from."""
    group: Group
    per_chunk: int = 1
    """Items of `source` in the chunk of one step."""
    items: str = "samples"
    """Kind of the items: `samples` (a chunk is divided), `batches` (dealt whole) or `split` (each batch is a chunk and is
    divided)."""
    single: bool = False
    """Whether to give bare indices instead of lists of them."""
    drop_unit: int = 1
    """Only multiples of so many items are used; 1 for all."""
    aligned: bool = True
    """Whether all ranks take the same number of steps."""
    accumulate: int = 1
    """Steps in an accumulation window."""
    portions: collections.deque[Portion] = dataclasses.field(default_factory=collections.deque)
    """The samples of each batch of the latest pass, until `Batches` takes it."""
    _drawn: Any = None
    samples: int | None = None
    """Samples dealt to this rank so far in the latest pass; None before the first one."""

    def __len__(self) -> int:
        """Steps of this rank that are left of a pass. Raises TypeError if the source has no length."""
        used = len(self.source) // self.drop_unit * self.drop_unit
        if self.start:
            return int(max(1, -(-(used - self.start) // self.per_chunk)))
        steps = -(-used // self.per_chunk)
        if self.aligned or not steps:
            return int(steps)
        last = used - (steps - 1) * self.per_chunk
        has_last = self.items == "split" or last > self.group.rank
        return int(max(1, steps - (not has_last)))

    def begin_at(self, start: int, order: str) -> None:
        """Have the next pass begin there; the digest begins with the number of items."""
        count = length(self.source)
        is_other = bool(order) and count is not None and order.split(maxsplit=1)[0] != str(count)
        super().begin_at(0 if is_other else start, order)

    def __iter__(self) -> Iterator[Any]:
        # Each pass has its own queue: two passes may be under way at once.
        self.portions = collections.deque()
        return self._dealt(self.portions, self.start, self.place)

    def _dealt(self, portions: collections.deque[Portion], start: int, place: tuple[int, ...]) -> Iterator[Any]:
        rank, world = self.group.rank, self.group.world_size
        given = 0
        whole = self.items == "batches"
        for count, (chunk, last, window) in enumerate(self._chunks(start)):
            first = start // self.per_chunk if self.is_expected else 0
            index = first + count
            samples = chunk[0] if self.items == "split" else chunk
            if whole:
                mine = list(samples[rank]) if rank < len(samples) else []
                total = sum(map(len, samples))
            else:
                mine = sharding.part(samples, rank, world)
                total = len(samples)
            local = len(mine)
            if not mine:
                if not self.aligned and index > first:
                    continue
                mine = list(samples[0]) if whole else [samples[0]]
            given += local
            self.samples = given
            portions.append(Portion(index=index, local=local, total=total, last=last, window=window))
            yield numbered(mine[0] if self.single else mine, place, index)

    def _chunks(self, begin: int) -> Iterator[tuple[list[Any], bool, int | None]]:
        """The chunks of a pass from an item on, whether each is the last, and the samples of its accumulation window."""
        size = self.per_chunk
        if not self._draws_whole:
            items, self._drawn = self._items(begin) if self._drawn is None else self._drawn, None
            yield from ((chunk, last, None) for chunk, last in _drawn_ahead(items, size, self.group))
            return
        order, self._drawn = self._draw() if self._drawn is None else self._drawn, None
        begin = begin if self.is_expected else 0
        used = len(order) // self.drop_unit * self.drop_unit
        per_window = size * self.accumulate
        for start in range(begin, used, size):
            # Windows begin again at `begin`, which is the end of one.
            first = begin + (start - begin) // per_window * per_window
            window = order[first : min(first + per_window, used)]
            samples = len(window) if self.items == "samples" else sum(map(len, window))
            yield order[start : min(start + size, used)], start + size >= used, samples

    def draw(self) -> None:
        """Draw the order of the next pass now, or as much of it as a sampler draws that is not drawn as a whole."""
        if self._draws_whole:
            self._drawn = self._draw()
        elif not self.group.rank:
            self._drawn = _primed(self._items(self.start))

    @property
    def _draws_whole(self) -> bool:
        count = length(self.source)
        return count is not None and (count <= _DRAWN_WHOLE or type(self.source) is SequentialSampler)

    def _items(self, begin: int) -> Iterator[Any]:
        """The items of a pass that is not drawn as a whole, from one of them on."""
        count = length(self.source)
        end = None if count is None else count // self.drop_unit * self.drop_unit
        return itertools.islice(self.watched(iter(self.source)), begin, end)

    def _draw(self) -> Any:
        order: Any = range(len(self.source))
        if type(self.source) is not SequentialSampler:
            order = self.group.send(list(self.source) if self.group.rank == 0 else None)
        sample = repr(list(order[:: max(1, len(order) // 1000)]))
        self.order = f"{len(order)} {zlib.crc32(sample.encode())}"
        return order

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the sampler of a training loader stays in its rank")


def _primed(items: Iterator[Any]) -> Iterator[Any]:
    """Have an iterator draw all that it draws before its first item."""
    return itertools.chain(list(itertools.islice(items, 1)), items)


def _drawn_ahead(source: Iterator[Any], size: int, group: Group) -> Iterator[tuple[list[Any], bool]]:
    """Yield chunks of a source with whether each is the last: rank 0 draws one ahead to know that."""
    items = source if group.rank == 0 else iter(())
    ahead = list(itertools.islice(items, size))
    while True:
        current = ahead
        if group.rank == 0:
            ahead = list(itertools.islice(items, size))
        chunk, last = group.send((current, not ahead))
        if chunk:
            yield chunk, last
        if last:
            return


@dataclasses.dataclass(eq=False, kw_only=True)
class Counter(Passes):
    """Stands behind a sampler or batch sampler that is used as it is, and notes the size of each batch."""

    single: bool
    """Whether the sampler gives bare indices instead of lists of them."""
    portions: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    """Samples of each batch of the latest pass, until `Batches` takes them."""
    _held: list[Iterator[Any]] = dataclasses.field(default_factory=list)
    """The items of the latest pass."""

    def __len__(self) -> int:
        return max(min(1, self.start), super().__len__() - self.start)

    def begin_at(self, start: int, order: str) -> None:
        """Have the next pass begin there. Items have no digest here: a digest belongs to samples that are dealt."""
        super().begin_at(0 if order else start, order)

    def __iter__(self) -> Iterator[Any]:
        self.portions = collections.deque()
        self._held = [itertools.islice(self.watched(iter(self.inner)), self.start, None)]
        return self._count(self._held, self.portions, self.start, self.place)

    def draw(self) -> None:
        """Have the sampler draw what it draws before the first item of the latest pass."""
        self._held[0] = _primed(self._held[0])

    def _count(
        self, held: list[Iterator[Any]], sizes: collections.deque[int], start: int, place: tuple[int, ...]
    ) -> Iterator[Any]:
        for index, item in enumerate(held[0], start):
            sizes.append(1 if self.single else len(item))
            yield numbered(item, place if self.single or isinstance(item, list) else (), index)


def length(sized: Any) -> int | None:
    """The length of an object; None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
