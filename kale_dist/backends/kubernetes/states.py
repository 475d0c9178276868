"""The status of a job from what its agents say and what the cluster says. Pure.

The agents know more, so a job's end is theirs to tell. The cluster is believed where no agent can speak: before the pods
run, and where a pod ended without a word. Some of that is final at once, for it cannot heal (`Trouble.is_final`): a pod
killed for memory, evicted or deleted, a deadline, an image without Python. The rest is told and waited for: an image that
may still be pushed, a node that may become free, a quota that others may leave.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.backends.kubernetes import diagnosis
from kale_dist.backends.kubernetes.diagnosis import Finding
from kale_dist.backends.kubernetes.troubles import Place
from kale_dist.backends.kubernetes.views import JobView, PodView, attempt_of, seconds
from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.manifests.settings import CANCELLED_ANNOTATION, QUEUE_LABEL
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus, ReplicaStatus

_DEAD_AFTER_S = 15.0
"""An operator that is alive looks at a job within a second or two; a busy one may need longer."""

_SILENT_AFTER_S = 60.0
"""All pods run and no agent says a word: then nobody can read them."""

_START_SLACK_S = 5.0
"""The operator writes down when it began a little after it made the first pod."""

_UNSURE = (FailureCause.AGENT_DIED, FailureCause.DIED, FailureCause.LEFT)
"""Causes by which agents say that something was killed; the cluster may know by whom."""


def overlay(base: JobStatus, view: JobView, spec: JobSpec, now: float, *, activity: str = "") -> JobStatus:
    """A job's status.

    Args:
        base: What the agents' events say.
        view: What the cluster says.
        spec: What was submitted.
        now: Seconds since 1970.
        activity: What this process does for the job that takes time, as a sentence.

    Returns:
        The status. A final base stays, but for a better reason where its agents know only that something was killed.
    """
    if base.is_final:
        return _explained(base, view)
    base = dataclasses.replace(
        base,
        replicas=_replicas(base, view, spec),
        notes=(*base.notes, *(note for note in view.degraded if note not in base.notes)),
    )
    ended = _end(base, view, spec, now)
    if ended is not None:
        return ended
    state, reason = _state(base, view, spec, now)
    if activity:
        reason = f"{reason} {activity}".strip()
    if not view.healthy:
        reason = f"{view.problem} As last seen: {reason}" if reason else view.problem
    return dataclasses.replace(base, state=state, reason=reason)


# -- the end ---------------------------------------------------------------------------------------------------------


def is_unsure(verdict: JobStatus, view: JobView) -> bool:
    """Whether the cluster may know better than the agents why the job has ended, and whether it was cancelled at all."""
    if CANCELLED_ANNOTATION in _annotations(view.job or {}) or view.is_deleted or is_suspended(view.job or {}):
        return False
    return verdict.state is StateName.CANCELLED or (verdict.state is StateName.FAILED and verdict.cause in _UNSURE)


def is_put_off(view: JobView, verdict: Mapping[str, Any] | None) -> bool:
    """Whether somebody has suspended a job that was not to end: it begins again when it is resumed.

    Args:
        view: What the cluster says.
        verdict: The final event of pod 0's agent, if there is one.
    """
    job = view.job or {}
    if not is_suspended(job) or CANCELLED_ANNOTATION in _annotations(job):
        return False
    return verdict is None or may_be_of_suspension(verdict)


def may_be_of_suspension(verdict: Mapping[str, Any]) -> bool:
    """Whether pod 0's agent may have ended the job only because its pods were taken away.

    Whose pods the cluster ends, it tells so by SIGTERM, which the agents take for a cancel.
    """
    return verdict.get("state") == StateName.CANCELLED or _cause(verdict.get("cause")) in _UNSURE


def lost_pod(ended: JobStatus, view: JobView, verdict: Mapping[str, Any] | None) -> str:
    """Which pod was taken from a job that has failed only by that, so that other pods may do better.

    Args:
        ended: How the job has ended, as `overlay` says.
        view: What the cluster says.
        verdict: The final event of pod 0's agent, if there is one.

    Returns:
        A sentence; empty if the job has ended for another reason.
    """
    if ended.state is not StateName.FAILED or CANCELLED_ANNOTATION in _annotations(view.job or {}):
        return ""
    found = _first_failure(view, is_over=verdict is not None)
    if found is not None and found.trouble.loses_pod:
        is_why = ended.cause in (*_UNSURE, found.trouble.cause)
        return f"{found.sentence[:1].upper()}{found.sentence[1:].removesuffix('.')}." if is_why else ""
    # A node that fails is known to the agents at once, and to the cluster minutes later.
    return ended.reason if misses_pod(verdict) and (found is None or found.trouble.name == "ended") else ""


def misses_pod(verdict: Mapping[str, Any] | None) -> bool:
    """Whether pod 0's agent has ended the job because another pod's was gone: no rank is to blame then."""
    return verdict is not None and verdict.get("cause") == FailureCause.DIED and verdict.get("failed_rank") is None


def _explained(base: JobStatus, view: JobView) -> JobStatus:
    """A failure in the cluster's words, if a pod was killed by the cluster and the agents cannot know it."""
    found = _first_failure(view, is_over=True) if is_unsure(base, view) else None
    if found is None or found.text in base.reason:
        return base
    ends_pods = found.trouble.place in (Place.POD, Place.DISRUPTION) or found.trouble.name == "pod-deleted"
    if base.state is StateName.CANCELLED and ends_pods:
        # Whom the cluster ends, it tells so by SIGTERM, which the agents take for a cancel.
        return dataclasses.replace(base, state=StateName.FAILED, cause=found.trouble.cause, reason=found.text)
    if base.state is StateName.FAILED and (ends_pods or found.trouble.name == "out-of-memory"):
        return dataclasses.replace(base, reason=f"{found.text} {base.reason}".strip())
    return base


