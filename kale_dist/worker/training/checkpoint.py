"""Checkpoints: states of model, optimizer and scheduler in one file, as `torch.save` writes it.

A checkpoint is read with `weights_only`, which runs no code. So a value that is neither a tensor nor plain (a user's own object
in an optimizer's state) is left out, and the log names it.
"""

from __future__ import annotations

import collections
import dataclasses
import mmap
import pathlib
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.wire import EventKind, blobs, context
from kale_dist.worker.training.group import Group
from kale_dist.worker.training.result import load_state, on_cpu, state_of
from kale_dist.worker.training.trained import Progress, Trained

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint."""

    epoch: int
    """Finished epochs."""
    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    """What a training needs beyond these states to resume (see `describe`); None if the job cannot restart."""
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the callbacks: the best weights, and what the callbacks need to resume."""
    left_out: tuple[str, ...] = ()
    """Places of the values that could not be kept, such as `optimizer.state.0.hook`."""


_LEFT_OUT = object()
"""Stands for a value that cannot be kept."""


def write(path: pathlib.Path, contents: Checkpoint) -> tuple[str, ...]:
    """Write a checkpoint, replacing the one that is there by rename.

    Returns:
        The places of values that were left out.

    Raises:
        StoreError: The disk is full, or the folder cannot be written.
    """
    left_out: list[str] = []
    copies: dict[Any, Tensor] = {}
    names = ("model", "optimizer", "scheduler", "resume", "callbacks")
    tree = {name: _kept(getattr(contents, name), name, copies, left_out) for name in names}
    whole = {"version": VERSION, "epoch": contents.epoch, "left_out": tuple(left_out), **tree}
    before = torch.serialization.get_crc32_options()
    # Sums take four times as long as writing.
    torch.serialization.set_crc32_options(False)
    try:
        with blobs.fresh(path) as temporary:
            temporary.touch(0o600)
            torch.save(whole, temporary)
    # Torch's own writer raises RuntimeError when a disk is full.
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if not path.parent.is_dir():
            raise StoreError(f"{path} could not be written: {reason}.") from error
        free = shutil.disk_usage(path.parent).free
        raise StoreError(
            f"{path} could not be written; its disk has {free:,} bytes free ({reason}). Free some space, delete old jobs with "
            "`kale-dist delete`, or set XDG_STATE_HOME to a folder on a larger disk."
        ) from error
    finally:
        torch.serialization.set_crc32_options(before)
    return tuple(left_out)


def read(file: Any) -> Checkpoint:
    """Read a checkpoint from a path, or from memory that reads like a file.

    Tensors of a file are mapped copy-on-write: they take memory when they are used.

    Raises:
        SnapshotDamagedError: The file is not a checkpoint of this version.
        OSError: The file cannot be opened.
    """
    try:
        found = torch.load(file, weights_only=True, mmap=isinstance(file, pathlib.Path), map_location="cpu")
        if found.pop("version") != VERSION:
            raise ValueError("it is of another version")  # noqa: TRY301 - one place words the error
        return Checkpoint(**found)
    # What torch raises for a damaged file depends on where the damage is.
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise SnapshotDamagedError(f"{file} is not a checkpoint: {str(error).partition(chr(10))[0]}") from error


