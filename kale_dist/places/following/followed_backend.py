"""The `Backend` protocol for jobs in containers, over a `Place`: a job's folder here, a follower for each unfinished job."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from kale_dist.errors import BackendError, JobExistsError, JobNotFoundError, StoreError, log
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Place, PlacedJob, PlaceEvent, Plan
from kale_dist.job.reader import FolderBackend
from kale_dist.job.records import Life, Record
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.status import JobStatus
from kale_dist.places.following import verdict
from kale_dist.places.following.follower import Follower
from kale_dist.places.following.life import handle_of, handles_of
from kale_dist.places.following.warm_place import WarmPlace
from kale_dist.wire.messages import ToAgent

WAIT_S = 0.5
"""How often a reader of a log looks for lines that another process has copied; a follower of this process wakes it."""


class FollowedBackend(FolderBackend):
    """Runs jobs at a place and follows them. One instance serves a whole process; it is safe to use from threads.

    Args:
        place: Where containers run.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(lambda _: True)
        self.name = place.name
        self.place: Place = WarmPlace(place, self)
        """Where containers run."""
        self._followers: dict[str, Follower] = {}

    def settle(self, request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
        """Have the place look up what a request leaves open."""
        return self.place.settle(request, name=name, image=image, recipe=recipe, submit=submit)

    def plan(self, spec: JobSpec) -> Plan:
        """The objects that `submit` would create."""
        return Plan(backend=self.name, spec=spec, text=self.place.render(spec))

    def submit(self, spec: JobSpec, key: bytes) -> JobRef:
        """Create the job's record and its objects at the place, and begin to follow it; neither stays after an error."""
        name = f"{spec.cluster.namespace}/{spec.name}" if spec.cluster.namespace else spec.name
        ref = JobRef(self.name, name)
        self._end_overdue()
        records.create(ref.record_name, key)
        try:
            handle = self.place.start(spec, key)
            try:
                self._write_record(handle, created=time.time())
                self._follow(ref)
            except BaseException:
                self._forget(ref)
                self.place.remove(handle)
                raise
        except BaseException:
            records.withdraw(ref.record_name)
            raise
        return ref

    def _end_overdue(self) -> None:
        """End this user's jobs that wait past their `pending_timeout_s` since no process follows them: they hold what others need."""
        for record in records.all_records():
            ref, limit_s = JobRef.parse(record.ref), record.spec.cluster.pending_timeout_s
            if ref.backend != self.name or limit_s is None or time.time() - record.created <= limit_s:
                continue
            events = records.files(record.name).events
            with contextlib.suppress(OSError, JobNotFoundError):
                is_unheard = not events.exists() or not events.stat().st_size
                if is_unheard and records.read_key(record.name) is not None and (status := self.status(ref)).is_final:
                    log(f"{ref} {status.state}{f': {status.reason}' if status.reason else ''}")

    def status(self, ref: JobRef) -> JobStatus:
        """The status that the job's heads have sent, with what its place reports about pods."""
        job = self._reader(ref)
        if (status := job.status()).is_final:
            return status
        follower = self._follow(ref)
        problem = follower.wait_for_look()
        return verdict.overlay(
            job.status(),
            follower.sight.look,
            job.record().spec,
            self.place.noun,
            activity=follower.activity,
            problem=problem,
        )

    def cancel(self, ref: JobRef, *, grace_s: float | None = None, save: bool = True) -> None:
        """End a job: its head ends the ranks; if the head cannot be reached, the place ends the containers."""
        reader = self._reader(ref)
        if not reader.status().is_final:
            usual_s = reader.record().spec.policy.cancel_grace_s(save=save)
            self._follow(ref).cancel(usual_s if grace_s is None else grace_s, save=save)

    def send(self, ref: JobRef, rank: int, message: ToAgent, blobs: Iterable[str] = ()) -> None:
        """Have the job's head pass a message on to a rank, once it has the blobs."""
        if not self._follow(ref).send(rank, message, blobs):
            raise BackendError(f"The head of {ref} cannot be reached from here", retryable=True)

    def delete(self, ref: JobRef) -> None:
        """End the job and remove every trace of it, at its place and here."""
        self._reader(ref)
        # No follower, in this process or in another one, renews a cancelled job.
        records.mark_cancelled(records.files(ref.record_name))
        self._forget(ref)
        record, life = records.read(ref.record_name), records.life(records.files(ref.record_name))
        for handle in handles_of(self.place, record, life):
            self.place.remove(handle)
        records.delete(ref.record_name)
        self._notify(ref)

    def list(self) -> Sequence[JobRef]:
        """Jobs of this user's records, and those of the place (in its configured namespace), oldest first.

        Raises:
            BackendError: The place does not answer, and there is no record that could be listed without it.
        """
        recorded = records.refs(self.name)
        known = [JobRef.parse(ref) for ref in recorded if "/" not in ref.partition("://")[2]]
        # Places report the age of jobs in whole seconds; records know the order of this user's own.
        order = {ref: number for number, ref in enumerate(recorded)}
        try:
            there = sorted(self.place.survey(None, {}), key=lambda job: (job.created or 0.0, order.get(job.ref, -1)))
            known += [ref for ref in (JobRef.parse(job.ref) for job in there) if ref not in known]
        except BackendError:
            if not known:
                raise
        return known

    def survey(self, *, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Sequence[JobStatus]:
        """The statuses of all jobs of the place, oldest first, as far as the place itself knows: no job is followed."""
        return self.place.survey(namespace, labels or {})

    def adopt(self, ref: JobRef, *, trust: bool | None) -> JobRef:
        """Make a record of a job that was submitted from another machine, or by another user; arguments as in `Backend`."""
        if ref.backend != self.name:
            raise JobNotFoundError(f"{ref} is not a job of the {self.name} backend")
        if records.exists(ref.record_name) and (trust is None or records.read_key(ref.record_name) is not None):
            return ref
        handle, key = self.place.adopt(ref, trust=trust)
        name = handle.ref.record_name
        if records.exists(name) and (key is None or records.read_key(name) is not None):
            return handle.ref
        if records.exists(name):
            self._forget(handle.ref)
            records.withdraw(name)
        with records.keeping_blobs(), contextlib.suppress(JobExistsError):
            records.create(name, key or b"")
            self._write_record(handle, created=time.time())
        return handle.ref

    def fetch(self, ref: JobRef, name: str) -> None:
        """Fetch the checkpoint or an outcome of a job from its head or its place.

        Raises:
            StoreError: An ended job's file is gone.
        """
        ended = self._reader(ref).status().is_final
        try:
            came = self._follow(ref).fetch(name)
        except (BackendError, StoreError):
            if ended:
                raise
            return
        if ended and not came and name != "checkpoint":
            raise StoreError(
                f"{name} of {ref} is no longer there: the job's {self.place.noun}s have ended or are gone. A store (store=) keeps results for later"
            )

    def describe(self, ref: JobRef) -> Mapping[str, object]:
        """The object of the job, as it is now; empty where it is no single object."""
        return self.place.describe(self._handle(ref))

    def events(self, ref: JobRef) -> Sequence[PlaceEvent]:
        """Events of the job at its place, oldest first."""
        return self.place.events(self._handle(ref))

    def volumes(self) -> Sequence[str]:
        """Names of the volumes that jobs can have."""
        return self.place.volumes()

    def close(self) -> None:
        """Stop following jobs. They keep running."""
        with self._lock:
            followers, self._followers = list(self._followers.values()), {}
        for follower in followers:
            follower.stop()
        for follower in followers:
            follower.join()
        self.place.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _write_record(self, handle: PlacedJob, *, created: float) -> None:
        name = handle.ref.record_name
        records.write(
            Record(
                ref=str(handle.ref), name=name, created=created, spec=handle.spec, kernel_pid=os.getpid(), detach=True,
                place=handle.place,
            )
        )  # fmt: skip
        # Of a job that is adopted, the lives before are only known by their number.
        before = handle.life - 1
        life = Life(number=handle.life, object=handle.object, used_restarts=before, first_attempt=before)
        records.write_life(records.files(name), life)

    def _handle(self, ref: JobRef) -> PlacedJob:
        return handle_of(self.place, self._reader(ref).record(), records.life(records.files(ref.record_name)))

    def _follow(self, ref: JobRef) -> Follower:
        """This process's follower of a job, a new one if there is none that lives."""
        with self._lock:
            found = self._followers.get(ref.record_name)
            if found is None or not found.is_alive:
                found = self._followers[ref.record_name] = Follower(
                    place=self.place,
                    record=self._reader(ref).record(),
                    key=records.read_key(ref.record_name),
                    on_lines=self._wake_readers,
                    on_change=lambda: self._notify(ref),
                )
            return found

    def _forget(self, ref: JobRef) -> None:
        """Stop this process's follower and reader of a job."""
        with self._lock:
            follower = self._followers.pop(ref.record_name, None)
            self._readers.pop(ref.record_name, None)
        if follower is not None:
            follower.stop()
            follower.join()

    def _attend(self, ref: JobRef) -> float:
        # A follower that failed, as on a full disk, is replaced.
        with contextlib.suppress(JobNotFoundError):
            self._follow(ref)
        return WAIT_S