def _end(base: JobStatus, view: JobView, spec: JobSpec, now: float) -> JobStatus | None:
    """The status of a job that has ended as the cluster sees it; None if it has not."""
    job = view.job or {}
    person = _annotations(job).get(CANCELLED_ANNOTATION)
    if view.is_deleted:
        # Of a job that was followed, pods are remembered.
        is_late = spec.cluster.ttl_s is not None and not view.pods
        gone = diagnosis.of_job("job-expired" if is_late else "job-deleted", view, {"ttl": f"{spec.cluster.ttl_s}"})
        return _final(base, StateName.CANCELLED, gone.text, FailureCause.USER, now)
    if person is not None and is_suspended(job) and all(pod.has_ended for pod in view.pods):
        return _final(base, StateName.CANCELLED, f"The job was cancelled by {person}", FailureCause.USER, now)
    if is_suspended(job) or view.job is None:
        return None
    condition = _condition(job)
    head = _head(view, spec)
    if condition.get("type") == "Succeeded" or (head is not None and _has_succeeded(head)):
        left = [text for pod in view.pods if (text := _text(diagnosis.sidecar(pod, view)))]
        return _final(base, StateName.SUCCEEDED, " ".join(left), None, now)
    found = _limit(view, condition) or _first_failure(view) or _hopeless(view) or _given_up(view, condition)
    if found is None:
        return None
    told = _told(found.pod)
    cause = found.trouble.cause
    reason = found.text
    if told and found.trouble.name == "ended":
        reason = told.get("message") or reason
        cause = _cause(told.get("cause")) or cause
    if person is not None:
        return _final(base, StateName.CANCELLED, f"The job was cancelled by {person}", FailureCause.USER, now)
    if told and told["state"] == StateName.CANCELLED and found.trouble.name == "ended":
        return _final(base, StateName.CANCELLED, reason, cause, now)
    failed = _final(base, StateName.FAILED, reason, cause, now)
    rank = told.get("rank") if told else _rank_of(found.pod, view, spec)
    if failed.failed_rank is None and isinstance(rank, int) and 0 <= rank < spec.topology.number_of_processes:
        failed = dataclasses.replace(failed, failed_rank=rank)
    return failed


def _final(base: JobStatus, state: StateName, reason: str, cause: FailureCause | None, now: float) -> JobStatus:
    return dataclasses.replace(base, state=state, reason=reason, cause=cause, ended=now)


def _has_succeeded(pod: PodView) -> bool:
    return pod.main.state == "terminated" and pod.main.exit_code == 0


