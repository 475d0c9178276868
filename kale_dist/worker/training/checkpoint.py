"""Checkpoints: states of model, optimizer and scheduler in one file, as `torch.save` writes it.

A checkpoint is read with `weights_only`, which runs no code. So a value that is neither a tensor nor plain (a user's own object
in an optimizer's state) is left out, and the log names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.wire import JobFiles, blobs, context

VERSION = 3
_ROOM = 1.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint."""

    epoch: int
    """Finished epochs."""
    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    """What a training needs beyond these states to resume (see `resumption.describe`)."""
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
