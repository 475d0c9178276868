"""Folders that a launched function returns: their files come back with its value."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import tempfile
from collections.abc import Mapping

from kale_dist.errors import ConfigError, SnapshotDamagedError, StoreError
from kale_dist.wire import blobs, context

MOST_BYTES = 4 << 30
MOST_FILES = 10_000

_MAPPED_BYTES = 16 << 20
"""Smaller files are read into memory."""


class Folder:
    """A folder whose files come back from the function of `launch` that returns it.

        return kd.Folder("out/adapter")

    `job.result()` has a `Folder` in its place, whose `path` is a copy on the notebook's machine. It is within the job's folder,
    beside the outcome, so that the files take their size twice until `job.delete()`: `save` copies it to where you want it. A
    function may also return folders in lists, tuples and dicts. Only rank 0's files come back: what other ranks return has None
    in the folder's place. Empty folders, modes, links to folders or out of it, and special files do not come.

    Args:
        path: Where it is, as rank 0 sees it.

    Raises:
        ConfigError: In rank 0, when the function returns: there is no such folder; it has more than 4 GiB or 10,000 files, or a
            file that cannot be read.
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
        """Copy the folder, for you alone to read.

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


def holds_folder(value: object) -> bool:
    """Whether a value is a folder, or has one in its lists, tuples and dicts."""
    found, seen = [value], set()
    # It grows while it is gone through.
    for one in found:
        if isinstance(one, Folder):
            return True
        if isinstance(one, dict | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            found.extend(one.values() if isinstance(one, dict) else one)
    return False


def pack(folder: Folder) -> tuple[str, dict[str, pickle.PickleBuffer]]:
    """The name of a folder, and its files by their paths in it; large ones are mapped.

    Raises:
        ConfigError: As `Folder` says.
    """
    path = root = folder.path.resolve()
    if not root.is_dir():
        raise ConfigError("Folder", f"rank 0 sees no folder {root}", "Return one that rank 0 has written")
    found: dict[pathlib.Path, int] = {}
    left_out = []
    try:
        for parent, folders, names in os.walk(root, onerror=_stop):
            for path in (pathlib.Path(parent, name) for name in (*folders, *names)):
                # A link to a file of the same folder, as Lightning's last.ckpt, comes back as a file.
                if pathlib.Path(os.path.realpath(path)).is_relative_to(root) and path.is_file():
                    found[path] = path.stat().st_size
                elif path.is_symlink() or not path.is_dir():
                    left_out.append(path)
        if (size := sum(found.values())) > MOST_BYTES or len(found) > MOST_FILES:
            problem = f"{root} has {len(found):,} files of {size / 1e9:.1f} GB together"
            most = f"At most {MOST_FILES:,} files and 4 GiB come back"
            raise ConfigError("Folder", problem, f"{most}: write them to a volume (volumes=), and return the path")
        files = {}
        for path, size in found.items():
            # What is mapped is read twice, by when a log may have been cut.
            content = path.read_bytes() if size < _MAPPED_BYTES else blobs.map_file(path)
            files[path.relative_to(root).as_posix()] = pickle.PickleBuffer(content)
    except (OSError, StoreError) as error:
        unread = getattr(error, "filename", None) or path
        problem = f"{unread} cannot be read ({type(error.__cause__ or error).__name__})"
        raise ConfigError("Folder", problem, "Return a folder whose files rank 0 can read") from error
    if left_out:
        context.log(
            f"Only files, and links to files in it, come back of {root}. Left out: {len(left_out)}, first {left_out[0]}."
        )
    return root.name or "folder", files


def _stop(error: OSError) -> None:
    raise error


def unpack(target: pathlib.Path, files: Mapping[str, memoryview]) -> Folder:
    """Write the files of a folder, unless it exists already: it appears complete or not at all.

    Raises:
        SnapshotDamagedError: A name leads out of the folder.
        StoreError: The folder cannot be written.
    """
    temporary = ""
    try:
        if os.path.lexists(target):
            return Folder(target)
        _make(target.parent)
        temporary = tempfile.mkdtemp(dir=target.parent)
        for name, content in files.items():
            path = pathlib.Path(temporary, name)
            if ".." in path.parts or not path.is_relative_to(temporary):
                raise SnapshotDamagedError(f"A returned folder has a file outside of it: {name!r}")
            _make(path.parent)
            path.write_bytes(content)
            path.chmod(0o600)
        pathlib.Path(temporary).rename(target)
    except OSError as error:
        # Another process may have written it meanwhile.
        if not os.path.lexists(target):
            problem = f"A returned folder could not be written to {target}: {error.strerror}"
            raise StoreError(
                f"{problem}. Mend that, such as by `kale-dist delete` of old jobs, and read the result again."
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Folder(target)


def _make(folder: pathlib.Path) -> None:
    """Make a folder and those above it, for the user alone."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