def _first_failure(view: JobView, *, is_over: bool = False) -> Finding | None:
    """Why the first pod failed. One that the cluster killed comes before those that ended because of it."""
    ends = ((pod, diagnosis.end(pod, view, is_over=is_over)) for pod in current_pods(view))
    found = [(pod, finding) for pod, finding in ends if finding is not None]
    if not found:
        return None

    def order(item: tuple[PodView, Finding]) -> tuple[int, bool, float]:
        pod, finding = item
        told = _told(pod) or {}
        knows = told.get("state") == StateName.FAILED and _cause(told.get("cause")) not in _UNSURE
        words = {"ended": 1 if knows else 3, "pod-failed": 3, "pod-deleted": 2}
        return words.get(finding.trouble.name, 0), not told, pod.main.ended or pod.created

    return min(found, key=order)[1]


def current_pods(view: JobView) -> Sequence[PodView]:
    """Pods of the job as it is now: those from before a suspension ended because of it."""
    job = view.job or {}
    began, first = seconds((job.get("status") or {}).get("startTime")), attempt_of(job)
    return [
        pod for pod in view.pods if (began is None or pod.created >= began - _START_SLACK_S) and pod.attempt >= first
    ]


def _hopeless(view: JobView) -> Finding | None:
    """A pod that has not started and never will."""
    found = (diagnosis.hindrance(pod, view) for pod in view.latest_pods)
    return next((finding for finding in found if finding is not None and finding.trouble.is_final), None)


def _limit(view: JobView, condition: Mapping[str, Any]) -> Finding | None:
    """A limit on the PyTorchJob itself, by which the operator has ended its pods."""
    if condition.get("type") == "Failed":
        message = str(condition.get("message") or "").lower()
        for words, name in (("longer than specified deadline", "job-deadline"), ("backoff limit", "job-backoff")):
            if words in message:
                return diagnosis.of_job(name, view, {})
    return None


def _given_up(view: JobView, condition: Mapping[str, Any]) -> Finding | None:
    """What the operator says of a job that it has given up, where no pod says more."""
    if condition.get("type") != "Failed":
        return None
    return diagnosis.of_job("job-failed", view, {"detail": str(condition.get("message") or "without a reason")})


def _told(pod: PodView | None) -> dict[str, Any] | None:
    """What an agent has left in its container's termination message: state, cause, rank, error_type, message, last_line."""
    text = "" if pod is None else pod.main.message
    try:
        told = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return told if isinstance(told, dict) and "state" in told else None


def _cause(word: Any) -> FailureCause | None:
    try:
        return FailureCause(word)
    except ValueError:
        return None


# -- before the end --------------------------------------------------------------------------------------------------


def _state(base: JobStatus, view: JobView, spec: JobSpec, now: float) -> tuple[StateName, str]:
    job = view.job
    if job is None:
        return base.state, base.reason or ("The job is looked for on the cluster" if view.healthy else "")
    if is_suspended(job):
        return StateName.PENDING, _why_suspended(job, view)
    expected = spec.topology.number_of_pods
    pods = view.latest_pods
    running = [pod for pod in pods if pod.is_running]
    waiting = _waiting(view, job, expected, now)
    if CANCELLED_ANNOTATION in _annotations(job):
        waiting = f"The job is being cancelled by {_annotations(job)[CANCELLED_ANNOTATION]}"
    if base.state is StateName.RUNNING:
        return base.state, f"{_share(running, expected)}; {waiting}" if waiting else base.reason
    if waiting:
        state = StateName.STARTING if running or base.state is StateName.STARTING else StateName.PENDING
        return state, f"{_share(running, expected)}; {_lower(waiting)}" if running else waiting
    if len(running) < expected:
        return (StateName.STARTING if running else StateName.PENDING), base.reason or _share(running, expected)
    since = max((pod.created for pod in running), default=now)
    if base.state is StateName.PENDING and now - since > _SILENT_AFTER_S:
        return StateName.RUNNING, f"All {expected} pods run; what their ranks do cannot be read"
    return StateName.STARTING, base.reason or (f"All {expected} pods run" if expected > 1 else "The pod runs")


def _waiting(view: JobView, job: Mapping[str, Any], expected: int, now: float) -> str:
    """What the job waits for, with a remedy where there is one; empty if nothing is known to be wanting."""
    refused = diagnosis.refusal(view, expected)
    if refused is not None:
        return refused.text
    pods = [pod for pod in view.latest_pods if not pod.is_gone]
    found = [(pod, diagnosis.hindrance(pod, view)) for pod in pods]
    for late in (False, True):
        # A worker that waits for the master is the last thing to speak of.
        for _, finding in found:
            if finding is not None and (finding.trouble.name == "waits-for-master") is late:
                return finding.text
    idle = [pod for pod in pods if not pod.is_running and not pod.has_ended]
    if idle:
        return f"Pod {idle[0].name} {diagnosis.progress(idle[0], view)}"
    return _text(_untouched(view, job, now)) if not pods else ""


