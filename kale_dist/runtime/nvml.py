"""How busy the NVIDIA GPUs of this machine are, asked of the driver's own library (NVML). Standard library only.

The library comes with the driver and needs no CUDA. Structures and numbers are those of NVIDIA's `nvml.h`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

EACH_S = 2.0
"""The driver itself averages how busy a GPU is over up to a second."""

_LIBRARY = "libnvidia-ml.so.1"
_OK = 0
_UUID_BYTES = 96
_MAX_PROCESSES = 256
_NOT_AVAILABLE = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU at one moment."""

    uuid: str
    """Such as `GPU-5a1c...`; empty where the driver gives none."""
    percent: int | None
    """Share of the last moments in which it had work; None where the driver does not say, as on a part of a GPU (MIG)."""
    used_bytes: int | None
    """Memory in use, by whomever."""
    total_bytes: int | None
    processes: tuple[tuple[int, int | None], ...] = ()
    """Process ids, and the bytes each of them uses if that is known. Inside a container there may be none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What one rank uses of its GPUs."""

    percent: int | None
    used_bytes: int | None
    total_bytes: int | None


def use_of(gpus: Sequence[Gpu], pids: Collection[int], assigned: int | None) -> GpuUse | None:
    """What some processes use.

    Args:
        gpus: All that the machine shows.
        pids: Ids of the processes.
        assigned: Index of the GPU that the rank was given, for drivers that do not name its processes.

    Returns:
        None if no GPU is theirs as far as can be told.
    """
    own = [gpu for gpu in gpus if any(pid in pids for pid, _ in gpu.processes)]
    if own:
        amounts = [amount for gpu in own for pid, amount in gpu.processes if pid in pids]
        known = [amount for amount in amounts if amount is not None]
        used = sum(known) if len(known) == len(amounts) else _sum(gpu.used_bytes for gpu in own)
    elif assigned is not None and 0 <= assigned < len(gpus):
        own = [gpus[assigned]]
        used = own[0].used_bytes
    else:
        return None
    percents = [gpu.percent for gpu in own if gpu.percent is not None]
    return GpuUse(
        percent=round(sum(percents) / len(percents)) if percents else None,
        used_bytes=used,
        total_bytes=_sum(gpu.total_bytes for gpu in own),
    )


def assigned_gpu(gpus: Sequence[Gpu], environment: Mapping[str, str], local_rank: int) -> int | None:
    """Which GPU a rank with `cuda=True` was given: its turn among those that CUDA_VISIBLE_DEVICES names.

    Args:
        gpus: All that the machine shows, in the order of the bus, in which CUDA counts GPUs of one model.
        environment: The rank's.
        local_rank: The rank among those of its machine.

    Returns:
        An index into `gpus`; None if there is none.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    visible = list(range(len(gpus)))
    if wanted is not None:
        visible = []
        for word in wanted.split(","):
            index = _index(gpus, word.strip())
            if index is None:
                # So does CUDA: what stands behind a word that names no GPU does not count.
                break
            visible.append(index)
    return visible[local_rank % len(visible)] if visible else None


def _index(gpus: Sequence[Gpu], word: str) -> int | None:
    if word.isascii() and word.isdigit():
        return int(word) if int(word) < len(gpus) else None
    found = [index for index, gpu in enumerate(gpus) if word and gpu.uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


def _sum(amounts: Iterable[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


# -- the driver's library --------------------------------------------------------------------------------------------


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """Asks the library. Calls may take long, also forever where a GPU has failed: not for the agent's own thread.

    Args:
        library: What `ctypes.CDLL` gives for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def open(self) -> bool:
        """Begin; gives whether there is a driver."""
        return self._call("nvmlInit_v2")

    def close(self) -> None:
        """End."""
        self._call("nvmlShutdown")

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs, in the order of the bus."""
        count = ctypes.c_uint()
        if not self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return ()
        return tuple(self._read_gpu(index) for index in range(count.value))

    def _read_gpu(self, index: int) -> Gpu:
        device = ctypes.c_void_p()
        if not self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
            # One that has failed keeps its place, because GPUs are identified by it.
            return Gpu(uuid="", percent=None, used_bytes=None, total_bytes=None)
        uuid, busy, memory = ctypes.create_string_buffer(_UUID_BYTES), _Utilization(), _Memory()
        has_uuid = self._call("nvmlDeviceGetUUID", device, uuid, ctypes.c_uint(_UUID_BYTES))
        has_busy = self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(busy))
        has_memory = self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return Gpu(
            uuid=uuid.value.decode("ascii", "replace") if has_uuid else "",
            percent=int(busy.gpu) if has_busy else None,
            used_bytes=int(memory.used) if has_memory else None,
            total_bytes=int(memory.total) if has_memory else None,
            processes=self._processes(device),
        )

    def _processes(self, device: ctypes.c_void_p) -> tuple[tuple[int, int | None], ...]:
        found, count = (_Process * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
        # Drivers before 510 have only the older name of the same function.
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
            if self._call(name, device, ctypes.byref(count), found):
                return tuple(
                    (int(one.pid), None if one.used == _NOT_AVAILABLE else int(one.used))
                    for one in found[: min(count.value, _MAX_PROCESSES)]
                )
            count.value = _MAX_PROCESSES
        return ()

    def _call(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == _OK


class GpuWatch:
    """Reads all GPUs every two seconds in a thread of its own, which ends at once where there is no driver."""

    def __init__(self) -> None:
        self._latest: tuple[Gpu, ...] = ()
        self._stopped = threading.Event()

    @property
    def latest(self) -> tuple[Gpu, ...]:
        """What was read last; empty if there is no GPU, or nothing was read yet."""
        return self._latest

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def stop(self) -> None:
        """Read no more; does not wait for what is being read."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            library = Nvml(ctypes.CDLL(_LIBRARY))
        except OSError:
            return
        if library.open():
            self._latest = library.read()
            while self._latest and not self._stopped.wait(EACH_S):
                self._latest = library.read()
            library.close()
