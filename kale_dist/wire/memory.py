"""How much memory processes can still take."""

from __future__ import annotations

import pathlib


def free_memory() -> int:
    """Bytes that processes can still take, here and in this process's own container."""
    found = [1 << 50]
    try:
        text = pathlib.Path("/proc/meminfo").read_text()
        found.append(next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        group = pathlib.Path("/sys/fs/cgroup")
        limit, used = (int(group.joinpath(name).read_text()) for name in ("memory.max", "memory.current"))
        lines = group.joinpath("memory.stat").read_text().splitlines()
        # Pages of files are given back when they are needed.
        found.append(limit - used + next(int(line.split()[1]) for line in lines if line.startswith("inactive_file ")))
    except (OSError, StopIteration, ValueError):
        pass  # No container, no limit ("max"), or cgroups of version 1.
    return min(found)
