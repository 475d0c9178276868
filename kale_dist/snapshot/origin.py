"""Where a snapshot has the bytes of its call's tensors and arrays: what arrived is compared with them, and not copied."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from kale_dist.errors import SnapshotDamagedError
from kale_dist.snapshot.identity import storage_id
from kale_dist.wire import blobs

MAPPED_BYTES = 1 << 20
"""Smaller tensors are copied out of the snapshot's file into ordinary memory, larger ones stay mapped."""

Range: TypeAlias = tuple[str, int, int]
"""A blob's digest, the first byte in it, and how many bytes."""


class BlobRanges:
    """Reads ranges of blobs; each call returns memory of its own."""

    def __init__(self, store: blobs.Store) -> None:
        self._store = store
        # A blob of many small buffers is opened once; large buffers are mapped for each call.
        self._pack = functools.cache(store.open)

    def view(self, blob: str, offset: int, size: int) -> memoryview:
        """Map or copy a range; a `StoreError` or `SnapshotDamagedError` if it is not there."""
        if size >= MAPPED_BYTES:
            return self._slice(self._store.open(blob), blob, offset, size)
        return memoryview(bytearray(self._slice(self._pack(blob), blob, offset, size)))

    def _slice(self, data: memoryview, blob: str, offset: int, size: int) -> memoryview:
        if offset + size > data.nbytes:
            raise SnapshotDamagedError(
                f"The blob {blob} of the snapshot is cut short: {data.nbytes:,} of {offset + size:,} bytes are there. "
                "Submit the job again."
            )
        return data[offset : offset + size]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stayed:
    """A tensor as it arrived: where the snapshot has its bytes."""

    range: Range
    """Of its storage."""
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Its first element in the storage."""

    def tensor(self, memory: BlobRanges) -> Any:
        """The tensor, in memory that its blob is mapped into.

        Raises:
            StoreError: The blob is not there.
        """
        torch: Any = importlib.import_module("torch")

        view = memory.view(*self.range)
        made = torch.empty(0, dtype=self.dtype, device="cpu")
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage() if view.nbytes else made.untyped_storage()
        return made.set_(storage, self.start, self.shape, self.stride)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a snapshot has the bytes of tensors and arrays of its call."""

    digest: str
    """The snapshot's."""
    storages: Mapping[int, Range]
    """By `identity.storage_id`."""
    buffers: Mapping[int, Range]
    """Those of arrays, by their addresses."""
    memory: BlobRanges

    def place(self, tensor: Any) -> Stayed | None:
        """Where the bytes of a tensor are; None where they did not come with the snapshot."""
        if not is_own(tensor) or str(tensor.layout) != "torch.strided":
            return None
        found = self.storages.get(storage_id(tensor.untyped_storage()))
        shape, stride, start = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return found and Stayed(range=found, dtype=tensor.dtype, shape=shape, stride=stride, start=start)

    def array(self, array: Any) -> Any:
        """An array as it arrived, in memory that its blob is mapped into; a copy of one that did not come with the snapshot."""
        import numpy as np

        found = self.buffers.get(array.ctypes.data)
        if found is None or found[2] != array.nbytes:
            return array.copy()
        return np.ndarray(array.shape, array.dtype, self.memory.view(*found), strides=array.strides)


def is_own(value: Any) -> bool:
    """Whether a value is a tensor of torch's own with a memory."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta


def address_of(buffer: Any) -> int:
    """The address of a buffer's memory: that of the array which is made of it."""
    numpy = sys.modules.get("numpy")
    return 0 if numpy is None else int(numpy.frombuffer(buffer, "u1").ctypes.data)
