"""The private folder of an agent: its socket and what it writes to stderr. Removed when the agent ends."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import tempfile
import time

from kale_dist.errors import BackendUnavailableError
from kale_dist.runtime import processes

MAX_SOCKET_PATH_BYTES = 107
"""Linux keeps a socket's path in 108 bytes, the last of them zero."""

STALE_AFTER_S = 60.0
"""A folder without a live agent is somebody's start that is still going on, or rubbish once it is this old."""


def create() -> pathlib.Path:
    """Make the folder of a new agent, and remove those that killed agents have left.

    Returns:
        A new folder with mode 0700, whose path is short enough for a socket in it.

    Raises:
        BackendUnavailableError: The folder's parent belongs to somebody else or others can write to it.
        OSError: It cannot be made.
    """
    parent = _parent()
    parent.mkdir(mode=0o700, exist_ok=True)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise BackendUnavailableError(
            f"{parent} is not a folder that only this user can enter, so an agent's socket would not be safe in it. "
            "Remove it, or set XDG_RUNTIME_DIR to a folder of your own"
        )
    _remove_stale(parent)
    return pathlib.Path(tempfile.mkdtemp(prefix="agent-", dir=parent))


def read_errors(folder: pathlib.Path, limit: int = 4000) -> str:
    """The end of what an agent wrote to its stderr; empty if nothing or if the folder is gone."""
    try:
        return (folder / "errors").read_text(errors="backslashreplace")[-limit:]
    except OSError:
        return ""


def _parent() -> pathlib.Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and pathlib.Path(runtime).is_dir():
        parent = pathlib.Path(runtime) / "kale-dist"
        longest = parent / "agent-12345678" / "socket"
        if len(os.fsencode(longest)) <= MAX_SOCKET_PATH_BYTES and os.access(runtime, os.W_OK):
            return parent
    return pathlib.Path("/tmp") / f"kale-dist-{os.geteuid()}"  # noqa: S108 - a fixed name whose owner is checked


def _remove_stale(parent: pathlib.Path) -> None:
    for folder in parent.glob("agent-*"):
        try:
            if time.time() - folder.stat().st_mtime < STALE_AFTER_S:
                continue
            pid, start = (int(word) for word in (folder / "process").read_text().split())
        except FileNotFoundError:
            pid, start = 0, 0
        except (OSError, ValueError):
            continue
        if not processes.is_running(pid, start):
            shutil.rmtree(folder, ignore_errors=True)
