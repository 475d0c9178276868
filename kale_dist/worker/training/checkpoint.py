"""Checkpoints: states of model, optimizer and scheduler in one file, as `torch.save` writes it.

A checkpoint is read with `weights_only`, which runs no code. So a value that is neither a tensor nor plain (a user's own object
in an optimizer's state) is left out, and the log names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import pathlib
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.snapshot.changes import Changes
from kale_dist.snapshot.identity import place_of
from kale_dist.wire import JobFiles, blobs, context, decode, fields_of
from kale_dist.wire.memory import free_memory
from kale_dist.worker.training.contents import Checkpoint, Given, Position, RankPosition, Resume
from kale_dist.worker.training.data.generators import GlobalStates

VERSION = 4

Stored: TypeAlias = dict[str, Any]
"""A checkpoint as its file holds it: dicts, lists, tensors and plain values."""

_OURS = (Resume, Given, Position, RankPosition, GlobalStates, Changes)
"""Classes whose objects a file holds as dicts of their fields."""

_ROOM = 1.2


_LEFT_OUT = object()
"""Stands for a value that cannot be kept."""


def collect(contents: Checkpoint, copy: Callable[[int, Tensor], Tensor] | None = None) -> Stored:
    """Return what a file holds: no objects but tensors and plain values, and the places of those left out as `left_out`.

    Args:
        contents: The states.
        copy: Copies a tensor, which gets a number, to the CPU; None: those of the CPU are not copied.
    """
    keeper = _Keeper(copy)
    kept = {name: keeper.keep(value, name) for name, value in fields_of(contents).items()}
    return {**kept, "version": VERSION, "left_out": tuple(keeper.left_out)}


def save(path: pathlib.Path, whole: Stored) -> None:
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


def _replace(path: pathlib.Path, older: pathlib.Path, whole: Stored) -> None:
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
        context.log_once(
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
        if (stored := found["resume"]) is not None:
            # Objects of the user's keep their lists.
            found["resume"] = dataclasses.replace(decode(Resume, stored), state=stored["state"])
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
        if value is None or type(value) in (bool, int, float, bytes):
            return value
        if isinstance(value, str):
            # Of another class (an enumeration), the text alone.
            return str.__str__(value)
        if isinstance(value, numbers.Real):
            # NumPy's numbers, too, such as a learning rate of an array.
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        if isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_quantized or is_lazy(value)):
            # Tied weights are written once; of a view, the part that it shows.
            key = place_of(value) or len(self._copies)
            if key not in self._copies:
                self._copies[key] = self._tensor(value)
            return self._copies[key]
        if isinstance(value, _OURS):
            value = fields_of(value)
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


class Writing:
    """Writes one file at a time; the next one waits for it."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long the last file took."""

    @property
    def is_busy(self) -> bool:
        """Whether a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def copy(self, number: int, value: Tensor) -> Tensor:
        """Copy a tensor to the CPU, into the memory of the copy with the same number before if it fits.

        Args:
            number: Of the tensor among those of the file.
            value: The tensor. No file may be being written.
        """
        kept = self._kept.get(number)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = self._kept[number] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return kept.copy_(value.detach())

    def write(self, contents: Checkpoint, write: Callable[[Stored], None], *, at_once: bool) -> tuple[str, ...]:
        """Write states, once the file before is written.

        Args:
            contents: The states. They may change as soon as this returns.
            write: Writes what `collect` makes of them.
            at_once: Whether to return only when the file is written.

        Returns:
            The places of values that are left out.

        Raises:
            StoreError: This file, or the one before, could not be written.
        """
        self.wait()
        if at_once or not self._has_room(contents):
            whole = collect(contents)
            write(whole)
        else:
            whole = collect(contents, self.copy)
            self._thread = threading.Thread(target=self._run, args=(write, whole), name="checkpoint", daemon=True)
            self._thread.start()
        return tuple(whole["left_out"])

    def _has_room(self, contents: Checkpoint) -> bool:
        """Whether the memory that is free is more than twice that of a copy."""
        states = contents.model, contents.optimizer, contents.callbacks
        return bool(self._kept) or 2 * sum(map(_bytes_of, states)) < free_memory()

    def _run(self, write: Callable[[Stored], None], whole: Stored) -> None:
        began = time.monotonic()
        try:
            write(whole)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        self.seconds = time.monotonic() - began

    def wait(self) -> None:
        """Wait for the file that is being written.

        Raises:
            StoreError: It could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _bytes_of(tree: Any) -> int:
    """The memory of the tensors in dicts, lists and tuples; an optimizer's own `state_dict` may have any form."""
    if isinstance(tree, Tensor):
        return 0 if is_lazy(tree) else tree.numel() * tree.element_size()
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_bytes_of, parts))
