"""A job that is suspended while it runs, as Kueue does to make room: it begins again in the pods of its resumption.

The operator deletes a suspended job's pods, and makes new ones of the same PyTorchJob later. They have to know that they
are not the first: what they say, and their results, are another attempt's. Whoever follows the job with its key writes
that on the PyTorchJob while it is suspended; everybody who follows reads it there.
"""

from __future__ import annotations

import dataclasses

from kale_dist import records
from kale_dist.backends import own_events
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.kubernetes import restarts, states
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.restarts import Run
from kale_dist.backends.kubernetes.views import JobView, attempt_of
from kale_dist.backends.mirror import Mirror
from kale_dist.contract import StateName
from kale_dist.errors import BackendError
from kale_dist.spec import JobSpec

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
        base = self._reader.status()
        is_put_off = states.is_put_off(view, self._mirror.verdict)
        told = attempt_of(view.job)
        if is_put_off and self._has_key and told <= run.attempt and not restarts.waits_for_pods(run, base):
            self._tell(view, base.attempt + 1)
        if told <= run.attempt or (is_put_off and not (self._mirror.verdict or self._have_ended(view))):
            return None
        self._begin(Run(run.number, told))
        return Run(run.number, told)

    def _tell(self, view: JobView, attempt: int) -> None:
        try:
            restarts.put_off(self._cluster, view.job or {}, attempt)
        except BackendError as error:
            self.problem = f"The job's next pods cannot be told that it was suspended: {error}"
        else:
            self.problem = ""

    def _have_ended(self, view: JobView) -> bool:
        return all(pod.has_ended for pod in view.pods)

    def _begin(self, run: Run) -> None:
        seen = self._reader.status()
        records.write(restarts.with_run(self._reader.record(), run))
        self._mirror.begin_attempt(run.attempt)
        if seen.attempt < run.attempt:
            reason = _REASON.format(attempt=run.attempt + 1)
            again = dataclasses.replace(
                seen, state=StateName.PENDING, attempt=run.attempt, reason=reason, cause=None, failed_rank=None
            )
            own_events.record_state(self._mirror, again)
            keeps = self._spec.store and self._spec.policy.max_restarts
            if seen.checkpoint_epoch is not None and not keeps:
                own_events.record_note(self._mirror, _ANEW, run.attempt)
