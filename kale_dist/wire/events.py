"""Events, which ranks and agents write as lines of JSON.

Every event has `event` (an `EventKind`), `time` (seconds since 1970), `rank` (None when the
agent speaks of the whole job) and `attempt`; beyond these:

    state       state (`StateName`), reason (a sentence or ""), cause (`FailureCause` or ""),
                failed_rank (the rank that failed first; None or left out where there is none or it is unknown).
                free (how many attempts were begun only to have more ranks). A final one is a `Verdict`
    attempt     members: those of the `Attempt` whose ranks are started now, as objects
    rank        state (`RankStateName`), pid, exit_code (int or None), signal (name such as "SIGKILL", or None)
    metrics     values {name: number}; epoch and step where they are known; source: "train" or "eval" (what the steps
                returned, or a trainer logged: "train 2" of its second training), "averaged" (eval_step with averaged weights),
                "report", or one of `MEASURED_SOURCES`; reported_to: trackers that the trainer itself sends them to
    progress    phase ("train", "eval", ...), epoch (from 1), epochs, step (from 1), steps (or None),
                samples and samples_per_s (None in a rank whose batches another one reads and counts), loss (or None); during an
                evaluation of `distribute`, both of the training.
                Of another trainer also left_s and share (of its steps that are done), or None, and training (its number in this
                process). Epochs are 0 of a bar, and where only steps are known.
                Of training also num_workers, meets (whether all ranks exchange gradients in each step) and, since the
                process began, batches, trained (samples, or None), data_s (waited for data), exchange_s (None on GPUs)
                and checkpoint_s. Kept in `progress.json` alone, the last one of each rank.
    loss        epoch (from 1), step (from 1), steps (or None), loss: the mean over the ranks' latest batches, now and then while an
                epoch is trained: for the eye, with ever longer distances, so that a job of weeks has some thousand. At an epoch's
                end batches: step, time and loss of each, or of every second one and so on, in the place of those before
    usage       memory_bytes, memory_limit_bytes, gpu_percent, gpu_memory_bytes, gpu_memory_limit_bytes (each an int
                or None) and node (or None): what the rank uses, as its agent sees it. Kept like progress.
    history     some of `HISTORY`, each a list with a number or None for every rank: what ranks used and waited for since the one
                before, with ever longer distances. A pod's log has no more of it than its name.
    checkpoint  epoch (finished ones), step, batches (of the epoch that has begun; 0 between epochs), asked (whether the agent
                has asked for it), path (relative to the job's folder), bytes
    resumed     epoch: training continues after this epoch from its checkpoint; 0: it starts from the beginning;
                batches: of the next epoch that are done
    note        text: a sentence for the user (such as how data is sharded); warns: whether it is a warning;
                nan: epoch and step, both from 1, of a loss that is nan; only of the note that says so
    display     data {MIME type: text, base64 for pictures}: what a rank shows in the notebook
    disk        problem: why ranks wait for the disk with the job's folder, as a sentence; "" if they do not. Kept like progress.
    waiting     waiting (ranks inside a collective), busy (ranks that are not), seconds since the last progress
    debug       prompt (what an answer has to name; "" where the rank has left its breakpoint), where (file, line and
                function), text (what the debugger has printed since the last answer, with the prompt), typed (that answer)
    cell        number and ok of a live rank's answer, and those fields of `messages.Answer` that are not as by default
    outcome     ok; on failure error_type, error_text, where (the place in the user's code and its line), locals (the local
                variables of the last frames, as text)
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator
from typing import Any, Self

MEASURED_SOURCES = ("strategy", "pace")
"""Sources of metrics that the training loop measures by itself: for trackers and tables, not for curves."""

HISTORY = ("memory_gib", "gpu_percent", "gpu_memory_gib", "data_percent", "exchange_percent", "samples_per_s")
"""The numbers that a `Moment` has of each rank, in this order."""


class EventKind(enum.StrEnum):
    """The kinds of event; the module's docstring lists the fields of each."""

    STATE = "state"
    ATTEMPT = "attempt"
    RANK = "rank"
    METRICS = "metrics"
    PROGRESS = "progress"
    LOSS = "loss"
    USAGE = "usage"
    HISTORY = "history"
    CHECKPOINT = "checkpoint"
    RESUMED = "resumed"
    NOTE = "note"
    DISPLAY = "display"
    DISK = "disk"
    WAITING = "waiting"
    DEBUG = "debug"
    CELL = "cell"
    OUTCOME = "outcome"


