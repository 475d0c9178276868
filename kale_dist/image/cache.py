"""Files kept on this machine between builds, in `$XDG_CACHE_HOME/kale-dist/` (or `~/.cache/kale-dist/`).

bases/ packed/   what bases answered, names of layers; all of it can be made again
locks/<tag>      held while an image is made
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator

from kale_dist.blobs import fresh
from kale_dist.errors import ImageError, StoreError

_BUILDING = "building-"
_LEFT_BEHIND_S = 24 * 3600
"""A build that is older than this was killed."""


def folder() -> pathlib.Path:
    """The folder of it all, made with mode 0700 if it is not there.

    Raises:
        StoreError: It cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification tells to ignore a relative path.
        root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise StoreError(f"{error} Set HOME, or XDG_CACHE_HOME to a folder you can write to") from error
    return _made(root / "kale-dist")


@contextlib.contextmanager
def working_folder() -> Iterator[pathlib.Path]:
    """A folder for one build, which goes at its end; those that killed builds have left go at the beginning.

    Raises:
        ImageError: It cannot be made.
    """
    root = folder()
    for left in root.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _LEFT_BEHIND_S:
                shutil.rmtree(left, ignore_errors=True)
    try:
        made = tempfile.TemporaryDirectory(dir=root, prefix=_BUILDING)
    except OSError as error:
        raise no_room(root, error) from error
    with made as name:
        yield pathlib.Path(name)


def no_room(path: pathlib.Path, error: OSError) -> ImageError:
    """The error for something of a build that could not be written."""
    return ImageError(
        f"An image is made in {path}, which could not be written: {error.strerror or error}. Make room there, or set "
        f"XDG_CACHE_HOME to a folder that has some and that you can write to, and call again."
    )


def write(path: pathlib.Path, data: bytes) -> None:
    """Keep something: whole or not at all, and not where there is no room, for it can be found out again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh(path) as file:
            file.write_bytes(data)


@contextlib.contextmanager
def alone(tag: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold off other processes of this user that would make the same image.

    Args:
        tag: Of the image.
        waiting: Called once, if another process makes it at the moment.
    """
    path = _made(folder() / "locks") / tag
    try:
        file = path.open("a")
    except OSError as error:
        raise _store_error(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _made(path: pathlib.Path) -> pathlib.Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _store_error(path, error) from error
    return path


def _store_error(path: pathlib.Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space" if full else "Set XDG_CACHE_HOME to a folder you can write to"
    return StoreError(f"{path} could not be written ({error.strerror or error}). {remedy}")
