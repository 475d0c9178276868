"""How samples are divided over ranks, and the sentence that describes it. Pure: takes sizes, not tensors.

A pass over n samples is cut into chunks, one for each step of all ranks: `batch_size` x ranks samples in the order of
the sampler. Each chunk is divided as evenly as possible, so all ranks take the same number of steps and only the last
chunk can be uneven.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kale_dist.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How a number of samples is cut into steps and divided among ranks."""

    samples: int
    """Samples of one pass that are used, without those that `drop_last` leaves out."""
    chunk: int
    """Samples of all ranks in one full step."""
    world_size: int
    aligned: bool = True
    """Whether every rank takes every step, by a repeated sample of weight 0 where a chunk is too small for all."""

    @property
    def steps(self) -> int:
        """Steps of the rank that has most."""
        return -(-self.samples // self.chunk)

    def total(self, step: int) -> int:
        """Samples of all ranks in a step."""
        return min(self.chunk, self.samples - step * self.chunk)

    def portion(self, step: int, rank: int) -> int:
        """Samples of one rank in a step."""
        return portion(self.total(step), rank, self.world_size)

    def share(self, rank: int) -> int:
        """Samples of one rank in the whole pass."""
        if not self.steps:
            return 0
        return (self.steps - 1) * portion(self.chunk, rank, self.world_size) + self.portion(self.steps - 1, rank)


def portion(samples: int, rank: int, world_size: int) -> int:
    """Return how many samples a rank gets when they are divided as evenly as possible; the first ranks get more."""
    return samples // world_size + (rank < samples % world_size)


def part(chunk: Sequence[Any], rank: int, world_size: int) -> list[Any]:
    """Return a rank's samples of a chunk: ranks have neighbouring parts, in order."""
    small, more = divmod(len(chunk), world_size)
    start = rank * small + min(rank, more)
    return list(chunk[start : start + small + (rank < more)])


def divide(
    argument: str, samples: int, batch_size: int, world_size: int, *, drop_last: bool, aligned: bool, split: bool
) -> Division:
    """Plan a pass over samples of known number.

    Args:
        argument: Name of the loader's argument, for the error.
        samples: Samples that the sampler gives.
        batch_size: The loader's batch size.
        world_size: Number of ranks.
        drop_last: Whether an incomplete batch is left out: of all ranks together when training, of one process when
            evaluating.
        aligned: Whether all ranks must take the same number of steps (training).
        split: Whether `batch_size` is that of all ranks together.

    Raises:
        ConfigError: Nothing would be left to train on.
    """
    chunk = batch_size if split else batch_size * world_size
    used = samples
    if drop_last:
        unit = chunk if aligned else batch_size
        used = samples // unit * unit
        if samples and not used:
            raise ConfigError(
                argument,
                f"drop_last=True leaves no batch: {samples:,} samples are fewer than the {unit:,} of one step of"
                f" {world_size} ranks",
                "Use a smaller batch size, fewer processes, or drop_last=False",
            )
    return Division(samples=used, chunk=chunk, world_size=world_size, aligned=aligned)


def describe(name: str, division: Division, *, dropped: int = 0) -> str:
    """Describe a pass of known length in a sentence.

    For 1,437 samples, 2 ranks and batches of 32: "train: 1,437 samples, 2 ranks x 719/718, batch 32 x 2 = 64, last
    batch 15 + 14".

    Args:
        name: `train` or `eval`.
        division: How the samples are divided.
        dropped: Samples that `drop_last` leaves out.
    """
    world = division.world_size
    shares = [division.share(rank) for rank in range(world)]
    full = [portion(division.chunk, rank, world) for rank in range(world)]
    sizes = f"{full[0]} x {world}" if full[0] == full[-1] else " + ".join(map(str, full))
    count = f"{division.samples:,} sample{'' if division.samples == 1 else 's'}"
    words = [f"{name}: {count}", f"{ranks(world)} x {extremes(shares)}"]
    words.append(f"batch {sizes} = {division.chunk}" if world > 1 else f"batch {division.chunk}")
    if division.steps and (last := division.total(division.steps - 1)) != division.chunk:
        parts = [portion(last, rank, world) for rank in range(world)]
        shown = " + ".join(map(str, parts)) if world <= 8 else f"{last} ({extremes(parts)} a rank)"  # noqa: PLR2004
        words.append(f"last batch {shown}")
        idle = parts.count(0)
        if idle and (division.aligned or division.steps == 1):
            words.append(f"{ranks(idle)} without one repeat{'s' if idle == 1 else ''} a sample with weight 0")
    if dropped:
        words.append(f"{dropped:,} left out by drop_last")
    return ", ".join(words)


def ranks(number: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} rank{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """`second`, `third`, `4th`."""
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def extremes(numbers: Sequence[int]) -> str:
    """Largest and smallest of some numbers as `719/718`, or one number where all are equal."""
    largest, smallest = max(numbers), min(numbers)
    return f"{largest:,}" if largest == smallest else f"{largest:,}/{smallest:,}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """The part of one rank in one step."""

    index: int
    """Number of the step within the pass over the data, from 0."""
    local: int
    """Samples of this rank; 0 where it repeats one to keep pace."""
    total: int
    """Samples of all ranks together."""
    last: bool
    """Whether no step follows."""
    window: int | None = None
    """Samples of all ranks in this step's accumulation window; None where it is not known beforehand."""


class Pace:
    """The current batch of the training loader and its window of accumulation.

    A window is `accumulate` steps, fewer at the end of a pass. Gradients of a batch are multiplied by `factor` before
    they are added up, so that their mean over ranks, summed over the window, is the gradient of one process that sees
    the window as one batch. `correction` mends what could not be foreseen (data of unknown length, a loop that is
    left early).

    Args:
        world_size: Number of ranks.
        accumulate: Steps of the loader for one step of the optimizer.
    """

    def __init__(self, world_size: int, accumulate: int) -> None:
        self.world_size = world_size
        self.accumulate = accumulate
        self.portion: Portion | None = None
        self.batches = 0
        """Batches given so far in the whole job: a number on which all ranks agree."""
        self.trained = 0
        """Samples of this rank in them."""
        self.optimizer_steps_of_batch = 0
        self._foreseen = 0
        self._seen = 0

    def take(self, portion: Portion) -> None:
        """Called when the training loader gives a batch."""
        self.portion = portion
        self.batches += 1
        self.trained += portion.local
        self.optimizer_steps_of_batch = 0
        if self.accumulate == 1 or not self._seen:
            self._foreseen = portion.window or portion.total * self.accumulate
            self._seen = 0
        self._seen += portion.total

    def leave(self) -> None:
        """Called when the loader is exhausted, or the step has left it."""
        self.portion = None

    def stepped(self) -> None:
        """Called after a real step of the optimizer: a new window begins."""
        if self.accumulate > 1:
            self._seen = 0

    @property
    def is_due(self) -> bool:
        """Whether gradients are exchanged at the end of the current batch's backward pass."""
        portion = self.portion
        if self.accumulate == 1 or portion is None:
            return True
        return portion.last or (portion.index + 1) % self.accumulate == 0

    @property
    def factor(self) -> float:
        """Factor on the gradients of this rank's batch."""
        portion = self.portion
        if portion is None or not self._foreseen:
            return 1.0
        return self.world_size * portion.local / self._foreseen

    @property
    def correction(self) -> float:
        """Factor on the window's gradients before the real step; 1 where the window was as foreseen."""
        if self.accumulate == 1 or not self._seen:
            return 1.0
        return self._foreseen / self._seen
