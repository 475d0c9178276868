"""A job's status at one moment, and the pure reduction of events to it. No clock, no I/O."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from kale_dist.wire import (
    HISTORY,
    BatchLoss,
    EventKind,
    FailureCause,
    Member,
    MetricRow,
    Moment,
    RankStateName,
    StateName,
    Verdict,
    visible,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """How far one rank is."""

    phase: str
    """`train`, `eval`, or a word of the user's."""
    epoch: int
    """From 1."""
    epochs: int
    step: int
    """From 1; 0 before the first."""
    steps: int | None
    """Steps of this phase, None where the loader's length is not known."""
    samples: int
    """Samples this rank has seen in this phase; 0 where another rank reads its batches, and counts them for both."""
    samples_per_s: float | None
    """None where it is not known yet, or another rank counts the samples."""
    loss: float | None
    left_s: float | None = None
    """Seconds that are left, as a trainer's own pace tells; None where it does not."""
    share: float | None = None
    """How much of its training is done, 0 to 1, as a trainer tells; None where it does not."""
    training: int = 0
    """The number of the training in this process, from 1, where a trainer tells it; else 0."""
    time: float
    """Seconds since 1970."""


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Breakpoint:
    """Where a rank waits in `breakpoint()`."""

    prompt: str
    """Names the prompt that an answer is for; each has another one."""
    where: str
    """`Cell In[3]:5 in step`."""
    text: str
    """What the debugger has printed since the last answer, with the prompt."""
    typed: str
    """The last answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """One rank."""

    rank: int
    state: RankStateName = RankStateName.PENDING
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    """Name of the signal that ended it, such as `SIGKILL`."""
    error: str | None = None
    """`Type: text` of its exception."""
    where: str = ""
    """Where in your code it was raised, and that line: `Cell In[3]:5 in step` and below it `return x @ w`."""
    locals: str = ""
    """The local variables of that exception's last frames, as text."""
    in_collective: bool | None = None
    """Whether it waited in a collective when last looked at; None if it was not examined."""
    breakpoint: Breakpoint | None = None
    """None if it waits in none."""
    progress: RankProgress | None = None
    usage: Usage | None = None
    """None until its agent has looked for the first time."""
    agent: int | None = None
    """Number of its agent in the job, from 0: that of its pod or container. None until an attempt gives it."""
    pod: str | None = None
    """Where it runs, on a cluster."""
    node: str | None = None
    """The node of its pod, once it has one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobStatus:
    """A whole job at one moment."""

    ref: str
    state: StateName = StateName.PENDING
    reason: str = ""
    """One plain sentence: why it is in this state."""
    cause: FailureCause | None = None
    attempt: int = 0
    """How often the ranks were started again after one was lost."""
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    metrics: tuple[MetricRow, ...] = ()
    losses: tuple[BatchLoss, ...] = ()
    """The training loss within the epochs so far, for a curve. `metrics` has what the steps returned."""
    history: tuple[Moment, ...] = ()
    """What the ranks used and waited for so far."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Those of the notes that warn of something that is probably wrong, such as a loss that is nan."""
    nan_since: tuple[int, int] | None = None
    """Epoch and step, both from 1, of the first loss of this attempt that was nan; None if none was."""
    checkpoint_epoch: int | None = None
    is_checkpoint_here: bool = False
    """Whether this machine has a checkpoint of the job, once that has ended."""
    failed_rank: int | None = None
    """The rank that failed first; None if none has, or if it is unknown."""
    queue_position: int | None = None
    """Where the job stands in the cluster's queue, from 1; None if it waits in none, or if that is not known."""
    idle_s: float | None = None
    """For how many seconds warm pods without a job wait for one; else None."""
    idle_since: float | None = None
    """Since when warm pods have had no job, in seconds since 1970; else None."""
    needs_action: bool = False
    """Whether the job waits for what only a person can mend, such as an image that does not exist."""

    def __repr__(self) -> str:
        """One line with the reason's beginning: a status is often the last value of a cell whose `wait()` has printed the reason."""
        shown = visible(textwrap.shorten(self.reason, 100, placeholder=" ..."))
        return f"<JobStatus {self.ref} {self.state.value}{f': {shown}' if shown else ''}>"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state.is_final

    @property
    def is_nan(self) -> bool:
        """Whether the training's loss became nan, and no later epoch, or batch where steps return no `loss`, had a number again."""
        if self.nan_since is None:
            return False
        rows = [row for row in self.metrics if row.source == "train" and (row.epoch or 0) >= self.nan_since[0]]
        later = [value for row in rows for name, value in row.values if name == "loss"]
        later = later or [one.loss for one in self.losses if (one.epoch, one.step) > self.nan_since]
        return not (later and math.isfinite(later[-1]))

    @property
    def at_breakpoints(self) -> tuple[ReplicaStatus, ...]:
        """The ranks that wait in `breakpoint()`."""
        return tuple(replica for replica in self.replicas if replica.breakpoint is not None and not self.is_final)

    @property
    def fraction(self) -> float | None:
        """Share of the work that rank 0 has done, 0 to 1; None where it is not known."""
        if self.state is StateName.SUCCEEDED:
            return 1.0
        progress = self.replicas[0].progress if self.replicas else None
        if progress is not None and progress.share is not None:
            return progress.share
        if progress is None or progress.epochs < 1:
            return None
        if progress.phase != "train":
            return progress.epoch / progress.epochs
        within = progress.step / progress.steps if progress.steps else 0.0
        return (progress.epoch - 1 + within) / progress.epochs


