"""Compares what ranks with parts of the weights compute outside of the model, in the first steps.

Ranks with the same batch have to compute the same loss, and a step may multiply gradients, or move weights along them, only by a number that is
the same on all: a penalty on weights, or a norm that the step takes of its gradients by itself, is of this rank's part alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.worker.training.rank_group import Group, differing, fingerprint
from kale_dist.worker.training.result import optimizers_of

_STEPS = 2
"""A step's code is the same in all batches, and comparing has a cost."""
_ELEMENTS = 4
"""So many of the largest elements of each gradient are looked at."""
_TOLERANCE = 1e-2
"""Relative difference of numbers on two ranks; weights in 16 bits move in steps of this size."""
_SAME = 1e-4
"""Relative difference up to which a number is the same in two steps, or on two ranks."""
_COMPARED_STEPS = (1, 2, 10)
"""After these steps the numbers of an optimizer are compared; it may begin to use them late."""


class Agreement:
    """Notices a rank that computes with its part alone.

    Args:
        row: The ranks with the same batch.
        of_each: Whether ranks have parts of the same weights, so that a weight's own number has to be equal, too.
    """

    def __init__(self, row: Group, *, of_each: bool) -> None:
        self._row, self._of_each = row, of_each
        self._left = 0 if row.is_alone else _STEPS
        self._losses: list[float] = []
        self._factors: list[list[float]] = [[]]
        """Those of each step."""
        self._kept: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        """Parameters with places in them, and the gradients and values there at the end of the latest backward pass."""

    @torch.no_grad()
    def passed(self, root: Tensor, parameters: Iterable[Any]) -> None:
        """Called when a backward pass is over: keep its loss, and a few numbers of each gradient. Local."""
        if not self._left:
            return
        if root.numel() == 1:
            self._losses += fingerprint([root])
        self._note([(_at(p, places) - value) / gradient for p, places, gradient, value in self._kept])
        self._kept = []
        for p in parameters:
            if p.grad is not None and p.grad.layout is torch.strided:
                flat = local_part(p.grad).flatten()
                # Large ones, as differences of weights are exact there, but not alike: values that are clipped have no factor.
                largest = flat.abs().topk(min(len(flat), max(_ELEMENTS, min(16 * _ELEMENTS, len(flat) // 4)))).indices
                places = largest[:: max(1, len(largest) // _ELEMENTS)]
                places = places[flat[places] != 0]
                self._kept.append((p, places, flat[places], _at(p, places)))

    @torch.no_grad()
    def check(self) -> None:
        """Called before a step of the optimizer, on all ranks: compare.

        Raises:
            KaleDistError: A rank has computed with its part alone.
        """
        if not self._left:
            return
        self._left -= 1
        self._note(
            [gradient[:0] if p.grad is None else _at(p.grad, at) / gradient for p, at, gradient, _ in self._kept]
        )
        self._kept = []
        if self._left:
            self._factors.append([])
            return
        losses, factors = zip(*self._row.gather((self._losses, self._factors)), strict=True)
        if len(set(map(len, losses))) == 1 and differing(losses):
            raise KaleDistError(
                f"Ranks with the same batch computed different losses ({losses[0]} on the first): the step or the criterion uses"
                " weights of which each rank has a part. For a penalty on weights use weight_decay= of the optimizer, or"
                " strategy='ddp'"
            )
        if any(_differ(factors[0], other) for other in factors[1:]):
            raise KaleDistError(
                "train_step multiplies gradients, or moves weights along them, by a number that is not the same on all ranks,"
                " such as a norm that it computes itself: each rank has a part of the gradients. Clip by"
                " torch.nn.utils.clip_grad_norm_ or clip_norm=, which take the norm over all ranks; for what else needs the"
                " norm, as SAM does, use strategy='ddp' or 'fsdp'"
            )

    def _note(self, ratios: list[Tensor]) -> None:
        """Note the number that all gradients of this rank have in common, or that of each; nan if there is none."""
        if not ratios:
            return
        for group in [[one] for one in ratios] if self._of_each else [ratios]:
            numbers = torch.cat([ratio.abs().double().cpu() for ratio in group]).tolist()
            is_one = len(numbers) > 1 and max(numbers) - min(numbers) <= _TOLERANCE * max(numbers)
            self._factors[-1].append(max(numbers) if is_one else math.nan)


def _differ(first: list[list[float]], other: list[list[float]]) -> bool:
    """Whether the numbers of two ranks differ, and not by the same factor in both steps (which is a choice, of a layer's own)."""
    return any(
        not (math.isclose(a, b, rel_tol=_TOLERANCE) and math.isclose(c, d, rel_tol=_TOLERANCE))
        and not math.isclose(a * d, b * c, rel_tol=_SAME)
        and math.isfinite(a * b * c * d)
        for a, c, b, d in zip(*first, *other, strict=False)
    )


class Numbers:
    """Notices an optimizer that takes a number of all weights at once, as Prodigy does, where ranks have parts of them.

    Args:
        optimizer: The ranks'.
        group: The ranks.
    """

    def __init__(self, optimizer: Any, group: Group) -> None:
        self._optimizer, self._group = optimizer, group
        self._steps = 0

    def check(self) -> None:
        """Called after a step, on all ranks: compare the numbers.

        Raises:
            ConfigError: They are not the same on all ranks.
        """
        self._steps += 1
        if self._steps not in _COMPARED_STEPS:
            return
        everyone = self._group.gather(self._now())
        for key in sorted(set.intersection(*map(set, everyone))):
            if differing([[numbers[key]] for numbers in everyone], tolerance=_SAME):
                _, kind, name = key
                raise ConfigError(
                    "strategy",
                    f"{kind} computes {name!r} of all weights at once, and each rank has a part of them",
                    "Use an optimizer such as AdamW, or strategy='ddp'",
                )

    def _now(self) -> dict[tuple[int, str, str], float]:
        """The numbers of the groups, and of the state of each weight, with the class of their optimizer."""
        kept = [
            (type(one).__name__, values)
            for one in optimizers_of(self._optimizer)
            for group in one.param_groups
            for values in (group, *(one.state.get(p, {}) for p in group["params"]))
        ]
        return {
            (place, kind, name): float(value)
            for place, (kind, values) in enumerate(kept)
            for name, value in values.items()
            # Ranks' learning rates are brought to one after each epoch.
            if name != "lr" and (isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()))
        }


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a `DTensor`, which counts its changes; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _at(tensor: Any, places: Tensor) -> Tensor:
    return local_part(tensor).detach().flatten()[places]
