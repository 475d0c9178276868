"""What notebook and worker agree on: file names, log frames, event records, the agent's inbox. Standard library only.

Nothing here knows how bytes travel. The same order reaches an agent through a socket on this machine, a mounted Secret
or a connection into a pod; the same frames go into a file or a pod's stdout.

A job's folder (`JobFiles`) is the whole truth about a local job: whoever can read it sees the job's state, and the
messages of the inbox only hasten what the files would tell a little later.

Events are JSON objects, one a line. Every event has `event` (an `EventKind`), `time` (seconds since 1970), `rank` (None
when the agent speaks of the whole job) and `attempt`; beyond these:

    state       state (`StateName`), reason (a sentence or ""), cause (`FailureCause` or ""),
                failed_rank (the rank that failed first; None or left out where none has or nobody can tell)
    rank        state (`RankStateName`), pid, exit_code (int or None), signal (name such as "SIGKILL", or None)
    metrics     values {name: number}; epoch and step where they are known; source ("report", "train", "eval")
    progress    phase ("train", "eval", ...), epoch (from 1), epochs, step (from 1), steps (or None),
                samples, samples_per_s, loss (or None). Kept in `progress.json` alone, the last one of each rank.
    usage       memory_bytes, memory_limit_bytes, gpu_percent, gpu_memory_bytes, gpu_memory_limit_bytes (each an int
                or None) and node (or None): what the rank uses, as its agent sees it. Kept like progress.
    checkpoint  epoch, step, path (relative to the job's folder), bytes
    resumed     epoch: the training of an attempt after the first goes on behind this one; 0: it begins anew
    note        text: a sentence for the user (how data is sharded, that a warning holds)
    waiting     waiting (ranks inside a collective), busy (ranks that are not), seconds since the last progress
    outcome     ok; on failure error_type, error_text
"""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

VERSION = 1
"""Version of everything in this module. Notebook and worker must have the same."""

MAX_LINE_BYTES = 1 << 20
"""A longer line of output is cut into parts of this size, marked as continued."""


class EventKind(enum.StrEnum):
    """The kinds of event; the module's docstring lists the fields of each."""

    STATE = "state"
    RANK = "rank"
    METRICS = "metrics"
    PROGRESS = "progress"
    USAGE = "usage"
    CHECKPOINT = "checkpoint"
    RESUMED = "resumed"
    NOTE = "note"
    WAITING = "waiting"
    OUTCOME = "outcome"


class StateName(enum.StrEnum):
    """States of a whole job."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RankStateName(enum.StrEnum):
    """States of one rank."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended by the agent: because of a cancel, a deadline or another rank's failure."""


class FailureCause(enum.StrEnum):
    """Why a job is `failed` or `cancelled`; decides which error `job.result()` raises."""

    ERROR = "error"
    """A rank raised an exception."""
    DIED = "died"
    """A rank ended without an outcome: a signal, `os._exit`."""
    LEFT = "left"
    """A rank ended while others wait for it in a collective."""
    TIMEOUT = "timeout"
    STALLED = "stalled"
    USER = "user"
    """Somebody called cancel."""
    KERNEL_ENDED = "kernel-ended"
    AGENT_DIED = "agent-died"
    NOT_STARTED = "not-started"
    """The agent could not start the ranks (versions, damaged snapshot, no process to be had)."""


class Stream(enum.StrEnum):
    """Where a line of the log came from. A part of a line that is continued has the upper-case letter."""

    STDOUT = "o"
    STDERR = "e"
    AGENT = "a"


