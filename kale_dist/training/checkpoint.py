"""Checkpoints: states of model, optimizer and scheduler in one file, without pickle.

Tensors are buffers of a container (`blobs`); all around them is JSON. What is neither a tensor nor something that JSON
can say (a user's own object in an optimizer's state) is left out, and named.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
from torch import Tensor

from kale_dist import blobs
from kale_dist.errors import SnapshotDamagedError

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint."""

    epoch: int
    """Finished epochs."""
    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    resume: dict[str, Any] | None = None
    """What a training needs beyond these states to go on where it was (`resume`); None where nobody has asked for it."""
    left_out: tuple[str, ...] = ()
    """Places of the values that could not be kept, such as `optimizer.state.0.hook`."""


class _LeftOut:
    """Marks a value that cannot be kept."""


def write(
    path: pathlib.Path,
    *,
    model: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    epoch: int,
    resume: dict[str, Any] | None = None,
) -> tuple[str, ...]:
    """Write a checkpoint, replacing the one that is there by rename.

    Args:
        path: The file.
        model: `model.state_dict()`.
        optimizer: `optimizer.state_dict()`, or None.
        scheduler: `scheduler.state_dict()`, or None.
        epoch: Finished epochs.
        resume: See `Checkpoint.resume`.

    Returns:
        The places of values that were left out.

    Raises:
        StoreError: The disk is full, or the folder cannot be written.
    """
    tensors: list[Tensor] = []
    positions: dict[tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], int] = {}
    left_out: list[str] = []
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if resume is not None:
        states["resume"] = resume
    tree = {name: _encode(state, name, tensors, positions, left_out) for name, state in states.items()}
    header = {
        "version": VERSION,
        "epoch": epoch,
        "tree": tree,
        "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
        "left_out": left_out,
    }
    blobs.write_container(path, header, [_bytes_of(tensor) for tensor in tensors])
    return tuple(left_out)


def read(path: pathlib.Path) -> Checkpoint:
    """Read a checkpoint. Tensors are mapped copy-on-write: they cost memory when they are used.

    Raises:
        SnapshotDamagedError: The file is not a checkpoint of this version.
        OSError: The file cannot be opened.
    """
    header, buffers = blobs.open_container(path)
    if header.get("version") != VERSION or "tree" not in header:
        raise SnapshotDamagedError(f"{path} is not a checkpoint of version {VERSION}")
    tensors = []
    for (dtype, shape), buffer in zip(header["tensors"], buffers, strict=True):
        kind = getattr(torch, dtype)
        flat = torch.frombuffer(buffer, dtype=kind) if len(buffer) else torch.empty(0, dtype=kind)
        tensors.append(flat.view(shape))
    tree = {name: _decode(value, tensors) for name, value in header["tree"].items()}
    return Checkpoint(epoch=header["epoch"], left_out=tuple(header["left_out"]), **tree)


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _encode(value: Any, place: str, tensors: list[Tensor], positions: dict[Any, int], left_out: list[str]) -> Any:
    """JSON for a value: plain ones as they are, the rest as a one-entry object that says its kind."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        whole = value.detach().cpu().contiguous()
        # Tied weights are written once.
        key = (value.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if not value.numel() or key not in positions:
            positions[key] = len(tensors)
            tensors.append(whole)
        return {"tensor": positions[key]}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            encoded = _encode(item, f"{place}.{key}", tensors, positions, left_out)
            if type(key) not in (str, int) or isinstance(encoded, _LeftOut):
                if not isinstance(encoded, _LeftOut):
                    left_out.append(f"{place}.{key}")
                continue
            pairs.append([key, encoded])
        return {"dict": pairs}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{place}.{i}", tensors, positions, left_out) for i, item in enumerate(value)]
        kept = [None if isinstance(item, _LeftOut) else item for item in items]
        return {"list" if isinstance(value, list) else "tuple": kept}
    left_out.append(place)
    return _LeftOut()


def _decode(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
