"""Brings batches to a device, and counts their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def move(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device.

    Args:
        batch: Tensors in any nesting of tuples, named tuples, lists and mappings, or objects with a `to` method.
        device: The device.

    Returns:
        The same object where nothing had to be moved, else one of the same make.
    """
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, str | bytes | int | float) or batch is None:
        return batch
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        if all(moved[key] is batch[key] for key in moved):
            return batch
        return _rebuild(batch, moved)
    if isinstance(batch, tuple | list):
        parts = [move(value, device) for value in batch]
        if all(part is value for part, value in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else _rebuild(batch, parts)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch


def _rebuild(original: Any, parts: Any) -> Any:
    """Make a container of the original's class; a plain one where the class's constructor takes something else."""
    try:
        return type(original)(parts)
    except TypeError:
        return parts


def count(batch: Any) -> int:
    """Count the samples of a batch that a dataset made itself: the first dimension of its first tensor or array, else 1."""
    size = _first_dimension(batch)
    return 1 if size is None else size


def _first_dimension(batch: Any) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            size = _first_dimension(part)
            if size is not None:
                return size
    return None