class JobFiles:
    """Names of the files in a job's folder.

    Args:
        folder: The job's folder, or the folder in which an agent keeps a job's files in a pod.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)

    @property
    def record(self) -> pathlib.Path:
        """JSON written by the notebook when it submits: `records.Record`."""
        return self.folder / "record.json"

    @property
    def key(self) -> pathlib.Path:
        """The job's 32 secret bytes; mode 0600."""
        return self.folder / "key"

    @property
    def log(self) -> pathlib.Path:
        """Framed lines of all ranks, in the order in which the agent saw them."""
        return self.folder / "log"

    @property
    def events(self) -> pathlib.Path:
        """Events as JSON lines, all kinds but progress and usage."""
        return self.folder / "events"

    @property
    def progress(self) -> pathlib.Path:
        """A JSON object: `last_name` of an event to the event, for kinds of which the last one counts. Replaced by rename."""
        return self.folder / "progress.json"

    @property
    def modules(self) -> pathlib.Path:
        """The notebook's local modules, laid out for `sys.path`."""
        return self.folder / "modules"

    @property
    def checkpoint(self) -> pathlib.Path:
        """The last checkpoint of rank 0. Replaced by rename."""
        return self.folder / "checkpoint"

    def outcome(self, attempt: int, rank: int) -> pathlib.Path:
        """The signed outcome of one rank."""
        return self.folder / f"outcome-{attempt}-{rank}"


# -- log frames ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a job's log."""

    sequence: int
    """Number of the line in its agent's log, from 0, without gaps."""
    time: float
    """When the agent read it, in seconds since 1970."""
    attempt: int
    rank: int | None
    """None for a line of the agent itself."""
    stream: Stream
    text: str
    """Without the line end. Bytes that are not UTF-8 appear as `\\xNN`."""
    continued: bool = False
    """Whether the next line of the same rank and stream is a part of the same line."""

    @property
    def prefix(self) -> str:
        """Where it comes from: `[0]`, or `[kale-dist]` for the agent. Every log that people see has it from here."""
        return f"[{'kale-dist' if self.rank is None else self.rank}]"

    def __str__(self) -> str:
        """The text behind its prefix: `[0] text`."""
        return f"{self.prefix} {self.text}"


def frame_lines(
    first_sequence: int, time_ms: int, attempt: int, rank: int | None, stream: Stream, lines: Iterable[bytes]
) -> bytes:
    """Frame lines of one rank and stream for the log: `sequence time attempt rank stream text`, one a line.

    Args:
        first_sequence: Number of the first line; the next ones count up.
        time_ms: Milliseconds since 1970.
        attempt: The attempt, from 0.
        rank: The rank, or None for the agent's own lines.
        stream: Where the lines came from.
        lines: Lines without line ends and without newline bytes in them, none longer than `MAX_LINE_BYTES`.

    Returns:
        The framed bytes, ending with a newline (empty for no lines).
    """
    constant = _frame_constant(time_ms, attempt, rank, stream.value)
    return b"".join([b"%x%s%s\n" % (number, constant, line) for number, line in enumerate(lines, first_sequence)])


def frame_continued(sequence: int, time_ms: int, attempt: int, rank: int | None, stream: Stream, part: bytes) -> bytes:
    """Frame a part of a line whose next part follows as the next line of the same rank and stream."""
    return b"%x%s%s\n" % (sequence, _frame_constant(time_ms, attempt, rank, stream.value.upper()), part)


def _frame_constant(time_ms: int, attempt: int, rank: int | None, letter: str) -> bytes:
    """What the frames of one block share: all between the sequence number and the text."""
    return b" %x %d %s %s " % (time_ms, attempt, b"-" if rank is None else b"%d" % rank, letter.encode())


def parse_line(framed: bytes) -> LogLine:
    """Parse one framed line, with or without its newline.

    Raises:
        ValueError: The bytes are not a frame.
    """
    sequence, time_ms, attempt, rank, stream, text = framed.removesuffix(b"\n").split(b" ", 5)
    letter = stream.decode("ascii")
    return LogLine(
        sequence=int(sequence, 16),
        time=int(time_ms, 16) / 1000,
        attempt=int(attempt),
        rank=None if rank == b"-" else int(rank),
        stream=Stream(letter.lower()),
        text=text.decode("utf-8", "backslashreplace"),
        continued=letter.isupper(),
    )


# -- events ----------------------------------------------------------------------------------------------------------


