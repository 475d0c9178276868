"""Sums over the ranks of one machine through memory that they share.

The memory is a memfd (containers give /dev/shm 64 MiB only), which the other ranks open by /proc/PID/fd. It has two slots of
bounded size for each rank, used in turn: a rank that has passed the barrier of one exchange may fill its other slot while
others still read the first, and fills the first again only after the next barrier.

Ranks wait on POSIX semaphores in the same memory. The semaphores' calls order memory on every processor (POSIX.1-2017, 4.12);
reads and writes of Python do not, on ARM. A rank tries for 50 microseconds, then waits in the kernel, so that it does not take
the core that another rank needs, and checks twice a second whether all others are alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kale_dist.errors import KaleDistError
from kale_dist.worker.training.clock import timed
from kale_dist.worker.training.rank_group import Group

SLOT_BYTES = 4 << 20
"""A slot's largest size, which stays in a core's cache; longer tensors are exchanged in pieces."""

_PAGE = 4096
_LINE = 64
"""Bytes between semaphores, so that no two share a cache line."""
_SPIN_S = 50e-6
_LOOK_S = 0.5

_NONE: list[list[list[Tensor]]] = [[], []]
"""Views of no tensors, by turn."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """Memory of all ranks of a group, and a barrier. All ranks construct it together, and call `barrier` equally often.

    Args:
        group: Ranks of one machine.
        notes: Bytes in each slot for small numbers, before its data.
        slot: Bytes of data in each slot.

    Raises:
        OSError: The ranks cannot share memory. Raised in all of them alike.
    """

    def __init__(self, group: Group, notes: int, slot: int) -> None:
        self._group = group
        world = group.world_size
        self._rounds = max(1, (world - 1).bit_length())
        head = -(-self._rounds * world * _LINE // _PAGE) * _PAGE
        notes, slot = -(-notes // _LINE) * _LINE, -(-slot // _LINE) * _LINE
        # Rank `world` is the result of all.
        size = head + 2 * (world * notes + (world + 1) * slot)
        self._map, pids = _shared(group, size, self._rounds * world)
        data = memoryview(self._map)
        self.notes: list[list[memoryview]] = []
        """Memory for notes, by turn and rank."""
        self.slots: list[list[Tensor]] = []
        """Slots as bytes, by turn and rank; each turn's last slot is for a result."""
        place = head
        for _ in range(2):
            starts = [place + number * notes for number in range(world)]
            self.notes.append([data[start : start + notes] for start in starts])
            place += world * notes
            whole = torch.frombuffer(self._map, dtype=torch.uint8, offset=place, count=(world + 1) * slot)
            self.slots.append(list(torch.split(whole, slot)))
            place += (world + 1) * slot
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._semaphores = [
            [ctypes.c_void_p(address + (step * world + rank) * _LINE) for rank in range(world)]
            for step in range(self._rounds)
        ]
        self._alive = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids) if rank != group.rank}

    def close(self) -> None:
        """Close the handles of the other processes. The memory stays until the last tensor in it is gone."""
        while self._alive:
            os.close(self._alive.popitem()[0])

    def barrier(self) -> None:
        """Wait until all ranks have called this; then this rank can read what the others wrote before.

        In round r each rank wakes the rank that is 2^r ahead (Hensgen, Finkel, Manber: Two algorithms for barrier
        synchronization, 1988).

        Raises:
            KaleDistError: Another rank has ended.
        """
        rank, world = self._group.rank, self._group.world_size
        for step, row in enumerate(self._semaphores):
            _libc.sem_post(row[(rank + (1 << step)) % world])
            self._wait(row[rank])

    def _wait(self, semaphore: ctypes.c_void_p) -> None:
        if not _libc.sem_trywait(semaphore):
            return
        until = time.perf_counter() + _SPIN_S
        while time.perf_counter() < until:
            if not _libc.sem_trywait(semaphore):
                return
        while True:
            moment = time.time() + _LOOK_S
            limit = _Time(int(moment), int(moment % 1 * 1e9))
            if not _libc.sem_timedwait(semaphore, ctypes.byref(limit)):
                return
            if ctypes.get_errno() == errno.ETIMEDOUT:
                self._check_others()

    def _check_others(self) -> None:
        poll = select.poll()
        for descriptor in self._alive:
            poll.register(descriptor, select.POLLIN)
        if ended := poll.poll(0):
            raise KaleDistError(f"Rank {self._alive[ended[0][0]]} has ended while others wait for its gradients")


def _shared(group: Group, size: int, semaphores: int) -> tuple[mmap.mmap, list[int]]:
    """Map rank 0's memory, which begins with semaphores, in every rank; returns the map and the process ids of all ranks.

    Raises:
        OSError: A rank cannot map it: another machine, or another process namespace.
    """
    token, made = os.urandom(16), None
    descriptor = os.memfd_create("kale-dist") if group.rank == 0 else -1
    try:
        if group.rank == 0:
            os.ftruncate(descriptor, size)
            made = mmap.mmap(descriptor, size)
            # The last bytes are of a result's, which is written before it is read.
            made[-16:] = token
            address = ctypes.addressof(ctypes.c_char.from_buffer(made))
            for number in range(semaphores):
                _libc.sem_init(ctypes.c_void_p(address + number * _LINE), 1, 0)
        pid, number, token = group.send((os.getpid(), descriptor, token))
        if group.rank:
            made = _opened(f"/proc/{pid}/fd/{number}", size, token)
        everyone = group.gather((made is not None, os.getpid()))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if made is None or not all(is_good for is_good, _ in everyone):
        raise OSError(errno.ENXIO, "the ranks cannot map the same memory")
    return made, [pid for _, pid in everyone]


