"""What a training needs beyond the states of a checkpoint to resume from it, and the resumption itself."""

from __future__ import annotations

import collections
import dataclasses
import mmap
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import KaleDistError, SnapshotDamagedError
from kale_dist.wire import EventKind, blobs, context, fields_of
from kale_dist.worker.training.checkpoint import Checkpoint, read
from kale_dist.worker.training.data.generators import random_states, set_random_states
from kale_dist.worker.training.given import Differences, Given
from kale_dist.worker.training.group import Group
from kale_dist.worker.training.position import Position, RankPosition
from kale_dist.worker.training.result import load_state, on_cpu, state_of
from kale_dist.worker.training.trained import Progress, Trained

_trained_in: int | None = None
"""The attempt in which a training of this process has looked for a checkpoint: what it writes is not the next one's to resume from."""


def describe(
    group: Group,
    trained: Trained,
    given: Given,
    progress: Progress,
    scaler: Any,
    own_state: dict[str, Any],
    seed: int,
    steps: int,
    mine: RankPosition | None = None,
) -> dict[str, Any]:
    """Collect what `Checkpoint.resume` holds, in rank 0. All ranks have to call this.

    Args:
        group: The ranks.
        trained: The objects that are trained.
        given: What the call sets.
        progress: How far the training is; within an epoch with its position.
        scaler: The loss scaler of the ready-made step, or None.
        own_state: The `own_state` of the strategy in this rank.
        seed: From which the seeds of this rank's workers are made.
        steps: Real steps of the optimizer so far.
        mine: This rank's part of the position; None between epochs.
    """
    # On the CPU: unpickled, a tensor of a GPU would be on that GPU in rank 0.
    own = random_states(group.device, trained.loaders), on_cpu(own_state), seed, mine
    ranks = group.gather(own, in_first=True)
    place = None if mine is None else progress.position
    position = None if place is None else dataclasses.replace(place, ranks=tuple(own for *_, own in ranks)).plain()
    return {
        "given": fields_of(given),
        "random": [states for states, *_ in ranks],
        "strategy": [state for _, state, *_ in ranks],
        "seeds": [seed for *_, seed, _ in ranks],
        "steps": steps,
        "position": position,
        "criterion": trained.criterion.state_dict() if isinstance(trained.criterion, torch.nn.Module) else None,
        "evaluating": [name for name, module in trained.model.named_modules() if not module.training],
        "frozen": [name for name, parameter in trained.model.named_parameters() if not parameter.requires_grad],
        "state": [state_of(value) for value in trained.state],
        "scaler": None if scaler is None else scaler.state_dict(),
        "values": dict(progress.values),
        "stopped": progress.stopped,
    }


