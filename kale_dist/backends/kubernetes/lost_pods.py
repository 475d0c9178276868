"""Whether a job that has lost a pod goes on in new ones, and what its log and its record say of that."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from kale_dist import records
from kale_dist.backends import own_events
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.kubernetes import restarts, states
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.restarts import Run
from kale_dist.backends.kubernetes.views import JobView
from kale_dist.backends.mirror import Mirror
from kale_dist.contract import FailureCause, StateName
from kale_dist.errors import BackendError
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus

ASKING_S = 120.0
"""How long a cluster that cannot be reached is asked for new pods in the place of lost ones."""

_WATCHES = (
    "A job that has lost a pod goes on in new ones while somebody follows it who has its key: who submitted it, or "
    "attached to it with trust=True. This user only watches"
)

_ANEW = (
    "A pod was lost, and the training begins anew: without a store no checkpoint outlives the pods. Give one, such as "
    "store='pvc://claim'"
)


def turn_to(mirror: Mirror, reader: JobReader, run: Run) -> None:
    """Write down that other pods make a job now; what those before have held counts no more."""
    records.write(restarts.with_run(reader.record(), run))
    mirror.begin_attempt(run.attempt)


def record_again(mirror: Mirror, run: Run, before: JobStatus, reason: str) -> None:
    """Let everybody see that a job waits for other pods, and why."""
    again = dataclasses.replace(
        before, state=StateName.PENDING, attempt=run.attempt, reason=reason, cause=None, failed_rank=None
    )
    own_events.record_state(mirror, again)


class LostPods:
    """Of one job.

    Args:
        cluster: Where it runs.
        spec: The job.
        mirror: What is said of it goes there.
        reader: Of its folder.
        show: Told what is being done, as a sentence; empty for nothing.
        has_key: Whether this user has the job's key; who has none only watches.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: JobSpec,
        mirror: Mirror,
        reader: JobReader,
        show: Callable[[str], None],
        *,
        has_key: bool,
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._mirror = mirror
        self._reader = reader
        self._show = show
        self._has_key = has_key
        self._since: float | None = None
        self.has_asked = False
        """Whether new pods were asked for, had or not."""

    def may_be_missed(self, ended: JobStatus) -> bool:
        """Whether the agents miss a pod of a job that may go on, so that it matters what the cluster says of that pod."""
        return ended.attempt < self._spec.policy.max_restarts and states.misses_pod(self._mirror.verdict)

    def why_again(self, ended: JobStatus, view: JobView) -> str:
        """Why a job that has ended so goes on in new pods, as a sentence; empty if it does not."""
        if ended.attempt >= self._spec.policy.max_restarts:
            return ""
        return states.lost_pod(ended, view, self._mirror.verdict)

    def go_on(self, ended: JobStatus, why: str, before: Run) -> Run | JobStatus | None:
        """Make new pods.

        Args:
            ended: How the job would have ended.
            why: What `why_again` has said.
            before: The PyTorchJob that has lost a pod.

        Returns:
            The new PyTorchJob; None if the cluster has to be asked once more; else how the job has ended.
        """
        now = time.time()
        self._since = self._since or now
        if not self._has_key:
            if now - self._since < ASKING_S:
                self._show(f"{why} {_WATCHES}")
                return None
            return dataclasses.replace(
                ended, reason=f"{ended.reason} It did not go on within {ASKING_S:g} s. {_WATCHES}"
            )
        self.has_asked = True
        try:
            run = restarts.begin(self._cluster, self._spec, before, ended.attempt + 1, self._reader.status().started)
        except BackendError as error:
            if error.retryable and now - self._since < ASKING_S:
                self._show(f"New pods cannot be had yet: {error}")
                return None
            return dataclasses.replace(ended, reason=f"{ended.reason} New pods could not be had: {error}")
        self._since = None
        self._show("")
        if isinstance(run, str):
            reason = f"The job was cancelled by {run}"
            return dataclasses.replace(
                ended, state=StateName.CANCELLED, cause=FailureCause.USER, reason=reason, failed_rank=None
            )
        self._turn_to(run, why, ended)
        return run

    def take_over(self, job: Mapping[str, Any] | None) -> Run | None:
        """Have the job go on in new pods that somebody else has made, or this machine before it could write that down.

        Args:
            job: A PyTorchJob by the name of the next one; None if there is none.

        Returns:
            The new one; None if it is not there, or not this job's.
        """
        run = restarts.run_in(job, dict(self._reader.record().place)["uid"])
        if run is not None:
            self._since = None
            self._show("")
            if self._has_key:
                with contextlib.suppress(BackendError):
                    restarts.complete(self._cluster, self._spec, run, self._reader.status().started)
            self._turn_to(run, "", self._reader.status())
        return run

    def _turn_to(self, run: Run, why: str, before: JobStatus) -> None:
        seen, policy = self._reader.status(), self._spec.policy
        name = restarts.name_of(self._spec.name, run.number)
        count = f"attempt {run.attempt + 1} of {policy.max_restarts + 1}"
        reason = f"{why} The job goes on in new pods, those of {name}: {count}".lstrip()
        turn_to(self._mirror, self._reader, run)
        record_again(self._mirror, run, before, reason)
        if seen.checkpoint_epoch is not None and not self._spec.store:
            own_events.record_note(self._mirror, _ANEW, run.attempt)