def _opened(path: str, size: int, token: bytes) -> mmap.mmap | None:
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            # A file of this number may be another one, where processes are numbered elsewhere.
            if os.fstat(descriptor).st_size == size and os.pread(descriptor, 16, size - 16) == token:
                return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    return None


class SharedSum:
    """The mean over ranks of tensors of fixed shapes, in place.

    Args:
        shapes: Tensors of the shapes, dtypes and order that `average` will get; their values are not used.
        notes: Bytes of a rank's note.
        group: Ranks of one machine.

    Raises:
        OSError: The ranks cannot share memory.
    """

    def __init__(self, shapes: Sequence[Tensor], notes: int, group: Group) -> None:
        self._group = group
        total = sum(-(-one.numel() * one.element_size() // _LINE) * _LINE for one in shapes)
        slot = min(SLOT_BYTES, max(total, _LINE))
        self._chunks = list(_chunks(shapes, slot))
        self.memory = SharedMemory(group, notes, slot)
        self._turn = 0
        self._views = [
            [[_views(slot, chunk, shapes) for slot in slots] for slots in self.memory.slots] for chunk in self._chunks
        ]
        self.bytes_written = 0

    @timed
    def average(self, tensors: Sequence[Tensor], note: bytes) -> list[bytes]:
        """Replace contiguous tensors by their means over ranks. All ranks get the same bits.

        Args:
            tensors: In the shapes, dtypes and order of `shapes`.
            note: Bytes that every rank gets.

        Returns:
            The notes of all ranks.
        """
        rank, world = self._group.rank, self._group.world_size
        notes: list[bytes] = []
        for chunk, turns in zip(self._chunks or [[]], self._views or [_NONE], strict=True):
            mine = [tensors[i] if whole else tensors[i].view(-1)[start:stop] for i, start, stop, _, whole in chunk]
            self._turn ^= 1
            ranks = turns[self._turn]
            is_half = bool(mine) and mine[0].dtype in (torch.float16, torch.bfloat16)
            if is_half:
                # Sums of half floats overflow.
                torch._foreach_mul_(mine, 1 / world)
            if mine:
                torch._foreach_copy_(ranks[rank], mine)
                self.bytes_written += sum(one.numel() * one.element_size() for one in mine)
            written = self.memory.notes[self._turn]
            if not notes:
                written[rank][: len(note)] = note
            self.memory.barrier()
            notes = notes or [bytes(one[: len(note)]) for one in written]
            if not mine:
                continue
            if world == 2:  # noqa: PLR2004 - a + b is b + a, bit by bit
                torch._foreach_add_(mine, ranks[1 - rank])
            else:
                self._reduce(self._turn, chunk, mine[0].dtype)
                torch._foreach_copy_(mine, ranks[world])
            if not is_half:
                torch._foreach_mul_(mine, 1 / world)
        return notes

    def _reduce(self, turn: int, chunk: Sequence[tuple[int, int, int, int, bool]], dtype: torch.dtype) -> None:
        """Add up this rank's section of all slots, into the common result."""
        rank, world = self._group.rank, self._group.world_size
        _, start, stop, offset, _ = chunk[-1]
        size = dtype.itemsize
        end = offset + (stop - start) * size
        length = -(-end // (world * _LINE)) * _LINE
        first, last = min(end, rank * length), min(end, (rank + 1) * length)
        if first < last:
            *slots, result = (slot[first:last].view(dtype) for slot in self.memory.slots[turn])
            torch.add(slots[0], slots[1], out=result)
            for one in slots[2:]:
                result.add_(one)
            self.bytes_written += last - first
        self.memory.barrier()


def _chunks(shapes: Sequence[Tensor], limit: int) -> Iterator[list[tuple[int, int, int, int, bool]]]:
    """Cut tensors into pieces that fill slots; yield the pieces of one slot at a time, all of one dtype.

    A piece is: the tensor's number, its first element, the element after its last, its byte in the slot, and whether it
    is the whole tensor.
    """
    limit = limit // _LINE * _LINE
    for dtype in dict.fromkeys(one.dtype for one in shapes):
        size = dtype.itemsize
        chunk: list[tuple[int, int, int, int, bool]] = []
        offset = 0
        for number, tensor in enumerate(shapes):
            if tensor.dtype != dtype:
                continue
            start = 0
            while start < tensor.numel():
                if offset >= limit:
                    yield chunk
                    chunk, offset = [], 0
                stop = min(tensor.numel(), start + (limit - offset) // size)
                chunk.append((number, start, stop, offset, stop - start == tensor.numel()))
                offset += -(-(stop - start) * size // _LINE) * _LINE
                start = stop
        if chunk:
            yield chunk


def _views(slot: Tensor, chunk: Sequence[tuple[int, int, int, int, bool]], shapes: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for number, start, stop, offset, whole in chunk:
        like = shapes[number]
        flat = slot[offset : offset + (stop - start) * like.element_size()].view(like.dtype)
        found.append(flat.view(like.shape) if whole else flat)
    return found