def values_of(status: JobStatus, metric: str) -> list[float]:
    """All values of a metric (`eval/loss`, or a name alone) in order; of those that each rank reports, rank 0's."""
    source, _, name = metric.rpartition("/")
    rows = (row for row in status.metrics if row.rank in (None, 0) and row.source == (source or row.source))
    return [value for row in rows for key, value in row.values if key == name]


def reduce_events(status: JobStatus, events: Iterable[dict[str, Any]]) -> JobStatus:
    """The status after some events, in their order; fields as `wire.events` lists them.

    A final state stays: what a dying job still sends does not revive it. Events of an attempt before the status's own
    are passed over, and the first event of a later attempt sets the ranks back to `pending`. What is no event (a file
    was damaged) changes nothing either.
    """
    rows: list[MetricRow] = []
    losses: list[BatchLoss] = []
    history: list[Moment] = []
    latest: dict[int, dict[str, RankProgress | Usage]] = {}
    for event in events:
        with contextlib.suppress(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
            event = _visible(event, keeps_colours=event.get("event") == EventKind.DEBUG)  # noqa: PLW2901 - as it is shown
            attempt = event.get("attempt") or 0
            if attempt < status.attempt:
                continue
            if attempt > status.attempt:
                status, latest = _next_attempt(status, attempt), {}
            # These are collected, for a tuple that grows by one at each of 100,000 reports would take minutes.
            match event.get("event"):
                case EventKind.METRICS:
                    rows.append(_metric_row(event))
                case EventKind.LOSS if "batches" not in event:
                    losses.append(_batch_loss(event))
                case EventKind.LOSS:
                    status = _with_epoch(_with_rows(status, rows, losses), event)
                    rows, losses = [], []
                case EventKind.HISTORY:
                    history.append(_moment(event))
                case EventKind.PROGRESS | EventKind.USAGE as kind if 0 <= event["rank"] < len(status.replicas):
                    value = _progress(event) if kind == EventKind.PROGRESS else _usage(event)
                    latest.setdefault(event["rank"], {})[str(kind)] = value
                case EventKind.RESUMED:
                    status = _resumed(_with_rows(status, rows, losses), event)
                    rows, losses = [], []
                case _:
                    status, latest = _reduce_one(_with_latest(status, latest), event), {}
    status = dataclasses.replace(status, history=(*status.history, *history)) if history else status
    return _with_latest(_with_rows(status, rows, losses), latest)


def _visible(value: Any, *, keeps_colours: bool) -> Any:
    """A value of JSON whose texts control no terminal."""
    if isinstance(value, str):
        return visible(value, keeps_colours=keeps_colours)
    if isinstance(value, dict):
        return {visible(key): _visible(one, keeps_colours=keeps_colours) for key, one in value.items()}
    return [_visible(one, keeps_colours=keeps_colours) for one in value] if isinstance(value, list) else value


def _with_rows(status: JobStatus, rows: list[MetricRow], losses: list[BatchLoss]) -> JobStatus:
    """Add rows; a status without new ones keeps its tuples, by which readers see that nothing has changed."""
    if rows:
        status = dataclasses.replace(status, metrics=(*status.metrics, *rows))
    return dataclasses.replace(status, losses=(*status.losses, *losses)) if losses else status


def _with_epoch(status: JobStatus, event: dict[str, Any]) -> JobStatus:
    """Put the losses of an epoch's batches in the place of those that were told while it ran, unless these are more."""
    names = ("step", "time", "loss")
    found = [_batch_loss({**event, **dict(zip(names, one, strict=True))}) for one in event["batches"]]
    end = len(status.losses)
    while end and (status.losses[end - 1].epoch, status.losses[end - 1].step) >= (found[0].epoch, found[0].step):
        end -= 1
    are_more = len({one.step for one in status.losses[end:]}) > len(found)
    return status if are_more else dataclasses.replace(status, losses=(*status.losses[:end], *found))


def _with_latest(status: JobStatus, latest: Mapping[int, Mapping[str, Any]]) -> JobStatus:
    """Give ranks their latest progress and usage."""
    if not latest:
        return status
    replicas = list(status.replicas)
    for rank, values in latest.items():
        replicas[rank] = dataclasses.replace(replicas[rank], **values)
    return dataclasses.replace(status, replicas=tuple(replicas))


def _next_attempt(status: JobStatus, attempt: int) -> JobStatus:
    fresh = tuple(ReplicaStatus(rank=replica.rank) for replica in status.replicas)
    return dataclasses.replace(
        status, attempt=attempt, replicas=fresh, state=StateName.PENDING, reason="", cause=None, ended=None,
        failed_rank=None, nan_since=None,
    )  # fmt: skip


def _resumed(status: JobStatus, event: dict[str, Any]) -> JobStatus:
    """Forget the rows of epochs that are trained once more; what users have reported themselves stays."""
    epoch, batches = int(event["epoch"]), int(event.get("batches") or 0)
    kept = tuple(row for row in status.metrics if row.source == "report" or (row.epoch or 0) <= epoch)
    losses = tuple(one for one in status.losses if (one.epoch, one.step) <= (epoch + 1, batches))
    last = epoch if epoch or batches else None
    return dataclasses.replace(status, metrics=kept, losses=losses, checkpoint_epoch=last)


def _reduce_one(status: JobStatus, event: dict[str, Any]) -> JobStatus:
    rank = event.get("rank")
    match event.get("event"):
        case EventKind.STATE if not status.is_final:
            return _reduce_state(status, event)
        case EventKind.ATTEMPT:
            members = [Member(**member) for member in event["members"]]
            ranks = (ReplicaStatus(rank=rank, agent=member.agent) for member in members for rank in member.ranks)
            return dataclasses.replace(status, replicas=tuple(ranks))
        case EventKind.RANK if rank is not None:
            return _reduce_rank(status, rank, event)
        case EventKind.OUTCOME if rank is not None and not event.get("ok"):
            error = ": ".join(part for part in (event.get("error_type"), event.get("error_text")) if part)
            first = rank if status.failed_rank is None else status.failed_rank
            shown = {name: str(event.get(name) or "") for name in ("where", "locals")}
            return _with_replica(dataclasses.replace(status, failed_rank=first), rank, error=error, **shown)
        case EventKind.DEBUG if rank is not None:
            values = {field.name: str(event[field.name]) for field in dataclasses.fields(Breakpoint)}
            return _with_replica(status, rank, breakpoint=Breakpoint(**values) if values["prompt"] else None)
        case EventKind.DISK if not status.is_final:
            return dataclasses.replace(status, reason=str(event["problem"]))
        case EventKind.CHECKPOINT:
            return dataclasses.replace(status, checkpoint_epoch=event.get("epoch"))
        case EventKind.NOTE if event.get("text"):
            text = str(event["text"])
            if status.nan_since is None and event.get("nan"):
                epoch, step = map(int, event["nan"])
                status = dataclasses.replace(status, nan_since=(epoch, step))
            if text in status.notes:
                return status
            warnings = (*status.warnings, text) if event.get("warns") else status.warnings
            return dataclasses.replace(status, notes=(*status.notes, text), warnings=warnings)
        case EventKind.WAITING:
            for names, inside in ((event.get("waiting"), True), (event.get("busy"), False)):
                for member in names or ():
                    status = _with_replica(status, member, in_collective=inside)
    return status


def closing_events(verdict: Verdict, status: JobStatus, attempt: int, now: float) -> list[dict[str, Any]]:
    """The last events of a job whose agent has written none.

    Args:
        verdict: How it ended.
        status: Of the job, with the ranks of its newest attempt.
        attempt: The number of its newest attempt.
        now: Seconds since 1970.
    """
    common = {"time": now, "attempt": attempt}
    ranks = [
        {
            **common, "event": EventKind.RANK, "rank": replica.rank, "pid": None, "exit_code": replica.exit_code,
            "signal": replica.signal, "state": RankStateName.FAILED if failed else RankStateName.STOPPED,
        }
        for replica in status.replicas
        if (failed := replica.rank == verdict.rank) or not replica.state.has_ended
    ]  # fmt: skip
    return [*ranks, {**common, "event": EventKind.STATE, "rank": None, **verdict.fields()}]


def _reduce_state(status: JobStatus, event: dict[str, Any]) -> JobStatus:
    state = StateName(event["state"])
    cause = event.get("cause")
    time = event.get("time")
    changed = dataclasses.replace(
        status, state=state, reason=event.get("reason") or "", cause=FailureCause(cause) if cause else None,
        idle_s=event.get("idle_s"), idle_since=time if event.get("idle_s") else None,
    )  # fmt: skip
    if event.get("idle_s") or (status.idle_s and changed.is_final):
        # Warm pods have no ranks of their own.
        each = RankStateName.STOPPED if changed.is_final else RankStateName.RUNNING
        changed = dataclasses.replace(
            changed, replicas=tuple(dataclasses.replace(replica, state=each) for replica in changed.replicas)
        )
    if isinstance(event.get("failed_rank"), int):
        # Events of several agents come interleaved: the one that judges the job knows who failed first.
        changed = dataclasses.replace(changed, failed_rank=event["failed_rank"])
    if state is StateName.RUNNING and status.started is None:
        return dataclasses.replace(changed, started=time)
    return dataclasses.replace(changed, ended=time) if changed.is_final else changed


def _reduce_rank(status: JobStatus, rank: int, event: dict[str, Any]) -> JobStatus:
    state = RankStateName(event["state"])
    if state is RankStateName.FAILED and status.failed_rank is None:
        status = dataclasses.replace(status, failed_rank=rank)
    known = {name: event[name] for name in ("pid", "exit_code", "signal") if event.get(name) is not None}
    return _with_replica(status, rank, state=state, breakpoint=None, **known)


def _with_replica(status: JobStatus, rank: int, **changes: Any) -> JobStatus:
    replicas = list(status.replicas)
    if rank < 0:
        raise IndexError(rank)
    replicas[rank] = dataclasses.replace(replicas[rank], **changes)
    return dataclasses.replace(status, replicas=tuple(replicas))


def _progress(event: dict[str, Any]) -> RankProgress:
    return RankProgress(
        phase=event.get("phase") or "train",
        epoch=int(event.get("epoch") or 0),
        epochs=int(event.get("epochs") or 0),
        step=int(event.get("step") or 0),
        steps=None if event.get("steps") is None else int(event["steps"]),
        samples=int(event.get("samples") or 0),
        samples_per_s=_float_or_none(event.get("samples_per_s")),
        loss=_float_or_none(event.get("loss")),
        left_s=_float_or_none(event.get("left_s")),
        share=_float_or_none(event.get("share")),
        training=int(event.get("training") or 0),
        time=float(event.get("time") or 0.0),
    )


def _usage(event: dict[str, Any]) -> Usage:
    names = ("memory_bytes", "memory_limit_bytes", "gpu_percent", "gpu_memory_bytes", "gpu_memory_limit_bytes")
    amounts = {name: None if event.get(name) is None else max(0, int(event[name])) for name in names}
    node = event.get("node")
    return Usage(**amounts, node=None if node is None else str(node), time=float(event.get("time") or 0.0))


def _float_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def _batch_loss(event: dict[str, Any]) -> BatchLoss:
    steps = event.get("steps")
    return BatchLoss(
        epoch=int(event["epoch"]),
        step=int(event["step"]),
        steps=None if steps is None else int(steps),
        loss=float(event["loss"]),
        time=event.get("time") or 0.0,
    )


def _moment(event: dict[str, Any]) -> Moment:
    return Moment(
        time=float(event["time"]),
        values=tuple((name, tuple(map(_float_or_none, event[name]))) for name in HISTORY if name in event),
    )


def _metric_row(event: dict[str, Any]) -> MetricRow:
    return MetricRow(
        time=event.get("time") or 0.0,
        rank=event.get("rank"),
        epoch=event.get("epoch"),
        step=event.get("step"),
        source=event.get("source") or "report",
        values=tuple((str(name), float(value)) for name, value in event.get("values", {}).items()),
        from_batch=int(event.get("from_batch") or 0),
        reported_to=tuple(map(str, event.get("reported_to") or ())),
    )
