"""The Docker backend: a job is a container for each pod-to-be, and everything that is learnt of it goes into a folder here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kale_dist import records
from kale_dist.backends import job_reader
from kale_dist.backends.base import JobRef, Plan
from kale_dist.backends.docker import adoption, cancelling, connection, containers, preparation, states, submission
from kale_dist.backends.docker.follower import Follower
from kale_dist.backends.job_reader import JobReader
from kale_dist.contract import LogLine
from kale_dist.engine import Engine
from kale_dist.errors import BackendError, JobNotFoundError, StoreError
from kale_dist.records import Record
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus

_LOOK_S = 0.5
_CANCEL_MARGIN_S = 10.0


class DockerBackend:
    """Runs jobs in containers. One instance serves a whole process (`shared()`); it is safe to use from threads."""

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
        return "docker"

    def listen(self, callback: Callable[[JobRef], None]) -> None:
        """Call `callback` from a thread of this backend whenever a job may have changed."""
        self._listeners.append(callback)

    def prepare(self, spec: JobSpec, *, submit: bool) -> JobSpec:
        """Settle the image and have it on the engine; look whether the job could run."""
        return preparation.prepare(spec, submit=submit)

    def plan(self, spec: JobSpec) -> Plan:
        """The command lines that would do the same."""
        return Plan(backend=self.name, spec=spec, text=containers.render(spec))

    def submit(self, plan: Plan, key: bytes) -> JobRef:
        """Write the job down, start its containers with their input in them, and begin to follow them.

        Raises:
            JobExistsError: The name is taken, here or on the engine.
            StoreError: The job's folder cannot be written.
            BackendError: The engine cannot be reached or refused.
        """
        spec = plan.spec
        engine = connection.connect()
        ref = JobRef(self.name, spec.name)
        records.create(ref.record_name, key)
        try:
            submission.create(engine, spec, key)
            try:
                records.write(_record(ref, spec, engine))
            except BaseException:
                submission.remove(engine, spec.name)
                raise
        except BaseException:
            records.withdraw(ref.record_name)
            raise
        self._follow(ref)
        return ref

    def status(self, ref: JobRef) -> JobStatus:
        """What the agents have said, and what the engine says of containers whose agents say nothing (yet)."""
        reader = self._reader(ref)
        status = reader.status()
        if status.is_final:
            return status
        spec = reader.record().spec
        try:
            follower = self._follow(ref)
        except BackendError as error:
            return dataclasses.replace(status, reason=f"{error} As last seen: {status.reason or status.state}")
        return states.overlay(status, follower.view, spec, follower.activity)

    def logs(
        self, ref: JobRef, *, follow: bool = False, ranks: Sequence[int] | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines of all containers, of those there are only the last `tail`; with `follow` until the job has ended."""
        wanted = None if ranks is None else frozenset(ranks)
        reader = self._reader(ref)
        if not reader.status().is_final:
            with contextlib.suppress(BackendError):
                self._follow(ref)
        return job_reader.lines(
            reader.open_log(),
            lambda line: wanted is None or line.rank in wanted,
            tail,
            lambda: reader.status().is_final,
            (lambda: self._wait_for_change(_LOOK_S)) if follow else None,
        )

    def cancel(self, ref: JobRef, *, grace_s: float = 5.0) -> None:
        """End a job: its agents end the ranks; where they cannot be reached, the containers are told to end, then killed."""
        reader = self._reader(ref)
        if reader.status().is_final:
            return
        engine = _engine(reader.record())
        cancelling.mark(records.files(ref.record_name).folder)
        follower = self._follow(ref)
        cancelling.cancel(engine, reader.record().spec, records.read_key(ref.record_name), grace_s)
        follower.kill_by(time.monotonic() + grace_s + _CANCEL_MARGIN_S)

    def delete(self, ref: JobRef) -> None:
        """End the job and remove every trace of it, on the engine and here.

        Raises:
            JobNotFoundError: No such job.
            BackendError: The engine cannot be reached or refused.
        """
        reader = self._reader(ref)
        engine = _engine(reader.record())
        with self._lock:
            follower = self._followers.pop(ref.record_name, None)
        if follower is not None:
            follower.stop()
        submission.remove(engine, reader.record().spec.name)
        if follower is not None:
            follower.join()
        with self._lock:
            self._readers.pop(ref.record_name, None)
        records.delete(ref.record_name)
        self._tell(ref)

    def list(self) -> Sequence[JobRef]:
        """Jobs of this user's records, and those of the engine, oldest first.

        Raises:
            BackendError: The engine does not answer, and there is no record that could be listed without it.
        """
        known = [JobRef.parse(ref) for ref in records.refs(self.name)]
        try:
            known += [ref for ref in adoption.select(connection.connect()) if ref not in known]
        except BackendError:
            if not known:
                raise
        return known

    def adopt(self, ref: JobRef, *, trust: bool | None) -> JobRef:
        """Make a record of a job that was submitted from another machine, or by another user of the engine."""
        self._check(ref)
        if not records.exists(ref.record_name) or (trust is not None and records.read_key(ref.record_name) is None):
            adoption.adopt(connection.connect(), ref, trust=trust)
        return ref

    def fetch(self, ref: JobRef, name: str) -> None:
        """Bring the checkpoint or an outcome of a running job here."""
        if not self._reader(ref).status().is_final:
            with contextlib.suppress(BackendError, StoreError, OSError):
                self._follow(ref).fetch(name)

    def close(self) -> None:
        """Follow no job any more. They run on."""
        with self._lock:
            followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.stop()
        for follower in followers:
            follower.join()
        connection.disconnect()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _follow(self, ref: JobRef) -> Follower:
        """The follower of an unfinished job."""
        with self._lock:
            found = self._followers.get(ref.record_name)
            if found is not None and found.is_alive:
                return found
            record = self._reader(ref).record()
            made = Follower(
                engine=_engine(record),
                ref=ref,
                spec=record.spec,
                key=records.read_key(ref.record_name),
                reader=JobReader(ref.record_name, lambda _: True),
                on_change=lambda: self._tell(ref),
            )
            self._followers[ref.record_name] = made
            return made

    def _reader(self, ref: JobRef) -> JobReader:
        self._check(ref)
        with self._lock:
            reader = self._readers.get(ref.record_name)
            if reader is None or not reader.exists:
                self._readers.pop(ref.record_name, None)
                reader = self._readers[ref.record_name] = JobReader(ref.record_name, lambda _: True)
            return reader

    def _check(self, ref: JobRef) -> None:
        if ref.backend != self.name:
            raise JobNotFoundError(f"{ref} is not a job of the docker backend")

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
def shared() -> DockerBackend:
    """The backend of this process."""
    return DockerBackend()


def _engine(record: Record) -> Engine:
    place = dict(record.place)
    return connection.connect_again(place.get("engine", ""), place.get("engine_id", ""))


def _record(ref: JobRef, spec: JobSpec, engine: Engine) -> Record:
    return Record(
        ref=str(ref), name=ref.record_name, created=time.time(), spec=spec, kernel_pid=os.getpid(), detach=True,
        place=connection.place(engine),
    )  # fmt: skip
