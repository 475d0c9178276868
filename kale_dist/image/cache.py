"""What is kept on this machine between builds: inventories, wheels, locks, and when an image was last used from here.

`$XDG_CACHE_HOME/kale-dist/` (or `~/.cache/kale-dist/`) holds

    layers/ resolutions/ wheels/ ...   of the builder without a daemon; all of it can be made again
    locks/<tag>                        held while an image is made
    used/<registry and path>/<tag>     empty; its time is that of the last use
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

from kale_dist.errors import StoreError

_OWN = frozenset({"locks", "used"})
_BUILDING = "building-"
_DAY_S = 24 * 3600


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


def note_use(repository: str, tag: str) -> None:
    """Write down that an image is used now.

    Args:
        repository: With its registry: `localhost:5000/team/kale-dist`.
        tag: Of the image.
    """
    # An image that is used and not noted is at worst listed as unknown.
    with contextlib.suppress(OSError, StoreError):
        (_made(folder() / "used" / quote(repository, safe="")) / tag).touch()


def last_use(repository: str, tag: str) -> float | None:
    """When an image was last used from this machine, in seconds since 1970; None: never."""
    try:
        return (folder() / "used" / quote(repository, safe="") / tag).stat().st_mtime
    except OSError:
        return None


def forget_use(repository: str, tag: str) -> None:
    """Remove what `note_use` wrote."""
    with contextlib.suppress(OSError):
        (folder() / "used" / quote(repository, safe="") / tag).unlink()


def clean(older_than_s: float) -> int:
    """Remove what builders have kept and not touched for so many seconds. Gives the bytes that were freed.

    What builds that were killed have left goes after a day; younger folders may be at work.
    """
    now, freed = time.time(), 0
    for place in folder().iterdir():
        if place.name.startswith(_BUILDING):
            if place.stat().st_mtime < now - max(older_than_s, _DAY_S):
                shutil.rmtree(place, ignore_errors=True)
        elif place.name not in _OWN and place.is_dir():
            freed += _clean(place, now - older_than_s)
    return freed


def _clean(place: pathlib.Path, limit: float) -> int:
    freed = 0
    for path in sorted(place.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.is_dir() and not path.is_symlink():
                # Only an empty one goes.
                path.rmdir()
            elif max(status.st_mtime, status.st_atime) < limit:
                path.unlink()
                freed += status.st_size
    return freed


def _made(path: pathlib.Path) -> pathlib.Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _store_error(path, error) from error
    return path


def _store_error(path: pathlib.Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "Free some space; `kale-dist image prune` removes what builds have left"
        if full
        else "Set XDG_CACHE_HOME to a folder you can write to"
    )
    return StoreError(f"{path} could not be written ({error.strerror or error}). {remedy}")
