"""Folders that a launched function returns: their files come back with its value."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import stat
from collections.abc import Mapping

from kale_dist.errors import ConfigError, SnapshotDamagedError
from kale_dist.wire import blobs

MOST_BYTES = 4 << 30
MOST_FILES = 10_000


class Folder:
    """A folder whose files come back from the function of `launch` that returns it.

        return kd.Folder("out/adapter")

    `job.result()` has a `Folder` in its place, whose `path` is a copy on the notebook's machine. It is within the job's folder,
    and `job.delete()` removes it: `save` copies it to where you want it. A function may also return folders in lists, tuples and
    dicts. Only rank 0's files come back: what other ranks return has None in the folder's place.

    Args:
        path: Where it is, as rank 0 sees it.

    Raises:
        ConfigError: In rank 0, when the function returns: there is no such folder; it has more than 4 GiB or 10,000 files, a link
            to something else than a file in it, or what is neither file nor folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        """Where it is."""

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r})"

    def __fspath__(self) -> str:
        """The path as text, so that a folder can be given where a path can."""
        return str(self.path)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Copy the folder.

        Args:
            path: The new folder, which must not exist yet.

        Returns:
            The absolute path.

        Raises:
            ConfigError: It exists, or it cannot be written.
        """
        target = pathlib.Path(path).expanduser().absolute()
        try:
            shutil.copytree(self.path, target)
        except OSError as error:
            remedy = "Name a folder that does not exist yet, such as adapter"
            raise ConfigError("path", f"{self.path} cannot be copied to {target} ({error.strerror})", remedy) from error
        return target


def pack(folder: Folder) -> tuple[str, dict[str, pickle.PickleBuffer]]:
    """The name of a folder, and its files, mapped, by their paths in it.

    Raises:
        ConfigError: As `Folder` says.
    """
    root = folder.path.resolve()
    found: dict[str, pathlib.Path] = {}
    size = 0
    if not root.is_dir():
        raise ConfigError("Folder", f"rank 0 sees no folder {root}", "Return one that rank 0 has written")
    for parent, folders, names in os.walk(root):
        for path in (pathlib.Path(parent, name) for name in (*folders, *names)):
            # A link to a file of the same folder, as Lightning's last.ckpt, comes back as a file.
            is_within = path.is_symlink() and path.exists() and path.resolve().is_relative_to(root)
            state = path.stat() if is_within else path.lstat()
            if path.is_dir() and not path.is_symlink():
                continue
            if not stat.S_ISREG(state.st_mode):
                what = "a link, but not to a file in it" if path.is_symlink() else "neither a file nor a folder"
                raise ConfigError("Folder", f"{path} is {what}", "Return a folder of plain files")
            found[path.relative_to(root).as_posix()] = path
            size += state.st_size
    if size > MOST_BYTES or len(found) > MOST_FILES:
        problem = f"{root} has {len(found):,} files of {size / 1e9:.1f} GB together"
        remedy = (
            f"At most {MOST_FILES:,} files and 4 GiB come back: write them to a volume (volumes=), and return the path"
        )
        raise ConfigError("Folder", problem, remedy)
    return root.name or "folder", {name: pickle.PickleBuffer(blobs.map_file(path)) for name, path in found.items()}


def unpack(target: pathlib.Path, files: Mapping[str, memoryview]) -> Folder:
    """Write the files of a folder; each takes the place of one that was written before.

    Raises:
        SnapshotDamagedError: A name leads out of the folder.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in files.items():
        path = target.joinpath(name)
        if ".." in path.parts or not path.is_relative_to(target):
            raise SnapshotDamagedError(f"A returned folder has a file outside of it: {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with blobs.fresh(path, lasting=False) as fresh:
            fresh.write_bytes(content)
    return Folder(target)
