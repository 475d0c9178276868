"""The GPUs of this machine, as a call sees them: how many work, and whether others hold their memory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from kale_dist.places.agent_client import agent_environment
from kale_dist.worker.agent.usage import Driver, assigned_gpu
from kale_dist.worker.rank.rank_gpus import HIDING

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these is there where torch could find a GPU. `KALE_DIST_GPU_DEVICES` names others, for a driver with files of its own."""

_PROBE_S = 60.0
_GIB = 1 << 30
_TAKEN = 0.1
"""Share of a GPU's memory in use from which on a note reports it."""

_working: dict[tuple[str, str], int] = {}
"""How many GPUs work, by the interpreter and the value of CUDA_VISIBLE_DEVICES. Failures are not kept: drivers get repaired."""


def are_there() -> bool:
    """Whether this machine has a device that may be a GPU of torch's."""
    named = os.environ.get("KALE_DIST_GPU_DEVICES")
    return any(pathlib.Path(device).exists() for device in (named.split(os.pathsep) if named else _DEVICES))


def usable() -> tuple[int, str]:
    """How many GPUs work with this torch, and why none does, as a clause. Asks another process, which takes seconds once.

    In this process the question would start CUDA, take memory of a GPU for good, and leave out what NVML does not know: whether
    the driver and this torch fit the GPU.
    """
    key = sys.executable, os.environ.get(HIDING, "all")
    if key in _working:
        return _working[key], ""
    command = [sys.executable, "-P", "-m", "kale_dist.worker", "probe"]
    try:
        asked = subprocess.run(
            command, env=agent_environment(), capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
        count, problem = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return 0, f"the driver has not answered within {_PROBE_S:.0f} s"
    except (OSError, IndexError, ValueError):
        return 0, f"{' '.join(command[3:])} ended without an answer; run it in a terminal"
    if count:
        _working[key] = count
    return count, problem


def memory_notes(processes: int) -> tuple[str, ...]:
    """Sentences about GPUs of so many ranks here of whose memory others, such as this notebook, hold a part."""
    found, notes = Driver().read(), []
    for rank in range(processes):
        number = assigned_gpu(len(found), os.environ, rank)
        gpu = found[number] if number is not None else None
        if gpu is None or not gpu.total_bytes or (gpu.used_bytes or 0) < _TAKEN * gpu.total_bytes:
            continue
        used, total = (gpu.used_bytes or 0) / _GIB, gpu.total_bytes / _GIB
        held = _held_here(rank) / _GIB
        whose = f", of which this notebook holds {held:.1f} GiB" if held else ""
        notes.append(
            f"GPU {number}, rank {rank}'s, has {used:.1f} of {total:.1f} GiB in use{whose}, so rank {rank} has less room than on "
            "an empty one. `del` what you do not need and call torch.cuda.empty_cache(), or choose other GPUs with "
            f"{HIDING}"
        )
    return tuple(notes)


def _held_here(device: int) -> int:
    """Bytes that this process's tensors and torch's cache take on a GPU, without starting CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or device >= torch.cuda.device_count():
        return 0
    return int(torch.cuda.memory_reserved(device))
