"""Going on after a lost rank: what a checkpoint holds beyond states, and how all ranks take up the last one.

The file lies with rank 0's agent. Rank 0 reads it and sends it to the others, wherever they run.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kale_dist.contract import EventKind
from kale_dist.errors import SnapshotDamagedError
from kale_dist.runtime import context
from kale_dist.training import checkpoint
from kale_dist.training.checkpoint import Checkpoint
from kale_dist.training.group import Group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training is."""

    epochs: int = 0
    """Finished epochs."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last of them."""
    stopped: bool = False
    """Whether a step has asked for the end in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The objects whose states a checkpoint holds."""

    model: torch.nn.Module
    criterion: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loaders: tuple[Any, ...]
    """Their generators, and those of their samplers, go on where they were."""


def is_wanted() -> bool:
    """Whether this job may be started again, so that its checkpoints have to hold all that a training goes on from."""
    return context.context().max_restarts > 0


def describe(group: Group, trained: Trained, progress: Progress, scaler: Any) -> dict[str, Any]:
    """What `Checkpoint.resume` holds. All ranks have to call this.

    Args:
        group: The ranks.
        trained: What is trained.
        progress: How far it is.
        scaler: The loss scaler of the ready-made step, or None.
    """
    return {
        "random": group.gather(_random_states(group.device, trained.loaders)),
        "criterion": trained.criterion.state_dict() if isinstance(trained.criterion, torch.nn.Module) else None,
        "evaluating": [name for name, module in trained.model.named_modules() if not module.training],
        "frozen": [name for name, parameter in trained.model.named_parameters() if not parameter.requires_grad],
        "scaler": None if scaler is None else scaler.state_dict(),
        "values": dict(progress.values),
        "stopped": progress.stopped,
    }


class Resumption:
    """The last checkpoint of an earlier attempt, in every rank. All ranks have to make it and call it together.

    Args:
        group: The ranks.
        trained: What is trained, moved to the rank's device and otherwise as at the start.
    """

    def __init__(self, group: Group, trained: Trained) -> None:
        self.progress = Progress()
        """How far the training is; nothing is done yet where there is no checkpoint to go on from."""
        self._group = group
        self._trained = trained
        self._resume: dict[str, Any] | None = None
        place = context.context()
        if not place.attempt:
            return
        # Without it, checkpoints hold less than is needed to go on; a suspended job is begun again all the same.
        found = _send(group, self._read() if group.rank == 0 else None) if is_wanted() else None
        if found is not None:
            self._take(found)
        if group.rank == 0:
            context.emit(EventKind.RESUMED, epoch=self.progress.epochs)
        epochs = self.progress.epochs
        what = f"goes on behind epoch {epochs}, from the last checkpoint" if epochs else "begins anew"
        group.say(f"Attempt {place.attempt + 1}: the training {what}.")

    def restore_rest(self, scaler: Any) -> None:
        """Set what comes last: the scaler, then the generators of random numbers, from which nobody may draw before."""
        if self._resume is None:
            return
        if scaler is not None and self._resume["scaler"] is not None:
            scaler.load_state_dict(self._resume["scaler"])
        _set_random_states(self._group.device, self._trained.loaders, self._resume["random"][self._group.rank])

    def _read(self) -> Checkpoint | None:
        """The last checkpoint, in rank 0, if there is one that fits."""
        files = context.context().files
        if files is None or not files.checkpoint.exists():
            return None
        try:
            found = checkpoint.read(files.checkpoint)
        except (SnapshotDamagedError, OSError, ValueError) as error:
            self._group.say(f"The last checkpoint cannot be read ({error}).")
            return None
        problem = _misfit(found, self._trained)
        if problem:
            self._group.say(f"The last checkpoint is of no use for the objects as they were at the call: {problem}.")
            return None
        return found

    def _take(self, found: Checkpoint) -> None:
        trained, resume = self._trained, found.resume or {}
        _load_module(trained.model, found.model)
        if isinstance(trained.criterion, torch.nn.Module):
            _load_module(trained.criterion, resume["criterion"])
        trained.optimizer.load_state_dict(found.optimizer or {})
        if trained.scheduler is not None and found.scheduler is not None:
            trained.scheduler.load_state_dict(_of_kinds(found.scheduler, trained.scheduler.state_dict()))
        # Steps change these too: one that never calls model.train() goes on in the mode that the evaluation has left.
        for name, module in trained.model.named_modules():
            module.training = name not in resume["evaluating"]
        for name, parameter in trained.model.named_parameters():
            parameter.requires_grad_(name not in resume["frozen"])
        self.progress = Progress(epochs=found.epoch, values=dict(resume["values"]), stopped=bool(resume["stopped"]))
        self._resume = resume


