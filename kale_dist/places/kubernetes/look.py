"""Turns what the cluster reports of a job's object and pods into a `Look`: what runs, what waits, and why. Pure.

This module reports, and the follower judges. `Look.trouble` is the one sentence that helps most: a pod that the cluster
killed comes before the pods that ended because of it, and a refused pod before one that merely waits for the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.job.backend import Look, Part, Trouble
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus, ReplicaStatus
from kale_dist.places.kubernetes.explain import pods as explain
from kale_dist.places.kubernetes.explain.sentences import Found
from kale_dist.places.kubernetes.views import JobView, PodView, QueuePosition, seconds
from kale_dist.places.manifests import Kind, ObjectState, kind_of
from kale_dist.places.manifests.object_settings import (
    CANCELLED_ANNOTATION,
    FAILED_ANNOTATION,
    INSTANCE_LABEL,
    QUEUE_LABEL,
    SPEC_ANNOTATION,
)
from kale_dist.wire import FailureCause, StateName, visible

_DEAD_AFTER_S = 15.0
"""An operator that works looks at a job within a second or two; a busy one may need longer."""

_LONG_S = 60.0
"""Of what a healthy start shows, too, the remedy is told after this."""

_START_SLACK_S = 5.0
"""The operator writes down when it began a little after it made the first pod."""


_Seen = Sequence[tuple[PodView, Found | None]]
"""The pods of a job, the head first, each with why it ended as it did, or what keeps it from running."""


def look(view: JobView, spec: JobSpec, now: float) -> Look:
    """How a job is now.

    Args:
        view: What the cluster reports.
        spec: What was submitted.
        now: Seconds since 1970.
    """
    job, is_fresh, kind = view.job, view.is_complete and not view.problem, kind_of(spec)
    state = ObjectState() if job is None else kind.state(job)
    replaces = kind.replaces_pods(spec)
    current, replaced = pods_of_object(view, state, replaces=replaces, returns_head=kind.returns_head(spec))
    pods = [(pod, _trouble_of(pod, view, now)) for pod in current]
    parts = tuple(_part(pod, found) for pod, found in pods)
    if view.is_deleted:
        is_late = spec.cluster.ttl_s is not None and not view.pods
        name = "job-expired" if is_late else "job-deleted"
        trouble = explain.of_job(name, view, kind, {"ttl": f"{spec.cluster.ttl_s}"}).trouble
        return Look(parts=parts, trouble=trouble, gone=True, fresh=is_fresh)
    if job is None:
        problem = Trouble(sentence=view.problem.rstrip("."), heals=True) if view.problem else None
        return Look(trouble=problem, fresh=False)
    is_suspended = kind.is_suspended(job)
    person, failure = _annotation(job, CANCELLED_ANNOTATION), _annotation(job, FAILED_ANNOTATION)
    if person or failure:
        is_over = all(part.state == "ended" for part in parts) and (is_suspended or bool(parts))
        word: Any = "cancelled" if person else "failed"
        sentence = f"The job was cancelled by {person}" if person else failure.rstrip(".")
        cause = FailureCause.USER if person else FailureCause.LOST
        trouble = Trouble(sentence=sentence, heals=not is_over, cause=cause)
        return Look(parts=parts, trouble=trouble, finished=word if is_over else "", fresh=is_fresh)
    if is_suspended:
        trouble = _why_suspended(job, view, kind)
        there = tuple(part for part in parts if part.lost != "deleted")
        number = None if view.queue_position is None else view.queue_position.number
        return Look(parts=there, trouble=trouble, suspended=str(trouble), queue_position=number, fresh=is_fresh)
    known = _ended(pods, view, kind, state) or _waiting(pods, view, kind, state, now)
    if view.problem:
        last = "" if known is None else f"As last seen: {known}"
        known = Trouble(sentence=view.problem.rstrip("."), remedy=last, heals=True)
    before = tuple(_part(pod, _trouble_of(pod, view, now)) for pod in replaced)
    return Look(
        parts=parts, replaces=replaces, returns_head=kind.returns_head(spec), replaced=before, trouble=known,
        finished=state.finished, fresh=is_fresh,
    )  # fmt: skip


def _annotation(job: Mapping[str, Any], name: str) -> str:
    return str(((job.get("metadata") or {}).get("annotations") or {}).get(name) or "")


def pods_of_object(
    view: JobView, state: ObjectState, *, replaces: bool, returns_head: bool
) -> tuple[Sequence[PodView], Sequence[PodView]]:
    """One pod of each number: the newest since the job was started or resumed, as a suspension ended those before.

    Args:
        view: What the cluster reports.
        state: What the object reports.
        replaces: Whether the job goes on with the pod that its controller makes in the place of a worker that was lost. If not,
            the lost one stands for its number.
        returns_head: Whether it goes on with a head whose container was started again.

    Returns:
        These pods, and the lost workers in whose places some of them are.
    """
    began = seconds(state.started) or 0.0
    latest, gone = view.latest_pods, [pod for pod in view.pods if (pod.is_gone or pod.is_past) and pod.has_started]
    head = latest[0] if latest else None
    found, replaced = [], []
    for pod in latest:
        since = began if pod is head or head is None else max(began, head.created)
        lost = [
            old for old in gone
            if old.number == pod.number and (pod is not head or old.is_past) and old.created >= since - _START_SLACK_S
        ]  # fmt: skip
        if pod.created >= began - _START_SLACK_S:
            goes_on = returns_head if pod is head else replaces
            found.append(pod if goes_on else next(iter(lost), pod))
            replaced += [old for old in lost if old is not pod][-1:]
    return found, replaced if replaces else ()


def _trouble_of(pod: PodView, view: JobView, now: float) -> Found | None:
    if pod.has_ended:
        return explain.end(pod, view) or explain.sidecar(pod, view)
    found = explain.hindrance(pod, view)
    if found is not None and found.entry.is_usual and now - pod.created < _LONG_S:
        return dataclasses.replace(found, trouble=dataclasses.replace(found.trouble, remedy=""))
    return found


def _part(pod: PodView, found: Found | None) -> Part:
    state: Any = "ended" if pod.has_ended else "running" if pod.is_running else "waiting"
    return Part(
        number=pod.number,
        name=pod.name,
        uid=pod.identity,
        state=state,
        exit_code=pod.main.exit_code,
        message=pod.main.message,
        trouble=None if found is None else found.trouble,
        lost=found.entry.lost if found is not None and pod.has_ended else "",
        node=pod.node,
    )


def _ended(pods: _Seen, view: JobView, kind: Kind, state: ObjectState) -> Trouble | None:
    """What ended the job, or will: a pod that failed, else one that can never start, else one that a sidecar keeps alive."""
    ended = [(pod, found) for pod, found in pods if pod.has_ended and found is not None]
    failed = [(pod, found) for pod, found in ended if found.name != "sidecar"]
    hopeless = [found for pod, found in pods if not pod.has_ended and found is not None and not found.trouble.heals]
    # The operator counts a relay that was lost as a failure while the head still works. A limit of the object's own ends it
    # with all of its pods deleted.
    first = min(failed, key=_order_of_failures)[1] if failed else None
    was_deleted = first is not None and first.name == "pod-deleted" and all(pod.is_gone for pod, _ in pods)
    found = first or next(iter(hopeless), None) or next((found for _, found in ended), None)
    is_over = found is None and all(pod.has_ended for pod, _ in pods)
    if state.finished == "failed" and (is_over or was_deleted):
        found = explain.of_job("job-failed", view, kind, {"detail": state.message or "without a reason"})
    return None if found is None else found.trouble


def _order_of_failures(item: tuple[PodView, Found]) -> tuple[int, bool, float]:
    """A pod that the cluster killed comes before those that ended because of it, then the one that ended first."""
    pod, found = item
    verdict = explain.verdict_of(pod)
    knows = verdict is not None and verdict.cause is FailureCause.ERROR
    rank = {"ended": 1 if knows else 3, "pod-failed": 3, "pod-deleted": 2}.get(found.name, 0)
    return rank, verdict is None, pod.main.ended or pod.created


# -- what it waits for -------------------------------------------------------------------------------------------------


def _waiting(pods: _Seen, view: JobView, kind: Kind, state: ObjectState, now: float) -> Trouble | None:
    """What the job waits for; None if nothing is known to be missing."""
    refused = explain.refusal(view, kind)
    if refused is not None:
        return refused.trouble
    hindered = [found for pod, found in pods if found is not None and not pod.has_ended]
    lacking = [found.trouble for found in hindered if found.name != "waits-for-master"]
    if lacking:
        return next((trouble for trouble in lacking if trouble.needs_action), lacking[0])
    idle = [pod for pod, _ in pods if not pod.is_running and not pod.has_ended]
    # A worker that waits for the master lacks nothing itself.
    if hindered and idle[0].number > 0:
        return hindered[0].trouble
    if idle:
        return Trouble(sentence=explain.progress(idle[0], view), heals=True)
    untouched = None if any(not pod.is_gone for pod, _ in pods) else _untouched(view, kind, state, now)
    return None if untouched is None else untouched.trouble


def _untouched(view: JobView, kind: Kind, state: ObjectState, now: float) -> Found | None:
    """What is wrong with a job that has no pods and no refusal of one."""
    job = view.job or {"metadata": {}}
    waited_s = now - (seconds(job["metadata"].get("creationTimestamp")) or now)
    if waited_s < _DEAD_AFTER_S:
        return None
    if view.lacks_events:
        unknown = f"the reason why the job has no pods after {waited_s:.0f} s"
        return explain.of_job("not-readable", view, kind, {"kind": "events", "unknown": unknown})
    if state.is_known or view.events:
        return None
    return explain.of_job("operator-dead", view, kind, {"waited": f"{waited_s:.0f}"})


def _why_suspended(job: Mapping[str, Any], view: JobView, kind: Kind) -> Trouble:
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if queue is None:
        return explain.of_job("suspended", view, kind).trouble
    messages = [event.message for event in view.events if event.kind == "Workload"]
    facts = {
        "queue": f"Kueue's queue {queue}",
        "position": "" if view.queue_position is None else f", {view.queue_position}",
        "queue_said": f": {messages[-1]}" if messages else "",
    }
    if view.queue_position is not None and view.queue_position.problem:
        return explain.of_job("queue-closed", view, kind, {**facts, "detail": view.queue_position.problem}).trouble
    is_too_large = messages and "maximum capacity" in messages[-1]
    return explain.of_job("queued-for-ever" if is_too_large else "queued", view, kind, facts).trouble


# -- lists -----------------------------------------------------------------------------------------------------------


def statuses(
    items: Sequence[tuple[Kind, Mapping[str, Any]]], queued: Mapping[str, QueuePosition | None] | None = None
) -> list[JobStatus]:
    """The status of each job by its objects alone, for lists, which follow no job.

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
    report = kind.state(last)
    state = StateName.RUNNING if report.is_running and not kind.is_suspended(last) else StateName.PENDING
    failure, person = _annotation(last, FAILED_ANNOTATION), _annotation(last, CANCELLED_ANNOTATION)
    if report.finished:
        state = StateName(report.finished)
    if state is not StateName.RUNNING and (person or failure):
        state = StateName.CANCELLED if person else StateName.FAILED
    position = queued.get(last["metadata"].get("uid", "")) if state is StateName.PENDING else None
    is_final = state.is_final
    reason = failure or report.message if state is StateName.FAILED else ""
    if position is not None:
        reason = position.problem or f"Queued {position}"
    return JobStatus(
        ref=f"kubernetes://{namespace}/{name}",
        state=state,
        reason=visible(reason),
        queue_position=None if position is None else position.number,
        created=seconds(first["metadata"]["creationTimestamp"]),
        started=seconds(kind.state(first).started),
        ended=seconds(report.ended) if is_final else None,
        replicas=tuple(ReplicaStatus(rank=rank) for rank in range(_ranks(first))),
    )


MOST_RANKS = 100_000
"""Objects of others may name any number."""


def _ranks(job: Mapping[str, Any]) -> int:
    try:
        spec = json.loads(job["metadata"]["annotations"][SPEC_ANNOTATION])
        return min(int(spec["topology"]["number_of_processes"]), MOST_RANKS)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return 0