def _untouched(view: JobView, job: Mapping[str, Any], now: float) -> Finding | None:
    """What is wrong with a job without pods, of which nobody has said anything."""
    waited_s = now - (seconds(job["metadata"].get("creationTimestamp")) or now)
    if waited_s < _DEAD_AFTER_S:
        return None
    facts = {"waited": f"{waited_s:.0f}"}
    manager = (job["spec"].get("runPolicy") or {}).get("managedBy")
    if manager and manager != "kubeflow.org/training-operator":
        return diagnosis.of_job("managed-elsewhere", view, {**facts, "manager": manager})
    if any("events" in note for note in view.degraded):
        return diagnosis.of_job("no-pods", view, facts)
    return None if _condition(job) or view.events else diagnosis.of_job("operator-dead", view, facts)


def _why_suspended(job: Mapping[str, Any], view: JobView) -> str:
    annotations = _annotations(job)
    if CANCELLED_ANNOTATION in annotations:
        return f"The job is being cancelled by {annotations[CANCELLED_ANNOTATION]}"
    queue = (job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if queue is None:
        return diagnosis.of_job("suspended", view, {}).text
    said = [event.message for event in view.events if event.kind == "Workload"]
    facts = {"queue": f"Kueue's queue {queue}", "queue_said": f": {said[-1]}" if said else ""}
    is_too_large = said and "maximum capacity" in said[-1]
    return diagnosis.of_job("queued-for-ever" if is_too_large else "queued", view, facts).text


# -- ranks -----------------------------------------------------------------------------------------------------------


def _replicas(base: JobStatus, view: JobView, spec: JobSpec) -> tuple[ReplicaStatus, ...]:
    """The ranks with their pods; what no agent has said of a rank is taken from its pod."""
    has_master = _has_master(view, spec)
    pods = {view.number(pod, has_master=has_master): pod for pod in view.latest_pods}
    return tuple(
        replica
        if (pod := pods.get(replica.rank // spec.topology.processes_per_pod)) is None
        else _replica(replica, pod)
        for replica in base.replicas
    )


def _replica(replica: ReplicaStatus, pod: PodView) -> ReplicaStatus:
    replica = dataclasses.replace(replica, pod=pod.name, node=pod.node or None)
    if replica.state in (RankStateName.SUCCEEDED, RankStateName.FAILED, RankStateName.STOPPED):
        return replica
    if pod.is_running and replica.state is RankStateName.PENDING:
        return dataclasses.replace(replica, state=RankStateName.STARTING)
    if pod.has_ended and not _has_succeeded(pod):
        return dataclasses.replace(replica, state=RankStateName.FAILED, exit_code=pod.main.exit_code)
    return replica


def _rank_of(pod: PodView | None, view: JobView, spec: JobSpec) -> int | None:
    """The first rank of a pod."""
    if pod is None:
        return None
    return view.number(pod, has_master=_has_master(view, spec)) * spec.topology.processes_per_pod


def _head(view: JobView, spec: JobSpec) -> PodView | None:
    has_master = _has_master(view, spec)
    return next((pod for pod in view.latest_pods if view.number(pod, has_master=has_master) == 0), None)


def _has_master(view: JobView, spec: JobSpec) -> bool:
    if view.job is not None:
        return "Master" in (view.job.get("spec") or {}).get("pytorchReplicaSpecs", {})
    return spec.cluster.master is not False


# -- parts of objects and sentences ----------------------------------------------------------------------------------


def _annotations(job: Mapping[str, Any]) -> Mapping[str, str]:
    return (job.get("metadata") or {}).get("annotations") or {}


def is_suspended(job: Mapping[str, Any]) -> bool:
    """Whether a PyTorchJob is to have no pods."""
    return bool(((job.get("spec") or {}).get("runPolicy") or {}).get("suspend"))


def _condition(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last condition that holds."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((item for item in reversed(conditions) if item.get("status") == "True"), {})


def _share(running: Sequence[PodView], expected: int) -> str:
    verb = "runs" if len(running) == 1 else "run"
    return f"{len(running) or 'None'} of {expected} pods {verb}" if expected > 1 else "The pod does not run yet"


def _text(finding: Finding | None) -> str:
    return "" if finding is None else finding.text


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
