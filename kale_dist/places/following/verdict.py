"""Decides a job's state and how it ended, from its head's events and its place's report. Pure.

The sources, most trusted first: the head's verdict in its events; the same in the termination message of its container; the state of the
container; the state of the object. The object's state comes last because a PyTorchJob is Failed as soon as one worker
ends badly, while its head still runs.
"""

from __future__ import annotations

import dataclasses

from kale_dist.job.backend import Look, Part, Trouble
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus, ReplicaStatus
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.wire import FailureCause, RankStateName, StateName, Verdict, visible

RETRIED = frozenset(("evicted", "deleted", "node lost", "preempted", "killed"))
"""Losses after which a job is renewed. Running out of memory is not one of them, because it would happen again."""

_UNSURE = (FailureCause.AGENT_DIED, FailureCause.DIED, FailureCause.LEFT, FailureCause.LOST)
"""Causes of a head's verdict that only state that something was killed; the place may know by what."""


def judge(reported: Verdict | None, look: Look, status: JobStatus, *, canceller: str = "") -> Verdict:
    """Decide how a life ended.

    Args:
        reported: The head's verdict, from its events; None if there is none and none will come.
        look: The place's report.
        status: From the job's folder: which pod has which ranks.
        canceller: The user who cancelled the job here; empty if none did.

    Returns:
        The verdict. With the cause `SUSPENDED`, the next head does not count as a restart.
    """
    head, wish = look.head, f"The job was cancelled by {canceller}" if canceller else ""
    if not wish and look.trouble is not None and look.trouble.cause is FailureCause.USER:
        # Somebody else has cancelled or deleted the job.
        wish = str(look.trouble)
    if reported is not None:
        verdict = _explained(reported, look, status)
    elif wish:
        return Verdict(StateName.CANCELLED, FailureCause.USER, wish)
    elif look.suspended:
        return Verdict(StateName.PENDING, FailureCause.SUSPENDED, look.suspended)
    elif look.gone:
        reason = str(look.trouble or "The job was deleted while it ran, and its last lines are lost")
        return Verdict(StateName.CANCELLED, FailureCause.USER, reason)
    elif head is not None and head.state == "ended":
        written = Verdict.parse(head.message)
        verdict = judge_part(head, look, status) if written is None else _explained(written, look, status)
    elif head is None and look.finished == "succeeded":
        # The pods are gone; the results may be in the job's store.
        return Verdict(StateName.SUCCEEDED)
    elif head is None and look.finished == "":
        reason = "The first pod of the job was deleted, and its last lines are lost"
        return Verdict(StateName.FAILED, FailureCause.LOST, reason, may_restart=True)
    elif (part := lost_part(look, is_over=True)) is not None and part.lost in RETRIED:
        # The object has failed for its lost pods, while the next head is only being prepared.
        return Verdict(StateName.FAILED, FailureCause.LOST, _loss(part, look), may_restart=True)
    else:
        reason = str(_reason(look) or f"The job {look.finished or 'ended'} without a message from its ranks")
        return Verdict(StateName.FAILED, FailureCause.DIED, reason)
    if wish and verdict.cause in (FailureCause.SUSPENDED, FailureCause.LOST):
        # All the head knows is that it got SIGTERM.
        return Verdict(StateName.CANCELLED, FailureCause.USER, wish)
    return verdict


def judge_part(part: Part, look: Look, status: JobStatus) -> Verdict:
    """Decide how a life ended of which a part has ended, while the head has no verdict."""
    reason, trouble = _loss(part, look), part.trouble or look.trouble
    cause = trouble.cause if trouble is not None else None
    if part.lost in RETRIED:
        return Verdict(StateName.FAILED, cause or FailureCause.LOST, reason, may_restart=True)
    if part.exit_code == EXIT_CODE:
        return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
    return Verdict(StateName.FAILED, cause or FailureCause.DIED, reason, rank=_first_rank(part, status))


def judge_trouble(trouble: Trouble) -> Verdict:
    """The verdict on a job that can never start."""
    return Verdict(StateName.FAILED, trouble.cause or FailureCause.NOT_STARTED, str(trouble))


def lost_part(look: Look, *, is_over: bool = False) -> Part | None:
    """The part whose end explains a failure best: first one that was OOM killed, then one that was lost, then any that failed.

    Args:
        look: The place's report.
        is_over: Whether the life is over, so that parts explain its end that were made again.
    """
    parts = look.parts + look.replaced if is_over else look.parts
    ended = [part for part in parts if part.state == "ended" and (part.lost or part.exit_code)]

    def order(part: Part) -> tuple[bool, bool, int]:
        return part.lost != "out of memory", not part.lost, part.number

    return min(ended, key=order, default=None)


