"""The agent of a pod other than the first: it joins the head and does as that says."""

from __future__ import annotations

import time
from typing import Any

from kale_dist.contract import FailureCause, StateName
from kale_dist.runtime.delivery import Delivery
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.head_link import HeadLink
from kale_dist.runtime.job_run import FAILURE_GRACE_S
from kale_dist.runtime.member_protocol import Op
from kale_dist.runtime.member_run import MemberRun
from kale_dist.runtime.pod_site import Site
from kale_dist.runtime.rank_run import RankRun

REFUSED_LIMIT_S = 60.0
"""A pod that cannot run its part waits so long for the head to end the job."""

UNREAD_LIMIT_S = 15.0
"""A pod whose log nobody reads stays so long at the end for the notebook to ask for it; the head waits longer."""

_LOOK_EACH_S = 0.1


class PodMember:
    """Obeys.

    Args:
        site: The pod.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._verdict: Verdict | None = None
        self._fetch_allowed = False
        self._is_ready = False
        self._refusal = ""
        self._cancelled: dict[str, Any] | None = None
        self._ended_at: float | None = None
        self._is_acknowledged = False
        self._delivery = Delivery(site, self._shipped)
        self._run = MemberRun(site, self._send, self._delivery.ship, self._check_end)
        self._link = HeadLink(
            site.order,
            site.key,
            site.place.pod,
            site.loop,
            site.mailbox,
            on_join=self._joined,
            on_message=self._take,
            on_lost=self._lost,
            say=site.say,
        )

    @property
    def verdict(self) -> Verdict | None:
        """How the job has ended, once the head has said so or is lost and the last line of this pod is written."""
        return self._verdict if self._ended_at is not None else None

    def blobs_are_here(self) -> None:
        """This pod can start its ranks."""
        self._is_ready = True
        self._send({"op": Op.READY})

    def blobs_cannot_be_had(self, reason: str) -> None:
        """It never can."""
        self._refusal = reason
        self._site.say(reason)
        self._send({"op": Op.REFUSED, "reason": reason})
        # Without a head that says so, this pod ends by itself.
        self._site.loop.call_later(REFUSED_LIMIT_S, lambda: self._settle(_not_started(reason)))

    def blobs_may_be_fetched(self) -> bool:
        """Whether the head has said that it has all blobs."""
        return self._fetch_allowed

    def cancel(self, reason: str, grace_s: float) -> None:
        """End the ranks and have the head end the job."""
        self._cancelled = {"op": Op.CANCEL, "reason": reason, "grace_s": grace_s}
        self._send(self._cancelled)
        self._run.end(grace_s)
        self._site.loop.call_later(FAILURE_GRACE_S, self._check_end)

    def acknowledged(self) -> None:
        """The notebook has this pod's log."""
        self._is_acknowledged = True

    def outcome_arrived(self) -> None:
        """Nobody brings outcomes here."""

    def close(self) -> None:
        """Leave."""
        self._link.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._link.send(message)

    def _shipped(self, rank: RankRun) -> None:
        self._run.local.shipped(rank)

    def _joined(self) -> None:
        """Say all that the head has to know."""
        if self._cancelled is not None:
            self._send(self._cancelled)
        if self._refusal:
            self._send({"op": Op.REFUSED, "reason": self._refusal})
        elif self._is_ready:
            self._send({"op": Op.READY})
        self._run.repeat()

    def _take(self, message: dict[str, Any]) -> None:
        match message.get("op"):
            case Op.BLOBS:
                self._fetch_allowed = True
            case Op.VERDICT:
                cause = message["cause"]
                self._settle(
                    Verdict(
                        StateName(message["state"]),
                        FailureCause(cause) if cause else None,
                        str(message["reason"]),
                        rank=message["rank"],
                        error_type=str(message["error_type"]),
                        error_text=str(message["error_text"]),
                        last_line=str(message["last_line"]),
                    )
                )
            case _:
                self._run.take(message)

    def _lost(self, reason: str) -> None:
        self._site.say(reason)
        self._run.end(FAILURE_GRACE_S)
        self._settle(Verdict(StateName.FAILED, FailureCause.AGENT_DIED, reason))

    def _settle(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._check_end()

    def _check_end(self) -> None:
        """Leave if the job has ended and no rank is left."""
        if self._verdict is None and self._cancelled is not None:
            # Who was told to end does not wait for the head to say so too.
            self._verdict = Verdict(StateName.CANCELLED, FailureCause.USER, str(self._cancelled["reason"]))
        if self._verdict is not None and self._run.is_gone and self._ended_at is None:
            self._ended_at = time.monotonic()
            self._leave_if_possible(self._verdict, self._ended_at)

    def _leave_if_possible(self, verdict: Verdict, since: float) -> None:
        is_read = self._site.order.log_is_read or self._is_acknowledged or self._cancelled is not None
        if is_read or time.monotonic() - since > UNREAD_LIMIT_S:
            self._site.end(verdict)
        else:
            self._site.loop.call_later(_LOOK_EACH_S, lambda: self._leave_if_possible(verdict, since))


def _not_started(reason: str) -> Verdict:
    return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
