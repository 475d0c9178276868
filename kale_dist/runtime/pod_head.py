"""The agent of a job's first pod: it speaks for the job, waits for the others and leaves last."""

from __future__ import annotations

import time
from typing import Any

from kale_dist.contract import FailureCause, StateName
from kale_dist.runtime.delivery import Delivery
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.job_run import JobRun
from kale_dist.runtime.members import Members
from kale_dist.runtime.pod_site import Site
from kale_dist.runtime.rank_run import RankRun
from kale_dist.runtime.remote_rank import RemoteRank

SAY_MISSING_EACH_S = 30.0
"""The log says this often which pods have not joined yet."""

LEAVE_LIMIT_S = 20.0
"""How long the other agents may take to leave once the job has ended."""

STRAGGLER_LIMIT_S = 60.0
"""How long the head stays for pods that have not joined yet, to tell them that the job has ended. They would wait else."""

GIVE_UP_AFTER_S = 0.5
"""A pod that was blamed for errors of others does not hold up the end for longer."""

_LOOK_EACH_S = 0.1
_KEPT_COLLECT_S = 60.0


class PodHead:
    """Judges the job.

    Args:
        site: The pod.

    Raises:
        OSError: A port is taken.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._has_blobs = False
        self._is_started = False
        self._is_acknowledged = False
        self._is_killed = False
        self._verdict: Verdict | None = None
        self._ended_at = 0.0
        self._began_at = time.monotonic()
        self._members: Members | None = None
        if site.job.groups > 1:
            self._members = Members(site.order, site.key, site.loop, site.place.listen, self, site.say)
        self._delivery = Delivery(site, self._shipped)
        self._job = JobRun(
            site.job,
            site.loop,
            site.pool,
            site.writer,
            self._ended,
            others=self._members.ranks if self._members is not None else (),
            start_others=self._members.start if self._members is not None else None,
            ship=self._delivery.ship,
        )
        if self._members is not None:
            self._job.when_peers_are_lost(self._explain_loss)
            site.loop.call_later(min(SAY_MISSING_EACH_S, site.order.start_wait_s), self._say_missing)

    @property
    def verdict(self) -> Verdict | None:
        """How the job has ended, once the last event is written."""
        return self._verdict

    def blobs_are_here(self) -> None:
        """This pod can start its ranks."""
        self._has_blobs = True
        if self._members is not None:
            self._members.tell_of_blobs()
        self._start_if_complete()

    def blobs_cannot_be_had(self, reason: str) -> None:
        """It never can."""
        self._job.fail(FailureCause.NOT_STARTED, reason)

    def blobs_may_be_fetched(self) -> bool:
        """The head fetches from nobody."""
        return False

    def cancel(self, reason: str, grace_s: float) -> None:
        """End the job."""
        self._job.cancel(FailureCause.USER, reason, grace_s)

    def killed(self) -> None:
        """This pod is told to end: nobody is waited for."""
        self._is_killed = True

    def acknowledged(self) -> None:
        """The notebook has all it wants."""
        self._is_acknowledged = True

    def outcome_arrived(self) -> None:
        """It lies in the job's folder, and its agent says so as well."""

    def close(self) -> None:
        """Leave."""
        if self._members is not None:
            self._members.close()

    # -- the start --------------------------------------------------------------------------------------------------

    def _start_if_complete(self) -> None:
        if self._is_started or not self._has_blobs or self._job.verdict is not None:
            return
        if self._members is None or not self._members.missing:
            self._is_started = True
            self._job.start()
            if self._site.order.max_restarts:
                self._delivery.keep_checkpoints()

    def _say_missing(self) -> None:
        if self._is_started or self._members is None or self._job.verdict is not None:
            return
        missing = ", ".join(self._members.missing)
        waited_s, limit_s = time.monotonic() - self._began_at, self._site.order.start_wait_s
        if missing and waited_s >= limit_s:
            self._job.fail(
                FailureCause.NOT_STARTED,
                f"The job could not start: not all of its pods were there within {limit_s:.0f} s. Missing: {missing}. "
                "Look at their state: they may be waiting for a node, a GPU or their image",
            )
            return
        if missing:
            self._site.say(f"Waiting for pods: {missing}")
        pause_s = min(SAY_MISSING_EACH_S, max(0.1, limit_s - waited_s)) if missing else SAY_MISSING_EACH_S
        self._site.loop.call_later(pause_s, self._say_missing)

    # -- what members say -------------------------------------------------------------------------------------------

    def member_is_ready(self) -> None:
        """Another member has what it needs."""
        self._start_if_complete()

    def member_refuses(self, reason: str) -> None:
        """A member cannot run its ranks."""
        self._job.fail(FailureCause.NOT_STARTED, reason)

    def member_is_lost(self, reason: str) -> None:
        """A member that had started its ranks is lost."""
        self._job.fail(FailureCause.DIED, reason)

    def member_cancels(self, reason: str, grace_s: float) -> None:
        """A member was told that the job has to end."""
        self._job.cancel(FailureCause.USER, reason, grace_s)

    def remote_rank_changed(self, rank: RemoteRank) -> None:
        """A member's rank has changed."""
        self._job.rank_changed(rank)

    def remote_rank_moved(self, event: dict[str, Any] | None) -> None:
        """A member's ranks have given signs of progress."""
        self._job.moved(event)

    def _explain_loss(self) -> str:
        members = self._members
        sentence = members.explain_loss() if members is not None else ""
        if sentence and members is not None:
            self._site.loop.call_later(GIVE_UP_AFTER_S, members.give_up_absent)
        return sentence

    def _shipped(self, rank: RankRun) -> None:
        self._job.local.shipped(rank)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        """The last event is written."""
        self._verdict = self._job.verdict or Verdict(StateName.FAILED, None, "")
        self._ended_at = time.monotonic()
        if self._members is not None:
            self._members.conclude(self._verdict)
        self._delivery.ship_checkpoint(self._leave_if_possible)

    def _leave_if_possible(self) -> None:
        """Stay while members are leaving, and while the notebook has something to fetch."""
        verdict = self._verdict
        if verdict is None:
            return
        waited_s = time.monotonic() - self._ended_at
        is_awaited = self._is_awaited()
        limit_s = self._collect_limit_s()
        if self._members_are_there(waited_s) or (is_awaited and waited_s < limit_s):
            self._site.loop.call_later(_LOOK_EACH_S, self._leave_if_possible)
            return
        if is_awaited:
            order = self._site.order
            self._site.say(
                f"The results were not fetched within {limit_s:g} s. They lie in {order.store}/jobs/{order.job}"
                if self._delivery.is_kept
                else f"The results were not fetched within {limit_s:g} s and are lost; give a store with "
                "store='pvc://...' to keep them"
            )
        self._site.end(verdict)

    def _members_are_there(self, waited_s: float) -> bool:
        """Whether other agents are leaving, or may still come and have to be told."""
        if self._members is None:
            return False
        if self._members.connected:
            return waited_s < LEAVE_LIMIT_S
        still_expected = time.monotonic() - self._began_at < self._site.order.start_wait_s
        return not self._is_killed and self._members.untold > 0 and still_expected and waited_s < STRAGGLER_LIMIT_S

    def _collect_limit_s(self) -> float:
        """How long results are held here. What a store keeps is not worth a GPU for long."""
        limit_s = self._site.order.collect_wait_s
        return min(limit_s, _KEPT_COLLECT_S) if self._delivery.is_kept else limit_s

    def _is_awaited(self) -> bool:
        """Whether the notebook still has to come for something."""
        if self._verdict is None or self._is_acknowledged or self._is_killed:
            return False
        return self._delivery.must_be_fetched(succeeded=self._verdict.state is StateName.SUCCEEDED)
