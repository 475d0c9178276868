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
        self._kept: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long the last file took."""

    @property
    def is_busy(self) -> bool:
        """Whether a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def copy(self, place: str, value: Tensor) -> Tensor:
        """Copy a tensor to the CPU, into the memory of the copy from the same place before if it fits.

        Args:
            place: Names the tensor.
            value: The tensor. No file may be being written.
        """
        kept = self._kept.get(place)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = self._kept[place] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
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
        """Whether a copy of the weights and the optimizer fits into twice the memory that is free."""
        if self._kept:
            return True
        states = (contents.optimizer or {}).get("state", {}).values()
        tensors = [*contents.model.values(), *(value for state in states for value in state.values())]
        return 2 * sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor)) < free_memory()

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