class StateName(enum.StrEnum):
    """States of a whole job."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether a job in this state has ended."""
        return self in (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)


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

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process is over."""
        return self not in (RankStateName.PENDING, RankStateName.STARTING, RankStateName.RUNNING)


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
    """A pod or container of the job was lost while the head lived; another attempt may end otherwise."""
    SUSPENDED = "suspended"
    """The head got SIGTERM: the job was suspended or deleted, or its pod evicted."""
    NOT_STARTED = "not-started"
    """The agent could not start the ranks (versions, damaged snapshot, no process to be had)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """Metrics of one report, or of one epoch of a step."""

    time: float
    rank: int | None
    """None where the values are averaged over ranks."""
    epoch: int | None
    step: int | None
    source: str
    """`train`, `eval`, `averaged` (the evaluation of averaged weights), `strategy`, `pace`, `usage` or `report`."""
    values: tuple[tuple[str, float], ...]
    from_batch: int = 0
    """The first batch of the epoch that they are of, where the training resumed within it; 0 for the whole epoch."""
    reported_to: tuple[str, ...] = ()
    """Trackers that a trainer itself has sent them to, by the words of `track=`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoss:
    """The training loss of one step, the mean over the ranks; while the epoch runs, over their latest batches."""

    epoch: int
    """The number of the epoch, from 1."""
    step: int
    """The number of the step in its epoch, from 1."""
    steps: int | None
    """How many steps the epoch has; None where the loader's length is not known."""
    loss: float
    time: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One point of a job's history: what its ranks used and waited for since the point before."""

    time: float
    """Seconds since 1970."""
    values: tuple[tuple[str, tuple[float | None, ...]], ...]
    """The numbers of `HISTORY` that are known, by name: a value of each rank, or None."""

    def rows(self, step: int | None = None) -> Iterator[MetricRow]:
        """The same as metrics of the source `usage`, a row for each rank."""
        for rank in range(max((len(each) for _, each in self.values), default=0)):
            found = ((name, each[rank]) for name, each in self.values if rank < len(each))
            values = tuple((name, value) for name, value in found if value is not None)
            if values:
                yield MetricRow(time=self.time, rank=rank, epoch=None, step=step, source="usage", values=values)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt or a job ended.

    A head's verdict is the fields of its final state event and, where nothing else comes through, its termination message.
    A follower judges only what a head cannot know: how a head without a verdict ended, and what became of a lost pod.
    """

    state: StateName
    cause: FailureCause | None = None
    reason: str = ""
    """A sentence; empty if there is none."""
    rank: int | None = None
    """The rank that failed first; None if there is none, or it is unknown."""
    lost: tuple[int, ...] = ()
    """Ranks without which the others carried on."""
    next_line: int = 0
    """The number that the log's next line would have, as the writer of the events knows it."""
    may_restart: bool = False
    """Whether another attempt could end otherwise: a rank or pod was lost, and memory did not run out. Not sent."""

    def fields(self) -> dict[str, Any]:
        """The fields of the event."""
        return {
            "state": str(self.state), "cause": str(self.cause or ""), "reason": self.reason, "failed_rank": self.rank,
            "lost": list(self.lost),
        }  # fmt: skip

    @classmethod
    def read(cls, fields: Any) -> Self | None:
        """The verdict in a record, if it is one: another agent wrote it, or a disk was full."""
        try:
            state, rank = StateName(fields["state"]), fields.get("failed_rank")
            verdict = cls(
                state, FailureCause(fields["cause"]) if fields.get("cause") else None, str(fields.get("reason") or ""),
                rank=rank if isinstance(rank, int) else None, lost=tuple(fields.get("lost") or ()),
                next_line=int(fields.get("next_line") or 0),
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return None
        return verdict if state.is_final else None

    @classmethod
    def parse(cls, text: str | bytes) -> Self | None:
        """The same in a termination message."""
        try:
            return cls.read(json.loads(text))
        except (ValueError, RecursionError):
            return None


def encode_json(record: Any) -> bytes:
    """One event, message or dataclass as one line of JSON with its newline. Inner dataclasses become objects, too.

    Numbers that JSON has no word for (inf, nan) are written as Python's json module does and reads back.
    """
    return json.dumps(record, separators=(",", ":"), default=dataclasses.asdict).encode() + b"\n"


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
        The rank as text for progress, `usage <rank>` for usage, `disk`; None for kinds of which every event counts.
    """
    match event.get("event"):
        case EventKind.PROGRESS:
            return str(event.get("rank"))
        case EventKind.USAGE:
            return f"{EventKind.USAGE} {event.get('rank')}"
        case EventKind.DISK:
            return EventKind.DISK
        case _:
            return None
