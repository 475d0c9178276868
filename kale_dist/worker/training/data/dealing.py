"""Stand-ins for a loader's dataset and samplers: they have this rank's share, and otherwise behave like the original."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import SequentialSampler, get_worker_info

from kale_dist.worker.training.data import sharding
from kale_dist.worker.training.data.sharding import Portion
from kale_dist.worker.training.group import Group


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


class View:
    """Stands in for an object: passes attributes, indexing and `isinstance` on to it, and takes the rest from `Shown`.

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

    def __len__(self) -> int:
        return len(self._kale)

    def __getitem__(self, index: Any) -> Any:
        return self._kale.inner[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kale)

    def __contains__(self, item: object) -> bool:
        return item in self._kale.inner

    def __add__(self, other: Any) -> Any:
        return self._kale.inner + other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return View, (self._kale,)


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
    own = generator_states()
    set_generator_states(states)
    try:
        items = iter(stream)
        for _ in itertools.islice(items, rank):
            pass
    finally:
        states = generator_states()
        set_generator_states(own)
    while True:
        own = generator_states()
        set_generator_states(states)
        try:
            pulled = list(itertools.islice(items, world_size))
        finally:
            states = generator_states()
            set_generator_states(own)
        if not pulled:
            return
        yield pulled[0]


def generator_states() -> tuple[Any, Any, Any]:
    """The states of Python's, NumPy's and torch's global generators (None for NumPy where it is not imported)."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


def set_generator_states(states: tuple[Any, Any, Any]) -> None:
    """Set Python's, NumPy's and torch's global generators to what `generator_states` returned."""
    python, numpy_state, torch_state = states
    random.setstate(python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy_state is not None:
        numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


_DRAWN_WHOLE = 1 << 24
"""A sampler that gives more is drawn chunk by chunk: minGPT asks for 10,000,000,000 samples with replacement."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Deal(Shown):
    """Behind a loader's sampler or batch sampler: gives this rank's part of every chunk.

    Rank 0 draws the order of a pass once, at the first batch (so rank 0's generators are used as one process would use
    them), and sends it to all ranks. Without a length it draws and sends chunk by chunk.
    """

    source: Any
    """The sampler or batch sampler that rank 0 draws from."""
    group: Group
    per_chunk: int
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
    """What each batch of the latest pass holds, until `Batches` takes it."""
    samples: int | None = None
    """Samples dealt to this rank so far in the latest pass; None before the first one."""

    def __len__(self) -> int:
        """Steps of this rank in a pass. Raises TypeError if the source has no length."""
        used = len(self.source) // self.drop_unit * self.drop_unit
        steps = -(-used // self.per_chunk)
        if self.aligned or not steps:
            return int(steps)
        last = used - (steps - 1) * self.per_chunk
        has_last = self.items == "split" or last > self.group.rank
        return int(max(1, steps - (not has_last)))

    def __iter__(self) -> Iterator[Any]:
        # Each pass has its own queue: two passes may be under way at once.
        self.portions = collections.deque()
        return self._dealt(self.portions)

    def _dealt(self, portions: collections.deque[Portion]) -> Iterator[Any]:
        rank, world = self.group.rank, self.group.world_size
        given = 0
        whole = self.items == "batches"
        for index, (chunk, last, window) in enumerate(self._chunks()):
            samples = chunk[0] if self.items == "split" else chunk
            if whole:
                mine = list(samples[rank]) if rank < len(samples) else []
                total = sum(map(len, samples))
            else:
                mine = sharding.part(samples, rank, world)
                total = len(samples)
            local = len(mine)
            if not mine:
                if not self.aligned and index:
                    continue
                mine = list(samples[0]) if whole else [samples[0]]
            given += local
            self.samples = given
            portions.append(Portion(index=index, local=local, total=total, last=last, window=window))
            yield mine[0] if self.single else mine

    def _chunks(self) -> Iterator[tuple[list[Any], bool, int | None]]:
        """The chunks of a pass, whether each is the last, and the samples of its accumulation window."""
        size, source = self.per_chunk, self.source
        count = length(source)
        samples = None if count is None else count // self.drop_unit * self.drop_unit
        if samples is None or (samples > _DRAWN_WHOLE and type(source) is not SequentialSampler):
            drawn = _drawn_ahead(itertools.islice(iter(source), samples), size, self.group)
            yield from ((chunk, last, None) for chunk, last in drawn)
            return
        order = self._draw()
        used = len(order) // self.drop_unit * self.drop_unit
        per_window = size * self.accumulate
        for start in range(0, used, size):
            first = start // per_window * per_window
            window = order[first : min(first + per_window, used)]
            samples = len(window) if self.items == "samples" else sum(map(len, window))
            yield order[start : min(start + size, used)], start + size >= used, samples

    def _draw(self) -> Any:
        if type(self.source) is SequentialSampler:
            return range(len(self.source))
        return self.group.send(list(self.source) if self.group.rank == 0 else None)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the sampler of a training loader stays in its rank")


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
class Counter(Shown):
    """Behind a sampler or batch sampler that is used as it is: notes the size of each batch."""

    single: bool
    """Whether the sampler gives bare indices instead of lists of them."""
    portions: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    """Samples of each batch of the latest pass, until `Batches` takes them."""

    def __iter__(self) -> Iterator[Any]:
        self.portions = collections.deque()
        return self._count(self.portions)

    def _count(self, sizes: collections.deque[int]) -> Iterator[Any]:
        for item in self.inner:
            sizes.append(1 if self.single else len(item))
            yield item


def length(sized: Any) -> int | None:
    """The length of an object; None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
