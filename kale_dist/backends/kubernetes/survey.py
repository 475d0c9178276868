"""How jobs are by their objects alone: for lists, which follow no job. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.backends.kubernetes.views import QueuePosition, seconds
from kale_dist.contract import StateName
from kale_dist.manifests import Kind
from kale_dist.manifests.settings import CANCELLED_ANNOTATION, INSTANCE_LABEL, SPEC_ANNOTATION
from kale_dist.status import JobStatus, ReplicaStatus


def statuses(
    items: Sequence[tuple[Kind, Mapping[str, Any]]], queued: Mapping[str, QueuePosition | None] | None = None
) -> list[JobStatus]:
    """The status of each job.

    Args:
        items: Objects with their kinds, oldest first. The last run of a job decides; the first one names it.
        queued: Where those stand that wait in a queue, by their UIDs.
    """
    jobs: dict[tuple[str, str], list[tuple[Kind, Mapping[str, Any]]]] = {}
    for kind, item in items:
        metadata = item["metadata"]
        name = metadata.get("labels", {}).get(INSTANCE_LABEL, metadata["name"])
        jobs.setdefault((metadata["namespace"], name), []).append((kind, item))
    return [_status(namespace, name, runs, queued or {}) for (namespace, name), runs in jobs.items()]


def _status(
    namespace: str,
    name: str,
    runs: Sequence[tuple[Kind, Mapping[str, Any]]],
    queued: Mapping[str, QueuePosition | None],
) -> JobStatus:
    (kind, first), (_, last) = runs[0], runs[-1]
    said = kind.state(last)
    state = StateName.RUNNING if said.is_running else StateName.PENDING
    if kind.is_suspended(last):
        state = StateName.PENDING
    if said.finished:
        state = StateName(said.finished)
    if state is not StateName.RUNNING and CANCELLED_ANNOTATION in (last["metadata"].get("annotations") or {}):
        state = StateName.CANCELLED
    position = queued.get(last["metadata"].get("uid", "")) if state is StateName.PENDING else None
    is_final = state in (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)
    return JobStatus(
        ref=f"kubernetes://{namespace}/{name}",
        state=state,
        reason=said.message if state is StateName.FAILED else "" if position is None else f"Queued {position}",
        queue_position=None if position is None else position.number,
        created=seconds(first["metadata"]["creationTimestamp"]),
        started=seconds(kind.state(first).started),
        ended=seconds(said.ended) if is_final else None,
        replicas=tuple(ReplicaStatus(rank=rank) for rank in range(_ranks(first))),
    )


def _ranks(job: Mapping[str, Any]) -> int:
    try:
        spec = json.loads(job["metadata"]["annotations"][SPEC_ANNOTATION])
        return int(spec["topology"]["number_of_processes"])
    except (KeyError, ValueError, TypeError):
        return 0
