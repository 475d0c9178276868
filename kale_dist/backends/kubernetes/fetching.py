"""Fetches the results of a job that has ended: from its store, or from pod 0's agent."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from kale_dist import records
from kale_dist.backends.kubernetes import kept_results
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.mirror import Mirror
from kale_dist.backends.pod_client import PodClient
from kale_dist.contract import StateName
from kale_dist.errors import BackendError, StoreError
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus


class Fetcher:
    """Of one job.

    Args:
        cluster: Where it runs.
        spec: The job.
        mirror: What its agents have announced.
        name: Of its record.
        has_key: Whether this user has the job's key; without it outcomes are of no use.
        progress: Told how many bytes have come, and how many there are.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: JobSpec,
        mirror: Mirror,
        name: str,
        *,
        has_key: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._mirror = mirror
        self._folder = records.files(name).folder
        self._has_key = has_key
        self._progress = progress

    def missing(self) -> list[str]:
        """Names of the outcomes that there are and that are not here."""
        verdict = self._mirror.verdict or {}
        names = set(self._mirror.outcomes)
        if self._has_key and verdict.get("state") == StateName.SUCCEEDED:
            ranks = range(self._spec.topology.number_of_processes)
            names |= {f"outcome-{verdict.get('attempt', 0)}-{rank}" for rank in ranks}
        return sorted(name for name in names if not (self._folder / name).exists())

    def fetch_kept(self) -> None:
        """Copy from the store what it has, where this process sees the store."""
        for name in self.missing() if self._spec.store else ():
            with contextlib.suppress(StoreError):
                kept_results.copy(self._cluster, self._spec, name, self._folder / name)

    def with_attempt(self, ended: JobStatus) -> JobStatus:
        """A status that only the cluster tells of, with the attempt whose results the store has."""
        if ended.state is StateName.SUCCEEDED and ended.started is None:
            with contextlib.suppress(BackendError, StoreError):
                last = kept_results.last_attempt(self._cluster, self._spec)
                return dataclasses.replace(ended, attempt=max(last, ended.attempt))
        return ended

    def fetch_from(self, agent: PodClient) -> None:
        """Take all that pod 0's agent holds, and tell it that it may go.

        Raises:
            BackendError: The agent cannot be reached.
            StoreError: A file cannot be written here.
        """
        status = agent.status()
        names = [name for name in self.missing() if name.removeprefix("outcome-") in status["outcomes"]]
        failed = (self._mirror.verdict or {}).get("state") != StateName.SUCCEEDED
        if failed and status.get("checkpoint") is not None:
            names.append("checkpoint")
        for name in names:
            agent.fetch_file(name, self._folder / name, self._progress)
        agent.ack()
