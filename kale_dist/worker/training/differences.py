"""Compares a call with the checkpoint that it resumes from: whether it can resume, and what it sets otherwise.

The later call's settings win. Everything else continues as the earlier training left it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kale_dist.worker.training.contents import Checkpoint, Given, Resume
from kale_dist.worker.training.trained import Trained

_SCHEDULED = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"))
"""Options of an optimizer that schedulers set."""


def misfit(found: Checkpoint, trained: Trained, given: Given, *, is_in_parts: bool = False) -> str:
    """Return why a training cannot resume from a checkpoint, as the end of a sentence; empty if it can.

    Args:
        found: The checkpoint.
        trained: The objects of the call that is to resume.
        given: What this call sets.
        is_in_parts: Whether this call's checkpoints are folders of parts.
    """
    if found.resume is None:
        return "it holds only what a result needs"
    if bool(found.parts) != is_in_parts:
        return f"it is {'a folder of parts' if found.parts else 'one file'}, and those of this call are not"
    if found.parts and not pathlib.Path(found.parts, ".metadata").exists():
        return f"its parts are not at {found.parts}"
    modules = [("model", trained.model, found.model)]
    if isinstance(trained.criterion, torch.nn.Module):
        modules.append(("criterion", trained.criterion, found.resume.criterion or {}))
    for what, module, state in modules:
        mine = module.state_dict(keep_vars=True)
        if mine.keys() != state.keys():
            name = min(mine.keys() ^ state.keys())
            return f"{name} of the {what} is {'only in the checkpoint' if name in state else 'not in the checkpoint'}"
        for name, value in mine.items():
            is_tensor = isinstance(value, Tensor) and not torch.nn.parameter.is_lazy(value)
            if is_tensor and value.shape != (saved := getattr(state[name], "shape", None)):
                return (
                    f"{name} of the {what} has the shape {_shape(value.shape)}, and {_shape(saved)} in the checkpoint"
                )
    counts = [len(group["params"]) for group in trained.optimizer.param_groups]
    saved_counts = [len(group["params"]) for group in (found.optimizer or {}).get("param_groups", [])]
    if counts != saved_counts and found.resume.given.optimizer == given.optimizer:
        return f"the optimizer has other parameters: {_count(counts)}, and {_count(saved_counts)} in the checkpoint"
    return ""


def _shape(shape: Any) -> str:
    return str(tuple(shape or ()))


def _count(groups: list[int]) -> str:
    return f"{' + '.join(map(str, groups))} in {len(groups)} groups" if len(groups) > 1 else f"{sum(groups)}"


class Differences:
    """The settings in which a call differs from the one that has written a checkpoint, and what of the checkpoint is restored.

    Args:
        found: The checkpoint.
        now: What this call sets.
    """

    def __init__(self, found: Checkpoint, now: Given) -> None:
        resume = found.resume or Resume(given=now)
        before = resume.given
        self._before, self._now = before, now
        self.sentences: list[str] = []
        """Sentences for the user about all that does not continue as the earlier training left it."""
        self.has_optimizer = self._is_alike("optimizer", "It begins without a state, and a scheduler from its start")
        self.has_scheduler = self._is_alike("scheduler", "It begins from its start") and self.has_optimizer
        self.has_state = self._is_alike("state", "These objects begin as this call gives them")
        self.has_callbacks = self._is_alike("callbacks", "They begin without what earlier epochs were like")
        """Whether the states of these objects are restored."""
        self.is_same_call = bool(now.snapshot) and before.snapshot == now.snapshot
        """Whether the checkpoint is one of this very call: then all that its ranks have changed is restored."""
        self.has_frozen = before.frozen == now.frozen
        """Whether parameters are frozen as in the checkpoint, and not as in the call."""
        self.has_same_ranks = (before.strategy, before.world_size) == (now.strategy, now.world_size)
        """Whether there are as many ranks, with the same strategy."""
        self.has_same_batches = before.batch == now.batch
        """Whether a step takes as much data."""
        self.has_ranks = self.has_same_ranks and self.has_optimizer
        """Whether each rank gets back what it had of its own."""
        words = [json.loads(one.strategy)["strategy"] for one in (now, before)]
        self.has_average = self.has_same_ranks or words == ["ddp", "ddp"]
        """Whether the average of the weights is restored: one of all ranks, or the part of each rank."""
        if before.strategy != now.strategy:
            self._add(
                f"The strategy is {words[0]!r}{' with other settings' * (words[0] == words[1])}, and was {words[1]!r}"
            )
        if any(resume.strategy) and not self.has_ranks:
            self._add("What each rank had of its own (residuals, states of its own optimizer) is left out")
        if (found.callbacks.get("average") or {}).get("parts") and not self.has_average:
            self._add("The average of the weights begins again: the ranks have other parts of it")
        if before.batch.rpartition("= ")[2] != now.batch.rpartition("= ")[2]:
            self._add(
                f"A step takes {now.batch} instead of {before.batch.removesuffix(' samples')}. The learning rate stays"
            )
        self.schedule = self._schedule(found.scheduler or {}) if self.has_scheduler else {}
        """The scheduler's state to be restored."""
        groups = (found.optimizer or {}).get("param_groups", ()) if self.has_optimizer else ()
        self.options = [self._options(*each) for each in zip(groups, before.options, now.options, strict=False)]
        """The options of each parameter group that this call sets otherwise."""

    def apply(self, optimizer: Any) -> None:
        """Set the options that this call sets otherwise; needed after all that loads the optimizer's state."""
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            group.update(options)

    def restores(self, root: str) -> bool:
        """Whether what ranks have changed in an object of the call is restored; a later call gives some objects anew."""
        return self.is_same_call or (
            root in self._now.classes and self._before.classes.get(root) == self._now.classes[root]
        )

    def _add(self, sentence: str) -> None:
        if f"{sentence}." not in self.sentences:
            self.sentences.append(f"{sentence}.")

    def _is_alike(self, field: str, otherwise: str) -> bool:
        before, now = (getattr(one, field) for one in (self._before, self._now))
        if before != now and now:
            self._add(
                f"{field}: {', '.join(now)} here, and {', '.join(before) or 'none'} in the checkpoint. {otherwise}"
            )
        return bool(before == now)

    def _schedule(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The scheduler's state with this call's settings, such as `T_max`: what the earlier training has not changed."""
        before, now, schedule = self._before.schedule, self._now.schedule, dict(saved)
        for name in before.keys() & now.keys() & saved.keys() - {"base_lrs"}:
            if not _is_equal(now[name], before[name]) and _is_equal(before[name], saved[name]):
                schedule[name] = now[name]
                if not name.startswith("_"):
                    self._add(f"The scheduler's {name} is {now[name]} instead of {saved[name]}, as this call sets it")
        return schedule

    def _options(self, saved: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """The options of one parameter group that replace those of the checkpoint."""
        scheduled = set(_SCHEDULED if self._now.scheduler else ())
        if scheduled and "base_momentum" in {**saved, **now}:
            scheduled |= {"momentum", "betas"}
        wins = {}
        for name, value in now.items():
            is_set = name not in before or not _is_equal(value, before[name])
            is_other = name not in saved or not _is_equal(value, saved[name])
            if name in scheduled and self.has_scheduler:
                if is_set and is_other and name == "lr":
                    self._add(
                        f"lr stays {saved[name]}, and {value} of this call is not used: the scheduler's state decides"
                    )
            elif is_other and (is_set or name in scheduled):
                wins[name] = value
                if name in saved and name not in scheduled:
                    self._add(f"{name} is {value} instead of {saved[name]}, as this call sets it")
        return wins


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        one, other = torch.as_tensor(one, device="cpu"), torch.as_tensor(other, device="cpu")
        return torch.equal(one, other)
    return bool(one == other)
