"""How jobs are by their PyTorchJobs alone: for lists, which follow no job. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.backends.kubernetes.views import seconds
from kale_dist.contract import StateName
from kale_dist.manifests.settings import CANCELLED_ANNOTATION, SPEC_ANNOTATION
from kale_dist.status import JobStatus, ReplicaStatus

_INSTANCE_LABEL = "app.kubernetes.io/instance"
_STATES = {
    "Succeeded": StateName.SUCCEEDED,
    "Failed": StateName.FAILED,
    "Suspended": StateName.PENDING,
    "Running": StateName.RUNNING,
}
"""Conditions of a PyTorchJob, the first that is true counts; without one it waits."""


def statuses(items: Sequence[Mapping[str, Any]]) -> list[JobStatus]:
    """The status of each job.

    Args:
        items: PyTorchJobs, oldest first. The last run of a job decides; the first one names it.
    """
    jobs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in items:
        metadata = item["metadata"]
        name = metadata.get("labels", {}).get(_INSTANCE_LABEL, metadata["name"])
        jobs.setdefault((metadata["namespace"], name), []).append(item)
    return [_status(namespace, name, runs) for (namespace, name), runs in jobs.items()]


def _status(namespace: str, name: str, runs: Sequence[Mapping[str, Any]]) -> JobStatus:
    first, last = runs[0], runs[-1]
    status = last.get("status") or {}
    true = {found["type"]: found for found in status.get("conditions") or () if found.get("status") == "True"}
    condition = next((name for name in _STATES if name in true), "")
    state = _STATES.get(condition, StateName.PENDING)
    if state is not StateName.RUNNING and CANCELLED_ANNOTATION in (last["metadata"].get("annotations") or {}):
        state = StateName.CANCELLED
    started = seconds((first.get("status") or {}).get("startTime"))
    ended = seconds(status.get("completionTime")) or seconds(true.get(condition, {}).get("lastTransitionTime"))
    is_final = state in (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)
    return JobStatus(
        ref=f"kubernetes://{namespace}/{name}",
        state=state,
        reason=str(true[condition].get("message") or "") if state is StateName.FAILED else "",
        created=seconds(first["metadata"]["creationTimestamp"]),
        started=started,
        ended=ended if is_final else None,
        replicas=tuple(ReplicaStatus(rank=rank) for rank in range(_ranks(first))),
    )


def _ranks(job: Mapping[str, Any]) -> int:
    try:
        spec = json.loads(job["metadata"]["annotations"][SPEC_ANNOTATION])
        return int(spec["topology"]["number_of_processes"])
    except (KeyError, ValueError, TypeError):
        return 0
