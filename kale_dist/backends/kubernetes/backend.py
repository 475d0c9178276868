"""The Kubernetes backend: a job is a PyTorchJob, and everything that is learnt of it goes into a folder of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist import records
from kale_dist.backends import job_reader
from kale_dist.backends.base import JobRef, Plan
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.kubernetes import (
    adoption,
    client,
    kept_results,
    preparation,
    refusals,
    restarts,
    states,
    submission,
    survey,
    watching,
)
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.follower import Follower
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.contract import LogLine, RankStateName, StateName
from kale_dist.errors import BackendError, ConfigError, JobNotFoundError, ResultUnavailableError, StoreError
from kale_dist.pod_order import Source
from kale_dist.records import Record
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus

_LOOK_S = 0.5
_DELETE_TIMEOUT_S = 60.0
_CANCEL_MARGIN_S = 10.0
_FIRST_LOOK_S = 2.0
_END_LOOK_S = 5.0
"""The same for a job whose pods have ended: their logs are read first."""

_FIRST_PAUSE_S = 0.05


class KubernetesBackend:
    """Runs jobs on clusters. One instance serves a whole process (`shared()`); it is safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._followers: dict[str, Follower] = {}
        self._readers: dict[str, JobReader] = {}
        self._listeners: list[Callable[[JobRef], None]] = []
        self._changed = threading.Condition()
        self._changes = 0

    @property
    def name(self) -> str:
        """The word that `on=` takes."""
        return "kubernetes"

    def listen(self, callback: Callable[[JobRef], None]) -> None:
        """Call `callback` from a thread of this backend whenever a job may have changed."""
        self._listeners.append(callback)

    def prepare(self, spec: JobSpec, *, submit: bool) -> JobSpec:
        """Settle image, namespace, form of the job and its user; look whether the job could run."""
        return preparation.prepare(spec, submit=submit)

    def plan(self, spec: JobSpec) -> Plan:
        """The PyTorchJob and its Secret, as YAML."""
        return Plan(backend=self.name, spec=spec, text=submission.render(spec))

    def submit(self, plan: Plan, key: bytes) -> JobRef:
        """Write the job down, create it with its input, and begin to follow it.

        Raises:
            JobExistsError: The name is taken, here or in the namespace.
            StoreError: The job's folder, or its store, cannot be written.
            BackendError: The cluster refused.
        """
        spec = plan.spec
        cluster = client.connect(namespace=spec.cluster.namespace, context=spec.cluster.context)
        ref = JobRef(self.name, f"{spec.cluster.namespace}/{spec.name}")
        records.create(ref.record_name, key)
        try:
            source = preparation.place_bytes(cluster, spec)
            data = submission.input_data(spec, key, source, log_is_read=preparation.may_read_logs(cluster))
            made = submission.create(cluster, spec, data)
            try:
                records.write(_record(ref, spec, cluster, made, source))
            except BaseException:
                submission.remove(cluster, spec.cluster.namespace, spec.name)
                raise
        except BaseException:
            records.withdraw(ref.record_name)
            raise
        self._follow(ref)
        return ref

    def status(self, ref: JobRef) -> JobStatus:
        """What the agents have said, and what the cluster says of a job whose agents say nothing (yet)."""
        ref, reader = self._reader(ref)
        status = reader.status()
        if status.is_final:
            return status
        is_new = ref.record_name not in self._followers
        follower = self._follow(ref)
        if follower is None:
            return status
        if is_new:
            _await_first_look(follower, reader)
            status = reader.status()
        seen = states.overlay(status, follower.view, reader.record().spec, time.time(), activity=follower.activity)
        if not seen.is_final:
            return seen
        # Whoever sees a job end finds all of its log and its results: the follower writes that down when it has them.
        reason = follower.activity or "The pods have ended. Their last lines and results are being read"
        return dataclasses.replace(seen, state=StateName.RUNNING, cause=None, reason=reason, ended=None)

    def logs(
        self, ref: JobRef, *, follow: bool = False, ranks: Sequence[int] | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines of all pods, of those there are only the last `tail`; with `follow` until the job has ended."""
        wanted = None if ranks is None else frozenset(ranks)
        ref, reader = self._reader(ref)
        if not reader.status().is_final:
            self._follow(ref)
        return job_reader.lines(
            reader.open_log(),
            lambda line: wanted is None or line.rank in wanted,
            tail,
            lambda: reader.status().is_final,
            (lambda: self._wait_for_change(_LOOK_S)) if follow else None,
        )

    def cancel(self, ref: JobRef, *, grace_s: float = 5.0) -> None:
        """End a job: its agents end the ranks; where they cannot be reached, the job is suspended, which ends the pods."""
        ref, reader = self._reader(ref)
        if reader.status().is_final:
            return
        spec = reader.record().spec
        cluster = _cluster(spec)
        last = restarts.newest(cluster, spec, restarts.run_of(reader.record()))
        run = restarts.spec_of(spec, last)
        refusal: BackendError | None = None
        try:
            if not submission.mark_cancelled(cluster, run, _person()):
                return
            while (later := restarts.newest(cluster, spec, last)) != last:
                last, run = later, restarts.spec_of(spec, later)
                submission.mark_cancelled(cluster, run, _person())
        except BackendError as error:
            refusal = error
        follower = self._follow(ref)
        if follower is not None:
            with contextlib.suppress(BackendError, StoreError, OSError):
                follower.agent(follower.head).cancel(grace_s)
                follower.cancel_by(time.monotonic() + grace_s + _CANCEL_MARGIN_S)
                return
        if refusal is not None:
            raise refusal
        submission.suspend(cluster, run.cluster.namespace, run.name)

    def delete(self, ref: JobRef) -> None:
        """End the job and remove every trace of it, on the cluster and here.

        Raises:
            JobNotFoundError: No such job.
            BackendError: The cluster refused, or pods do not go.
        """
        ref, reader = self._reader(ref)
        spec = reader.record().spec
        cluster = _cluster(spec)
        last = restarts.newest(cluster, spec, restarts.run_of(reader.record())).number
        names = [restarts.name_of(spec.name, number) for number in range(last + 1)]
        for name in names:
            submission.remove(cluster, spec.cluster.namespace, name)
        with self._lock:
            follower = self._followers.pop(ref.record_name, None)
        if follower is not None:
            follower.stop()
        submission.wait_until_gone(cluster, spec, names, _DELETE_TIMEOUT_S)
        if follower is not None:
            follower.join()
        with self._lock:
            self._readers.pop(ref.record_name, None)
        records.delete(ref.record_name)
        self._tell(ref)

    def list(self) -> Sequence[JobRef]:
        """Jobs of this user's records, and those of the configured namespace, oldest first."""
        known = [JobRef.parse(ref) for ref in records.refs(self.name)]
        with contextlib.suppress(BackendError, ConfigError):
            known += [ref for ref in self.select(namespace=None, labels=None) if ref not in known]
        return known

    def select(self, *, namespace: str | None, labels: Mapping[str, str] | None) -> Sequence[JobRef]:
        """Jobs that the cluster has, whoever submitted them, oldest first."""
        return adoption.select(client.connect(), namespace, {} if labels is None else labels)

    def survey(self, *, namespace: str | None, labels: Mapping[str, str] | None) -> Sequence[JobStatus]:
        """How the jobs are by their PyTorchJobs alone, oldest first."""
        return survey.statuses(adoption.find(client.connect(), namespace, {} if labels is None else labels))

    def adopt(self, ref: JobRef, *, trust: bool | None) -> JobRef:
        """Make a record of a job that was submitted from another machine."""
        ref = self._full(ref)
        if not records.exists(ref.record_name) or (trust is not None and records.read_key(ref.record_name) is None):
            adoption.adopt(client.connect(namespace=ref.name.partition("/")[0]), ref, trust=trust)
        return ref

    def fetch(self, ref: JobRef, name: str) -> None:
        """Bring the checkpoint or an outcome here: of a running job from its agent, of an ended one from its store.

        Raises:
            StoreError: The store has no such file.
            BackendError: The store cannot be read from here; the message says how to get at the file.
            ResultUnavailableError: There is no store, and nobody fetched the result in time.
        """
        ref, reader = self._reader(ref)
        path = records.files(ref.record_name).folder / name
        follower = self._follow(ref) if not reader.status().is_final else None
        spec = reader.record().spec
        if follower is not None:
            with contextlib.suppress(BackendError, StoreError, OSError):
                follower.agent(follower.head).fetch_file(name, path)
        elif not path.exists() and spec.store:
            kept_results.fetch(_cluster(spec), spec, name, path.parent)
        elif not path.exists() and name.startswith("outcome-") and reader.status().state is StateName.SUCCEEDED:
            raise ResultUnavailableError(
                f"The result of {ref} is lost: no notebook fetched it from the pods within {spec.cluster.collect_wait_s:g} s "
                "of the job's end (collect_wait_s). Give a store to keep results, such as store='pvc://claim'",
                str(ref),
            )

    def volumes(self) -> Sequence[str]:
        """Names of the claims in the configured namespace.

        Raises:
            BackendError: The cluster refused.
        """
        cluster = client.connect()
        try:
            listed = cluster.core.list_namespaced_persistent_volume_claim(cluster.namespace)
        except Exception as error:
            doing = Doing(verb="list", resource="persistentvolumeclaims", namespace=cluster.namespace, name="")
            raise refusals.explain(error, doing=doing) from error
        return sorted(claim.metadata.name for claim in listed.items if claim.metadata and claim.metadata.name)

    def close(self) -> None:
        """Follow no job any more. They run on."""
        with self._lock:
            followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.stop()
        for follower in followers:
            follower.join()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _follow(self, ref: JobRef) -> Follower | None:
        """The follower of an unfinished job; None while its cluster cannot be reached."""
        with self._lock:
            found = self._followers.get(ref.record_name)
            if found is not None and found.is_alive:
                return found
            _, reader = self._reader(ref)
            record = reader.record()
            try:
                cluster = _cluster(record.spec)
            except BackendError:
                return None
            made = Follower(
                cluster=cluster,
                watch=watching.shared(cluster),
                ref=ref,
                spec=record.spec,
                key=records.read_key(ref.record_name),
                reader=JobReader(ref.record_name, lambda _: True),
                source=Source(dict(record.place)["source"]),
                on_change=lambda: self._tell(ref),
            )
            self._followers[ref.record_name] = made
            return made

    def _reader(self, ref: JobRef) -> tuple[JobRef, JobReader]:
        ref = self._full(ref)
        with self._lock:
            reader = self._readers.get(ref.record_name)
            if reader is None or not reader.exists:
                self._readers.pop(ref.record_name, None)
                reader = self._readers[ref.record_name] = JobReader(ref.record_name, lambda _: True)
            return ref, reader

    def _full(self, ref: JobRef) -> JobRef:
        if ref.backend != self.name:
            raise JobNotFoundError(f"{ref} is not a job of the kubernetes backend")
        return ref if "/" in ref.name else JobRef(self.name, f"{client.connect().namespace}/{ref.name}")

    def _tell(self, ref: JobRef) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
        for callback in tuple(self._listeners):
            callback(ref)

    def _wait_for_change(self, timeout_s: float) -> None:
        with self._changed:
            seen = self._changes
            self._changed.wait_for(lambda: self._changes != seen, timeout_s)


@functools.cache
def shared() -> KubernetesBackend:
    """The backend of this process."""
    return KubernetesBackend()


def _cluster(spec: JobSpec) -> Cluster:
    return client.connect(namespace=spec.cluster.namespace, context=spec.cluster.context)


def _record(ref: JobRef, spec: JobSpec, cluster: Cluster, made: Mapping[str, Any], source: Source) -> Record:
    place = {"server": cluster.server, "uid": made["metadata"]["uid"], "source": str(source)}
    return Record(
        ref=str(ref), name=ref.record_name, created=time.time(), spec=spec, kernel_pid=os.getpid(), detach=True,
        place=tuple(place.items()),
    )  # fmt: skip


def _await_first_look(follower: Follower, reader: JobReader) -> None:
    """Wait a moment for what the cluster says of a job that was submitted elsewhere, or by an earlier process.

    Whoever asks just once would else learn nothing.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < _END_LOOK_S:
        view, status = follower.view, reader.status()
        has_ended = bool(view.pods) and all(pod.has_ended for pod in view.pods)
        is_read = bool(view.pods) and (
            status.replicas[0].state is not RankStateName.PENDING or not any(pod.has_started for pod in view.pods)
        )
        is_known = view.is_deleted or not view.healthy or waited_s > _FIRST_LOOK_S or is_read
        if status.is_final or (is_known and not has_ended):
            return
        time.sleep(_FIRST_PAUSE_S)


def _person() -> str:
    with contextlib.suppress(Exception):
        return getpass.getuser()
    return "somebody"