def _misfit(found: Checkpoint, trained: Trained) -> str:
    """Why a checkpoint cannot be taken up, as the end of a sentence; empty if it can."""
    if found.resume is None:
        return "it holds only what a result needs"
    modules = [("model", trained.model, found.model)]
    if isinstance(trained.criterion, torch.nn.Module):
        modules.append(("criterion", trained.criterion, found.resume["criterion"]))
    for what, module, state in modules:
        before = module.state_dict(keep_vars=True)
        if before.keys() != state.keys():
            name = min(before.keys() ^ state.keys())
            return f"{name} of the {what} was {'added' if name in state else 'left out or removed'} later"
        for name, value in before.items():
            is_tensor = isinstance(value, Tensor) and not torch.nn.parameter.is_lazy(value)
            if is_tensor and value.shape != getattr(state[name], "shape", None):
                return f"{name} of the {what} changed its shape later"
    groups = trained.optimizer.param_groups
    saved = (found.optimizer or {}).get("param_groups", [])
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        return "the optimizer got other parameters later"
    return ""


def _load_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    full: Any = collections.OrderedDict(state)
    # Versions of its submodules' states: a checkpoint of this very code does not need them repeated.
    full._metadata = getattr(module.state_dict(), "_metadata", None)  # noqa: SLF001 - load_state_dict reads it
    module.load_state_dict(full)


def _of_kinds(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """A state whose dicts are of the classes that they were of before (a Counter, for one)."""
    kinds = {name: type(value) for name, value in like.items() if isinstance(value, dict)}
    return {name: kinds[name](value) if name in kinds else value for name, value in state.items()}


# -- to all ranks ----------------------------------------------------------------------------------------------------


def _send(group: Group, found: Checkpoint | None) -> Checkpoint | None:
    """Rank 0's checkpoint in every rank."""
    if group.is_alone:
        return found
    tensors: list[Tensor] = []
    head = None
    if found is not None:
        tree = {
            field.name: _without_tensors(getattr(found, field.name), tensors) for field in dataclasses.fields(found)
        }
        head = (tree, [(tensor.shape, tensor.dtype) for tensor in tensors])
    head = group.send(head)
    if head is None:
        return None
    tree, forms = head
    if group.rank:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
    for tensor in tensors:
        if tensor.numel():
            group.send_tensor(tensor.reshape(-1).view(torch.uint8))
    return found if group.rank == 0 else Checkpoint(**_with_tensors(tree, tensors))


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor that is sent apart."""

    number: int


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value


# -- random numbers --------------------------------------------------------------------------------------------------


def _random_states(device: torch.device, loaders: Iterable[Any]) -> dict[str, Any]:
    """Where this rank's generators are: of random, torch, NumPy if it is loaded, and of the loaders."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "random": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": None,
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return states


def _set_random_states(device: torch.device, loaders: Iterable[Any], states: dict[str, Any]) -> None:
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if states["numpy"] is not None:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - the one that code shares
    for generator, state in zip(_generators(loaders), states["loaders"], strict=False):
        generator.set_state(state)


def _generators(loaders: Iterable[Any]) -> Iterator[torch.Generator]:
    """The loaders' own generators of random numbers, each once."""
    seen: set[int] = set()
    for data in loaders:
        batches = data.batch_sampler
        for part in (data, data.sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator
