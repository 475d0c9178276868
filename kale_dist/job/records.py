"""Jobs on disk: one private folder each, found again by any process of the same user.

`$XDG_STATE_HOME/kale-dist/` (or `~/.local/state/kale-dist/`) holds

    jobs/<name>/     a job's folder, named by `contract.JobFiles`; making it takes the name. Runs after the first have
                     a folder of their own in it: `run-2`, `run-3`
    blobs/           the snapshots' bytes, by content, shared by all jobs
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
from kale_dist.wire import JobFiles, decode
from kale_dist.wire.blobs import FolderStore, fresh
from kale_dist.wording import listing

BLOBS_WARNING_BYTES = 20 << 30
"""From this size on a call warns that old snapshots fill the disk."""

_DELETED = ".deleted-"
_FOLDER_NAME = re.compile(r"[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){0,3}", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is written down of a job when it is submitted. Never holds the key."""

    ref: str
    name: str
    """Of its folder: the job's own name, with the backend's name and the namespace in front for other backends."""
    created: float
    """Seconds since 1970."""
    spec: JobSpec
    kernel_pid: int
    detach: bool
    agent_pid: int = 0
    agent_start: int = 0
    """With the pid this names the agent's process for good: ticks since boot."""
    agent_socket: str = ""
    """Where processes other than the notebook's reach the agent."""
    place: tuple[tuple[str, str], ...] = ()
    """What a backend that is not local needs to find the job again."""

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`. Fields of later versions are passed over."""
        known = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        return decode(cls, {**known, "spec": JobSpec.from_json(data["spec"])})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is written down of one run of a job: one head and what it did."""

    number: int
    """From 1."""
    files: JobFiles
    """Where its log, events and outcomes are."""
    object: str = ""
    """Name of its PyTorchJob, or the prefix of its containers' names; empty for a local job."""
    uid: str = ""
    """Of its head; empty before the head has been seen."""
    first_attempt: int = 0
    """Attempts of all runs before it: what the head calls attempt 0."""
    began: float = 0.0
    """When it was submitted, or resumed after a suspension, in seconds since 1970; 0: when the record was written."""
    is_started: bool = True
    """Whether its object has been created."""
    is_free: bool = False
    """Whether it does not count against `max_restarts`, as after a suspension."""
    is_suspended: bool = False
    """Whether it was suspended: the next head of the same object is the next run, which is free."""
    place: tuple[tuple[str, str], ...] = ()
    """What the backend needs to find it again; empty: what the record has."""


def state_dir() -> pathlib.Path:
    """The folder of everything that outlives a process; made with mode 0700 if it is not there.

    Raises:
        StoreError: It cannot be made.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The XDG specification tells to ignore a relative path.
        root = pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise StoreError(f"{error} Set HOME, or XDG_STATE_HOME to a folder you can write to") from error
    return _private(root / "kale-dist")


def jobs_dir() -> pathlib.Path:
    """The folder of the jobs' folders."""
    return _private(state_dir() / "jobs")


def blobs_dir() -> pathlib.Path:
    """The folder of the snapshots' bytes."""
    return _private(state_dir() / "blobs")


def files(name: str) -> JobFiles:
    """The files of a job, whether it exists or not."""
    return JobFiles(jobs_dir() / name)


def exists(name: str) -> bool:
    """Whether the name is taken."""
    return files(name).folder.exists()


def exists_error(name: str) -> JobExistsError:
    """The error for a name that is taken."""
    ref = name
    # The record is written a little after its name was taken.
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
    except OSError as error:
        shutil.rmtree(made.folder, ignore_errors=True)
        raise _store_error(made.folder, error) from error
    return made


def write(record: Record) -> None:
    """Write or replace a job's record; its folder has to be there.

    Raises:
        StoreError: The disk is full or read-only.
    """
    target = files(record.name).record
    try:
        with fresh(target) as file:
            file.write_text(json.dumps(record.to_json()))
    except OSError as error:
        raise _store_error(target, error) from error


def read(name: str) -> Record:
    """The record of a job.

    Raises:
        JobNotFoundError: There is no such job, or its record cannot be read.
    """
    folder = files(name).folder
    if not _FOLDER_NAME.fullmatch(name) or not folder.exists():
        backend, dot, elsewhere = name.partition(".")
        if dot:
            # The user knows the job by its reference, not by its folder here.
            ref = f"{backend}://{elsewhere.replace('.', '/', 1)}"
            raise JobNotFoundError(f"There is no job {ref!r}. {listing(backend)}")
        raise JobNotFoundError(
            f"There is no job {name!r} on this machine. kale_dist.jobs() or `kale-dist jobs` lists those there are"
        )
    try:
        return Record.from_json(json.loads(files(name).record.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobNotFoundError(
            f"The record of job {name!r} cannot be read ({error}). Remove {folder} to be rid of the job"
        ) from error


def runs(name: str) -> tuple[Run, ...]:
    """All runs of a job, oldest first; at least one, also of a job that does not exist."""
    job = files(name)
    found = [_read_run(job, 1) or Run(number=1, files=job)]
    while (run := _read_run(job, len(found) + 1)) is not None:
        found.append(run)
    return tuple(found)


def write_run(run: Run) -> None:
    """Write down a run, or what is new about it.

    Raises:
        StoreError: The job's folder is gone, or the disk is full.
    """
    target = run.files.run_facts
    values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "files"}
    try:
        # Not its parents: a job that was deleted stays deleted.
        if run.number > 1:
            run.files.folder.mkdir(mode=0o700, exist_ok=True)
        with fresh(target) as file:
            file.write_text(json.dumps(values))
    except OSError as error:
        raise _store_error(target, error) from error


def _read_run(job: JobFiles, number: int) -> Run | None:
    run = job.run(number)
    try:
        values = json.loads(run.run_facts.read_bytes())
        return Run(**{**values, "files": run, "place": tuple((name, value) for name, value in values["place"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_key(name: str) -> bytes | None:
    """The job's secret bytes; None if this user may not read them or they are gone."""
    try:
        return files(name).key.read_bytes() or None
    except OSError:
        return None


def all_records() -> list[Record]:
    """The readable records of all jobs, oldest first."""
    found = []
    for folder in jobs_dir().iterdir():
        if not folder.name.startswith("."):
            # Another process may delete a job between the list and the look.
            with contextlib.suppress(JobNotFoundError):
                found.append(read(folder.name))
    return sorted(found, key=lambda record: (record.created, record.name))


def refs(backend: str) -> list[str]:
    """References of all jobs of a backend with a readable record, oldest first."""
    return [record.ref for record in all_records() if record.ref.startswith(f"{backend}://")]


def withdraw(name: str) -> None:
    """Remove the folder of a job that was never handed over. Its blobs stay until the next deletion.

    Unlike `delete` it may be called within `keeping_blobs`.
    """
    shutil.rmtree(_put_aside(name), ignore_errors=True)


def delete(name: str) -> None:
    """Remove a job's folder, and all blobs that no other job needs. A job that is not there is left at that."""
    with _locked(exclusive=True):
        _put_aside(name)
        for rubbish in jobs_dir().glob(f"{_DELETED}*"):
            shutil.rmtree(rubbish, ignore_errors=True)
        needed = {blob for other in all_records() for blob in _blobs_of(other.spec)}
        store = FolderStore(blobs_dir())
        for blob in set(store.list()) - needed:
            store.delete(blob)


def _blobs_of(spec: JobSpec) -> Iterator[str]:
    """What a job's ranks need, and what its image is made of."""
    yield from spec.blobs
    yield from (file.digest for file in (spec.recipe.files if spec.recipe is not None else ()))


@contextlib.contextmanager
def keeping_blobs() -> Iterator[None]:
    """Hold off the deletion of blobs, from a snapshot's first byte until its record is written."""
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
    """Rename a job's folder: the name is free at once and for all, however long the removal of the files takes."""
    folder = files(name).folder
    gone = folder.with_name(f"{_DELETED}{name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    return gone


@contextlib.contextmanager
def _locked(*, exclusive: bool) -> Iterator[None]:
    path = state_dir() / "lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise _store_error(path, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def _private(folder: pathlib.Path) -> pathlib.Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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


# -- what processes of one machine share: who follows a job, and that its user cancelled it ------------------------------


def identity() -> str:
    """The user and machine that submit or cancel a job: `ann@laptop`."""
    person = "somebody"
    with contextlib.suppress(Exception):
        person = getpass.getuser()
    return f"{person}@{socket.gethostname()}"


def mark_cancelled(files: JobFiles) -> None:
    """Record that this user cancelled a job: it is then not restarted, however its pods end."""
    with contextlib.suppress(OSError):
        files.cancelled.write_text(identity())


def canceller(files: JobFiles) -> str:
    """Who cancelled a job on this machine; empty if it was not cancelled."""
    try:
        return files.cancelled.read_text() or "its user"
    except OSError:
        return ""


def opened_lock(files: JobFiles) -> TextIO:
    """The file of the lock that makes one process of several the follower of a job.

    Raises:
        StoreError: The job's folder is gone or cannot be written.
    """
    try:
        return (files.folder / "follower.lock").open("a")
    except OSError as error:
        raise StoreError(f"{files.folder} could not be written: {error.strerror or error}") from error


def try_lock(file: TextIO) -> bool:
    """Whether this process is the one that follows the job, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
