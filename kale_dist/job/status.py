"""A job's status at one moment, and the pure reduction of events to it. No clock, no I/O."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from kale_dist.wire import (
    BatchLoss,
    FailureCause,
    MetricRow,
    Moment,
    RankStateName,
    StateName,
    Verdict,
    events,
    fields_of,
    visible,
)
from kale_dist.wire.events import Event, RankProgress, Usage
from kale_dist.wire.messages import Breakpoint, Done


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

    def __str__(self) -> str:
        """One plain sentence, for a person or a program that reads: `local://train-net-x3k9f: running, 31 % done.`."""
        share = "" if self.is_final or self.fraction is None else f", {int(100 * self.fraction)} % done"
        reason = f": {' '.join(visible(self.reason).split()).rstrip('.')}" if self.reason else ""
        return f"{visible(self.ref)}: {self.state.value}{share}{reason}."

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


def reduce_events(status: JobStatus, records: Iterable[Mapping[str, Any]]) -> JobStatus:
    """The status after some events, in their order.

    A final state stays: what a dying job still sends does not revive it. Events of an attempt before the status's own
    are passed over, and the first event of a later attempt sets the ranks back to `pending`. What is no event (a file
    was damaged), or is of a rank that there is not, changes nothing either.

    Args:
        status: The status before them.
        records: The events, as they are in a file.
    """
    rows: list[MetricRow] = []
    losses: list[BatchLoss] = []
    history: list[Moment] = []
    latest: dict[int, dict[str, RankProgress | Usage]] = {}
    for record in records:
        event = Event.read(_visible(record, keeps_colours=record.get("event") == "debug"))
        if event is None or event.attempt < status.attempt:
            continue
        if event.attempt > status.attempt:
            status, latest = _next_attempt(status, event.attempt), {}
        # These are collected, for a tuple that grows by one at each of 100,000 reports would take minutes.
        match event.what:
            case MetricRow():
                rows.append(event.what)
            case BatchLoss():
                losses.append(event.what)
            case events.EpochLosses():
                status = _with_epoch(_with_rows(status, rows, losses), event.what)
                rows, losses = [], []
            case Moment():
                history.append(event.what)
            case RankProgress() | Usage() as value:
                if event.rank is not None and event.rank < len(status.replicas):
                    latest.setdefault(event.rank, {})["usage" if isinstance(value, Usage) else "progress"] = value
            case events.Resumed():
                status = _resumed(_with_rows(status, rows, losses), event.what)
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
        return {name: _visible(one, keeps_colours=keeps_colours) for name, one in value.items()}
    return [_visible(one, keeps_colours=keeps_colours) for one in value] if isinstance(value, list) else value


def _with_rows(status: JobStatus, rows: list[MetricRow], losses: list[BatchLoss]) -> JobStatus:
    """Add rows; a status without new ones keeps its tuples, by which readers see that nothing has changed."""
    if rows:
        status = dataclasses.replace(status, metrics=(*status.metrics, *rows))
    return dataclasses.replace(status, losses=(*status.losses, *losses)) if losses else status


def _with_epoch(status: JobStatus, whole: events.EpochLosses) -> JobStatus:
    """Put the losses of an epoch's batches in the place of those that were told while it ran, unless these are more."""
    found = [
        BatchLoss(epoch=whole.epoch, step=step, steps=whole.steps, loss=loss, time=time)
        for step, time, loss in whole.batches
    ]
    end = len(status.losses)
    while (
        end and found and (status.losses[end - 1].epoch, status.losses[end - 1].step) >= (found[0].epoch, found[0].step)
    ):
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


def _resumed(status: JobStatus, at: events.Resumed) -> JobStatus:
    """Forget the rows of epochs that are trained once more; what users have reported themselves stays."""
    kept = tuple(row for row in status.metrics if row.source == "report" or (row.epoch or 0) <= at.epoch)
    losses = tuple(one for one in status.losses if (one.epoch, one.step) <= (at.epoch + 1, at.batches))
    last = at.epoch if at.epoch or at.batches else None
    return dataclasses.replace(status, metrics=kept, losses=losses, checkpoint_epoch=last)


