"""Memory of processes and containers: what is used, the limit, and whether the kernel has killed because of it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Collection

_ROOT = pathlib.Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_GIB = 1 << 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PRIVATE = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")


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
    return "no limit but the machine's" if limit is None else f"a limit of {limit / _GIB:.1f} GiB"


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
