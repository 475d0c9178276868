"""Files kept on this machine between builds, in `$XDG_CACHE_HOME/kale-dist/` (or `~/.cache/kale-dist/`).

made/<tag>       the digest of the image that this user has made
bases/ packed/   what bases are and answered, names of layers; all of it can be made again
distributions/   packed packages, with what each has, and what images have told (`packages="here"`)
locks/<tag>      held while an image is made
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator

from kale_dist.errors import ImageError
from kale_dist.image.reference import Reference
from kale_dist.job import records
from kale_dist.wire.blobs import fresh


def folder(name: str = "") -> pathlib.Path:
    """A folder of the cache, created with mode 0700 if it is missing; without a name, the cache's root.

    Raises:
        ImageError: The folder cannot be created.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is ignored.
    root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".cache"
    path = root / "kale-dist" / name
    with writing(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turn an `OSError` of the block into an error that names the folder where images are built and how to make room.

    Raises:
        ImageError: The block raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise ImageError(
            f"Images and packages are packed in {path}, which could not be written: {error.strerror or error}. Make room there, or set "
            f"XDG_CACHE_HOME to a folder that has some and that you can write to, and call again."
        ) from error


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file of the cache atomically. A failure is ignored: everything in the cache can be made again."""
    with contextlib.suppress(OSError), fresh(path, lasting=False) as file:
        file.write_bytes(data)


@contextlib.contextmanager
def alone(image: Reference, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of an image's tag, so that other processes of this user do not build the same image meanwhile."""
    path = folder("locks") / image.tag
    with writing(path):
        file = path.open("a")
    with file:
        if not records.try_lock(file):
            log(f"Another process on this machine makes the image {image}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
