"""The files that a mirror appends to, and the account of what is in them: right after an end at any moment.

What is about to be appended is written into `mirror.json` first. If the process is killed then, the sizes of the files
tell the next one how much of it was appended, and so up to where each pod was copied: nothing is read back, and no
line is taken away that a reader may have seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from kale_dist import contract
from kale_dist.contract import JobFiles, Stream
from kale_dist.errors import JobNotFoundError, StoreError
from kale_dist.runtime.log_segments import LineFile

_MAX_PLAIN_KEPT = 1000

_locked: set[str] = set()
_locked_lock = threading.Lock()


@dataclasses.dataclass(slots=True)
class PodCursor:
    """How far one pod was copied. Changed by `Journal` as things are written."""

    number: int
    """Which of the job's pods it is."""
    next_line: int = 0
    next_event: int = 0
    plain: list[int] = dataclasses.field(default_factory=list)
    """Checksums of the last lines without a number."""
    refused: list[str] = dataclasses.field(default_factory=list)
    """Kinds of things that were refused of it and said already."""
    is_finished: bool = False
    """Whether nothing of it will come any more: it was read to its end, or it was said that it was not."""

    def to_json(self) -> list[Any]:
        """The arguments that make it again."""
        return [self.number, self.next_line, self.next_event, self.plain, self.refused, self.is_finished]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Whose lines are appended to one of the files at once."""

    file: Literal["log", "events"]
    uid: str = ""
    """UID of the pod that they come from; empty for those of the mirror's own."""
    first: int = 0
    """The pod's cursor in front of them. Each line moves it by one, unless they have no numbers."""
    plain: tuple[int, ...] = ()
    """Checksums of lines without a number."""


