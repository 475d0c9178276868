"""Decides a job's state and how it ended, from its head's messages and what its place sees. Pure.

The sources, most trusted first: the head's final state event; the termination message of its container; the state of its
container; the state of the object. The object's state comes last because a PyTorchJob is Failed as soon as one worker
ends badly, while its head still runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kale_dist.job.backend import Look, Part, Trouble
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus, ReplicaStatus
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.wire import EventKind, FailureCause, RankStateName, StateName, Verdict

RETRIED = frozenset(("evicted", "deleted", "node lost", "preempted", "killed"))
"""Losses after which another run may do better. Not `out of memory`: it would only happen again."""

_UNSURE = (FailureCause.AGENT_DIED, FailureCause.DIED, FailureCause.LEFT, FailureCause.LOST)
"""Causes by which a head says that something was killed; the place may know by what."""

_ENDED = (RankStateName.SUCCEEDED, RankStateName.FAILED, RankStateName.STOPPED, RankStateName.LOST)


def judge(said: Verdict | None, look: Look, spec: JobSpec, *, canceller: str = "") -> Verdict:
    """Decide how a run ended.

    Args:
        said: The head's verdict, from its events; None if there is none and none will come.
        look: What its place sees.
        spec: What was submitted.
        canceller: The user who cancelled the job here; empty if none did.

    Returns:
        The verdict. Its cause is `SUSPENDED` where the run was suspended; another run of it costs nothing.
    """
    head, wish = look.head, f"The job was cancelled by {canceller}" if canceller else ""
    if not wish and look.trouble is not None and look.trouble.cause is FailureCause.USER:
        # Cancelled or deleted from elsewhere.
        wish = str(look.trouble)
    if said is not None:
        verdict = _explained(said, look, spec)
    elif wish:
        return Verdict(StateName.CANCELLED, FailureCause.USER, wish)
    elif look.suspended:
        return Verdict(StateName.PENDING, FailureCause.SUSPENDED, look.suspended)
    elif look.gone:
        reason = str(look.trouble or "The job was deleted while it ran, and its last lines are lost")
        return Verdict(StateName.CANCELLED, FailureCause.USER, reason)
    elif head is not None and head.state == "ended":
        told = Verdict.parse(head.message)
        verdict = judge_part(head, look, spec) if told is None else _explained(told, look, spec)
    elif head is None and look.finished == "succeeded":
        # Its pods are gone; the results may lie in its store.
        return Verdict(StateName.SUCCEEDED)
    elif head is None and look.finished == "":
        reason = "The first pod of the job was deleted, and its last lines are lost"
        return Verdict(StateName.FAILED, FailureCause.LOST, reason, may_restart=True)
    else:
        reason = str(look.trouble or f"The job {look.finished or 'ended'} without a message from its ranks")
        return Verdict(StateName.FAILED, FailureCause.DIED, reason)
    if wish and verdict.cause in (FailureCause.SUSPENDED, FailureCause.LOST):
        # The head only knows that it got SIGTERM.
        return Verdict(StateName.CANCELLED, FailureCause.USER, wish)
    return verdict


def judge_part(part: Part, look: Look, spec: JobSpec) -> Verdict:
    """Decide how a run ended when one of its parts ended and the head says nothing about it."""
    reason, trouble = _loss(part, look), part.trouble or look.trouble
    cause = trouble.cause if trouble is not None else None
    if part.lost in RETRIED:
        return Verdict(StateName.FAILED, cause or FailureCause.LOST, reason, may_restart=True)
    if part.exit_code == EXIT_CODE:
        return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
    return Verdict(StateName.FAILED, cause or FailureCause.DIED, reason, rank=_first_rank(part, spec))


def judge_trouble(trouble: Trouble) -> Verdict:
    """Decide how a run ends when it can never start."""
    return Verdict(StateName.FAILED, trouble.cause or FailureCause.NOT_STARTED, str(trouble))


def lost_part(look: Look) -> Part | None:
    """The part whose end explains a failure best: one out of memory, then one that was lost, then any that failed."""
    ended = [part for part in look.parts if part.state == "ended" and (part.lost or part.exit_code)]

    def order(part: Part) -> tuple[bool, bool, int]:
        return part.lost != "out of memory", not part.lost, part.number

    return min(ended, key=order, default=None)


def explains_loss(cause: FailureCause | None, look: Look, pods: int) -> bool:
    """Whether a place says by now what became of the pods that a head has lost.

    Args:
        cause: Of the head's verdict.
        look: What the place sees.
        pods: How many pods the run has.
    """
    head = look.head
    if cause is FailureCause.LOST:
        return lost_part(look) is not None or len(look.parts) < pods
    if cause is FailureCause.SUSPENDED:
        return bool(look.suspended or look.gone or look.finished == "cancelled" or head is None or head.lost)
    return True


def overlay(
    status: JobStatus, look: Look, spec: JobSpec, noun: str, *, activity: str = "", problem: str = ""
) -> JobStatus:
    """A job's status while it has not ended: what its head said, and what its place sees before and beside it.

    Args:
        status: From the job's folder.
        look: What its place sees.
        spec: What was submitted.
        noun: What the place calls a part: `container`, `pod`.
        activity: What this process does for the job that takes time, as a sentence.
        problem: Why the place does not answer, as a sentence.
    """
    if status.is_final:
        return status
    parts = {part.number: part for part in look.parts}
    per = spec.topology.processes_per_pod
    numbers = (one.rank // per if one.agent is None else one.agent for one in status.replicas)
    replicas = tuple(_replica(one, parts.get(number)) for one, number in zip(status.replicas, numbers, strict=True))
    status = dataclasses.replace(status, replicas=replicas)
    running = sum(part.state == "running" for part in look.parts)
    state, reason = status.state, status.reason
    if look.suspended:
        state, reason = StateName.PENDING, look.suspended
    elif state is StateName.PENDING and running:
        state = StateName.STARTING
    troubles = [part.trouble for part in look.parts if part.trouble is not None and part.state != "ended"]
    if look.trouble is not None:
        troubles.insert(0, look.trouble)
    if troubles and (state is not StateName.RUNNING or not reason):
        reason = str(troubles[0])
    elif not reason and state is not StateName.RUNNING and look.fresh:
        expected = spec.topology.number_of_pods
        shown = f"{running} of {expected} {noun}s run" if expected > 1 else f"The {noun} runs"
        reason = (
            shown if running else f"The {noun}s are being started" if expected > 1 else f"The {noun} is being started"
        )
    if activity:
        reason = f"{reason}. {activity}" if reason and not reason.endswith(".") else f"{reason} {activity}".strip()
    if problem:
        reason = f"{problem} As last seen: {reason}" if reason else problem
    return dataclasses.replace(status, state=state, reason=reason, queue_position=look.queue_position)


def closing_events(verdict: Verdict, status: JobStatus, attempt: int, now: float) -> Sequence[dict[str, Any]]:
    """The events by which a run ends whose head could not say so itself.

    Args:
        verdict: How it ended.
        status: What is known of its ranks.
        attempt: As the head counts.
        now: Seconds since 1970.
    """
    common = {"time": now, "attempt": attempt}
    ranks = [
        {
            **common, "event": EventKind.RANK, "rank": replica.rank, "pid": None, "exit_code": replica.exit_code,
            "signal": replica.signal, "state": RankStateName.FAILED if failed else RankStateName.STOPPED,
        }
        for replica in status.replicas
        if (failed := replica.rank == verdict.rank) or replica.state not in _ENDED
    ]  # fmt: skip
    return [*ranks, {**common, "event": EventKind.STATE, "rank": None, **verdict.fields()}]


# -- inside -----------------------------------------------------------------------------------------------------------


def _explained(verdict: Verdict, look: Look, spec: JobSpec) -> Verdict:
    """A head's verdict, with what became of a pod or of the whole run where the head cannot know it."""
    head, part = look.head, lost_part(look)
    if verdict.cause is FailureCause.SUSPENDED:
        if look.suspended:
            return dataclasses.replace(verdict, reason=look.suspended)
        reason = "Its first pod received SIGTERM"
        if (head is not None and head.lost) or look.trouble is not None:
            reason = _loss(head, look) if head is not None else str(look.trouble)
        return Verdict(StateName.FAILED, FailureCause.LOST, reason, rank=verdict.rank, may_restart=True)
    is_lost = verdict.cause is FailureCause.LOST
    if verdict.state is StateName.FAILED and verdict.cause in _UNSURE and part is not None and part.lost:
        if part.lost == "out of memory":
            reason = f"{_loss(part, look).rstrip('.')}. {verdict.reason}".strip()
            rank = _first_rank(part, spec) if verdict.rank is None else verdict.rank
            return dataclasses.replace(verdict, reason=reason, rank=rank)
        if is_lost:
            return dataclasses.replace(verdict, may_restart=True, reason=_loss(part, look))
    # The head only knows that a connection ended.
    return (
        dataclasses.replace(verdict, may_restart=True, reason=str(look.trouble or verdict.reason))
        if is_lost
        else verdict
    )


def _loss(part: Part, look: Look) -> str:
    trouble = part.trouble or look.trouble
    if trouble is not None:
        return str(trouble)
    if part.lost:
        return f"{part.name} was {part.lost}" if part.lost != "node lost" else f"The node of {part.name} was lost"
    return f"{part.name} ended with exit code {part.exit_code} before it could say why"


def _first_rank(part: Part, spec: JobSpec) -> int | None:
    rank = part.number * spec.topology.processes_per_pod
    return rank if rank < spec.topology.number_of_processes else None


def _replica(replica: ReplicaStatus, part: Part | None) -> ReplicaStatus:
    if part is None:
        return replica
    replica = dataclasses.replace(replica, pod=part.name, node=part.node or replica.node)
    if replica.state in _ENDED:
        return replica
    if part.state == "running" and replica.state is RankStateName.PENDING:
        return dataclasses.replace(replica, state=RankStateName.STARTING)
    if part.state == "ended" and part.exit_code:
        return dataclasses.replace(replica, state=RankStateName.FAILED, exit_code=part.exit_code)
    return replica
