"""Stand-ins for a loader's dataset and samplers: they have this rank's share, and otherwise behave as the original."""

from __future__ import annotations

import collections
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

_OWN = ("_kale_inner", "_kale_length", "_kale_share")


class View:
    """Passes everything on to the object behind it: attributes, indexing, `isinstance`. Only its length is different.

    Args:
        inner: The object behind.
        length: The length, or a function that gives it; None for the inner object's own.
    """

    def __init__(self, inner: Any, length: int | Callable[[], int] | None = None) -> None:
        object.__setattr__(self, "_kale_inner", inner)
        object.__setattr__(self, "_kale_length", length)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before there is an inner object.
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._kale_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kale_inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._kale_inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class behind, so that `isinstance` holds."""
        return type(self._kale_inner)

    def __dir__(self) -> list[str]:
        return dir(self._kale_inner)

    def __repr__(self) -> str:
        return repr(self._kale_inner)

    def __bool__(self) -> bool:
        return bool(self._kale_inner)

    def __len__(self) -> int:
        length = self._kale_length
        if length is None:
            return len(self._kale_inner)
        return int(length() if callable(length) else length)

    def __getitem__(self, index: Any) -> Any:
        return self._kale_inner[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kale_inner)

    def __contains__(self, item: object) -> bool:
        return item in self._kale_inner

    def __add__(self, other: Any) -> Any:
        return self._kale_inner + other

    def _kale_frozen_length(self) -> int | None:
        """The length as a number that can be sent; None where there is none."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return View, (self._kale_inner, self._kale_frozen_length())