class Journal:
    """Appends to `log` and `events` of one job's folder. Any thread may call; after `close` nothing is written.

    What writes raises `StoreError` if the disk is full (what was written until then counts), and `JobNotFoundError` if
    the job was deleted.

    Args:
        folder: The job's folder.

    Raises:
        JobNotFoundError: It is not there.
        StoreError: The account is damaged.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._shown = folder
        try:
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise deleted(folder) from None
        # Names that lead into this very folder: a job of the same name may come after this one was deleted.
        self.files = JobFiles(f"/proc/self/fd/{self._folder}")
        self._account = self.files.folder / "mirror.json"
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptors = {path.name: os.open(path, flags, 0o600) for path in (self.files.log, self.files.events)}
        self.lock = threading.RLock()
        """Held by whoever changes what is here."""
        self.is_closed = False
        self.next_line = 0
        """Number of the log's next line."""
        self.pods: dict[str, PodCursor] = {}
        """By UID."""
        self.verdict: dict[str, Any] | None = None
        """The final state event that is kept back, or was."""
        self.is_released = False
        """Whether the verdict is among the events."""
        self.first_attempt = 0
        """The first attempt of the pods that the job has now; verdicts of earlier ones say nothing any more."""
        self._sizes = dict.fromkeys(self._descriptors, 0)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def append_lines(self, batch: Batch, framed: Sequence[bytes]) -> None:
        """Append lines of a pod, numbered anew, and move its cursor.

        Args:
            batch: Whose they are.
            framed: Lines as in `contract`, without their newlines.
        """
        with self.lock:
            numbered = enumerate(framed, self.next_line)
            renumbered = [b"%x %s\n" % (number, line.partition(b" ")[2]) for number, line in numbered]
            self._append(batch, b"".join(renumbered), len(framed))

    def append_text(self, batch: Batch, lines: Sequence[bytes]) -> None:
        """Append lines that no agent has framed."""
        with self.lock:
            now_ms = time.time_ns() // 1_000_000
            framed = contract.frame_lines(self.next_line, now_ms, 0, None, Stream.AGENT, lines)
            self._append(batch, framed, len(lines))

    def append_events(self, batch: Batch, events: Sequence[dict[str, Any]]) -> None:
        """Append events, and move their pod's cursor."""
        with self.lock:
            self._append(batch, b"".join(map(contract.encode_record, events)), len(events))

    def _append(self, batch: Batch, data: bytes, count: int) -> None:
        if not count or self.is_closed:
            return
        self.save(batch)
        descriptor, rest = self._descriptors[batch.file], memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            self._find_out(batch)
            raise self._refusal(error) from error
        self._count(batch, len(data), count)

    def save(self, batch: Batch | None = None) -> None:
        """Write the account, with what is about to be appended."""
        with self.lock:
            account = {
                "sizes": self._sizes,
                "next_line": self.next_line,
                "pods": {uid: pod.to_json() for uid, pod in tuple(self.pods.items())},
                "verdict": self.verdict,
                "is_released": self.is_released,
                "batch": None if batch is None else dataclasses.astuple(batch),
            }
            self.replace(self._account, contract.encode_record(account))

    def replace(self, path: pathlib.Path, data: bytes) -> None:
        """Replace a small file at once, or leave the one that is there."""
        temporary = path.with_suffix(".new")
        with self.lock:
            if self.is_closed:
                return
            try:
                temporary.write_bytes(data)
                temporary.chmod(0o600)
                temporary.replace(path)
            except FileNotFoundError:
                raise deleted(self._shown) from None
            except OSError as error:
                raise self._refusal(error) from error

    def close(self) -> None:
        """Close the files."""
        with self.lock:
            self.is_closed = True
            for descriptor in (*self._descriptors.values(), self._folder):
                os.close(descriptor)

    def _load(self) -> None:
        try:
            account = json.loads(self._account.read_bytes())
            self._sizes, self.next_line = account["sizes"], account["next_line"]
            self.pods = {uid: PodCursor(*values) for uid, values in account["pods"].items()}
            self.verdict, self.is_released = account["verdict"], account["is_released"]
            batch = None if account["batch"] is None else Batch(*account["batch"])
        except FileNotFoundError:
            # What was written before the first mirror stays.
            with contextlib.closing(LineFile(self.files.log)) as log:
                last = log.last_number()
            self.next_line = 0 if last is None else last + 1
            self._sizes = {name: os.fstat(descriptor).st_size for name, descriptor in self._descriptors.items()}
            return
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self._shown / self._account.name} is damaged ({error}), so that this notebook does not know how much "
                "of the job's log it has. Delete that file and the files log and events beside it: what the pods still "
                "have is then read once more."
            ) from error
        if batch is not None:
            self._find_out(batch)

    def _find_out(self, batch: Batch) -> None:
        """Count how much of a batch was appended; half a line is taken back, for readers wait for its end."""
        descriptor, start = self._descriptors[batch.file], self._sizes[batch.file]
        data = bytearray()
        while piece := os.pread(descriptor, 1 << 20, start + len(data)):
            data += piece
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.ftruncate(descriptor, start + end)
        self._count(batch, end, data.count(b"\n"))

    def _count(self, batch: Batch, size: int, count: int) -> None:
        self._sizes[batch.file] += size
        if batch.file == "log":
            self.next_line += count
        pod = self.pods.get(batch.uid)
        if pod is None or not count:
            return
        if batch.plain:
            pod.plain = [*pod.plain, *batch.plain[:count]][-_MAX_PLAIN_KEPT:]
        elif batch.file == "log":
            pod.next_line = batch.first + count
        else:
            pod.next_event = batch.first + count

    def _refusal(self, error: OSError) -> StoreError:
        return StoreError(
            f"What the job's pods say could not be written into {self._shown} on the notebook's side: {error.strerror}. "
            "It is read again while the pods are there. Free some space, delete old jobs with `kale-dist delete`, or "
            "set XDG_STATE_HOME to a folder on a larger disk."
        )


class FolderLock:
    """Only one holder in one process has a folder's lock; it goes with the process.

    Args:
        path: The lock's file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._name = os.path.realpath(path)
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock.

        Returns:
            Whether it was free.

        Raises:
            JobNotFoundError: The folder is not there.
        """
        with _locked_lock:
            # Asked before the file is opened: closing it again would free the lock that another holder here has.
            if self._name in _locked:
                return False
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                raise deleted(self._path.parent) from None
            try:
                # Not `flock`: a process that the user's code has forked would hold that on.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
            _locked.add(self._name)
            return True

    def free(self) -> None:
        """Give the lock back, if it was taken."""
        with _locked_lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                _locked.discard(self._name)


def deleted(folder: pathlib.Path) -> JobNotFoundError:
    """The error for a folder that is gone."""
    return JobNotFoundError(f"The job whose folder was {folder} was deleted")
