"""Resumes a training from the checkpoint of an earlier attempt or of an earlier job."""

from __future__ import annotations

import collections
import mmap
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from kale_dist.errors import KaleDistError, SnapshotDamagedError
from kale_dist.snapshot.changes import Arrived, load_state_dict, put
from kale_dist.wire import blobs, context, events
from kale_dist.worker.training.checkpoint import read
from kale_dist.worker.training.contents import Checkpoint, Given, Progress, Resume
from kale_dist.worker.training.data.generators import RandomStates
from kale_dist.worker.training.differences import Differences, misfit
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.result import load_state
from kale_dist.worker.training.trained import Trained

_trained_in: int | None = None
"""The attempt in which a training of this process has looked for a checkpoint: what it writes is not the next one's to resume from."""


class Resumption:
    """Resumes from the last checkpoint of an earlier attempt, or from that of an earlier job. All ranks construct it together.

    Args:
        group: The ranks.
        trained: The objects that are trained, moved to the rank's device and otherwise as at the call.
        given: What the call sets.
        arrived: The objects of which a checkpoint holds what ranks have changed.
        is_in_parts: Whether checkpoints are folders of parts.
    """

    def __init__(self, group: Group, trained: Trained, given: Given, arrived: Arrived, *, is_in_parts: bool) -> None:
        self._group, self._trained, self._given, self._is_in_parts = group, trained, given, is_in_parts
        self._arrived = arrived
        place = context.context()
        # Also at the first attempt: a job that was suspended counts from 0 again, and there may be no restart left.
        path, problem = self._usable() if group.rank == 0 else (None, "")
        if problem := group.send(problem):
            raise KaleDistError(problem)
        is_earlier = bool(group.send(path is not None and path == place.resume))
        found = _shared(group, path)
        self.found = found or Checkpoint(epoch=0, model={})
        """The checkpoint; an empty one where there is none to resume from."""
        self.before = self.found.resume or Resume(given=given)
        """All that the checkpoint holds besides the states; where there is none, what this call sets."""
        self.differences = Differences(self.found, given)
        self.progress = Progress(
            epochs=self.found.epoch,
            values=dict(self.before.values),
            # A later call is made to train on, also where the earlier training was stopped.
            stopped=self.before.stopped and not is_earlier,
            position=self.before.position,
        )
        """How far the training is."""
        if found is not None:
            self._load()
        epochs, position = self.progress.epochs, self.progress.position
        batches = 0 if position is None else position.batches
        if group.rank == 0:
            context.emit(events.Resumed(epoch=epochs, batches=batches))
        what = f"resumes after epoch {epochs}, from the last checkpoint" if epochs else "starts from the beginning"
        if batches:
            what = f"resumes in epoch {epochs + 1}, after {batches:,} batches, from the last checkpoint"
        if is_earlier:
            what += " of the earlier job"
        if place.attempt or found is not None:
            who = f"Attempt {place.attempt + 1}" if place.attempt else "New job" if is_earlier else "New run"
            group.log(f"{who}: the training {what}.")
        for sentence in self.differences.sentences:
            group.log(sentence)

    def restore_rest(self, scaler: Any, load_own_state: Callable[[dict[str, Any]], None]) -> None:
        """Restore the strategy's state, the scaler, and last the generators, so that nothing draws from them in between.

        Args:
            scaler: The loss scaler of the ready-made step, or None.
            load_own_state: The strategy's.
        """
        before, rank = self.before, self._group.rank
        if before.strategy and self.differences.has_ranks and (own := before.strategy[rank]):
            load_own_state(own)
            self.differences.apply(self._trained.optimizer)
        if scaler is not None and before.scaler is not None:
            scaler.load_state_dict(before.scaler)
        # A rank that was lost before the checkpoint, while others carried on, starts with new generators.
        if rank < len(before.random):
            before.random[rank].restore(self._group.device, self._trained.loaders)

    @property
    def seed(self) -> int | None:
        """The number from which the seeds of this rank's workers are made; None for a new one."""
        return self.before.seeds[self._group.rank] if self._group.rank < len(self.before.seeds) else None

    @property
    def random(self) -> RandomStates:
        """This rank's generators at the checkpoint."""
        return self.before.random[self._group.rank]

    @property
    def callbacks(self) -> dict[str, Any]:
        """The part of `Checkpoint.callbacks` that is restored."""
        kept = self.found.callbacks if self.differences.has_callbacks else {}
        return {name: one for name, one in kept.items() if name != "average" or self.differences.has_average}

    def load_again(self) -> None:
        """Restore what a step may set before its loop: it did so before the checkpoint, too."""
        saved = (self.found.optimizer or {}).get("param_groups", ()) if self.differences.has_optimizer else ()
        for options, before in zip(self._trained.optimizer.param_groups, saved, strict=False):
            options.update({name: value for name, value in before.items() if name != "params"})
        self.differences.apply(self._trained.optimizer)
        self._load_rest()

    def _usable(self) -> tuple[pathlib.Path | None, str]:
        """The newest checkpoint that is whole, of this job or of the earlier one, in rank 0; or why none of those there are can be used."""
        global _trained_in
        place = context.context()
        problems: list[str] = []
        is_later, _trained_in = _trained_in == place.attempt, place.attempt
        files = None if is_later else place.files
        own = () if files is None else (files.checkpoint, files.older_checkpoint)
        # A rank that was killed while it wrote has left a file as large as a checkpoint.
        for unfinished in () if files is None else files.folder.glob(f".{files.checkpoint.name}.*.part"):
            unfinished.unlink(missing_ok=True)
        for path in (*own, place.resume):
            try:
                if path is None or (path in own and not path.exists()):
                    continue
                problem = misfit(read(path), self._trained, self._given, is_in_parts=self._is_in_parts)
                problem = problem and f"{path} does not fit the objects as they were at the call: {problem}"
            except (SnapshotDamagedError, OSError, ValueError) as error:
                problem = f"{path} cannot be read ({error})"
            if not problem:
                for sentence in problems:
                    self._group.log(f"The last checkpoint is left out: {sentence}.")
                return path, ""
            problems.append(problem)
        if not problems:
            return None, ""
        remedy = "Mend that, or make a call without resume_from, which begins at the beginning"
        return None, f"The training cannot resume: {'; '.join(problems)}. {remedy}"

    def _load(self) -> None:
        """Restore what the checkpoint holds, but for what `restore_rest` does."""
        trained, found = self._trained, self.found
        if not found.parts:
            _load_module(trained.model, found.model)
        if isinstance(trained.criterion, torch.nn.Module):
            _load_module(trained.criterion, self.before.criterion or {})
        if self.differences.has_optimizer:
            load_state_dict(trained.optimizer, found.optimizer or {})
            self.differences.apply(trained.optimizer)
        self._load_rest()

    def _load_rest(self) -> None:
        trained, before, differences = self._trained, self.before, self.differences
        if trained.scheduler is not None and differences.has_scheduler:
            trained.scheduler.load_state_dict(_of_kinds(differences.schedule, trained.scheduler.state_dict()))
        for problem in put(self._arrived.roots(), before.changes, differences.restores, self._arrived):
            self._group.log(f"A part of the checkpoint was left out: {problem}.")
        for value, state in zip(trained.state, before.state if differences.has_state else (), strict=False):
            # Sets cannot be kept: `collect` left them out, and the log named them.
            if state is not None:
                load_state(value, state)
        # Steps change these too: one that never calls model.train() continues in the mode that the evaluation has left.
        for name, module in trained.model.named_modules():
            module.training = name not in before.evaluating
        for name, parameter in trained.model.named_parameters():
            if differences.has_frozen:
                parameter.requires_grad_(name not in before.frozen)


def _load_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    full: Any = collections.OrderedDict(state)
    # Versions of its submodules' states: a checkpoint of this very code does not need them repeated.
    full._metadata = getattr(module.state_dict(), "_metadata", None)  # noqa: SLF001 - load_state_dict reads it
    module.load_state_dict(full)


def _of_kinds(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Give the dicts of a scheduler's state the classes that they had before they were written (such as Counter)."""
    kinds = {name: type(value) for name, value in like.items() if isinstance(value, dict)}
    return {name: kinds[name](value) if name in kinds else value for name, value in state.items()}


def _shared(group: Group, path: pathlib.Path | None) -> Checkpoint | None:
    """Send rank 0's checkpoint to every rank; returns None where rank 0 has none."""
    data = blobs.map_file(path) if path is not None else None
    size = group.send(None if data is None else len(data))
    if size is None:
        return None
    if path is not None and data is not None:
        group.send_tensor(torch.frombuffer(data, dtype=torch.uint8))
        return read(path)
    received = mmap.mmap(-1, size)
    group.send_tensor(torch.frombuffer(received, dtype=torch.uint8))
    return read(received)