class Resumption:
    """Resumes from the last checkpoint of an earlier attempt, or from that of an earlier job. All ranks construct it together.

    Args:
        group: The ranks.
        trained: The objects that are trained, moved to the rank's device and otherwise as at the call.
        given: What the call sets.
        is_in_parts: Whether checkpoints are folders of parts.
    """

    def __init__(self, group: Group, trained: Trained, given: Given, *, is_in_parts: bool) -> None:
        self.progress = Progress()
        """How far the training is; nothing is done yet where there is no checkpoint to resume from."""
        self.callbacks: dict[str, Any] = {}
        """`Checkpoint.callbacks`."""
        self._group = group
        self._trained = trained
        self._given = given
        self._is_in_parts = is_in_parts
        self.folder = ""
        """Of the parts that the weights and the optimizer's state are in, which are still to be read; empty for none."""
        self._differences: Differences | None = None
        self._resume: dict[str, Any] | None = None
        self._found: Checkpoint | None = None
        place = context.context()
        # Also at the first attempt: in new pods, after others were lost or suspended, attempts count from 0 again, and
        # there may be no restart left.
        path, problem = self._usable() if group.rank == 0 else (None, "")
        if problem := group.send(problem):
            raise KaleDistError(problem)
        is_earlier = bool(group.send(path is not None and path == place.resume))
        found = _shared(group, path)
        sentences = [] if found is None else self._take(found, is_earlier=is_earlier)
        epochs, position = self.progress.epochs, self.progress.position
        batches = 0 if position is None else position.batches
        if group.rank == 0:
            context.emit(EventKind.RESUMED, epoch=epochs, batches=batches)
        what = f"resumes after epoch {epochs}, from the last checkpoint" if epochs else "starts from the beginning"
        if batches:
            what = f"resumes in epoch {epochs + 1}, after {batches:,} batches, from the last checkpoint"
        if is_earlier:
            what += " of the earlier job"
        if place.attempt or found is not None:
            who = f"Attempt {place.attempt + 1}" if place.attempt else "New job" if is_earlier else "New run"
            group.say(f"{who}: the training {what}.")
        for sentence in sentences:
            group.say(sentence)

    def restore_rest(self, scaler: Any, load_own_state: Callable[[dict[str, Any]], None]) -> None:
        """Restore the strategy's state, the scaler, and last the generators, so that nothing draws from them in between.

        Args:
            scaler: The loss scaler of the ready-made step, or None.
            load_own_state: The strategy's.
        """
        if self._resume is None or self._differences is None:
            return
        rank = self._group.rank
        if self._differences.has_ranks and (own := self._resume["strategy"][rank]):
            load_own_state(own)
            self._differences.apply(self._trained.optimizer)
        if scaler is not None and self._resume["scaler"] is not None:
            scaler.load_state_dict(self._resume["scaler"])
        # A rank that was lost before the checkpoint, while others carried on, starts with new generators.
        if rank < len(self._resume["random"]):
            set_random_states(self._group.device, self._trained.loaders, self._resume["random"][rank])

    @property
    def steps(self) -> int:
        """Real steps of the optimizer before."""
        return 0 if self._resume is None else int(self._resume["steps"])

    @property
    def seed(self) -> int | None:
        """From which the seeds of this rank's workers are made; None for a new one."""
        seeds = [] if self._resume is None else self._resume["seeds"]
        return int(seeds[self._group.rank]) if self._group.rank < len(seeds) else None

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state is restored."""
        return self._differences is not None and self._differences.has_optimizer

    @property
    def has_same_batches(self) -> bool:
        """Whether a step takes as much data as before."""
        return self._resume is not None and self._resume["given"]["batch"] == self._given.batch

    @property
    def has_same_ranks(self) -> bool:
        """Whether there are as many ranks as before, with the same strategy."""
        return self._differences is not None and self._differences.has_same_ranks

    @property
    def random(self) -> dict[str, Any]:
        """This rank's generators at the checkpoint."""
        found: dict[str, Any] = (self._resume or {})["random"][self._group.rank]
        return found

    def load_again(self) -> None:
        """Restore what a step may set before its loop: it did so before the checkpoint, too."""
        if self._found is None or self._differences is None:
            return
        saved = (self._found.optimizer or {}).get("param_groups", ()) if self._differences.has_optimizer else ()
        for options, before in zip(self._trained.optimizer.param_groups, saved, strict=False):
            options.update({name: value for name, value in before.items() if name != "params"})
        self._differences.apply(self._trained.optimizer)
        self._load_rest(self._differences)

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
                    self._group.say(f"The last checkpoint is left out: {sentence}.")
                return path, ""
            problems.append(problem)
        if not problems:
            return None, ""
        remedy = "Mend that, or make a call without resume_from, which begins at the beginning"
        return None, f"The training cannot resume: {'; '.join(problems)}. {remedy}"

    def _take(self, found: Checkpoint, *, is_earlier: bool) -> list[str]:
        """Restore what a checkpoint holds; returns what does not continue as before, as sentences."""
        trained, resume = self._trained, found.resume or {}
        differences = Differences(found, self._given)
        self.folder = found.parts
        if not found.parts:
            _load_module(trained.model, found.model)
        if isinstance(trained.criterion, torch.nn.Module):
            _load_module(trained.criterion, resume["criterion"] or {})
        if differences.has_optimizer:
            trained.optimizer.load_state_dict(found.optimizer or {})
            differences.apply(trained.optimizer)
        # A later call is made to train on, also where the earlier training was stopped.
        is_stopped = bool(resume["stopped"]) and not is_earlier
        position = None if resume["position"] is None else Position.of(resume["position"])
        self.progress = Progress(
            epochs=found.epoch, values=dict(resume["values"]), stopped=is_stopped, position=position
        )
        self.callbacks = dict(found.callbacks) if differences.has_callbacks else {}
        if not differences.has_average:
            self.callbacks.pop("average", None)
        self._resume, self._found, self._differences = resume, found, differences
        self._load_rest(differences)
        return differences.sentences

    def _load_rest(self, differences: Differences) -> None:
        trained, resume = self._trained, self._resume or {}
        if trained.scheduler is not None and differences.has_scheduler:
            trained.scheduler.load_state_dict(_of_kinds(differences.schedule, trained.scheduler.state_dict()))
        for value, state in zip(trained.state, resume["state"] if differences.has_state else (), strict=False):
            # Sets cannot be kept: `write` left them out, and the log named them.
            if state is not None:
                load_state(value, state)
        # Steps change these too: one that never calls model.train() continues in the mode that the evaluation has left.
        for name, module in trained.model.named_modules():
            module.training = name not in resume["evaluating"]
        for name, parameter in trained.model.named_parameters():
            if differences.has_frozen:
                parameter.requires_grad_(name not in resume["frozen"])


def misfit(found: Checkpoint, trained: Trained, given: Given, *, is_in_parts: bool = False) -> str:
    """Say why a training cannot resume from a checkpoint, as the end of a sentence; empty if it can.

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
        modules.append(("criterion", trained.criterion, found.resume["criterion"] or {}))
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
    if counts != saved_counts and tuple(found.resume["given"]["optimizer"]) == given.optimizer:
        return f"the optimizer has other parameters: {_count(counts)}, and {_count(saved_counts)} in the checkpoint"
    return ""


def _shape(shape: Any) -> str:
    return str(tuple(shape or ()))


def _count(groups: list[int]) -> str:
    return f"{' + '.join(map(str, groups))} in {len(groups)} groups" if len(groups) > 1 else f"{sum(groups)}"


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
