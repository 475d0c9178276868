"""A job that is suspended while it runs, as Kueue does to make room: it begins again in the pods of its resumption.

The operator deletes a suspended job's pods, and makes new ones of the same PyTorchJob later. They have to know that they
are not the first: what they say, and their results, are another attempt's. Whoever follows the job with its key writes
that on the PyTorchJob while it is suspended; everybody who follows reads it there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kale_dist.backends import own_events
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.kubernetes import lost_pods, restarts, states
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.restarts import Run
from kale_dist.backends.kubernetes.views import JobView, attempt_of
from kale_dist.backends.mirror import Mirror
from kale_dist.errors import BackendError
from kale_dist.spec import JobSpec

_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 60.0
"""Between tries to tell the next pods, which a cluster may refuse for as long as the job is suspended."""

_REASON = "The job was suspended while it ran, and begins again when it is resumed: attempt {attempt}"

_ANEW = (
    "When the job is resumed, the training begins anew: it goes on from its last checkpoint where it has max_restarts, "
    "and a store that outlives its pods, such as store='pvc://claim'"
)


class Suspensions:
    """Of one job.

    Args:
        cluster: Where it runs.
        spec: The job.
        mirror: What is said of it goes there.
        reader: Of its folder.
        has_key: Whether this user has the job's key; who has none only watches.
    """

    def __init__(self, cluster: Cluster, spec: JobSpec, mirror: Mirror, reader: JobReader, *, has_key: bool) -> None:
        self._cluster = cluster
        self._spec = spec
        self._mirror = mirror
        self._reader = reader
        self._has_key = has_key
        self._pause_s, self._again_at = _PAUSE_S, 0.0
        self.problem = ""
        """Why the next pods could not be told so far, as a sentence."""

    def look(self, view: JobView, run: Run) -> Run | None:
        """See whether the job was suspended, and what its next pods will make.

        Args:
            view: What the cluster says.
            run: What its pods have made so far.

        Returns:
            What they make from now on; None if nothing has changed.
        """
        if view.job is None:
            return None
        verdict, told = self._mirror.verdict, attempt_of(view.job)
        is_put_off = states.is_put_off(view, verdict)
        if is_put_off and self._has_key:
            self._tell(view.job, max(self._next_attempt(run), told), told)
        is_over = verdict is not None and not states.may_be_of_suspension(verdict)
        if told <= run.attempt or is_over or (is_put_off and verdict is None and not self._have_ended(view)):
            return None
        self._begin(Run(run.number, told))
        return Run(run.number, told)

    def _next_attempt(self, run: Run) -> int:
        """What the next pods make, by what those before have told."""
        base, verdict = self._reader.status(), self._mirror.verdict
        if verdict is not None:
            return max(base.attempt, int(verdict.get("attempt") or 0), run.attempt) + 1
        return run.attempt if restarts.waits_for_pods(run, base) else max(base.attempt, run.attempt) + 1

    def _tell(self, job: Mapping[str, Any], attempt: int, told: int) -> None:
        if (attempt <= told and restarts.is_told(job, attempt)) or time.monotonic() < self._again_at:
            return
        try:
            restarts.put_off(self._cluster, job, attempt)
        except BackendError as error:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if self._pause_s > 1:
                # Before that it is only that the job has changed meanwhile.
                self.problem = f"The job's next pods cannot be told that it was suspended: {error}"
            self._again_at = time.monotonic() + self._pause_s
        else:
            self.problem, self._pause_s = "", _PAUSE_S

    def _have_ended(self, view: JobView) -> bool:
        return all(pod.has_ended for pod in view.pods)

    def _begin(self, run: Run) -> None:
        seen = self._reader.status()
        lost_pods.turn_to(self._mirror, self._reader, run)
        if seen.attempt < run.attempt:
            lost_pods.record_again(self._mirror, run, seen, _REASON.format(attempt=run.attempt + 1))
            keeps = self._spec.store and self._spec.policy.max_restarts
            if seen.checkpoint_epoch is not None and not keeps:
                own_events.record_note(self._mirror, _ANEW, run.attempt)
