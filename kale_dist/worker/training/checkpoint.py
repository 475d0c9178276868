"""Checkpoints: states of model, optimizer and scheduler in one file, as `torch.save` writes it.

A checkpoint is read with `weights_only`, which runs no code. So a value that is neither a tensor nor plain (a user's own object
in an optimizer's state) is left out, and the log names it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import mmap
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import KaleDistError, SnapshotDamagedError, StoreError
from kale_dist.wire import EventKind, JobFiles, blobs, context
from kale_dist.worker.training.data.dealing import generator_states, set_generator_states
from kale_dist.worker.training.given import Differences, Given
from kale_dist.worker.training.group import Group
from kale_dist.worker.training.result import load_state, on_cpu, state_of
from kale_dist.worker.training.trained import Progress, Trained

VERSION = 2
_ROOM = 1.2

_trained_in: int | None = None
"""The attempt in which a training of this process has looked for a checkpoint: what it writes is not the next one's to resume from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint."""

    epoch: int
    """Finished epochs."""
    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    """What a training needs beyond these states to resume (see `describe`)."""
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the callbacks: the best weights, and what the callbacks need to resume."""
    parts: str = ""
    """The folder of parts, as ranks see it, that has the values of model and optimizer; empty if this file has them."""
    left_out: tuple[str, ...] = ()
    """Places of the values that could not be kept, such as `optimizer.state.0.hook`."""


_LEFT_OUT = object()
"""Stands for a value that cannot be kept."""


def collect(contents: Checkpoint, copy: Callable[[int, Tensor], Tensor] | None = None) -> dict[str, Any]:
    """Return what a file holds: no objects but tensors and plain values, and the places of those left out as `left_out`.

    Args:
        contents: The states.
        copy: Copies a tensor, which gets a number, to the CPU; None: those of the CPU are not copied.
    """
    keeper = _Keeper(copy)
    names = ("model", "optimizer", "scheduler", "resume", "callbacks")
    tree = {name: keeper.keep(getattr(contents, name), name) for name in names}
    return {
        "version": VERSION,
        "epoch": contents.epoch,
        "left_out": tuple(keeper.left_out),
        "parts": contents.parts,
        **tree,
    }


def save(path: pathlib.Path, whole: dict[str, Any]) -> None:
    """Write what `collect` returned, replacing the file that is there by rename. That one stays as `older_checkpoint`.

    Raises:
        StoreError: The disk is full, or the folder cannot be written.
    """
    before = torch.serialization.get_crc32_options()
    # Sums take four times as long as writing.
    torch.serialization.set_crc32_options(False)
    older = JobFiles(path.parent).older_checkpoint
    try:
        if older.exists() and is_tight(path):
            older.unlink()
        try:
            _replace(path, older, whole)
        except (OSError, RuntimeError):
            # A quota, or the limit of a pod, cannot be seen before.
            if not older.exists():
                raise
            older.unlink()
            _replace(path, older, whole)
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


def _replace(path: pathlib.Path, older: pathlib.Path, whole: dict[str, Any]) -> None:
    with blobs.fresh(path) as temporary:
        temporary.touch(0o600)
        torch.save(whole, temporary)
        # Some file systems have no links.
        with contextlib.suppress(OSError):
            if path.exists():
                older.unlink(missing_ok=True)
                older.hardlink_to(path)


def is_tight(last: pathlib.Path) -> bool:
    """Whether the disk has less room than another checkpoint like the last takes, a file or a folder, and a fifth."""
    parts = list(last.iterdir()) if last.is_dir() else [last] if last.exists() else []
    found = shutil.disk_usage(last.parent).free < _ROOM * sum(part.stat().st_size for part in parts)
    if found:
        context.say_once(
            f"The disk of {last.parent} is almost full: only the last checkpoint is kept while one is written."
        )
    return found


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


class _Keeper:
    """Copies values without the parts that `weights_only` cannot read; `left_out` has the places of those."""

    def __init__(self, copy: Callable[[int, Tensor], Tensor] | None) -> None:
        self.left_out: list[str] = []
        self._copy = copy
        self._copies: dict[Any, Tensor] = {}

    def keep(self, value: Any, place: str) -> Any:
        """Return the copy; `_LEFT_OUT` where there is none."""
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            # Of another class (an enumeration), the text alone.
            return str.__str__(value)
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
            # Tied weights are written once; of a view, the part that it shows.
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if not value.numel() or key not in self._copies:
                self._copies[key] = self._tensor(value)
            return self._copies[key]
        if isinstance(value, dict):
            kept = {key: self.keep(item, f"{place}.{key}") for key, item in value.items()}
            self.left_out += [
                f"{place}.{key}" for key, item in kept.items() if type(key) not in (str, int) and item is not _LEFT_OUT
            ]
            return {key: item for key, item in kept.items() if type(key) in (str, int) and item is not _LEFT_OUT}
        if type(value) in (list, tuple):
            items = [self.keep(item, f"{place}.{i}") for i, item in enumerate(value)]
            return type(value)(None if item is _LEFT_OUT else item for item in items)
        self.left_out.append(place)
        return _LEFT_OUT

    def _tensor(self, value: Tensor) -> Tensor:
        if self._copy is not None:
            return self._copy(len(self._copies), value)
        whole = value.detach().cpu().as_subclass(Tensor)
        return whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole


def describe(
    group: Group,
    trained: Trained,
    given: Given,
    progress: Progress,
    scaler: Any,
    own_state: dict[str, Any],
    seed: int,
    steps: int,
    mine: dict[str, Any] | None = None,
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
    position = None if progress.position is None else {**progress.position, "ranks": [own for *_, own in ranks]}
    return {
        "given": {field.name: getattr(given, field.name) for field in dataclasses.fields(given)},
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
        batches = 0 if position is None else position["batches"]
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
        self.progress = Progress(
            epochs=found.epoch, values=dict(resume["values"]), stopped=is_stopped, position=resume["position"]
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


# -- random numbers --------------------------------------------------------------------------------------------------


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


def unpacked(states: dict[str, Any]) -> Any:
    """Return what `set_generator_states` takes."""
    version, numbers, gauss = states["random"]
    numpy_state = states["numpy"]
    if numpy_state is not None:
        import numpy as np

        name, keys, *rest = numpy_state
        numpy_state = (name, keys.numpy().astype(np.uint32), *rest)
    return (version, tuple(numbers.tolist()), gauss), numpy_state, states["torch"]


def set_random_states(device: torch.device, loaders: Iterable[Any], states: dict[str, Any]) -> None:
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
