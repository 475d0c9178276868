"""Whether the kernel has killed processes for want of memory, and what the limit was. Standard library only."""

from __future__ import annotations

import contextlib
import pathlib

_ROOT = pathlib.Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_GIB = 1 << 30


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


def limit_text(root: pathlib.Path = _ROOT) -> str:
    """The container's limit, such as `a limit of 2.0 GiB`; `no limit but the machine's` where it has none.

    Args:
        root: As for `kills`.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / name).read_text())
            if limit < _NO_LIMIT:
                return f"a limit of {limit / _GIB:.1f} GiB"
    return "no limit but the machine's"
