r"""The formats that notebook and worker share: files, the log, events, the order, signed requests. Standard library only.

Nothing here depends on how bytes are sent. The same order reaches an agent through a socket on this machine, a mounted Secret
or a container's archive; the same blocks stand in a job's log, come over a connection and appear on a head's stdout.

**Blocks.** Each begins at the start of a line. Numbers are hexadecimal, but attempt and rank are decimal:

    @<first> <count> <bytes> <ms> <attempt> <rank>\n<body>    lines of output (`Record`)
    =<number> <bytes>\n<json>\n                              an event; numbered from 0 and never dropped (`EventBlock`)
    ~<bytes>\n<json>\n                                       progress or usage, of which the last counts (`ProgressBlock`)
    *<attempt> <rank> <index> <count> <bytes>\n<base64>\n    a part of an outcome file; on stdout only (`OutcomePart`)

`first` is the number of a record's first line, `count` how many there are, `ms` milliseconds since 1970 by the head's
clock, `rank` is "-" for the agent's own lines. Each line of a body has a mark before it: `|` stdout, `!` stderr, `#` the
agent; a `+` before the mark says that the next line carries this one on. A record whose `first` is "-" has no number: the
notebook wrote it into its copy, to say what is missing or what a pod said that had no head. The file `log` holds only
records, the file `events` only the bare JSON lines.

**Events** are JSON objects. Every event has `event` (an `EventKind`), `time` (seconds since 1970), `rank` (None when the
agent speaks of the whole job) and `attempt`; beyond these:

    state       state (`StateName`), reason (a sentence or ""), cause (`FailureCause` or ""),
                failed_rank (the rank that failed first; None or left out where there is none or it is unknown).
                A final one also has next_line (the number that the log's next line would have) and lost (ranks
                without which the others carried on)
    rank        state (`RankStateName`), pid, exit_code (int or None), signal (name such as "SIGKILL", or None)
    metrics     values {name: number}; epoch and step where they are known; source: "train" or "eval" (what the steps
                returned), "averaged" (eval_step with averaged weights), "report", or one of `MEASURED_SOURCES`
    progress    phase ("train", "eval", ...), epoch (from 1), epochs, step (from 1), steps (or None),
                samples, samples_per_s, loss (or None). Kept in `progress.json` alone, the last one of each rank.
    usage       memory_bytes, memory_limit_bytes, gpu_percent, gpu_memory_bytes, gpu_memory_limit_bytes (each an int
                or None) and node (or None): what the rank uses, as its agent sees it. Kept like progress.
    checkpoint  epoch, step, path (relative to the job's folder), bytes
    resumed     epoch: training continues after this epoch from its checkpoint; 0: it starts from the beginning
    note        text: a sentence for the user (how data is sharded, that a warning holds)
    display     data {MIME type: text, base64 for pictures}: what a rank shows in the notebook
    waiting     waiting (ranks inside a collective), busy (ranks that are not), seconds since the last progress
    outcome     ok; on failure error_type, error_text
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import enum
import hashlib
import hmac
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, Self

VERSION = 2
"""Version of everything in this module. Notebook and worker must have the same."""

MEASURED_SOURCES = ("strategy", "pace", "profile")
"""Sources of metrics that the training loop measures by itself: for trackers and tables, not for curves."""

MAX_LINE_BYTES = 15_000
"""A longer line of output is cut into parts of this size, marked as continued: containerd splits lines at 16 KiB."""

OUTCOME_PART_BYTES = 12_000
"""Bytes of an outcome file in one `OutcomePart`, for the same reason."""

EXIT_TOLD_TO_END = 143
"""Exit code of a container that got SIGTERM: 128 + SIGTERM."""

MAC_HEADER = "X-Kale-Dist-Mac"
"""Header of every request to a head, with its signature."""

SIZE_HEADER = "X-Kale-Dist-Size"
"""Header of a PUT: bytes of the whole blob or file, of which the request may bring a part."""


PHASES = ("data", "forward", "backward", "exchange", "optimizer")
"""Of a training step: what a profile says the time of, in this order."""


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
    DISPLAY = "display"
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
    LOST = "lost"
    """It died, and the others carried on without it.

    So it is with a parameter server that has a backup, and with a worker of asynchronous ones.
    """


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
    """The user cancelled the job."""
    KERNEL_ENDED = "kernel-ended"
    AGENT_DIED = "agent-died"
    LOST = "lost"
    """A pod or container of the job was lost while the head lived; another run may end otherwise."""
    SUSPENDED = "suspended"
    """The head got SIGTERM: the job was suspended or deleted, or its pod evicted."""
    NOT_STARTED = "not-started"
    """The agent could not start the ranks (versions, damaged snapshot, no process to be had)."""


class Stream(enum.StrEnum):
    """Where a line of the log came from: the mark before it."""

    STDOUT = "|"
    STDERR = "!"
    AGENT = "#"


class JobFiles:
    """Names of the files in a job's folder.

    Args:
        folder: The job's folder, or the folder in which a head keeps a job's files.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)

    def run(self, number: int) -> JobFiles:
        """The files of one run: the first run's are in the job's folder itself, later ones' in `run-2`, `run-3`."""
        return self if number == 1 else JobFiles(self.folder / f"run-{number}")

    @property
    def record(self) -> pathlib.Path:
        """JSON written by the notebook when it submits: `records.Record`."""
        return self.folder / "record.json"

    @property
    def key(self) -> pathlib.Path:
        """The job's 32 secret bytes; mode 0600."""
        return self.folder / "key"

    @property
    def run_facts(self) -> pathlib.Path:
        """JSON of one run that the notebook follows: uid of its head, name of its object, first_attempt."""
        return self.folder / "run.json"

    @property
    def cancelled(self) -> pathlib.Path:
        """There if the job's user has cancelled it on this machine; says who."""
        return self.folder / "cancelled"

    @property
    def log(self) -> pathlib.Path:
        """Records of all ranks' lines, in the order in which the head got them."""
        return self.folder / "log"

    @property
    def events(self) -> pathlib.Path:
        """Events as JSON lines, all kinds but progress and usage; an event's number is that of its line, from 0."""
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


