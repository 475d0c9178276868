"""Which memory a tensor has, and whether it was changed: what torch has no public names for."""

from __future__ import annotations

import ctypes
import importlib
import zlib
from typing import Any


def times_changed(tensor: Any) -> int:
    """Return how often a tensor was changed in place. Writes to `p.data` do not count; tensors of inference mode have no count."""
    changed: int = tensor._version  # noqa: SLF001
    return changed


def storage_id(storage: Any) -> int:
    """Return the address of a storage's C++ object, which all Python objects that stand for it share."""
    return int(storage._cdata)  # noqa: SLF001


def place_of(tensor: Any) -> tuple[Any, ...] | None:
    """A key that is equal for tensors that view the same memory; None for tensors without memory, such as a DTensor or an empty one."""
    if not tensor.numel() or not tensor.data_ptr():
        return None
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *form


def has_same_bytes(one: Any, other: Any) -> bool:
    """Whether two tensors on the CPU have the same dtype and shape, and hold the same bytes; False where a tensor is not strided."""
    if not all(_is_of_bytes(tensor) for tensor in (one, other)) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = one.detach().contiguous(), other.detach().contiguous()
    return not _memcmp(first.data_ptr(), second.data_ptr(), first.nbytes)


def is_same_array(one: Any, other: Any) -> bool:
    """Whether two arrays have the same dtype and shape, and hold the same bytes; no copy is made of those that are contiguous."""
    numpy: Any = importlib.import_module("numpy")
    first, second = map(numpy.ascontiguousarray, (one, other))
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_alike and not _memcmp(first.ctypes.data, second.ctypes.data, first.nbytes)


def checksum(tensor: Any) -> int:
    """A checksum of a tensor's bytes in their order."""
    torch: Any = importlib.import_module("torch")
    whole = tensor.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return zlib.crc32(whole.view(torch.uint8).numpy())


def sum_of_bits(tensor: Any) -> int:
    """The sum of a tensor's bits as whole numbers: any change shows."""
    torch: Any = importlib.import_module("torch")

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    return int(real.view(dtype).sum(dtype=dtype))


def _is_of_bytes(tensor: Any) -> bool:
    """Whether a tensor's bytes are all there is to its values."""
    return str(tensor.layout) == "torch.strided" and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
