"""Writes checkpoints beside the training: states are copied into memory that is kept, and a thread writes the copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kale_dist.wire.memory import free_memory
from kale_dist.worker.training import checkpoint
from kale_dist.worker.training.checkpoint import Checkpoint


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

    def write(self, contents: Checkpoint, write: Callable[[dict[str, Any]], None], *, at_once: bool) -> tuple[str, ...]:
        """Write states, once the file before is written.

        Args:
            contents: The states. They may change as soon as this returns.
            write: Writes what `checkpoint.collect` makes of them.
            at_once: Whether to return only when the file is written.

        Returns:
            The places of values that are left out.

        Raises:
            StoreError: This file, or the one before, could not be written.
        """
        self.wait()
        if at_once or not self._has_room(contents):
            whole = checkpoint.collect(contents)
            write(whole)
        else:
            whole = checkpoint.collect(contents, self.copy)
            self._thread = threading.Thread(target=self._run, args=(write, whole), name="checkpoint", daemon=True)
            self._thread.start()
        left_out: tuple[str, ...] = whole["left_out"]
        return left_out

    def _has_room(self, contents: Checkpoint) -> bool:
        """Whether the memory that is free is more than twice that of a copy."""
        states = contents.model, contents.optimizer, contents.callbacks
        return bool(self._kept) or 2 * sum(map(_bytes_of, states)) < free_memory()

    def _run(self, write: Callable[[dict[str, Any]], None], whole: dict[str, Any]) -> None:
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
        return tree.numel() * tree.element_size()
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(_bytes_of, parts))
