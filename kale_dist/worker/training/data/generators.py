"""Generators of random numbers: Python's, NumPy's, torch's, and those of loaders. Their states are taken, kept and set."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class OwnGenerators:
    """Generator states of its own for code that draws from the global generators.

    Args:
        states: The first ones, as `generator_states` returns them.
    """

    def __init__(self, states: Any) -> None:
        self._states = states

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the block the global generators continue from these states."""
        others = generator_states()
        set_generator_states(self._states)
        try:
            yield
        finally:
            self._states = generator_states()
            set_generator_states(others)


def seed_generators(seed: int) -> None:
    """Seed Python's, torch's and, where it is imported, NumPy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


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


def advance_generators() -> None:
    """Draw a number from each of them, so that what is drawn next is not what their states before would give."""
    random.random()  # noqa: S311 - no secret
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.random()
    torch.rand((), device="cpu")


def torch_states(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators, on the CPU and on a rank's GPU if it has one."""
    return torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_torch_states(states: tuple[Tensor, ...], device: torch.device) -> None:
    """Set torch's generators to what `torch_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlobalStates:
    """The states that `generator_states` returns, as values that a checkpoint can hold."""

    random: tuple[int, Tensor, float | None]
    torch: Tensor
    numpy: tuple[Any, ...] | None

    @classmethod
    def of(cls, states: Any, **others: Any) -> Self:
        """Convert what `generator_states` returned; `others` are the fields of a subclass."""
        (version, numbers, gauss), numpy_state, torch_state = states
        if numpy_state is not None:
            name, keys, *rest = numpy_state
            numpy_state = (name, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest)
        python = (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss)
        return cls(random=python, torch=torch_state, numpy=numpy_state, **others)

    def states(self) -> Any:
        """Return what `set_generator_states` takes."""
        version, numbers, gauss = self.random
        numpy_state = self.numpy
        if numpy_state is not None:
            import numpy as np

            name, keys, *rest = numpy_state
            numpy_state = (name, keys.numpy().astype(np.uint32), *rest)
        return (version, tuple(numbers.tolist()), gauss), numpy_state, self.torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomStates(GlobalStates):
    """The states of all generators of a rank: the global ones, its GPU's, and those of its loaders."""

    cuda: Tensor | None
    loaders: Sequence[Tensor]

    @classmethod
    def now(cls, device: torch.device, loaders: Iterable[Any]) -> RandomStates:
        """The states at this moment."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        own = [generator.get_state() for generator in _generators(loaders)]
        return cls.of(generator_states(), cuda=cuda, loaders=own)

    def restore(self, device: torch.device, loaders: Iterable[Any]) -> None:
        """Set this rank's generators to these states."""
        set_generator_states(self.states())
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)
        for generator, state in zip(_generators(loaders), self.loaders, strict=False):
            generator.set_state(state)


def _generators(loaders: Iterable[Any]) -> Iterator[torch.Generator]:
    """Yield the generators of loaders and their samplers, each once."""
    seen: set[int] = set()
    for data in loaders:
        batches = data.batch_sampler
        for part in (data, data.sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator
