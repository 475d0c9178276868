"""Files in a job's folder that processes of one machine share: who follows the job, and that its user cancelled it."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import socket
from typing import TextIO

from kale_dist.contract import JobFiles
from kale_dist.errors import StoreError

_CANCELLED = "cancelled"
_LOCK = "follower.lock"


def identity() -> str:
    """The user and machine that submit or cancel a job: `ann@laptop`."""
    person = "somebody"
    with contextlib.suppress(Exception):
        person = getpass.getuser()
    return f"{person}@{socket.gethostname()}"


def mark_cancelled(files: JobFiles) -> None:
    """Record that this user cancelled a job: it is then not restarted, however its pods end."""
    with contextlib.suppress(OSError):
        (files.folder / _CANCELLED).write_text(identity())


def canceller(files: JobFiles) -> str:
    """Who cancelled a job on this machine; empty if it was not cancelled."""
    try:
        return (files.folder / _CANCELLED).read_text() or "its user"
    except OSError:
        return ""


def opened_lock(files: JobFiles) -> TextIO:
    """The file of the lock that makes one process of several the follower of a job.

    Raises:
        StoreError: The job's folder is gone or cannot be written.
    """
    try:
        return (files.folder / _LOCK).open("a")
    except OSError as error:
        raise StoreError(f"{files.folder} could not be written: {error.strerror or error}") from error


def try_lock(file: TextIO) -> bool:
    """Whether this process is the one that follows the job, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