# -- lines and records -------------------------------------------------------------------------------------------------


def prefix_of(rank: int | None) -> str:
    """What stands before a line of a rank, or of the agent (None), in every log that people see; `PREFIX` recognises it."""
    return f"[{'kale-dist' if rank is None else rank}]"


PREFIX = re.compile(r"\[(?:\d+|kale-dist)\] ")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a job's log."""

    sequence: int | None
    """Number of the line in the log of its run, from 0; None for a line that the notebook added to its copy."""
    time: float
    """When the head got it, in seconds since 1970."""
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
        """Where it comes from: `[0]`, or `[kale-dist]` for the agent."""
        return prefix_of(self.rank)

    def __str__(self) -> str:
        """The text behind its prefix: `[0] text`."""
        return f"{self.prefix} {self.text}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Lines of one rank that stand together in the log."""

    first: int | None
    """Number of its first line; None for a record that the notebook wrote into its copy."""
    count: int
    ms: int
    """Milliseconds since 1970."""
    attempt: int
    rank: int | None
    body: bytes
    """Marked lines, each with its newline."""

    @property
    def next(self) -> int | None:
        """Number of the line after it."""
        return None if self.first is None else self.first + self.count

    def encode(self) -> bytes:
        """The whole block."""
        return encode_record(self.first, self.ms, self.attempt, self.rank, self.body, self.count)

    def lines(self) -> Iterator[LogLine]:
        """The lines one by one."""
        time = self.ms / 1000
        for at, line in enumerate(self.body.split(b"\n")[:-1]):
            continued = line.startswith(b"+")
            mark, text = (line[1:2], line[2:]) if continued else (line[:1], line[1:])
            yield LogLine(
                sequence=None if self.first is None else self.first + at, time=time, attempt=self.attempt, rank=self.rank,
                stream=Stream(mark.decode()), text=text.decode("utf-8", "backslashreplace"), continued=continued,
            )  # fmt: skip

    def since(self, number: int) -> Record:
        """The record without the lines before a number; itself where there are none."""
        if self.first is None or number <= self.first:
            return self
        skipped = number - self.first
        body = self.body.split(b"\n", skipped)[skipped]
        return dataclasses.replace(self, first=number, count=self.count - skipped, body=body)


def encode_record(first: int | None, ms: int, attempt: int, rank: int | None, body: bytes, count: int) -> bytes:
    """A record as a block.

    Args:
        first: Number of the first line; None for a record without numbers.
        ms: Milliseconds since 1970.
        attempt: The attempt, from 0.
        rank: The rank, or None for the agent's own lines.
        body: Marked lines as `body_of` makes them.
        count: Lines in it.
    """
    number = b"-" if first is None else b"%x" % first
    name = b"-" if rank is None else b"%d" % rank
    return b"@%s %x %x %x %d %s\n%s" % (number, count, len(body), ms, attempt, name, body)