def explains_loss(cause: FailureCause | None, look: Look, pods: int) -> bool:
    """Whether a place reports by now why the pods are gone that a head has lost.

    Args:
        cause: Of the head's verdict.
        look: The place's report.
        pods: How many pods the job has.
    """
    head = look.head
    if cause is FailureCause.LOST:
        return lost_part(look, is_over=True) is not None or len(look.parts) < pods
    if cause is FailureCause.SUSPENDED:
        return bool(look.suspended or look.gone or look.finished == "cancelled" or head is None or head.lost)
    return True


def overlay(
    status: JobStatus, look: Look, spec: JobSpec, noun: str, *, activity: str = "", problem: str = ""
) -> JobStatus:
    """The status of a job that has not ended: from its head's events, with what the place reports about its pods.

    Args:
        status: From the job's folder.
        look: The place's report.
        spec: What was submitted.
        noun: The place's word for a part: `container`, `pod`.
        activity: What the follower does at the moment that takes time, as a sentence.
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
    if (trouble := look.trouble) is not None:
        head = look.head
        if look.replaces and head is not None and head.state == "running":
            is_replaced = any(part.lost and part.trouble == trouble for part in look.parts)
            # There is nothing to do: its controller makes this pod again.
            trouble = dataclasses.replace(trouble, remedy="", heals=True) if is_replaced else trouble
        troubles.insert(0, trouble)
    is_trouble = bool(troubles) and (state is not StateName.RUNNING or not reason)
    if is_trouble:
        # The head names the pod it waits for, and the place why that pod is not there.
        reason = f"{reason}. {troubles[0]}" if status.attempt and reason and not look.suspended else str(troubles[0])
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
    return dataclasses.replace(
        status, state=state, reason=visible(reason), queue_position=look.queue_position,
        needs_action=is_trouble and (troubles[0].needs_action or not troubles[0].heals),
    )  # fmt: skip


# -- inside -----------------------------------------------------------------------------------------------------------


def _explained(verdict: Verdict, look: Look, status: JobStatus) -> Verdict:
    """A head's verdict, with the place's reason why a pod or the whole object is gone, which a head cannot know."""
    head, part = look.head, lost_part(look, is_over=True)
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
            rank = _first_rank(part, status) if verdict.rank is None else verdict.rank
            return dataclasses.replace(verdict, reason=reason, rank=rank)
        if is_lost:
            return dataclasses.replace(verdict, may_restart=True, reason=_loss(part, look) + _hindrance(look))
    if is_lost:
        # All the head knows is that a connection ended.
        return dataclasses.replace(verdict, may_restart=True, reason=str(look.trouble or verdict.reason))
    return verdict


def _reason(look: Look) -> Trouble | None:
    """What the place reports on the whole job that can be the reason of its end: no trouble that ends by itself."""
    return look.trouble if look.trouble is not None and (look.trouble.needs_action or not look.trouble.heals) else None


def _loss(part: Part, look: Look) -> str:
    trouble = part.trouble or _reason(look)
    if trouble is not None:
        return str(trouble)
    if part.lost:
        return f"{part.name} was {part.lost}" if part.lost != "node lost" else f"The node of {part.name} was lost"
    return f"{part.name} ended with exit code {part.exit_code} before it could say why"


def _hindrance(look: Look) -> str:
    """What keeps pods from running that the head has waited for, as further sentences."""
    found = (part.trouble for part in look.parts if part.state == "waiting")
    return "".join(f". {trouble}" for trouble in found if trouble is not None)


def _first_rank(part: Part, status: JobStatus) -> int | None:
    """The first rank of a part; None before an attempt has given it ranks."""
    return next((replica.rank for replica in status.replicas if replica.agent == part.number), None)


def _replica(replica: ReplicaStatus, part: Part | None) -> ReplicaStatus:
    if part is None:
        return replica
    replica = dataclasses.replace(replica, pod=part.name, node=part.node or replica.node)
    if replica.state.has_ended:
        return replica
    if part.state == "running" and replica.state is RankStateName.PENDING:
        return dataclasses.replace(replica, state=RankStateName.STARTING)
    if part.state == "ended" and part.exit_code:
        return dataclasses.replace(replica, state=RankStateName.FAILED, exit_code=part.exit_code)
    return replica
