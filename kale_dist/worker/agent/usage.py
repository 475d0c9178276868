"""Measures what memory and GPUs ranks use, while there are any, and whether the kernel has killed for lack of memory.

GPUs are asked of the driver's own library (NVML), which comes with the driver and needs no CUDA. Structures and numbers are
those of NVIDIA's `nvml.h`. Standard library only: it runs in any image.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kale_dist.wire import Order, PodVariable, fields_of
from kale_dist.wire.events import Usage
from kale_dist.worker.agent import processes

EACH_S = 2.0
"""Between two looks. The driver itself averages how busy a GPU is over up to a second."""

FIRST_S = 0.5
"""Until ranks have processes."""

REST_PER_WORK = 50
"""If looking takes long, the pauses are longer: it costs at most this share of one core. A look at DataLoader workers takes
some 35 ms for each GiB that they have inherited."""


_HARDLY = 0.02
_HARDLY_BYTES = 4 << 20
_HARDLY_PERCENT = 5
_ROOT = pathlib.Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_GIB = 1 << 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PRIVATE = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")
_OK = 0


class UsageWatch:
    """Sends the use of each rank of one agent when it has changed.

    Each look is a thread of its own, for it may take long, and forever if a driver does not answer; then nothing more is
    sent.

    Args:
        order: The job.
        loop: The agent's loop.
        pids: Gives the process ids of the agent's ranks that live, and their numbers.
        send: Called with a rank and what it uses.
        on_look: Called in the loop after each look.
    """

    def __init__(
        self,
        order: Order,
        loop: asyncio.AbstractEventLoop,
        pids: Callable[[], Mapping[int, int]],
        send: Callable[[int, Usage], None],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._order = order
        self._loop = loop
        self._pids = pids
        self._send = send
        self._on_look = on_look
        self._node = _node(os.environ)
        self._environment = dict(order.process.environment) if order.process is not None else dict(os.environ)
        self._driver: Driver | None = None
        self._sent: dict[int, Usage] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Begin, once the ranks are being started. The first look comes when they have processes, so it slows no start."""
        self._timer = self._loop.call_later(FIRST_S, self._look)

    def stop(self) -> None:
        """No rank is left. A second time changes nothing."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        threading.Thread(target=self._measure, args=(dict(self._pids()),), name="usage", daemon=True).start()

    def _measure(self, ranks: Mapping[int, int]) -> None:
        began, found = time.monotonic(), dict[int, Usage]()
        # Without a free descriptor nothing can be read; the next time is another chance.
        with contextlib.suppress(OSError):
            if self._order.cuda and self._driver is None:
                self._driver = Driver()
            gpus, limit = self._driver.read() if self._driver is not None else (), limit_bytes()
            for leader, members in processes.groups(ranks).items():
                # A process that has just ended uses nothing; what it used before may be why.
                if used := used_bytes(leader, members[1:]):
                    gpu = self._gpu_of(ranks[leader], gpus)
                    found[ranks[leader]] = Usage(
                        memory_bytes=used, memory_limit_bytes=limit, gpu_percent=gpu.percent, gpu_memory_bytes=gpu.used_bytes,
                        gpu_memory_limit_bytes=gpu.total_bytes, node=self._node,
                    )  # fmt: skip
        # The loop has ended where an agent received SIGTERM.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pass_on, found, time.monotonic() - began)

    def _gpu_of(self, rank: int, gpus: Sequence[Gpu]) -> Gpu:
        place = rank % self._order.processes_per_agent * self._order.gpus_each
        index = assigned_gpu(len(gpus), self._environment, place)
        return Gpu(percent=None, used_bytes=None, total_bytes=None) if index is None else gpus[index]

    def _pass_on(self, found: Mapping[int, Usage], took_s: float) -> None:
        if self._is_stopped:
            return
        for rank, now in found.items():
            before = self._sent.get(rank)
            if before is None or any(
                _differs(name, getattr(before, name), value) for name, value in fields_of(now).items()
            ):
                self._sent[rank] = now
                self._send(rank, now)
        self._timer = self._loop.call_later(max(EACH_S, REST_PER_WORK * took_s) if found else FIRST_S, self._look)
        self._on_look()


def _node(environment: Mapping[str, str]) -> str | None:
    """Return the machine's name; None in a container that was not given it, for its own name is no machine's."""
    is_container = PodVariable.REPLICA_INDEX in environment
    return environment.get(PodVariable.NODE) or (None if is_container else socket.gethostname())


def _differs(name: str, before: int | str | None, now: int | str | None) -> bool:
    """Whether a change is worth a line in a pod's log, where steady work shall leave none."""
    if not isinstance(before, int) or not isinstance(now, int):
        return before != now
    if name == "gpu_percent":
        return abs(now - before) >= _HARDLY_PERCENT
    return abs(now - before) > max(_HARDLY_BYTES, _HARDLY * before)


