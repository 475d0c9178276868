"""What is known of a job at one moment, and the pure reduction of events to it. No clock, no I/O."""

from __future__ import annotations

import dataclasses
from typing import Any

from kale_dist.contract import FailureCause, RankStateName, StateName


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
    """Samples this rank has seen in this phase."""
    samples_per_s: float | None
    loss: float | None
    time: float
    """Seconds since 1970."""


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
    in_collective: bool | None = None
    """Whether it waited in a collective when last looked at; None if nobody looked."""
    progress: RankProgress | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """Metrics of one report, or of one epoch of a step."""

    time: float
    rank: int | None
    """None where the values are averaged over ranks."""
    epoch: int | None
    step: int | None
    source: str
    """`train`, `eval` or `report`."""
    values: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A whole job at one moment."""

    ref: str
    state: StateName = StateName.PENDING
    reason: str = ""
    """One plain sentence: why it is in this state."""
    cause: FailureCause | None = None
    attempt: int = 0
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    metrics: tuple[MetricRow, ...] = ()
    notes: tuple[str, ...] = ()
    checkpoint_epoch: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)

    @property
    def fraction(self) -> float | None:
        """Share of the work that rank 0 has done, 0 to 1; None where it is not known."""
        if self.state is StateName.SUCCEEDED:
            return 1.0
        progress = self.replicas[0].progress if self.replicas else None
        if progress is None or progress.epochs < 1:
            return None
        if progress.phase != "train":
            return progress.epoch / progress.epochs
        within = progress.step / progress.steps if progress.steps else 0.0
        return (progress.epoch - 1 + within) / progress.epochs


def reduce_event(status: JobStatus, event: dict[str, Any]) -> JobStatus:
    """The status after an event (fields as `contract` lists them). Events of unknown kind change nothing."""
    raise NotImplementedError
