"""The classes of what you read: a job's status, log and results, and what a plan is made of.

    from kale_dist.types import JobStatus, LogLine

What you make yourself is in `kale_dist` (`kd.Kubernetes`, `kd.Resources`, ...), `kale_dist.strategies`,
`kale_dist.callbacks` and `kale_dist.trackers`; errors are in `kale_dist.errors`.
"""

from __future__ import annotations

from kale_dist.errors.local_variables import FrameLocals
from kale_dist.job.backend import Backend, Plan
from kale_dist.job.live_job import LiveJob
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.recipe import ImageFile
from kale_dist.job.spec.volumes import VolumeKind
from kale_dist.job.status import JobStatus, ReplicaStatus
from kale_dist.wire import BatchLoss, FailureCause, LogLine, MetricRow, RankStateName, StateName
from kale_dist.wire.context import Context
from kale_dist.wire.events import RankProgress, Usage
from kale_dist.wire.messages import Breakpoint
from kale_dist.worker.training.result import TrainingResult

__all__ = [
    "Backend",
    "BatchLoss",
    "Breakpoint",
    "ClusterOptions",
    "Context",
    "FailureCause",
    "FrameLocals",
    "ImageFile",
    "JobSpec",
    "JobStatus",
    "LiveJob",
    "LogLine",
    "MetricRow",
    "Plan",
    "RankProgress",
    "RankStateName",
    "ReplicaStatus",
    "StateName",
    "TrainingResult",
    "Usage",
    "VolumeKind",
]
