"""Which memory a tensor has, and whether it was changed: what torch has no public names for."""

from __future__ import annotations

from typing import Any


def times_changed(tensor: Any) -> int:
    """Return how often a tensor was changed in place. Writes to `p.data` do not count; tensors of inference mode have no count."""
    changed: int = tensor._version  # noqa: SLF001
    return changed


def storage_id(storage: Any) -> int:
    """Return the address of a storage's C++ object, which all Python objects that stand for it share."""
    return int(storage._cdata)  # noqa: SLF001


def place_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return what strided tensors share that show the same numbers; None without memory of its own, as of a DTensor or an empty one."""
    if not tensor.numel() or not tensor.data_ptr():
        return None
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *form