class StreamShare(View):
    """An iterable dataset of which this rank takes every n-th item.

    Without worker processes the stream draws from generators that start equal in all ranks: a dataset that shuffles
    itself must give all ranks the same order, or items would be doubled and lost. In worker processes the seeds are
    made equal when the workers start.

    Args:
        inner: The dataset.
        rank: Which items, modulo `world_size`.
        world_size: Number of ranks.
        share_randomness: Gives the states from which the stream's generators start; called once a pass, by all ranks.
    """

    def __init__(
        self, inner: Any, rank: int, world_size: int, share_randomness: Callable[[], Any] | None = None
    ) -> None:
        length = None if not hasattr(inner, "__len__") else self._length_of_share
        super().__init__(inner, length)
        object.__setattr__(self, "_kale_share", (rank, world_size, share_randomness))

    def _length_of_share(self) -> int:
        rank, world_size, _ = self._kale_share
        length = len(self._kale_inner)
        return max(min(1, length), int(-(-(length - rank) // world_size)))

    def __iter__(self) -> Iterator[Any]:
        rank, world_size, share_randomness = self._kale_share
        if get_worker_info() is not None or share_randomness is None:
            return itertools.islice(iter(self._kale_inner), rank, None, world_size)
        return _seeded(self._kale_inner, rank, world_size, share_randomness())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StreamShare, (self._kale_inner, *self._kale_share[:2])


def _seeded(stream: Any, rank: int, world_size: int, states: Any) -> Iterator[Any]:
    """Every n-th item of a stream that runs on generator states of its own."""
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
    """The inverse of `generator_states`."""
    python, numpy_state, torch_state = states
    random.setstate(python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy_state is not None:
        numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


_DRAWN_WHOLE = 1 << 24
"""A sampler that gives more is drawn chunk by chunk: minGPT asks for 10,000,000,000 samples with replacement."""


class Dealer(View):
    """Stands in for a loader's sampler or batch sampler and gives this rank's part of every chunk.

    The order of a pass is drawn once, by rank 0 at the first batch (so rank 0's generators are used as one process
    would use them), and sent to all. Without a length it is drawn and sent chunk by chunk.

    Args:
        shown: The object that this one stands in for.
        source: What is drawn from: gives indices, or whole batches of them.
        group: The ranks.
        per_chunk: Items of `source` in the chunk of one step.
        items: Kind of the items: `samples` (a chunk is divided), `batches` (dealt whole) or `split` (each batch is a
            chunk and is divided).
        single: Whether to give bare indices instead of lists of them.
        drop_unit: Only multiples of so many items are used; 1 for all.
        aligned: Whether all ranks take the same number of steps.
        accumulate: Steps in an accumulation window.
    """

    def __init__(
        self,
        shown: Any,
        source: Any,
        group: Group,
        *,
        per_chunk: int,
        items: str = "samples",
        single: bool = False,
        drop_unit: int = 1,
        aligned: bool = True,
        accumulate: int = 1,
    ) -> None:
        super().__init__(shown, self._steps)
        fields = {
            "_kale_source": source,
            "_kale_group": group,
            "_kale_per_chunk": per_chunk,
            "_kale_items": items,
            "_kale_single": single,
            "_kale_drop_unit": drop_unit,
            "_kale_aligned": aligned,
            "_kale_accumulate": accumulate,
            "kale_portions": collections.deque(),
            "kale_samples": None,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_kale_", "kale_")):
            raise AttributeError(name)
        return super().__getattr__(name)

    def _steps(self) -> int:
        """Steps of this rank in a pass.

        Raises:
            TypeError: The source has no length.
        """
        used = len(self._kale_source) // self._kale_drop_unit * self._kale_drop_unit
        steps = -(-used // self._kale_per_chunk)
        if self._kale_aligned or not steps:
            return int(steps)
        last = used - (steps - 1) * self._kale_per_chunk
        has_last = self._kale_items == "split" or last > self._kale_group.rank
        return int(max(1, steps - (not has_last)))

    def __iter__(self) -> Iterator[Any]:
        # Each pass has its own queue: two passes may be under way at once.
        portions: collections.deque[Portion] = collections.deque()
        object.__setattr__(self, "kale_portions", portions)
        return self._deal(portions)

    def _deal(self, portions: collections.deque[Portion]) -> Iterator[Any]:
        rank, world = self._kale_group.rank, self._kale_group.world_size
        given = 0
        whole = self._kale_items == "batches"
        for index, (chunk, last, window) in enumerate(self._chunks()):
            samples = chunk[0] if self._kale_items == "split" else chunk
            if whole:
                mine = list(samples[rank]) if rank < len(samples) else []
                total = sum(map(len, samples))
            else:
                mine = sharding.part(samples, rank, world)
                total = len(samples)
            local = len(mine)
            if not mine:
                if not self._kale_aligned and index:
                    continue
                mine = list(samples[0]) if whole else [samples[0]]
            given += local
            object.__setattr__(self, "kale_samples", given)
            portions.append(Portion(index=index, local=local, total=total, last=last, window=window))
            yield mine[0] if self._kale_single else mine

    def _chunks(self) -> Iterator[tuple[list[Any], bool, int | None]]:
        """The chunks of a pass, whether each is the last, and the samples of its accumulation window."""
        size, source, group = self._kale_per_chunk, self._kale_source, self._kale_group
        try:
            samples = len(source) // self._kale_drop_unit * self._kale_drop_unit
        except (TypeError, NotImplementedError):
            samples = None
        if samples is None or (samples > _DRAWN_WHOLE and type(source) is not SequentialSampler):
            used = itertools.islice(iter(source), samples)
            yield from ((chunk, last, None) for chunk, last in _drawn_ahead(used, size, group))
            return
        order = self._draw()
        used = len(order) // self._kale_drop_unit * self._kale_drop_unit
        per_window = size * self._kale_accumulate
        for start in range(0, used, size):
            first = start // per_window * per_window
            window = order[first : min(first + per_window, used)]
            samples = len(window) if self._kale_items == "samples" else sum(map(len, window))
            yield order[start : min(start + size, used)], start + size >= used, samples

    def _draw(self) -> Any:
        source = self._kale_source
        if type(source) is SequentialSampler:
            return range(len(source))
        group = self._kale_group
        return group.send(list(source) if group.rank == 0 else None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("the sampler of a training loader stays in its rank")


def _drawn_ahead(source: Iterator[Any], size: int, group: Group) -> Iterator[tuple[list[Any], bool]]:
    """Chunks of a source, drawn by rank 0 one ahead so that the last one is known to be it."""
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


class Counter(View):
    """Stands in for a sampler or batch sampler that is taken as it is, and notes the size of each batch."""

    def __init__(self, inner: Any, *, single: bool) -> None:
        super().__init__(inner)
        object.__setattr__(self, "_kale_single", single)
        object.__setattr__(self, "kale_portions", collections.deque())

    def __iter__(self) -> Iterator[Any]:
        sizes: collections.deque[int] = collections.deque()
        object.__setattr__(self, "kale_portions", sizes)
        return self._count(sizes)

    def _count(self, sizes: collections.deque[int]) -> Iterator[Any]:
        for item in self._kale_inner:
            sizes.append(1 if self._kale_single else len(item))
            yield item