def encode_record(record: dict[str, Any]) -> bytes:
    """One event or message as one line of JSON with its newline.

    Numbers that JSON has no word for (inf, nan) are written as Python's json module does and reads back.
    """
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def last_name(event: dict[str, Any]) -> str | None:
    """The name under which an event replaces the rank's one before it.

    Returns:
        The rank as text for progress, `usage <rank>` for usage; None for kinds of which every event counts.
    """
    match event.get("event"):
        case EventKind.PROGRESS:
            return str(event.get("rank"))
        case EventKind.USAGE:
            return f"{EventKind.USAGE} {event.get('rank')}"
        case _:
            return None


def decode_records(data: bytes) -> Iterator[dict[str, Any]]:
    """The records of whole lines; a line that is not JSON (cut by a crash) is passed over."""
    for line in data.split(b"\n"):
        if line:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


# -- the agent's inbox -----------------------------------------------------------------------------------------------


class Op(enum.StrEnum):
    """What a message to or from an agent is about. Messages are JSON objects, one a line, with an `op`."""

    TAKE = "take"
    """To the agent: run a job. Field `order`: a `JobOrder` as a JSON object."""
    CANCEL = "cancel"
    """To the agent: end a job. Fields `job`, `grace_s`."""
    STOP = "stop"
    """To the agent: end when no job is left."""
    TAKEN = "taken"
    """From the agent: it has the order. Field `job`."""
    WAKE = "wake"
    """From the agent, to every connection: the files of a job have changed. Field `job`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """What a process of the notebook's would have inherited; a rank applies it before it unpickles anything."""

    environment: tuple[tuple[str, str], ...]
    """The whole environment: a name that is not here is unset in the rank."""
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    """Resource limits as (RLIMIT number, soft, hard)."""
    torch_flags: tuple[tuple[str, str | int | float | bool], ...]
    """Torch's default dtype and global flags by name, as `snapshot.process` read them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobOrder:
    """Everything an agent needs to run its ranks of one job. Holds the key: never written to disk or shown."""

    version: int = VERSION
    job: str
    """The job's name, unique in its backend and namespace."""
    attempt: int = 0
    world_size: int
    first_rank: int = 0
    """The ranks of this agent are `first_rank` to `first_rank + local_world_size - 1`."""
    local_world_size: int
    group: int = 0
    """Number of this agent among those of the job, which is that of its pod."""
    groups: int = 1
    """Agents of the job."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: the agent opens a port itself (all ranks are its own)."""
    folder: str
    """Where log, events and outcomes go (`JobFiles`)."""
    store: str
    """Root of the folder store with the snapshot's blobs."""
    snapshot: str
    """Digest of the snapshot's manifest."""
    key: str = dataclasses.field(repr=False)
    """The job's secret, in hexadecimal."""
    process: ProcessState | None = dataclasses.field(repr=False, default=None)
    """None: the ranks keep the agent's own environment (in a pod)."""
    cuda: bool = False
    threads: int | None = None
    """Threads a rank; None: cores divided by ranks of this agent, at least 1."""
    seed: int | None = None
    """Seed of rank 0; rank r gets seed + r. None: a random one, drawn by the agent."""
    timeout_s: float | None = None
    stall_warn_s: float | None = 300.0
    stall_timeout_s: float | None = None
    max_restarts: int = 0
    """How often all ranks are started again after one was lost; `attempt` counts up with it."""
    detach: bool = False
    """Whether the job outlives the notebook that asked for it."""
    note: str = ""
    """A sentence for the log and the status, such as why this agent had to be started."""

    def to_json(self) -> dict[str, Any]:
        """A plain object for a message."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives (lists for tuples)."""
        values = dict(data)
        process = values.get("process")
        if process is not None:
            values["process"] = ProcessState(
                environment=tuple((name, value) for name, value in process["environment"]),
                cwd=process["cwd"],
                sys_path=tuple(process["sys_path"]),
                argv=tuple(process["argv"]),
                umask=process["umask"],
                limits=tuple((number, soft, hard) for number, soft, hard in process["limits"]),
                torch_flags=tuple((name, value) for name, value in process["torch_flags"]),
            )
        return cls(**values)
