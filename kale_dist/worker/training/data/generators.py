"""Generators of random numbers: Python's, NumPy's, torch's, and those of loaders. Their states are taken, kept and set."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


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


def random_states(device: torch.device, loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the states of this rank's generators: of random, torch, NumPy if it is imported, and the loaders."""
    return {
        **packed(generator_states()),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }


def packed(states: Any) -> dict[str, Any]:
    """Return what `generator_states` returned as values that a checkpoint can hold."""
    (version, numbers, gauss), numpy_state, torch_state = states
    name, keys, *rest = numpy_state if numpy_state is not None else ("", torch.zeros(0, device="cpu"))
    return {
        "random": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "torch": torch_state,
        "numpy": None
        if numpy_state is None
        else (name, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest),
    }


def unpacked(states: Mapping[str, Any]) -> Any:
    """Return what `set_generator_states` takes."""
    version, numbers, gauss = states["random"]
    numpy_state = states["numpy"]
    if numpy_state is not None:
        import numpy as np

        name, keys, *rest = numpy_state
        numpy_state = (name, keys.numpy().astype(np.uint32), *rest)
    return (version, tuple(numbers.tolist()), gauss), numpy_state, states["torch"]


def set_random_states(device: torch.device, loaders: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Set this rank's generators to what `random_states` returned."""
    set_generator_states(unpacked(states))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    for generator, state in zip(_generators(loaders), states["loaders"], strict=False):
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