def _reduce_one(status: JobStatus, event: Event) -> JobStatus:
    rank = event.rank if event.rank is not None and event.rank < len(status.replicas) else None
    match event.what:
        case events.JobState() as state if not status.is_final:
            return _reduce_state(status, state, event.time)
        case events.Members(members=members):
            ranks = (ReplicaStatus(rank=rank, agent=member.agent) for member in members for rank in member.ranks)
            return dataclasses.replace(status, replicas=tuple(ranks))
        case events.RankState() as state if rank is not None:
            if state.state is RankStateName.FAILED and status.failed_rank is None:
                status = dataclasses.replace(status, failed_rank=rank)
            known = {name: value for name, value in fields_of(state).items() if value is not None}
            return _with_replica(status, rank, breakpoint=None, **known)
        case Done(ok=False) as done if rank is not None:
            error = ": ".join(part for part in (done.error_type, done.error_text) if part)
            first = rank if status.failed_rank is None else status.failed_rank
            status = dataclasses.replace(status, failed_rank=first)
            return _with_replica(status, rank, error=error, where=done.where, locals=done.locals)
        case Breakpoint() as there if rank is not None:
            return _with_replica(status, rank, breakpoint=there if there.prompt else None)
        case events.DiskProblem(problem=problem) if not status.is_final:
            return dataclasses.replace(status, reason=problem)
        case events.CheckpointWritten(epoch=epoch):
            return dataclasses.replace(status, checkpoint_epoch=epoch)
        case events.Note(text=text) as note if text:
            if status.nan_since is None and note.nan:
                status = dataclasses.replace(status, nan_since=note.nan)
            if text in status.notes:
                return status
            warnings = (*status.warnings, text) if note.warns else status.warnings
            return dataclasses.replace(status, notes=(*status.notes, text), warnings=warnings)
        case events.Waiting(waiting=waiting, busy=busy):
            for member in (*waiting, *busy):
                if 0 <= member < len(status.replicas):
                    status = _with_replica(status, member, in_collective=member in waiting)
    return status


def closing_events(verdict: Verdict, status: JobStatus, attempt: int, now: float) -> list[dict[str, Any]]:
    """The last events of a job whose agent has written none, as records.

    Args:
        verdict: How it ended.
        status: Of the job, with the ranks of its newest attempt.
        attempt: The number of its newest attempt.
        now: Seconds since 1970.
    """
    ended = (one for one in status.replicas if one.rank == verdict.rank or not one.state.has_ended)
    made = [
        Event(
            events.RankState(
                state=RankStateName.FAILED if one.rank == verdict.rank else RankStateName.STOPPED,
                exit_code=one.exit_code, signal=one.signal,
            ), now, one.rank, attempt,
        )
        for one in ended
    ]  # fmt: skip
    return [one.record() for one in (*made, Event(verdict.last_state, now, None, attempt))]


def _reduce_state(status: JobStatus, new: events.JobState, time: float) -> JobStatus:
    changed = dataclasses.replace(
        status, state=new.state, reason=new.reason, cause=new.cause, idle_s=new.idle_s, idle_since=time if new.idle_s else None,
    )  # fmt: skip
    if new.idle_s or (status.idle_s and changed.is_final):
        # Warm pods have no ranks of their own.
        each = RankStateName.STOPPED if changed.is_final else RankStateName.RUNNING
        changed = dataclasses.replace(
            changed, replicas=tuple(dataclasses.replace(replica, state=each) for replica in changed.replicas)
        )
    if new.failed_rank is not None:
        # Events of several agents come interleaved: the one that judges the job knows who failed first.
        changed = dataclasses.replace(changed, failed_rank=new.failed_rank)
    if new.state is StateName.RUNNING and status.started is None:
        return dataclasses.replace(changed, started=time)
    return dataclasses.replace(changed, ended=time) if changed.is_final else changed


def _with_replica(status: JobStatus, rank: int, **changes: Any) -> JobStatus:
    replicas = list(status.replicas)
    replicas[rank] = dataclasses.replace(replicas[rank], **changes)
    return dataclasses.replace(status, replicas=tuple(replicas))