def _kept(value: Any, place: str, copies: dict[Any, Tensor], left_out: list[str]) -> Any:
    """Copy a value without the parts that `weights_only` cannot read; add the places of those to `left_out`."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        # Of another class (an enumeration), the text alone.
        return str.__str__(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        # Tied weights are written once; of a view, the part that it shows.
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or key not in copies:
            whole = value.detach().cpu().as_subclass(Tensor)
            is_part = whole.untyped_storage().nbytes() > whole.nbytes
            copies[key] = whole.clone() if is_part else whole
        return copies[key]
    if isinstance(value, dict):
        kept = {key: _kept(item, f"{place}.{key}", copies, left_out) for key, item in value.items()}
        left_out += [
            f"{place}.{key}" for key, item in kept.items() if type(key) not in (str, int) and item is not _LEFT_OUT
        ]
        return {key: item for key, item in kept.items() if type(key) in (str, int) and item is not _LEFT_OUT}
    if type(value) in (list, tuple):
        items = [_kept(item, f"{place}.{i}", copies, left_out) for i, item in enumerate(value)]
        return type(value)(None if item is _LEFT_OUT else item for item in items)
    left_out.append(place)
    return _LEFT_OUT


def describe(
    group: Group, trained: Trained, progress: Progress, scaler: Any, own_state: dict[str, Any]
) -> dict[str, Any]:
    """Collect what `Checkpoint.resume` holds. All ranks have to call this.

    Args:
        group: The ranks.
        trained: The objects that are trained.
        progress: How far the training is.
        scaler: The loss scaler of the ready-made step, or None.
        own_state: The `own_state` of the strategy in this rank.
    """
    # On the CPU: unpickled, a tensor of a GPU would be on that GPU in every rank.
    ranks = group.gather((random_states(group.device, trained.loaders), on_cpu(own_state)))
    return {
        "random": [states for states, _ in ranks],
        "strategy": [state for _, state in ranks],
        "criterion": trained.criterion.state_dict() if isinstance(trained.criterion, torch.nn.Module) else None,
        "evaluating": [name for name, module in trained.model.named_modules() if not module.training],
        "frozen": [name for name, parameter in trained.model.named_parameters() if not parameter.requires_grad],
        "state": [state_of(value) for value in trained.state],
        "scaler": None if scaler is None else scaler.state_dict(),
        "values": dict(progress.values),
        "stopped": progress.stopped,
    }


class Resumption:
    """Resumes from the last checkpoint of an earlier attempt. All ranks construct it together.

    Args:
        group: The ranks.
        trained: The objects that are trained, moved to the rank's device and otherwise as at the call.
    """

    def __init__(self, group: Group, trained: Trained) -> None:
        self.progress = Progress()
        """How far the training is; nothing is done yet where there is no checkpoint to resume from."""
        self.callbacks: dict[str, Any] = {}
        """`Checkpoint.callbacks`."""
        self._group = group
        self._trained = trained
        self._resume: dict[str, Any] | None = None
        place = context.context()
        # Also at the first attempt: in new pods, after others were lost or suspended, attempts count from 0 again, and
        # there may be no restart left.
        found = _shared(group, self._usable() if group.rank == 0 else None)
        if found is not None:
            self._take(found)
        if group.rank == 0:
            context.emit(EventKind.RESUMED, epoch=self.progress.epochs)
        epochs = self.progress.epochs
        what = f"resumes after epoch {epochs}, from the last checkpoint" if epochs else "starts from the beginning"
        if place.attempt or found is not None:
            group.say(f"{f'Attempt {place.attempt + 1}' if place.attempt else 'New run'}: the training {what}.")

    def restore_rest(self, scaler: Any, load_own_state: Callable[[dict[str, Any]], None]) -> None:
        """Restore the strategy's state, the scaler, and last the generators, so that nothing draws from them in between.

        Args:
            scaler: The loss scaler of the ready-made step, or None.
            load_own_state: The strategy's.
        """
        if self._resume is None:
            return
        rank = self._group.rank
        if rank < len(self._resume["strategy"]) and (own := self._resume["strategy"][rank]):
            load_own_state(own)
        if scaler is not None and self._resume["scaler"] is not None:
            scaler.load_state_dict(self._resume["scaler"])
        # A rank that was lost before the checkpoint, while others carried on, starts with new generators.
        if rank < len(self._resume["random"]):
            set_random_states(self._group.device, self._trained.loaders, self._resume["random"][rank])

    def _usable(self) -> pathlib.Path | None:
        """Rank 0's path of the last checkpoint, if it can be read and fits the objects of the call."""
        files = context.context().files
        if files is None or not files.checkpoint.exists():
            return None
        try:
            found = read(files.checkpoint)
        except (SnapshotDamagedError, OSError, ValueError) as error:
            self._group.say(f"The last checkpoint cannot be read ({error}).")
            return None
        problem = _misfit(found, self._trained)
        if problem:
            self._group.say(f"The last checkpoint does not fit the objects as they were at the call: {problem}.")
            return None
        return files.checkpoint

    def _take(self, found: Checkpoint) -> None:
        trained, resume = self._trained, found.resume or {}
        _load_module(trained.model, found.model)
        if isinstance(trained.criterion, torch.nn.Module):
            _load_module(trained.criterion, resume["criterion"])
        trained.optimizer.load_state_dict(found.optimizer or {})
        if trained.scheduler is not None and found.scheduler is not None:
            trained.scheduler.load_state_dict(_of_kinds(found.scheduler, trained.scheduler.state_dict()))
        for value, state in zip(trained.state, resume["state"], strict=False):
            # Sets cannot be kept: `write` left them out, and the log named them.
            if state is not None:
                load_state(value, state)
        # Steps change these too: one that never calls model.train() continues in the mode that the evaluation has left.
        for name, module in trained.model.named_modules():
            module.training = name not in resume["evaluating"]
        for name, parameter in trained.model.named_parameters():
            parameter.requires_grad_(name not in resume["frozen"])
        self.progress = Progress(epochs=found.epoch, values=dict(resume["values"]), stopped=bool(resume["stopped"]))
        self.callbacks = found.callbacks
        self._resume = resume


def _misfit(found: Checkpoint, trained: Trained) -> str:
    """Say why a training cannot resume from a checkpoint, as the end of a sentence; empty if it can."""
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


# -- random numbers --------------------------------------------------------------------------------------------------


def random_states(device: torch.device, loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the states of this rank's generators: of random, torch, NumPy if it is imported, and the loaders."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "random": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": None,
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest)
    return states


def set_random_states(device: torch.device, loaders: Iterable[Any], states: dict[str, Any]) -> None:
    """Set this rank's generators to what `random_states` returned."""
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
    """Yield the generators of loaders and their samplers, each once."""
    seen: set[int] = set()
    for data in loaders:
        batches = data.batch_sampler
        for part in (data, data.sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator
