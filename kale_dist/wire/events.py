"""Events, which ranks and agents write as lines of JSON: dataclasses, beside those of `messages.py`.

A line is an object with `event` (its kind, below), `time` (seconds since 1970), `rank` (None when the agent speaks of the whole job),
`attempt`, and those fields of the kind's class that are not as by default. A file of events has them all but progress, usage and disk,
of which `progress.json` keeps each rank's last one.

    of a job     state `JobState`, attempt `Members`, note `Note`, disk `DiskProblem`, waiting `Waiting`, history `Moment`
    of a rank    rank `RankState`, usage `Usage`, debug `Breakpoint`, cell `Answer`, outcome `Done`
    by a rank    metrics `MetricRow`, progress `RankProgress`, loss `BatchLoss`, losses `EpochLosses`, checkpoint `CheckpointWritten`,
                 resumed `Resumed`, display `Display`; for its agent alone alive `Alive`, dispensable `Dispensable`, saves `Saves`
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from kale_dist.wire.decoding import encode, readers_of
from kale_dist.wire.messages import Answer, Breakpoint, Done
from kale_dist.wire.order import Member

MEASURED_SOURCES = ("strategy", "pace")
"""Sources of metrics that the training loop measures by itself: for trackers and tables, not for curves."""

HISTORY = ("memory_gib", "gpu_percent", "gpu_memory_gib", "data_percent", "exchange_percent", "samples_per_s")
"""The numbers that a `Moment` has of each rank, in this order."""


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

    @property
    def last_state(self) -> JobState:
        """The job's last event."""
        return JobState(
            state=self.state,
            cause=self.cause,
            reason=self.reason,
            failed_rank=self.rank,
            lost=self.lost,
            next_line=self.next_line,
        )

    @classmethod
    def read(cls, record: Any) -> Self | None:
        """The verdict in the record of an event, if it is a final state: another agent wrote it, or a disk was full."""
        event = Event.read(record)
        state = event.what if event is not None else None
        if not isinstance(state, JobState) or not state.state.is_final:
            return None
        return cls(state.state, state.cause, state.reason, state.failed_rank, state.lost, state.next_line)

    @classmethod
    def parse(cls, text: str | bytes) -> Self | None:
        """The same in a termination message."""
        try:
            return cls.read({"event": "state", **json.loads(text)})
        except (TypeError, ValueError, RecursionError):
            return None


# -- of a job -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The job's state has changed. A final one is a `Verdict`."""

    state: StateName
    reason: str = ""
    """A sentence; empty if there is none."""
    cause: FailureCause | None = None
    failed_rank: int | None = None
    """The rank that failed first; None where there is none or it is unknown."""
    lost: tuple[int, ...] = ()
    """Ranks without which the others carried on."""
    next_line: int = 0
    """The number that the log's next line would have; 0 where nobody knows."""
    free: int = 0
    """How many attempts were begun only to have more ranks."""
    idle_s: float | None = None
    """Seconds after which warm pods end where no call comes; None where they are busy, or it is a job."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The ranks of an attempt are started now."""

    members: tuple[Member, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A sentence for the user, such as how data is sharded."""

    text: str
    warns: bool = False
    """Whether it is a warning."""
    nan: tuple[int, int] | None = None
    """Epoch and step, both from 1, of a loss that is nan; only of the note that says so."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiskProblem:
    """Ranks wait for the disk with the job's folder, or do so no longer."""

    problem: str = ""
    """Why, as a sentence; empty if they do not wait."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """No rank has moved for long."""

    waiting: tuple[int, ...] = ()
    """Ranks inside a collective."""
    busy: tuple[int, ...] = ()
    """Ranks that are in none."""
    seconds: float = 0.0
    """Since the last progress."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One point of a job's history: what its ranks used and waited for since the point before, with ever longer distances.

    A pod's log has no more of it than its kind.
    """

    time: float = 0.0
    """Seconds since 1970."""
    values: tuple[tuple[str, tuple[float | None, ...]], ...]
    """The numbers of `HISTORY` that are known, by name: a value of each rank, or None."""

    def rows(self, step: int | None = None) -> Iterator[MetricRow]:
        """The same as metrics of the source `usage`, a row for each rank."""
        for rank in range(max((len(each) for _, each in self.values), default=0)):
            found = ((name, each[rank]) for name, each in self.values if rank < len(each))
            values = tuple((name, value) for name, value in found if value is not None)
            if values:
                yield MetricRow(time=self.time, rank=rank, step=step, source="usage", values=values)


# -- of a rank ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """A rank's state has changed."""

    state: RankStateName
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    """A name such as `SIGKILL`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one rank uses, as its agent last saw it."""

    memory_bytes: int | None = None
    """Memory of the rank's process and what processes it has started hold besides, in bytes."""
    memory_limit_bytes: int | None = None
    """Limit of the container, which all its ranks share, in bytes; None where it has none."""
    gpu_percent: int | None = None
    """How busy the rank's GPU is, in per cent, by all processes together; the mean if it has several."""
    gpu_memory_bytes: int | None = None
    """Memory of its GPUs that it uses, in bytes; that of all processes if the driver does not distinguish them."""
    gpu_memory_limit_bytes: int | None = None
    """Memory that its GPUs have, in bytes."""
    node: str | None = None
    """The machine; None where the agent cannot know, as in a container of Docker's."""
    time: float = 0.0
    """Seconds since 1970. Values that have hardly changed are not sent again."""


# -- by a rank ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """Metrics of one report, or of one epoch of a step."""

    time: float = 0.0
    rank: int | None = None
    """None where the values are averaged over ranks."""
    epoch: int | None = None
    step: int | None = None
    source: str = "report"
    """`train` and `eval` (what the steps returned, or a trainer logged: `train 2` of its second training), `averaged` (the evaluation
    of averaged weights), `usage`, `report`, or one of `MEASURED_SOURCES`."""
    values: tuple[tuple[str, float], ...]
    from_batch: int = 0
    """The first batch of the epoch that they are of, where the training resumed within it; 0 for the whole epoch."""
    reported_to: tuple[str, ...] = ()
    """Trackers that a trainer itself has sent them to, by the words of `track=`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Where the time of a rank that trains has gone since its process began."""

    batches: int
    """Batches that were trained on."""
    trained: int | None = None
    """Samples of those batches; None where another rank reads and counts them."""
    data_s: float
    """Waited for data."""
    exchange_s: float | None = None
    """None where it is not known, as on GPUs."""
    checkpoint_s: float
    num_workers: int
    """The training loader's."""
    meets: bool = False
    """Whether all ranks exchange gradients in each step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """How far one rank is."""

    phase: str = "train"
    """`train`, `eval`, or a word of the user's."""
    epoch: int = 0
    """From 1; 0 where a trainer counts steps alone."""
    epochs: int = 0
    step: int = 0
    """From 1; 0 before the first."""
    steps: int | None = None
    """Steps of this phase, None where the loader's length is not known."""
    samples: int = 0
    """Samples this rank has seen in this phase; 0 where another rank reads its batches, and counts them for both."""
    samples_per_s: float | None = None
    """Of the training, also during an evaluation; None where it is not known yet, or another rank counts the samples."""
    loss: float | None = None
    """Of the training, also during an evaluation."""
    left_s: float | None = None
    """Seconds that are left, as a trainer's own pace tells; None where it does not."""
    share: float | None = None
    """How much of its training is done, 0 to 1, as a trainer tells; None where it does not."""
    training: int = 0
    """The number of the training in this process, from 1, where a trainer tells it; else 0."""
    counters: Counters | None = None
    """None of what is no training of `distribute`."""
    time: float = 0.0
    """Seconds since 1970."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoss:
    """The training loss of one step, the mean over the ranks; while the epoch runs, over their latest batches.

    For the eye, with ever longer distances, so that a job of weeks has some thousand.
    """

    epoch: int
    """The number of the epoch, from 1."""
    step: int
    """The number of the step in its epoch, from 1."""
    steps: int | None = None
    """How many steps the epoch has; None where the loader's length is not known."""
    loss: float
    time: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochLosses:
    """The losses of an epoch, in the place of those that were sent while it ran."""

    epoch: int
    steps: int | None = None
    batches: tuple[tuple[int, float, float], ...]
    """Step, time and loss of each batch, or of every second one and so on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointWritten:
    """A checkpoint is on the disk."""

    epoch: int
    """Finished epochs."""
    step: int = 0
    batches: int = 0
    """Batches of the epoch that has begun; 0 between epochs."""
    asked: bool = False
    """Whether the agent has asked for it."""
    path: str = ""
    """Relative to the job's folder."""
    bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Training continues from a checkpoint."""

    epoch: int
    """After this epoch; 0: from the beginning."""
    batches: int = 0
    """Batches of the next epoch that are done."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Display:
    """What a rank shows in the notebook."""

    data: Mapping[str, Any]
    """Text by MIME type; of pictures base64."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """Something moved, so that the agent does not take the rank for stalled."""

    exchanges: tuple[int, ...] = ()
    """Collectives of each backend in which the rank has taken part; empty where it says nothing of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dispensable:
    """The others carry on, from now on, when ranks are lost: all but one of each of these sets."""

    sets: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Whether the rank saves soon after it was asked to, or that it has."""

    can: bool = True
    has_saved: bool = False
    """Whether all of its part is written."""
    resumes: bool = False
    """Whether the job resumes from that by itself, as `distribute` does."""


# -- an event -----------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[Any]] = {
    "state": JobState, "attempt": Members, "note": Note, "disk": DiskProblem, "waiting": Waiting, "history": Moment,
    "rank": RankState, "usage": Usage, "debug": Breakpoint, "cell": Answer, "outcome": Done,
    "metrics": MetricRow, "progress": RankProgress, "loss": BatchLoss, "losses": EpochLosses, "checkpoint": CheckpointWritten,
    "resumed": Resumed, "display": Display, "alive": Alive, "dispensable": Dispensable, "saves": Saves,
}  # fmt: skip
_NAMES = {made: name for name, made in _KINDS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """What happened, when, and in which rank."""

    what: Any
    """One of the classes above."""
    time: float
    """Seconds since 1970."""
    rank: int | None = None
    attempt: int = 0

    def record(self) -> dict[str, Any]:
        """The event as an object of JSON."""
        common = {"event": _NAMES[type(self.what)], "time": self.time, "rank": self.rank, "attempt": self.attempt}
        return {**common, **encode(self.what)}

    @classmethod
    def read(cls, record: Any) -> Self | None:
        """The event in a record; None where there is none: a file was damaged, or a later version wrote it."""
        try:
            made = _KINDS[record["event"]]
            readers = readers_of(made).items()
            what = made(**{name: reader(record[name]) for name, reader in readers if name in record})
            rank, attempt = record.get("rank"), record.get("attempt") or 0
            is_placed = (rank is None or (isinstance(rank, int) and rank >= 0)) and isinstance(attempt, int)
            return cls(what, float(record.get("time") or 0.0), rank, attempt) if is_placed else None
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return None


def last_name(record: Mapping[str, Any]) -> str | None:
    """The name under which an event replaces the rank's one before it.

    Returns:
        The rank as text for progress, `usage <rank>` for usage, `disk`; None for kinds of which every event counts.
    """
    match record.get("event"):
        case "progress":
            return str(record.get("rank"))
        case "usage":
            return f"usage {record.get('rank')}"
        case "disk":
            return "disk"
        case _:
            return None