def body_of(stream: Stream, lines: Sequence[bytes], *, continued: bool = False) -> bytes:
    """The body of a record with some lines of one stream.

    Args:
        stream: Where the lines came from.
        lines: Lines without line ends, none longer than `MAX_LINE_BYTES`, each valid UTF-8 (`clean`).
        continued: Whether the next line of the stream carries the last of these on.
    """
    if not lines:
        return b""
    mark = stream.value.encode()
    body = mark + (b"\n" + mark).join(lines) + b"\n"
    if continued:
        start = body.rfind(b"\n", 0, -1) + 1
        body = body[:start] + b"+" + body[start:]
    return body


def clean(data: bytes) -> bytes:
    r"""Output as a log may hold it: bytes that are not UTF-8, NUL and carriage returns become `\xNN`.

    Docker's json-file driver would replace such bytes, and containerd drop them.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        data = data.decode("utf-8", "backslashreplace").encode()
    if b"\0" in data or b"\r" in data:
        data = data.replace(b"\0", rb"\x00").replace(b"\r", rb"\x0d")
    return data


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventBlock:
    """An event with its number."""

    number: int
    event: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgressBlock:
    """Progress or usage of one rank, in the place of the one before it."""

    event: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutcomePart:
    """A part of a rank's outcome file, which is signed itself."""

    attempt: int
    rank: int
    index: int
    count: int
    """How many parts there are."""
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A line between blocks that no agent wrote whole, without its newline: an interpreter's last words, a torn block."""

    text: bytes


Block = Record | EventBlock | ProgressBlock | OutcomePart | Foreign


def encode_event(number: int, event: bytes | Mapping[str, Any]) -> bytes:
    """An event as a block; `event` may be its JSON on one line, with or without a newline."""
    data = _json_line(event)
    return b"=%x %x\n%s" % (number, len(data) - 1, data)


def encode_progress(event: bytes | Mapping[str, Any]) -> bytes:
    """Progress or usage as a block."""
    data = _json_line(event)
    return b"~%x\n%s" % (len(data) - 1, data)


