"""Tells what each rank of an agent uses: memory, GPU, machine. Runs while there are ranks. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kale_dist.contract import Order, PodVariable
from kale_dist.runtime import memory, nvml

LOOK_EACH_S = 0.5
"""How soon a measurement is sent."""

MEASURE_EACH_S = 2.0

REST_PER_WORK = 50
"""Where measuring takes long it comes more seldom: it costs at most this share of one core."""

_HARDLY = 0.02
_HARDLY_BYTES = 4 << 20
_HARDLY_PERCENT = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    members: tuple[int, ...]
    """Processes of one rank."""
    used_bytes: int
    limit_bytes: int | None


class UsageWatch:
    """Tells the use of each rank of one agent when it has changed.

    Memory and GPUs are read in threads of their own: a look at DataLoader workers takes some 35 ms for each GiB that
    they have inherited, and a driver may not answer at all.

    Args:
        order: The job.
        loop: The agent's loop.
        pids: Gives the process ids of the agent's ranks that live, and their numbers.
        tell: Called with a rank and the fields of an event of kind usage.
    """

    def __init__(
        self,
        order: Order,
        loop: asyncio.AbstractEventLoop,
        pids: Callable[[], Mapping[int, int]],
        tell: Callable[[int, dict[str, int | str | None]], None],
    ) -> None:
        self._order = order
        self._loop = loop
        self._ranks = pids
        self._say = tell
        self._node = _node(os.environ)
        self._environment = dict(order.process.environment) if order.process is not None else dict(os.environ)
        self._gpus = nvml.GpuWatch()
        self._pids: tuple[int, ...] = ()
        self._measured: dict[int, _Measured] = {}
        self._told: dict[int, dict[str, int | str | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin, once the ranks are being started."""
        self._gpus.start()
        threading.Thread(target=self._measure, name="memory", daemon=True).start()
        self._look()

    def stop(self) -> None:
        """No rank is left. A second time changes nothing."""
        self._stopped.set()
        self._gpus.stop()
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        pause_s = LOOK_EACH_S
        while not self._stopped.wait(pause_s):
            pids, began, limit = self._pids, time.monotonic(), memory.limit_bytes()
            # Without a free descriptor nothing can be read; the next time is another chance.
            with contextlib.suppress(OSError):
                self._measured = {
                    leader: _Measured(
                        members=tuple(members), used_bytes=memory.used_bytes(leader, members[1:]), limit_bytes=limit
                    )
                    for leader, members in memory.groups(pids).items()
                }
            # Till the ranks are there, there is nothing to rest from.
            pause_s = max(MEASURE_EACH_S, REST_PER_WORK * (time.monotonic() - began)) if pids else LOOK_EACH_S

    def _look(self) -> None:
        gpus, measured = self._gpus.latest, self._measured
        ranks = self._ranks()
        self._pids = tuple(ranks)
        for pid, rank in ranks.items():
            seen = measured.get(pid)
            # A process that has just ended uses nothing; what it used before may be why.
            if seen is not None and seen.used_bytes:
                self._tell(rank, self._describe(rank, seen, gpus))
        self._timer = self._loop.call_later(LOOK_EACH_S, self._look)

    def _describe(self, rank: int, seen: _Measured, gpus: Sequence[nvml.Gpu]) -> dict[str, int | str | None]:
        local_rank = rank % self._order.processes_per_agent
        assigned = nvml.assigned_gpu(gpus, self._environment, local_rank) if self._order.cuda else None
        gpu = nvml.use_of(gpus, seen.members, assigned)
        return {
            "memory_bytes": seen.used_bytes,
            "memory_limit_bytes": seen.limit_bytes,
            "gpu_percent": gpu.percent if gpu is not None else None,
            "gpu_memory_bytes": gpu.used_bytes if gpu is not None else None,
            "gpu_memory_limit_bytes": gpu.total_bytes if gpu is not None else None,
            "node": self._node,
        }

    def _tell(self, rank: int, now: dict[str, int | str | None]) -> None:
        before = self._told.get(rank)
        if before is None or any(_differs(name, before[name], value) for name, value in now.items()):
            self._told[rank] = now
            self._say(rank, now)


def _node(environment: Mapping[str, str]) -> str | None:
    """The machine's name; None in a container that was not told on which it is, for its own name is no machine's."""
    is_container = PodVariable.REPLICA_INDEX in environment
    return environment.get(PodVariable.NODE) or (None if is_container else socket.gethostname())


def _differs(name: str, before: int | str | None, now: int | str | None) -> bool:
    """Whether a change is worth a line in a pod's log, where steady work shall leave none."""
    if not isinstance(before, int) or not isinstance(now, int):
        return before != now
    if name == "gpu_percent":
        return abs(now - before) >= _HARDLY_PERCENT
    return abs(now - before) > max(_HARDLY_BYTES, _HARDLY * before)
