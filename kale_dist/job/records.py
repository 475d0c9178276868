"""Jobs on disk: each has a private folder, which any process of the same user finds again.

`$XDG_STATE_HOME/kale-dist/` (or `~/.local/state/kale-dist/`) holds

    jobs/<name>/     a job's folder with the files of `wire.JobFiles`; its creation takes the name
    blobs/           the snapshots' bytes, by content, shared by all jobs
    checked          which files of blobs have the bytes of their names
    lock             held shared from a snapshot's first byte to its record, and alone while blobs are deleted
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import getpass
import json
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Iterator
from typing import Any, Self, TextIO

from kale_dist.errors import JobExistsError, JobNotFoundError, StoreError
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.wire import JobFiles, blobs, decode, fields_of
from kale_dist.wire.blobs import FolderStore, fresh
from kale_dist.wording import listing

BLOBS_WARNING_BYTES = 20 << 30
"""Above this size a call warns that old snapshots fill the disk."""

NOBODY = 65534
"""The user that owns root's files on an NFS server that squashes root."""

_DELETED = ".deleted-"
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
_FOLDER_NAME = re.compile(r"[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){0,3}", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The record of a job, written at its submission. Never contains the key."""

    ref: str
    name: str
    """The folder's name: the job's own, after the backend's name and the namespace for backends other than local."""
    created: float
    """Seconds since 1970."""
    spec: JobSpec
    kernel_pid: int
    detach: bool
    agent_pid: int = 0
    agent_start: int = 0
    """When the agent's process started, in ticks since boot: with the pid this identifies the process."""
    agent_socket: str = ""
    """The socket by which processes other than the notebook's reach the agent."""
    place: tuple[tuple[str, str], ...] = ()
    """Facts by which a backend other than local finds the job again."""

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {**fields_of(self), "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`. Ignores fields of later versions."""
        known = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return decode(cls, {**known, "spec": JobSpec.from_json(data["spec"])})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The present life of a job in containers: that of one head. A job has one at a time; the next takes its place here.

    Each head counts its attempts, lines and events from 0. In the job's folder they go on where those of the head before have ended.
    """

    number: int = 1
    """How many objects the job has had, this life's included: it gives the object its name."""
    object: str = ""
    """Name of the PyTorchJob, or the prefix of the containers' names; empty for a local job."""
    place: tuple[tuple[str, str], ...] = ()
    """Facts by which the backend finds the object; empty if they are those of the record."""
    is_started: bool = True
    """Whether the object is made. False while the job is renewed: whoever follows it removes the object before, and makes this one."""
    uid: str = ""
    """UID of the head's pod; empty before the head was seen."""
    began: float = 0.0
    """When the life began, or went on after a suspension, in seconds since 1970; 0 stands for `Record.created`."""
    is_suspended: bool = False
    """Whether the job was suspended: the next head of the same object then counts as no restart."""
    used_restarts: int = 0
    """How many restarts were used before it, its own included."""
    first_attempt: int = 0
    """The number of its attempt 0 within the job."""
    first_line: int = 0
    """The number of its line 0 within the job's log."""
    first_event: int = 0
    """The number of its event 0 within the job's events."""


FIRST_LIFE = Life()


def state_dir() -> pathlib.Path:
    """The folder of all state that outlives a process; created with mode 0700 if it is missing.

    Raises:
        StoreError: The folder cannot be created.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        # By the XDG specification a relative path is ignored.
        root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise StoreError(f"{error} Set HOME, or XDG_STATE_HOME to a folder you can write to") from error
    return _private(root / "kale-dist")


def jobs_dir() -> pathlib.Path:
    """The folder of the jobs' folders."""
    return _private(state_dir() / "jobs")


def blobs_dir() -> pathlib.Path:
    """The folder of the snapshots' bytes."""
    blobs.checked.file = state_dir() / "checked"
    return _private(state_dir() / "blobs")


def files(name: str) -> JobFiles:
    """The paths of a job's files, whether the job exists or not."""
    return JobFiles(jobs_dir() / name)


def exists(name: str) -> bool:
    """Whether a job of this name is there; the folder of one whose notebook was killed before its record is removed."""
    made = files(name)
    if made.folder.exists() and not made.record.exists():
        # While someone submits, it may be theirs.
        with contextlib.suppress(BlockingIOError), _locked(exclusive=True, waits=False):
            if not made.record.exists():
                withdraw(name)
    return made.folder.exists()


def exists_error(name: str) -> JobExistsError:
    """The error for a name that is taken."""
    ref = name
    # The record is written shortly after the name was taken.
    with contextlib.suppress(JobNotFoundError):
        ref = read(name).ref.removeprefix("local://")
    return JobExistsError(
        f"name: a job named {name!r} is there already. Leave `name` out, choose another one, or remove the old job "
        f"with kale_dist.attach({ref!r}).delete() or `kale-dist delete {ref}`"
    )


def create(name: str, key: bytes) -> JobFiles:
    """Take a name: make the job's folder and write its key.

    Raises:
        JobExistsError: The name is taken.
        StoreError: The disk is full or read-only.
    """
    made = files(name)
    try:
        made.folder.mkdir(mode=0o700)
        with open(made.key, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(key)
    except FileExistsError:
        raise exists_error(name) from None
    except BaseException as error:
        # Without its record the folder would only keep the name.
        shutil.rmtree(made.folder, ignore_errors=True)
        raise (_store_error(made.folder, error) if isinstance(error, OSError) else error) from error
    return made


def write(record: Record) -> None:
    """Write or replace a job's record; its folder has to exist.

    Raises:
        StoreError: The disk is full or read-only.
    """
    target = files(record.name).record
    try:
        with fresh(target, lasting=target.exists()) as file:
            file.write_text(json.dumps(record.to_json()))
    except OSError as error:
        raise _store_error(target, error) from error


def sync(name: str) -> None:
    """Have a new job's key and record outlive a power failure. After the submission: the ranks do not wait for the disk."""
    made = files(name)
    with contextlib.suppress(OSError):
        for path in (made.key, made.record, made.folder):
            blobs.sync(path)


def read(name: str) -> Record:
    """The record of a job.

    Raises:
        JobNotFoundError: There is no such job, or its record cannot be read.
    """
    folder = files(name).folder
    if not _FOLDER_NAME.fullmatch(name) or not folder.exists():
        # The user knows the job by its reference, not by its folder here.
        backend, dot, _ = name.partition(".")
        if dot:
            raise JobNotFoundError(f"There is no job {_ref_of(name)!r}. {listing(backend)}")
        elsewhere = [_ref_of(one.name) for one in jobs_dir().iterdir() if one.name.endswith(f".{name}")]
        remedy = "kale_dist.jobs() or `kale-dist jobs` lists those there are"
        raise JobNotFoundError(
            f"There is no job {name!r} on this machine. {f'Did you mean {elsewhere[0]!r}?' if elsewhere else remedy}"
        )
    try:
        return Record.from_json(json.loads(files(name).record.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobNotFoundError(
            f"The record of job {name!r} cannot be read ({error}). Remove {folder} to be rid of the job"
        ) from error


def _ref_of(folder: str) -> str:
    backend, _, elsewhere = folder.partition(".")
    return f"{backend}://{elsewhere.replace('.', '/', 1)}"


def life(files: JobFiles) -> Life:
    """The present life of a job, even if the job does not exist."""
    try:
        return decode(Life, json.loads(files.life.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return FIRST_LIFE


def write_life(files: JobFiles, life: Life) -> None:
    """Write or replace the record of a job's life.

    Raises:
        StoreError: The job's folder is gone, or the disk is full.
    """
    try:
        with fresh(files.life) as file:
            file.write_text(json.dumps(dataclasses.asdict(life)))
    except OSError as error:
        raise _store_error(files.life, error) from error


def read_key(name: str) -> bytes | None:
    """The job's key; None if it is gone or this user may not read it."""
    try:
        return files(name).key.read_bytes() or None
    except OSError:
        return None


def all_records() -> list[Record]:
    """The readable records of all jobs, oldest first."""
    found = []
    for folder in jobs_dir().iterdir():
        if not folder.name.startswith("."):
            # Another process may have deleted the job since the folder was listed.
            with contextlib.suppress(JobNotFoundError):
                found.append(read(folder.name))
    return sorted(found, key=lambda record: (record.created, record.name))


def refs(backend: str) -> list[str]:
    """References of all jobs of a backend with a readable record, oldest first."""
    return [record.ref for record in all_records() if record.ref.startswith(f"{backend}://")]


def withdraw(name: str) -> None:
    """Remove the folder of a job that was not submitted after all. Its blobs stay until the next `delete`.

    Unlike `delete` it may be called within `keeping_blobs`.
    """
    shutil.rmtree(_put_aside(name), ignore_errors=True)


def delete(name: str) -> None:
    """Remove a job's folder, if it exists, and all blobs that no other job needs."""
    with _locked(exclusive=True):
        _put_aside(name)
        for rubbish in jobs_dir().glob(f"{_DELETED}*"):
            shutil.rmtree(rubbish, ignore_errors=True)
        store = FolderStore(blobs_dir())
        for blob in set(store.list()) - _named_blobs():
            store.delete(blob)


def _named_blobs() -> set[str]:
    """Digests in the text of all records: another version may have written one that this version cannot read.

    Raises:
        StoreError: A record is there and cannot be opened.
    """
    found: set[str] = set()
    for folder in jobs_dir().glob("[!.]*"):
        try:
            found.update(_DIGEST.findall(JobFiles(folder).record.read_text(errors="replace")))
        except (FileNotFoundError, NotADirectoryError):
            # A submission that was killed before its record.
            continue
        except OSError as error:
            problem = f"{folder} cannot be read ({error.strerror or error}), so the bytes of no snapshot were deleted"
            raise StoreError(f"{problem}. Make it readable, and delete once more") from error
    return found


@contextlib.contextmanager
def keeping_blobs() -> Iterator[None]:
    """Prevent the deletion of blobs while a snapshot is taken, until the job's record is written."""
    with _locked(exclusive=False):
        yield


def blobs_size() -> int:
    """Bytes of all snapshots on disk."""
    store = FolderStore(blobs_dir())
    total = 0
    for blob in store.list():
        with contextlib.suppress(OSError):
            total += store.path(blob).stat().st_size
    return total


def _put_aside(name: str) -> pathlib.Path:
    """Rename a job's folder, so that the name is free at once, however long the removal of the files takes."""
    folder = files(name).folder
    gone = folder.with_name(f"{_DELETED}{name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    return gone


@contextlib.contextmanager
def _locked(*, exclusive: bool, waits: bool = True) -> Iterator[None]:
    path = state_dir() / "lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise _store_error(path, error) from error
    with file:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if waits else fcntl.LOCK_NB))
        yield


def _private(folder: pathlib.Path) -> pathlib.Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It may have been made by hand, or unpacked, and blobs are readable to all who come to them.
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), 0, NOBODY):
            raise StoreError(
                f"{folder} belongs to another user (uid {found.st_uid}). Set XDG_STATE_HOME to a folder of your own"
            )
        if found.st_uid == os.geteuid():
            if found.st_mode & 0o077:
                folder.chmod(0o700)
        elif found.st_mode & 0o002:
            raise StoreError(f"All users may write into {folder}. Set XDG_STATE_HOME to a folder of your own")
    except OSError as error:
        raise _store_error(folder, error) from error
    return folder


def _store_error(path: pathlib.Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "Free some space; `kale-dist delete --finished` removes old jobs and their snapshots"
        if full
        else "Set XDG_STATE_HOME to a folder you can write to"
    )
    return StoreError(f"{path} could not be written ({error.strerror or error}). {remedy}")


# -- shared by the processes of one machine: which of them follows a job, and whether the user cancelled it ---------------


def identity() -> str:
    """This user and machine: `ann@laptop`."""
    person = "somebody"
    with contextlib.suppress(Exception):
        person = getpass.getuser()
    return f"{person}@{socket.gethostname()}"


def mark_cancelled(files: JobFiles) -> None:
    """Record that this user cancelled a job, so that it is not restarted, however its pods end."""
    with contextlib.suppress(OSError):
        files.cancelled.write_text(identity())


def canceller(files: JobFiles) -> str:
    """The user and machine that cancelled a job from this machine; empty if none did."""
    try:
        return files.cancelled.read_text() or "its user"
    except OSError:
        return ""


def opened_lock(files: JobFiles) -> TextIO:
    """Open the file whose lock makes one process of several the follower of a job.

    Raises:
        StoreError: The job's folder is gone or cannot be written.
    """
    try:
        return (files.folder / "follower.lock").open("a")
    except OSError as error:
        raise StoreError(f"{files.folder} could not be written: {error.strerror or error}") from error


def try_lock(file: TextIO) -> bool:
    """Lock a file exclusively until it is closed; False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
