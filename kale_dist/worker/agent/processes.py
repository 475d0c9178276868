"""Processes of Linux: who they are, whether they live, how they end together. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import site
import socket
import struct
import sysconfig
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kale_dist.wire import PodVariable

if TYPE_CHECKING:
    import asyncio

JOB_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Ranks, and what they start, have the job's name in this variable, which is torchrun's own."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's thread that made this process ends; if it has ended already, end now.

    Only safe where the parent has a single thread: the kernel follows the thread, not the process.

    Args:
        parent: The parent's process id, taken before this process was made.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the second is a name that may hold spaces. None if there is no such process."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 if there is none. Process ids are used again, this is not."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int, start: int) -> bool:
    """Whether the process that began at `start` lives (a zombie does not)."""
    return _lives(pid) and start_time(pid) == start


def cpu_ticks(pid: int) -> int:
    """Clock ticks of processor time that all threads of a process have used; 0 if there is none."""
    return sum(map(int, _stat_fields(pid)[11:13]))


def thread_count(pid: int) -> int:
    """Number of threads of a process, seen from the kernel."""
    return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - names alone are needed


def groups(leaders: Collection[int]) -> dict[int, list[int]]:
    """Processes of some process groups by their leader, the leaders themselves first; zombies are among them."""
    found = {leader: [leader] for leader in leaders}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names alone are needed
        if entry.isdigit():
            # Asking the kernel costs a thirtieth of reading the process's stat file.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                leader = os.getpgid(int(entry))
                if leader in found and leader != int(entry):
                    found[leader].append(int(entry))
    return found


def live_members(group: int) -> list[int]:
    """Processes of a process group, its leader and zombies left out."""
    return [pid for pid in groups([group])[group] if pid != group and _lives(pid)]


def children(pid: int) -> list[int]:
    """Children of a process, zombies left out."""
    entries = os.listdir("/proc")  # noqa: PTH208 - names alone are needed
    return [int(entry) for entry in entries if entry.isdigit() and _lives(int(entry), parent=pid)]


def _lives(pid: int, parent: int | None = None) -> bool:
    """Whether there is such a process, with this parent if one is given; a zombie does not live."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X") and parent in (None, int(fields[1]))


def reap_orphans() -> None:
    """Collect the processes that ended ranks have left to us, as their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def watch(loop: asyncio.AbstractEventLoop, pid: int, ended: Callable[[], None]) -> None:
    """Call in the loop when a process is over. Its exit code is not to be had: the agent reaps all its children."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(ended)
        return

    def over() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, over)


def end_orphans(limit_s: float, spare: int = 0, job: str = "") -> None:
    """Kill children that are not the forkserver, and what those have started: what ranks have left behind in sessions of their own.

    Args:
        limit_s: Seconds to continue until no child is left.
        spare: Process id of the forkserver, if it is to live.
        job: Only what ranks of this job have left behind, as far as their environment shows it; empty for all.
    """
    deadline = time.monotonic() + limit_s
    while True:
        left = [pid for pid in children(os.getpid()) if pid != spare and (not job or _is_of(pid, job))]
        for pid in left:
            # The list grows: without their parents these would be left to us, and another job's end may be far away.
            left += children(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans()
        if not left or time.monotonic() >= deadline:
            return
        time.sleep(0.01)


def _is_of(pid: int, job: str) -> bool:
    """Whether a process has the environment of a job's ranks."""
    try:
        return f"{JOB_VARIABLE}={job}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of who has connected a unix socket, or listens at its other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def is_beside(pid: int) -> bool:
    """Whether a process is in no other container than this one: one that has the machine's network can reach us."""
    try:
        return pathlib.Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid")
    except OSError:
        return False


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have no name of their own and are `SIG40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by the cgroup's quota (rounded up).

    Where there is no quota, a pod that has asked for fewer cores than its node has takes as many as it has asked for.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _cores_of_quota()
    if quota is not None:
        return max(1, min(cores, quota))
    request = os.environ.get(PodVariable.CPU_REQUEST, "")
    if request.isdecimal() and int(request):
        cores = min(cores, -(-int(request) // 1000))
    return max(1, cores)


def _cores_of_quota(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int | None:
    """The cgroup's quota in whole cores, rounded up; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return None if quota_us < 0 else -(-quota_us // int((root / "cpu/cpu.cfs_period_us").read_text()))
    return None


def import_folders() -> list[pathlib.Path]:
    """Folders from which this process got kale_dist and cloudpickle, less those every Python has on its path."""
    usual = {pathlib.Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    usual |= {pathlib.Path(folder) for folder in site.getsitepackages()}
    found = [pathlib.Path(__file__).resolve().parents[3]]
    spec = importlib.util.find_spec("cloudpickle")
    if spec is not None and spec.origin is not None:
        found.append(pathlib.Path(spec.origin).resolve().parents[1])
    return [folder for folder in dict.fromkeys(found) if folder not in usual and folder.resolve() not in usual]


def remove_shared_memory(owners: list[int]) -> None:
    """Remove shared memory of torch that dead processes have left; torch puts the maker's pid into the name."""
    names = set(map(str, owners))
    # One pattern for all: Python keeps each that was used (32,768 since 3.12).
    for file in pathlib.Path("/dev/shm").glob("torch_*"):  # noqa: S108 - where Linux keeps it
        if file.name.split("_")[1] in names:
            with contextlib.suppress(OSError):
                file.unlink()
