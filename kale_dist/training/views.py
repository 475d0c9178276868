"""Objects that stand in for a loader's dataset and samplers: this rank's share in length, the original in all else."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import get_worker_info

_OWN = ("_kale_inner", "_kale_length", "_kale_share")


class View:
    """Passes everything on to the object behind it: attributes, indexing, `isinstance`. Only its length is its own.

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
        """The length as a number that can travel; None where there is none."""
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
