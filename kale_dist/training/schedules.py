"""Learning-rate schedules that a step moves in every batch, but that the notebook made for the batches of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

from kale_dist.training.group import Group
from kale_dist.training.sharding import Pace

_TOTALS = ("total_steps", "T_max", "total_iters")
"""Where torch's schedulers keep the number of calls they are made for."""

_WORDS = ("num_training_steps", "total_steps", "max_steps")
"""What the number is called in functions that `LambdaLR` calls, such as those of transformers."""


@dataclasses.dataclass(kw_only=True)
class Schedules:
    """Decides how far a call of `scheduler.step()` within a batch moves the scheduler.

    A rank takes fewer batches an epoch than one process would. A scheduler that counts the batches of one process is
    moved by the progress through the data, and so ends where it would have ended.
    """

    group: Group
    pace: Pace
    epochs: int
    alone: int | None = None
    """Batches of an epoch on one process, as `len(loader)` was in the notebook; None where it is unknown."""
    here: int | None = None
    """Batches of an epoch on this rank."""

    def moves(self, scheduler: Any) -> int:
        """How often the scheduler is to be stepped where the step has called it once."""
        portion = self.pace.portion
        if portion is None or not self.alone or not self.here:
            return 1
        steps = -(-self.here // self.pace.accumulate)
        if steps == self.alone:
            return 1
        total = total_of(scheduler)
        if total == self.epochs * steps:
            return 1
        name = type(scheduler).__name__
        per_epoch = f"{self.alone} batches an epoch on one process, {steps} steps of each rank here"
        if not total or total % self.alone or (total % steps == 0 and total != self.epochs * self.alone):
            size = f"made for {total} steps" if total else "of unknown length"
            self.group.say(
                f"{name}, {size}, is stepped once in each batch ({per_epoch}): if it counts the batches of one process, it"
                " stops early. Divide its number of steps by number_of_processes."
            )
            return 1
        self.group.say(
            f"{name} was made for {total} steps ({per_epoch}): in each batch it moves by the progress through the data,"
            " and ends where it would on one process."
        )
        index = portion.index // self.pace.accumulate
        return (index + 1) * self.alone // steps - index * self.alone // steps


def total_of(scheduler: Any) -> int | None:
    """How many steps a scheduler is made for; None where it does not say."""
    parts, milestones = getattr(scheduler, "_schedulers", None), getattr(scheduler, "_milestones", None)
    if parts and milestones:
        last = total_of(parts[-1])
        return None if last is None else milestones[-1] + last
    if parts:
        totals = [total for total in map(total_of, parts) if total]
        return max(totals, default=None)
    for name in _TOTALS:
        if isinstance(total := getattr(scheduler, name, None), int):
            return total
    for function in getattr(scheduler, "lr_lambdas", ()):
        for word in _WORDS:
            if isinstance(total := _bound(function).get(word), int):
                return total
    return None


def _bound(function: Any) -> dict[str, Any]:
    """What a function has bound by name: as `functools.partial` does, or as a closure."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
    values = {name: cell.cell_contents for name, cell in cells.items()}
    return {**values, **getattr(function, "keywords", {})}