# -- memory -----------------------------------------------------------------------------------------------------------


def kills(root: pathlib.Path = _ROOT) -> int:
    """How many processes of this container the kernel has killed because memory ran out.

    Args:
        root: Where the cgroup is mounted; of version 1 or 2.
    """
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in (root / name).read_text().splitlines())
            return int(fields.get("oom_kill", 0))
    return 0


def limit_bytes(root: pathlib.Path = _ROOT) -> int | None:
    """The container's limit in bytes; None where it has none.

    Args:
        root: As for `kills`.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / name).read_text())
            return limit if limit < _NO_LIMIT else None
    return None


def limit_text(root: pathlib.Path = _ROOT) -> str:
    """The container's limit, such as `a limit of 2.0 GiB`; `no limit but the machine's` where it has none.

    Args:
        root: As for `kills`.
    """
    limit = limit_bytes(root)
    if limit is None:
        return "no limit but the machine's"
    return f"a limit of {limit / _GIB:.1f} GiB" if limit >= _GIB else f"a limit of {limit >> 20} MiB"


def used_bytes(leader: int, helpers: Collection[int]) -> int:
    """Memory of a process and of helpers forked from it, in bytes; 0 if they are gone.

    What a helper shares counts once, with the leader: a DataLoader worker sees the whole dataset of the process it was
    forked from, and holds none of it.
    """
    resident, _ = _resident_and_shared(leader)
    return resident + sum(_own_bytes(pid) for pid in helpers)


def _resident_and_shared(pid: int) -> tuple[int, int]:
    try:
        pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
        return int(pages[1]) * _PAGE_BYTES, int(pages[2]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0, 0


def _own_bytes(pid: int) -> int:
    """What a process shares with no other."""
    try:
        with pathlib.Path(f"/proc/{pid}/smaps_rollup").open() as lines:
            return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_PRIVATE))
    except (OSError, IndexError, ValueError):
        # Not every kernel has the file, nor shows it to everybody: what it shares without a file then counts too.
        resident, shared = _resident_and_shared(pid)
        return max(0, resident - shared)


# -- GPUs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU at one moment."""

    percent: int | None
    """Share of the last moments in which it had work; None where the driver reports none, as on a part of a GPU (MIG)."""
    used_bytes: int | None
    """Memory in use, by all processes."""
    total_bytes: int | None


def assigned_gpu(count: int, environment: Mapping[str, str], place: int) -> int | None:
    """Which GPU a rank with `cuda=True` was given: its place among those that CUDA_VISIBLE_DEVICES names by numbers.

    Args:
        count: How many the machine has, in the order of the bus, in which CUDA counts GPUs of one model.
        environment: The rank's.
        place: That of the rank's first GPU among those of its machine's ranks.

    Returns:
        Its number on the machine; None if there is none, or its name cannot be read.
    """
    named = map(str.strip, environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(","))
    # So does CUDA: what stands behind a word that names no GPU does not count.
    visible = itertools.takewhile(lambda word: word.isascii() and word.isdigit() and int(word) < count, named)
    return next(map(int, itertools.islice(visible, place, None)), None)


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Driver:
    """The driver's library, if there is one.

    Args:
        library: What `ctypes.CDLL` gives for it; None: it is looked for.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        if library is None:
            with contextlib.suppress(OSError):
                self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._is_open = self._call("nvmlInit_v2")

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs, in the order of the bus; none without a driver."""
        count = ctypes.c_uint()
        if not self._is_open or not self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return ()
        return tuple(self._read_gpu(index) for index in range(count.value))

    def _read_gpu(self, index: int) -> Gpu:
        # One that has failed keeps its place, because GPUs are identified by it.
        device, busy, memory = ctypes.c_void_p(), _Utilization(), _Memory()
        is_there = self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        has_busy = is_there and self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(busy))
        has_memory = is_there and self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return Gpu(
            percent=int(busy.gpu) if has_busy else None,
            used_bytes=int(memory.used) if has_memory else None,
            total_bytes=int(memory.total) if has_memory else None,
        )

    def _call(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == _OK
