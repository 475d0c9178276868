"""Follows one unfinished job: has its log copied, decides how it has ended, fetches its results, renews it after a loss.

A follower writes everything into the job's folder on this machine, so that every reader of a job reads files. One process
follows a job at a time (a lock in its folder). The other processes read, and one of them takes over when the first ends.

A job has one life at a time, which is its head's, known by the head's UID. Where its pods are lost through no fault of the job, it is
renewed as long as `max_restarts` allows it: another object, named `<name>-2`, resumes from the last checkpoint. If that name is
taken, the follower of another machine was first, and this one follows the same object. A head that its controller makes again, or that
comes after a suspension, is the next life of the same object.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kale_dist.errors import BackendError, JobExistsError, KaleDistError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, Place, PlacedJob
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Life, Record
from kale_dist.job.spec.job_spec import WARM
from kale_dist.job.status import closing_events
from kale_dist.places.following.copy import FollowerClock
from kale_dist.places.following.head_client import HeadClient
from kale_dist.places.following.life import CANCEL_MARGIN_S, Followed, FollowedLife, HeadReach, handles_of, next_life
from kale_dist.places.following.sight import LOOK_S, Sight
from kale_dist.wire import CANCEL_GRACE_S, VERSION, FailureCause, StateName, Verdict
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.events import Event, JobState, Note
from kale_dist.wire.messages import Restart, ToAgent, ToLive

FIRST_LOOK_S = 10.0
"""How long the first status of a job waits for the place."""

LOCK_S = 2.0
"""How often a process that does not follow tries to get the lock."""

_ACK_S = 5.0


class Follower:
    """Follows one job in a thread that ends with the job.

    Args:
        place: Where the job runs.
        record: The job.
        key: The job's secret bytes; None if this user does not have them.
        on_lines: Called when the log here has grown.
        on_change: Called when the job's status may have changed.
        clock: Time; tests pass one of their own.
    """

    def __init__(
        self,
        *,
        place: Place,
        record: Record,
        key: bytes | None,
        on_lines: Callable[[], None],
        on_change: Callable[[], None],
        clock: FollowerClock | None = None,
    ) -> None:
        self.activity = ""
        """What the follower does at the moment that takes time, as a sentence."""
        self._clock = clock or FollowerClock()
        self._job = Followed(
            place=place, record=record, key=key, files=records.files(record.name), clock=self._clock,
            status=JobReader(record.name, lambda _: True), on_lines=on_lines, on_change=on_change, show=self._show,
        )  # fmt: skip
        self.sight = Sight(place, self._clock, on_change)
        """What the place reports."""
        self._reach = HeadReach(self._job, records.life(self._job.files))
        self._kill_at: float | None = None
        self._cancel: Callable[[HeadClient], None] | None = None
        """A request to end the job that has not reached its head yet; None if there is none."""
        self._unsubscribe: Callable[[], None] = lambda: None
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kale_dist follow {record.name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still follows the job."""
        return self._thread.is_alive()

    def wait_for_look(self) -> str:
        """Wait until the place, and a head that runs, have been asked, and of a job that is over for the verdict.

        A new process then shows no outdated status first. Only its first status waits: large results take a while.

        Returns:
            Why the status may be outdated, as a sentence; empty if it is not.
        """
        is_current = self.sight.has_looked.wait(FIRST_LOOK_S)
        self.sight.has_looked.set()
        return self.sight.problem or ("" if is_current else "The job's first pod has not answered yet.")

    def stop(self) -> None:
        """Have the thread end. The job runs on, and the next follower continues where this one stopped."""
        self._stopped.set()
        self._woken.set()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout_s)

    def cancel(self, grace_s: float, *, save: bool = False) -> None:
        """End the job: by its head, which gives the ranks their grace; else by its place.

        Args:
            grace_s: Seconds that ranks may take to save and to end by themselves.
            save: Whether ranks that can write one more checkpoint before.

        Raises:
            BackendError: Neither head nor place can be reached.
        """
        records.mark_cancelled(self._job.files)
        self._kill_at = self._clock.monotonic() + grace_s + (CANCEL_GRACE_S if save else 0.0) + CANCEL_MARGIN_S
        has_it = self._reach.ask(cancel := functools.partial(HeadClient.cancel, grace_s=grace_s, save=save))
        if has_it is None and self.sight.head_runs:
            self._cancel = cancel
        elif not has_it:
            self._job.place.kill(self._reach.handle, grace_s)
        self._woken.set()

    def send(self, rank: int, message: ToAgent, blobs: Iterable[str]) -> bool:
        """Have the head pass a message on to a rank, once it has some blobs; returns whether the head has it."""
        if isinstance(message, ToLive | Restart) and message.attempt is not None:
            message = dataclasses.replace(message, attempt=message.attempt - self._reach.handle.first_attempt)

        def send(head: HeadClient) -> None:
            head.upload(FolderStore(records.blobs_dir()), blobs)
            head.send(rank, message)

        return bool(self._reach.ask(send))

    def fetch(self, name: str) -> bool:
        """Fetch a file of the job as it is now: see `HeadReach.fetch`."""
        if self._job.status.status().is_final:
            # Its head may run still, with what could not be fetched.
            self.sight.take(self._reach.handle)
        try:
            return self._reach.fetch(name, head_runs=self.sight.head_runs)
        finally:
            self._show("")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            with records.opened_lock(self._job.files) as lock:
                if not self._wait_for_lock(lock):
                    return
                while self._follow_life():
                    pass
        except KaleDistError as error:
            # The disk is full, and the next call for the job's status tries again. Or the job was deleted.
            self.sight.problem = f"{error}"
        finally:
            self.sight.has_looked.set()
            self._unsubscribe()
            self.activity = ""
            self._job.on_change()

    def _wait_for_lock(self, lock: Any) -> bool:
        """Wait until no other process follows the job; whether there is something to follow then."""
        if records.try_lock(lock):
            return True
        self._listen()
        while not records.try_lock(lock):
            # This one only looks, for the status that it shows.
            self._reach = HeadReach(self._job, records.life(self._job.files))
            self.sight.take(self._reach.handle)
            if self.sight.head_runs:
                self.sight.has_looked.set()
            self._kill_if_due()
            if self._stopped.is_set() or self._job.status.status().is_final:
                return False
            self._wait(LOCK_S)
        return True

    def _follow_life(self) -> bool:
        """Follow the job's present life to its end; whether it has another one after it."""
        if self._job.status.status().is_final:
            return False
        life = FollowedLife(self._job, records.life(self._job.files), self.sight, self._woken.set)
        self._reach, self.sight.is_over = life.reach, life.is_overdue
        self._listen()
        try:
            if not self._job.files.life.exists():
                life.write(object=life.reach.handle.object)
            verdict = None if life.record.is_started else self._start(life)
            return self._end(life, verdict) if verdict is not None else self._attend(life)
        finally:
            life.close()

    def _attend(self, life: FollowedLife) -> bool:
        """Follow a life that has its object; whether the job has another one after it."""
        for look in self._looks():
            life.check()
            if life.has_another_head:
                if life.is_read:
                    return self._take_next_head(life)
                continue
            life.attend()
            if life.is_current:
                self.sight.has_looked.set()
            verdict = life.find_verdict() if look.fresh else None
            if verdict is not None and not life.goes_on(verdict):
                return self._end(life, verdict)
        return False

    def _looks(self) -> Iterator[Look]:
        """What the place reports, again and again, until the job is over or the thread is to end."""
        while not self._stopped.is_set() and not self._job.status.status().is_final:
            self.sight.take(self._reach.handle)
            self._kill_if_due()
            if not self.sight.problem:
                yield self.sight.look
            self._wait(LOOK_S)

    def _wait(self, seconds: float) -> None:
        self._clock.wait(self._woken, seconds)
        self._woken.clear()

    def _listen(self) -> None:
        """Have the place call for looks at the present object."""
        self._unsubscribe()
        self._unsubscribe = lambda: None
        with contextlib.suppress(BackendError):
            self._unsubscribe = self._job.place.listen(self._reach.handle, self._woken.set)

    def _kill_if_due(self) -> None:
        """Have a cancelled job end: its head, as soon as it can be reached, saves first."""
        if self._cancel is not None and self.sight.head_runs:
            is_sent = self._reach.ask(self._cancel)
            self._cancel = None if is_sent else self._cancel
            self._show("" if is_sent else "The job is told to end as soon as its first pod can be reached")
        if self._kill_at is not None and self._clock.monotonic() > self._kill_at:
            with contextlib.suppress(BackendError):
                self._job.place.kill(self._reach.handle, 0.0)
                self._kill_at = self._cancel = None

    def _show(self, activity: str) -> None:
        if activity != self.activity:
            self.activity = activity
            self.sight.has_looked.set()
            self._job.on_change()

    # -- the end of a life --------------------------------------------------------------------------------------------

    def _end(self, life: FollowedLife, verdict: Verdict) -> bool:
        """End the job with a verdict, or renew it.

        Returns:
            Whether it is renewed.
        """
        job, copy = self._job, life.copy
        if life.reader is not None:
            life.reader.stop()
        if verdict.state is StateName.FAILED:
            life.keep_last_words()
        if verdict.may_restart and self._may_renew(life):
            return self._renew(life, verdict)
        if (left := self._clear_up(life, verdict)) is None:
            return False
        # A command exits once the job has ended; the head, and in warm pods the next job, waits for this acknowledgement.
        atexit.register(self._thread.join, _ACK_S)
        if copy.verdict is not None and copy.verdict.reason == verdict.reason:
            copy.release(note=left)
        else:
            if copy.verdict is None or verdict.reason not in copy.verdict.reason:
                copy.log(verdict.reason)
            copy.release(closing_events(verdict, job.status.status(), copy.last_attempt, self._clock.time()), note=left)
        if self.sight.head_runs and life.unreached is None:
            life.reach.ask(HeadClient.ack)
        atexit.unregister(self._thread.join)
        return False

    def _clear_up(self, life: FollowedLife, verdict: Verdict) -> str | None:
        """Fetch the results of a job that has ended, and end its pods.

        Returns:
            A sentence for the status, which may be empty; None if the thread is to end before.
        """
        if not life.record.is_started:
            # The lost object may be there still, and the next one, if a process that was killed since has made it.
            for handle in handles_of(self._job.place, self._job.record, life.record):
                with contextlib.suppress(BackendError):
                    self._job.place.kill(handle, 0.0)
            return ""
        for _ in self._looks():
            if life.fetch_results(verdict) and (left := life.end_pods(verdict)) is not None:
                return left
        return None

    def _may_renew(self, life: FollowedLife) -> bool:
        job, spec = self._job, self._job.record.spec
        # Warm pods that are lost are not made again: the next call makes others.
        may_restart = spec.kind != WARM and life.used_restarts < spec.policy.max_restarts
        # Another version's pods understand other orders.
        is_ours = job.key is not None and spec.version == VERSION
        return may_restart and is_ours and not records.canceller(job.files)

    def _renew(self, life: FollowedLife, verdict: Verdict) -> bool:
        """Write down that the job is renewed: it is, even if this process ends before the next object is made.

        Returns:
            Whether it is; not if the thread is to end while the last checkpoint is waited for.
        """
        how: str | None = ": its function is called again"
        if self._job.record.spec.saves:
            how = next((f", {origin}" for _ in self._looks() if (origin := life.fetch_checkpoint())), None)
        if how is not None:
            self._begin_next(life, f"{verdict.reason.rstrip('.')}. The job is renewed{how}")
        return how is not None

    def _begin_next(self, life: FollowedLife, text: str, head: Part | None = None) -> None:
        """Write the last events of a life, and the record of the next one."""
        copy, now = life.copy, self._clock.time()
        copy.log(text)
        last = Note(text=text, warns=life.resumes_with_less), JobState(state=StateName.PENDING, reason=text)
        copy.release([Event(what, now, attempt=copy.last_attempt + 1).record() for what in last])
        records.write_life(self._job.files, next_life(life, now, head=head))
        self.sight.forget()

    def _take_next_head(self, life: FollowedLife) -> bool:
        """Go on with the object's new head; whether `max_restarts` allows it."""
        look, was_suspended = self.sight.look, life.record.is_suspended
        # A head that comes back counts for itself.
        if was_suspended or look.returns_head or life.used_restarts < self._job.record.spec.policy.max_restarts:
            why = "The job was suspended, and is resumed" if was_suspended else "Its first pod was lost and made again"
            self._begin_next(life, why, look.head)
            return True
        reason = "The first pod of the job was lost and made again, and max_restarts allows no further restart"
        return self._end(life, Verdict(StateName.FAILED, FailureCause.LOST, reason))

    def _start(self, life: FollowedLife) -> Verdict | None:
        """Remove the object that was lost, and make the next one.

        Returns:
            A verdict on a job that was cancelled, or cannot be renewed; None once it has its object, or the thread is to end.
        """
        job, record = self._job, life.record
        while not self._stopped.is_set():
            if job.key is None:
                reason = f"The job's key is gone, without which it cannot be renewed ({job.files.key})"
                return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
            if who := records.canceller(job.files):
                return Verdict(StateName.CANCELLED, FailureCause.USER, f"The job was cancelled by {who}")
            self._show("The job is being renewed")
            try:
                # The next object needs the GPUs and the quota of the one that was lost.
                job.place.remove(life.reach.handle)
                made = self._make(record, job.key)
            except BackendError as error:
                self.sight.problem = f"{error}"
                job.on_change()
                if not error.retryable:
                    return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"The job could not be renewed: {error}")
            else:
                life.write(is_started=True, object=made.object, place=made.place)
                life.reach = self._reach = HeadReach(job, life.record)
                self._listen()
                return None
            finally:
                self._show("")
            self._wait(LOOK_S)
        return None

    def _make(self, life: Life, key: bytes) -> PlacedJob:
        """Make the object of a life, unless it is there: the follower of another machine, or a process that was killed since, has made it.

        Raises:
            BackendError: It cannot be made, or its name is another job's.
        """
        place, spec, checkpoint = self._job.place, self._job.record.spec, self._job.files.checkpoint
        try:
            return place.start(spec, key, life, checkpoint if checkpoint.exists() else None)
        except JobExistsError:
            made, _ = place.adopt(JobRef.parse(self._job.record.ref), trust=None)
            if (made.life, made.spec.snapshot) != (life.number, spec.snapshot):
                name = place.object_name(spec.name, life.number)
                raise BackendError(f"The name {name} is taken by something else") from None
            return made