def encode_outcome(attempt: int, rank: int, data: bytes) -> Iterator[bytes]:
    """An outcome file as blocks."""
    count = max(1, -(-len(data) // OUTCOME_PART_BYTES))
    for index in range(count):
        part = base64.b64encode(data[index * OUTCOME_PART_BYTES : (index + 1) * OUTCOME_PART_BYTES])
        yield b"*%d %d %x %x %x\n%s\n" % (attempt, rank, index, count, len(part), part)


def _json_line(event: bytes | Mapping[str, Any]) -> bytes:
    if isinstance(event, bytes):
        return event if event.endswith(b"\n") else event + b"\n"
    return encode_json(event)


class BlockReader:
    """Cuts a stream of bytes into blocks, of a file, a connection or a container's stdout.

    Only whole blocks come out. What stands between them, and the lines of a block that was torn by a foreign line or
    by the next block, comes out as `Foreign`. A stream that is opened again gets a new reader.
    """

    _HEADER: ClassVar[re.Pattern[bytes]] = re.compile(
        rb"@(?P<first>[0-9a-f]{1,15}|-) (?P<lines>[0-9a-f]{1,8}) (?P<body>[0-9a-f]{1,8}) (?P<ms>[0-9a-f]{1,12})"
        rb" (?P<attempt>[0-9]{1,6}) (?P<rank>[0-9]{1,6}|-)"
        rb"|=(?P<number>[0-9a-f]{1,15}) (?P<event>[0-9a-f]{1,8})"
        rb"|~(?P<progress>[0-9a-f]{1,8})"
        rb"|\*(?P<of_attempt>[0-9]{1,6}) (?P<of_rank>[0-9]{1,6}) (?P<index>[0-9a-f]{1,8}) (?P<parts>[0-9a-f]{1,8})"
        rb" (?P<part>[0-9a-f]{1,8})"
    )

    def __init__(self) -> None:
        self._data = b""
        self._start = 0
        self._whole = 0

    @property
    def whole_bytes(self) -> int:
        """How many bytes of the stream are in blocks or lines that came out; where a torn file is to be cut off."""
        return self._whole

    @property
    def rest(self) -> bytes:
        """What came after the last block that was whole."""
        return self._data[self._start :]

    def feed(self, data: bytes) -> Iterator[Block]:
        """Take bytes; gives the blocks that they complete. Use up the iterator before the next call."""
        self._data = self._data[self._start :] + data
        self._start = 0
        while (found := self._next()) is not None:
            yield from found

    def finish(self) -> Iterator[Block]:
        """The stream has ended: lines of a torn block and a last line without an end come out as `Foreign`."""
        while self._start < len(self._data):
            yield from self._next(is_last=True) or []

    def _next(self, *, is_last: bool = False) -> list[Block] | None:
        """The next block, nothing for the header of a torn one; None if more bytes have to come."""
        data, start = self._data, self._start
        end = data.find(b"\n", start)
        if end < 0:
            return [self._take_foreign()] if is_last else None
        header = self._HEADER.fullmatch(data, start, end)
        if header is None:
            return [self._take_foreign()]
        size = int(header["body"] or header["event"] or header["progress"] or header["part"], 16)
        stop = end + 1 + size + (header["body"] is None)
        if len(data) < stop:
            return self._drop_header(end + 1) if is_last else None
        block = self._decode(header, data[end + 1 : stop])
        if block is None:
            return self._drop_header(end + 1)
        self._advance(stop)
        return [block]

    def _decode(self, header: re.Match[bytes], content: bytes) -> Block | None:
        """The block, if its content is what the header says."""
        if header["body"] is not None:
            count = int(header["lines"], 16)
            marks = sum(content.count(b"\n" + mark) for mark in (b"|", b"!", b"#", b"+"))
            if count == 0 or not content.endswith(b"\n") or content[:1] not in b"|!#+" or marks != count - 1:
                return None
            if content.count(b"\n") != count:
                return None
            return Record(
                first=None if header["first"] == b"-" else int(header["first"], 16), count=count,
                ms=int(header["ms"], 16), attempt=int(header["attempt"]),
                rank=None if header["rank"] == b"-" else int(header["rank"]), body=content,
            )  # fmt: skip
        if not content.endswith(b"\n"):
            return None
        if header["part"] is not None:
            try:
                data = base64.b64decode(content[:-1], validate=True)
            except binascii.Error:
                return None
            return OutcomePart(
                attempt=int(header["of_attempt"]), rank=int(header["of_rank"]), index=int(header["index"], 16),
                count=int(header["parts"], 16), data=data,
            )  # fmt: skip
        event = next(decode_json_lines(content), None)
        if event is None:
            return None
        if header["number"] is None:
            return ProgressBlock(event=event)
        return EventBlock(number=int(header["number"], 16), event=event)

    def _drop_header(self, body: int) -> list[Block]:
        """Give a torn block up: its lines come out one by one."""
        self._advance(body)
        return []

    def _take_foreign(self) -> Foreign:
        end = self._data.find(b"\n", self._start)
        stop = len(self._data) if end < 0 else end + 1
        text = self._data[self._start : stop].removesuffix(b"\n")
        self._advance(stop)
        return Foreign(text=text)

    def _advance(self, stop: int) -> None:
        self._whole += stop - self._start
        self._start = stop


def record_after(log: BinaryIO, offset: int) -> tuple[int, int] | None:
    """Where the first numbered record at or behind an offset of a log begins, and the number of its first line.

    None if there is none. It reads no more than one record, for no line of a body looks like a header.
    """
    log.seek(max(0, offset - 1))
    if offset:
        log.readline()
    for line in iter(log.readline, b""):
        if line.startswith(b"@"):
            with contextlib.suppress(ValueError):
                return log.tell() - len(line), int(line[1:].partition(b" ")[0], 16)
    return None


# -- JSON lines ------------------------------------------------------------------------------------------------------


def encode_json(record: Mapping[str, Any]) -> bytes:
    """One event or message as one line of JSON with its newline.

    Numbers that JSON has no word for (inf, nan) are written as Python's json module does and reads back.
    """
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def decode_json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The records of whole lines; a line that is not JSON (cut by a crash) is passed over."""
    for line in data.split(b"\n"):
        if line:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


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


# -- the agent's inbox -----------------------------------------------------------------------------------------------


class Op(enum.StrEnum):
    """What a message to or from an agent is about. Messages are JSON objects, one a line, with an `op`."""

    TAKE = "take"
    """To the agent: run a job. Field `order`: an `Order` as a JSON object."""
    CANCEL = "cancel"
    """To the agent: end a job. Fields `job`, `grace_s`."""
    STOP = "stop"
    """To the agent: end when no job is left."""
    TAKEN = "taken"
    """From the agent: it has the order. Field `job`."""
    WAKE = "wake"
    """From the agent, to every connection: the files of a job have changed. Field `job`."""


def socket_address(name: str) -> str:
    """Address of an agent's socket by its name. It lies in no folder: the kernel forgets it with the agent."""
    return f"\0{name}"


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
    """Torch's default dtype and global flags by name, and the level of the log, as `runtime.process_state` read them."""


# -- the order -------------------------------------------------------------------------------------------------------


class Source(enum.StrEnum):
    """Where the agents of a job get the snapshot's blobs from."""

    INPUT = "input"
    """They are there already: in `Order.store` on this machine, in `InputFiles.SNAPSHOT` in a pod or container."""
    FOLDER = "folder"
    """From `Order.store`, a folder that all pods and the notebook's own pod see; the notebook has put them there."""
    URL = "url"
    """From `Order.store`, a URL that fsspec opens."""
    STREAM = "stream"
    """The notebook sends them to the head; relays fetch them from there. If `Order.store` is not empty, it is a folder on
    a volume of the job's, and what lies there already is not sent again."""


class EndsWith(enum.StrEnum):
    """Whose end ends the run."""

    ANY_FAILURE = "any-failure"
    """All ranks have to succeed; the first that fails ends the others."""
    RANK_0 = "rank-0"
    """Rank 0's end, however it is; the others are ended then. A failure of another rank ends the run too."""
    ALL = "all"
    """The last rank's end: one that fails does not end the others."""


class PodVariable(enum.StrEnum):
    """Environment variables that a pod's or container's agent is started with."""

    INPUT = "KALE_DIST_INPUT"
    """Folder with the job's input (`InputFiles`): on a cluster a mounted Secret, which may appear late."""
    WORK = "KALE_DIST_WORK"
    """Writable folder of this pod alone."""
    FIRST_POD = "KALE_DIST_FIRST_POD"
    """Number of the replica type's first pod: 0, or 1 for workers beside a master."""
    REPLICA_INDEX = "KALE_DIST_REPLICA_INDEX"
    """The pod's index in its replica type; with `FIRST_POD` it is the pod's number, and pod 0 is the head."""
    CPU_REQUEST = "KALE_DIST_CPU_REQUEST"
    """Millicores that the container has asked for; unset or 0 where it is unknown."""
    NODE = "KALE_DIST_NODE"
    """Name of the pod's node; unset where it is unknown."""


class InputFiles:
    """Names of the files of a job's input, in the mounted Secret or a folder like it. All are there at once or none is."""

    RUNTIME = "runtime.zip"
    """This library's worker side and cloudpickle, for `sys.path`."""
    KEY = "key"
    """The job's 32 secret bytes."""
    ORDER = "order.json"
    """An `Order` without its key."""
    SNAPSHOT = "snapshot.zip"
    """The snapshot's blobs by digest, if they fit; else they come as `Order.source` says."""
    CHECKPOINT = "checkpoint"
    """The checkpoint that the ranks resume from, for a later run; there is none for the first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the agents of a job are to do: the same for all of them, on every backend. Made by `orders.order_of`."""

    version: int = VERSION
    job: str
    """Name of the run's object: the job's own for the first run, `<name>-2` for the second."""
    run: int = 1
    world_size: int
    processes_per_agent: int
    """Ranks of each agent; the last one may have fewer."""
    head: str = ""
    """Host name of the head; empty where there is only one agent and it is on this machine."""
    port: int = 0
    """MASTER_PORT of rank 0's store; relays connect to `port + 1`, requests for bytes go to `port + 2`. 0: any free one,
    where one agent has all ranks."""
    folder: str = ""
    """The job's folder; empty in a pod, whose agent has its own."""
    store: str = ""
    """Where the snapshot's blobs are: see `Source`. A folder or URL; results lie in it below `jobs/<job>`."""
    source: Source = Source.INPUT
    snapshot: str
    """Digest of the snapshot's manifest."""
    blobs: tuple[str, ...] = ()
    """Digests of all that the snapshot needs."""
    key: str = dataclasses.field(repr=False, default="")
    """The job's secret, in hexadecimal; empty in files, where it lies beside the order."""
    process: ProcessState | None = dataclasses.field(repr=False, default=None)
    """What the ranks take over from the notebook's process; None: they keep their agent's environment (in a pod)."""
    torch_flags: tuple[tuple[str, str | int | float | bool], ...] = ()
    """The notebook's default dtype and global flags, for ranks without a `process`."""
    cuda: bool = False
    threads: int | None = None
    """Threads a rank; None: cores divided by ranks of the agent, at least 1."""
    seed: int | None = None
    """Seed of rank 0; rank r gets seed + r. None: a random one, drawn by the head."""
    timeout_s: float | None = None
    stall_warn_s: float | None = 300.0
    stall_timeout_s: float | None = None
    max_restarts: int = 0
    """How often the head may start all ranks again in this run after one was lost."""
    ends_with: EndsWith = EndsWith.ANY_FAILURE
    servers: int = 0
    """How many of the last agents are parameter servers of TensorFlow."""
    mpi: bool = False
    """Whether mpirun runs beside the ranks, so that they are in `MPI.COMM_WORLD`."""
    detach: bool = False
    """Whether the job outlives the notebook that asked for it (local jobs)."""
    note: str = ""
    """A sentence for the log and the status, such as why the agent had to be started."""
    start_wait_s: float = 3600.0
    """Seconds that the head waits for relays, and they for it."""
    input_wait_s: float = 600.0
    """Seconds that the head waits for the notebook's next bytes."""
    collect_wait_s: float = 600.0
    """Seconds that the head keeps what the notebook has not fetched yet."""
    outcomes_on_stdout: bool = True
    """Whether small outcomes ride in the head's stdout, so that they come back without a connection."""
    metrics_port: int = 0
    """Port at which the head answers Prometheus; 0 for none."""
    work_is_kept: bool = False
    """Whether the head's folder can be read after its end, as in a container: then it does not wait for the notebook."""

    @property
    def agents(self) -> int:
        """How many agents the job has; number 0 is the head."""
        return -(-self.world_size // self.processes_per_agent)

    def ranks_of(self, agent: int) -> range:
        """The ranks that one agent runs."""
        first = agent * self.processes_per_agent
        return range(first, min(self.world_size, first + self.processes_per_agent))

    def to_json(self) -> dict[str, Any]:
        """A plain object for a message or a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives (lists for tuples)."""
        values = dict(data)
        values["blobs"] = tuple(data["blobs"])
        values["source"] = Source(data["source"])
        values["ends_with"] = EndsWith(data["ends_with"])
        values["torch_flags"] = tuple((name, value) for name, value in data["torch_flags"])
        process = values["process"]
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one rank gets from its agent: the order, and which rank it is."""

    order: Order
    """With this agent's own folder, store, key and process."""
    rank: int
    attempt: int
    """How often the ranks were started before in this run."""
    port: int
    """Where rank 0's store listens."""
    seed: int
    """Rank 0's."""

    @property
    def agent(self) -> int:
        """Number of the agent that runs the rank."""
        return self.rank // self.order.processes_per_agent

    @property
    def local_rank(self) -> int:
        """The rank among those of its agent."""
        return self.rank % self.order.processes_per_agent

    @property
    def local_world_size(self) -> int:
        """How many ranks its agent has."""
        return len(self.order.ranks_of(self.agent))

    @property
    def master_addr(self) -> str:
        """Where rank 0's store is."""
        return self.order.head if self.order.agents > 1 else "127.0.0.1"

    def to_json(self) -> dict[str, Any]:
        """A plain object for a message."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**data, "order": Order.from_json(data["order"])})


# -- signed requests -------------------------------------------------------------------------------------------------


def sign_request(key: bytes, method: str, path: str, body_digest: str = "") -> str:
    """The signature of a request.

    It holds no moment, because clocks differ: a request that is sent again has the same effect as the first.

    Args:
        key: The job's secret.
        method: Such as "GET".
        path: With the query, exactly as it is sent.
        body_digest: SHA-256 of a POST's body, in hexadecimal; empty for GET and PUT (what a PUT brings is checked by
            the digest in its path, or is signed itself).
    """
    text = f"request\n{method}\n{path}\n{body_digest}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def check_request(key: bytes, method: str, path: str, body_digest: str, mac: str) -> bool:
    """Whether a request has the right signature. Takes the same time for all wrong ones."""
    return hmac.compare_digest(sign_request(key, method, path, body_digest).encode(), mac.encode("utf-8", "replace"))
