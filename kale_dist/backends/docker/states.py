"""The status of a job from what its agents say and what the engine says of its containers. Pure.

The agents know more, so a job's end is theirs to tell. The engine is believed where no agent can speak: before they run,
and where a container ended without a word.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kale_dist.backends.docker.containers import ranks_of
from kale_dist.backends.docker.views import ContainerView, JobView
from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.manifests.bootstrap import EXIT_CODE
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus, ReplicaStatus

_GIB = 1 << 30
_KILLED = 137
_TOLD_TO_END = 143
_UNSURE = (FailureCause.AGENT_DIED, FailureCause.DIED, FailureCause.LEFT)
"""Causes by which agents say that something was killed; the engine may know by whom."""

_ENDED = (RankStateName.SUCCEEDED, RankStateName.FAILED, RankStateName.STOPPED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """What an ended container has left."""

    verdict: str = ""
    """The file that its agent writes at its end: JSON, or a sentence if it could not begin."""
    line: str = ""
    """Last line of its log."""


def overlay(base: JobStatus, view: JobView, spec: JobSpec, activity: str = "") -> JobStatus:
    """A job's status while it has not ended.

    Args:
        base: What the agents' events say. A final one stays.
        view: What the engine says.
        spec: What was submitted.
        activity: What this process does for the job that takes time, as a sentence.
    """
    if base.is_final:
        return base
    by_number = {item.number: item for item in view.containers}
    per = spec.topology.processes_per_pod
    base = dataclasses.replace(
        base, replicas=tuple(_replica(replica, by_number.get(replica.rank // per)) for replica in base.replicas)
    )
    expected = spec.topology.number_of_pods
    running = sum(item.is_running for item in view.containers)
    state, reason = base.state, base.reason
    if state is StateName.PENDING and running:
        state = StateName.STARTING
    if not reason and state is not StateName.RUNNING and view.was_seen:
        shown = f"{running} of {expected} containers run" if expected > 1 else "The container runs"
        reason = shown if running else "The containers are being started"
    paused = [item.name for item in view.containers if item.state == "paused"]
    if paused:
        reason = f"{', '.join(paused)} is paused. It goes on after: docker unpause {paused[0]}"
    if activity:
        reason = f"{reason} {activity}".strip()
    if view.problem:
        reason = f"{view.problem} As last seen: {reason}" if reason else view.problem
    return dataclasses.replace(base, state=state, reason=reason)


def failed_container(view: JobView) -> ContainerView | None:
    """The container whose end explains a job's best; None if none has ended badly."""
    ended = [item for item in view.containers if item.has_ended and item.exit_code != 0]

    def order(item: ContainerView) -> tuple[bool, bool, int]:
        return not item.oom_killed, item.exit_code != _KILLED, item.number

    return min(ended, key=order, default=None)


def ended(base: JobStatus, view: JobView, spec: JobSpec, words: LastWords, *, person: str, now: float) -> JobStatus:
    """The status of a job whose agents cannot tell of its end any more.

    Args:
        base: What they have said.
        view: What the engine says.
        spec: What was submitted.
        words: Of `failed_container`.
        person: Who has cancelled the job; empty if nobody has.
        now: Seconds since 1970.
    """
    state, cause = StateName.FAILED, FailureCause.DIED
    found = failed_container(view)
    rank: int | None = None
    told = _told(words.verdict)
    if person:
        state, cause, reason = StateName.CANCELLED, FailureCause.USER, f"The job was cancelled by {person}"
    elif not view.containers:
        state, cause = StateName.CANCELLED, FailureCause.USER
        reason = "The job's containers were removed on the engine, and what they had not yet told is lost"
    elif found is None:
        cause = FailureCause.AGENT_DIED
        reason = "The job's containers have ended without a verdict"
    elif told is not None and not found.oom_killed:
        state = StateName(told["state"]) if told["state"] in (StateName.FAILED, StateName.CANCELLED) else state
        cause = _cause(told.get("cause")) or cause
        reason = str(told.get("message") or "") or _sentence(found, words)
        rank = told["rank"] if isinstance(told.get("rank"), int) else None
    else:
        cause = FailureCause.NOT_STARTED if found.exit_code == EXIT_CODE else FailureCause.DIED
        reason = _sentence(found, words)
        rank = next(iter(ranks_of(spec, found.number)), None) if cause is FailureCause.DIED else None
    status = overlay(base, view, spec)
    if status.failed_rank is None and state is StateName.FAILED and rank is not None:
        status = dataclasses.replace(status, failed_rank=rank)
    replicas = tuple(
        item if item.state in _ENDED else dataclasses.replace(item, state=RankStateName.STOPPED)
        for item in status.replicas
    )
    return dataclasses.replace(status, state=state, cause=cause, reason=reason, ended=now, replicas=replicas)


def better_reason(verdict: dict[str, Any], view: JobView) -> str:
    """The reason of a failure in the engine's words, where agents know only that something was killed; else empty."""
    found = failed_container(view)
    if found is None or verdict.get("state") != StateName.FAILED or _cause(verdict.get("cause")) not in _UNSURE:
        return ""
    if found.exit_code != _KILLED:
        return ""
    return f"{_sentence(found, LastWords())}. {verdict.get('reason') or ''}".strip()


def _sentence(item: ContainerView, words: LastWords) -> str:
    """Why a container ended, without its full stop."""
    name = f"Container {item.name}"
    if item.oom_killed and item.exit_code == _KILLED:
        limit = f"its limit of {item.memory_bytes / _GIB:.1f} GiB" if item.memory_bytes else "the machine's memory"
        return f"{name} was killed because it had used up {limit}. Raise resources.memory_gib, or use less memory"
    if item.error:
        return f"{name} could not run: {item.error}"
    if item.exit_code == EXIT_CODE:
        said = words.line.removeprefix("kale_dist: ") or "the image's Python cannot run it"
        return (
            f"{name} could not start its agent: {said}. Name an image with Python 3.11 or later and torch, with image="
        )
    if item.exit_code == _KILLED:
        return (
            f"{name} was killed from outside (SIGKILL, exit code {_KILLED}), not for want of memory: by `docker kill` or "
            "`docker rm --force`, or its engine was stopped"
        )
    if words.verdict and not words.verdict.startswith("{"):
        return f"{name} ended: {words.verdict}"
    if item.exit_code == _TOLD_TO_END:
        return f"{name} was told to end (SIGTERM): by `docker stop`, or its engine was stopped"
    last = f"; its last line: {words.line}" if words.line else ", without a word"
    return f"{name} ended with exit code {item.exit_code}{last}"


def _replica(replica: ReplicaStatus, item: ContainerView | None) -> ReplicaStatus:
    if item is None:
        return replica
    replica = dataclasses.replace(replica, pod=item.name)
    if replica.state in _ENDED:
        return replica
    if item.is_running and replica.state is RankStateName.PENDING:
        return dataclasses.replace(replica, state=RankStateName.STARTING)
    if item.has_ended and item.exit_code:
        return dataclasses.replace(replica, state=RankStateName.FAILED, exit_code=item.exit_code)
    return replica


def _told(text: str) -> dict[str, Any] | None:
    try:
        told = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return told if isinstance(told, dict) and isinstance(told.get("state"), str) else None


def _cause(word: Any) -> FailureCause | None:
    try:
        return FailureCause(word)
    except ValueError:
        return None
