"""Follows one unfinished job from this process: copies what its heads say, decides how it ended, starts its next run.

Everything it learns is written into the job's folder on this machine, so that every reader of a job reads files. One
process follows a job at a time (a lock in its folder); the others read, and one of them takes over when it ends.

A head's UID identifies the run. If a run lost pods through no fault of the job, another one resumes from the last
checkpoint, as long as `max_restarts` allows it; after a suspended run another one starts, which does not count. The next run's object is named
`<name>-2`: if that name is taken, the follower of another machine was first, and its run is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from kale_dist.errors import BackendError, JobExistsError, KaleDistError, StoreError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, Place, RunHandle
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Record, Run
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.spec.place_settings import PENDING_TIMEOUT_S
from kale_dist.places.following.client import HeadClient
from kale_dist.places.following.copy import Clock, HeadReader, RunCopy
from kale_dist.places.following.results import Results
from kale_dist.places.following.verdict import (
    RETRIED,
    closing_events,
    explains_loss,
    judge,
    judge_part,
    judge_trouble,
    lost_part,
)
from kale_dist.wire import EventKind, FailureCause, StateName, Verdict

LOOK_S = 1.0
"""How often a place is looked at that has not said that something changed."""

FIRST_LOOK_S = 10.0
"""How long a first question about a job waits for a place that is slow to answer."""

LOCK_S = 2.0
"""How often a process that only reads looks whether the one that follows has ended."""

HEAD_S = 40.0
"""A head learns within 30 s (TCP's) that another pod is gone, and ends the run. One that has not said so 10 s later never
will: that pod ended before it reached the head."""

GIVE_UP_S = 5.0
"""A trouble that does not heal ends the job when it has been seen for so long: a first look may see half of it."""

ACT_WITHIN_S = 300.0
"""So long a job waits for somebody to mend what only a person can, unless its `pending_timeout_s` says otherwise."""

EXPLAIN_S = 10.0
"""A place may need so long to say what became of a pod that the head has lost."""

_NAMED = 5
_MADE_AGAIN = RETRIED - {"killed"}
"""How a pod is lost that its controller may make again."""

CANCEL_MARGIN_S = 10.0
"""A cancelled job whose pods still run so long after its ranks' grace is killed."""


def handle_of(place: Place, record: Record, run: Run) -> RunHandle:
    """What a place needs to find a run."""
    return RunHandle(
        ref=JobRef.parse(record.ref),
        object=run.object or place.object_name(record.spec.name, run.number),
        run=run.number,
        spec=record.spec,
        place=run.place or record.place,
    )


class Follower:
    """One job's follower; its thread ends with the job.

    Args:
        place: Where the job runs.
        record: The job.
        key: Its secret bytes; None if this user has none.
        on_lines: Called when the log here has grown.
        on_change: Called when something else about the job may have changed.
        clock: Time; tests have one of their own.
    """

    def __init__(
        self,
        *,
        place: Place,
        record: Record,
        key: bytes | None,
        on_lines: Callable[[], None],
        on_change: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self.look = Look(fresh=False)
        """What the place saw last."""
        self.problem = ""
        """Why the place does not answer, or why nothing can be written here, as a sentence."""
        self.activity = ""
        """What it does that takes time, as a sentence."""
        self._place = place
        self._record = record
        self._spec: JobSpec = record.spec
        self._key = key
        self._on_lines = on_lines
        self._on_change = on_change
        self._clock = clock or Clock()
        self._files = records.files(record.name)
        self._status = JobReader(record.name, lambda _: True)
        self._run = records.runs(record.name)[-1]
        self._handle = handle_of(place, record, self._run)
        self._opened: RunCopy | None = None
        self._reader: HeadReader | None = None
        self._input: threading.Thread | None = None
        self._input_error: KaleDistError | None = None
        self._kill_at: float | None = None
        self._seen_s: dict[str, float] = {}
        self._looked_at = self._clock.monotonic()
        self._between_looks_s = 0.0
        self._decided: Verdict | None = None
        self._heard: set[str] = set()
        self._was_suspended = False
        self._unsubscribe: Callable[[], None] = lambda: None
        self._woken = threading.Event()
        self._looked = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kale_dist follow {record.name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still follows."""
        return self._thread.is_alive()

    @property
    def _copy(self) -> RunCopy:
        if self._opened is None:
            raise StoreError(f"{self._files.folder} is followed by another process")
        return self._opened

    def client(self) -> HeadClient | None:
        """For requests to the head of the newest run; None where this user has no key."""
        handle = self._handle
        return None if self._key is None else HeadClient(lambda: self._place.connect(handle), self._key)

    def wait_for_look(self) -> None:
        """Wait for the first look, and for the end of a run that has ended: what a new process shows first is then true."""
        self._looked.wait(FIRST_LOOK_S)
        # Not a second time: large results take a while.
        self._looked.set()

    def wake(self) -> None:
        """Look at once."""
        self._woken.set()

    def stop(self) -> None:
        """Follow no more; what the job does from here on is found later."""
        self._stopped.set()
        self._woken.set()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait until it has stopped."""
        self._thread.join(timeout_s)

    def cancel(self, grace_s: float) -> None:
        """End the job: by its head, which ends the ranks well; else by its place.

        Args:
            grace_s: Seconds that ranks may take to end by themselves.

        Raises:
            BackendError: The place cannot be reached either.
        """
        records.mark_cancelled(self._files)
        self._kill_at = self._clock.monotonic() + grace_s + CANCEL_MARGIN_S
        client = self.client()
        asked = False
        if client is not None:
            with contextlib.suppress(BackendError, StoreError):
                client.cancel(grace_s)
                asked = True
        if not asked:
            self._place.kill(self._handle, grace_s)
        self.wake()

    def fetch(self, name: str) -> bool:
        """Bring a file of the newest run here, as it is now; see `Results.fetch`."""
        return self._results().fetch(name)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._listen()
        try:
            with records.opened_lock(self._files) as lock:
                while not records.try_lock(lock):
                    # Another process follows. This one only looks, for what it shows until then.
                    self._run = records.runs(self._record.name)[-1]
                    self._handle = handle_of(self._place, self._record, self._run)
                    self._look()
                    self._kill_if_due()
                    if self._stopped.is_set() or self._status.status().is_final:
                        return
                    self._wait(LOCK_S)
                self._open_newest_run()
                while not self._stopped.is_set() and not self._step():
                    self._wait(LOOK_S)
        except KaleDistError as error:
            # The disk is full: the next question about the job tries again. Or the job was deleted.
            self.problem = f"{error}"
        finally:
            self._looked.set()
            self._close_run()
            self._unsubscribe()
            self.activity = ""
            self._on_change()

    def _listen(self) -> None:
        self._unsubscribe()
        self._unsubscribe = lambda: None
        with contextlib.suppress(BackendError):
            self._unsubscribe = self._place.listen(self._handle, self._woken.set)

    def _wait(self, seconds: float) -> None:
        self._clock.wait(self._woken, seconds)
        self._woken.clear()

    def _look(self) -> None:
        now = self._clock.monotonic()
        self._looked_at, self._between_looks_s = now, min(now - self._looked_at, 2 * LOOK_S)
        before = self.look, self.problem
        try:
            self.look, self.problem = self._place.look(self._handle), ""
        except BackendError as error:
            self.problem = f"{error}"
        has_ended = self.look.head is not None and self.look.head.state == "ended"
        if self.problem or (self.look.fresh and not has_ended):
            self._looked.set()
        if (self.look, self.problem) != before:
            self._on_change()

    def _step(self) -> bool:
        """Look at everything once; whether the job is over."""
        if self._status.status().is_final:
            return True
        if not self._run.is_started:
            return self._start_run()
        self._look()
        self._kill_if_due()
        if self._reader is not None and self._reader.error is not None:
            raise self._reader.error
        if self.problem:
            return False
        head = self.look.head
        if head is not None and not self._run.uid:
            self._write_run(uid=head.uid)
        if head is not None and head.uid != self._run.uid:
            return self._follow_new_head(head)
        if head is not None and head.state == "running" and self._run.is_suspended and not self.look.suspended:
            # It was resumed before its pods were gone.
            self._write_run(is_suspended=False)
        if head is not None and head.state != "waiting" and self._reader is None:
            self._reader = self._read_head()
        if head is not None and head.state == "running" and self._input is None:
            self._send_input()
        return self._end_if_ended()

    # -- one run ------------------------------------------------------------------------------------------------------

    def _open_newest_run(self) -> None:
        self._run = records.runs(self._record.name)[-1]
        self._handle = handle_of(self._place, self._record, self._run)
        self._listen()
        self._opened = RunCopy(self._run.files, self._on_lines, self._on_change)
        if not self._run.files.run_facts.exists():
            records.write_run(dataclasses.replace(self._run, object=self._handle.object))

    def _close_run(self) -> None:
        if self._reader is not None:
            self._reader.stop()
        if self._opened is not None:
            self._opened.close()
        self._reader = self._opened = self._input = self._input_error = self._decided = None
        self._seen_s.clear()

    def _write_run(self, **changes: Any) -> None:
        self._run = dataclasses.replace(self._run, **changes)
        records.write_run(self._run)

    def _read_head(self) -> HeadReader:
        uid = self._run.uid

        def has_ended() -> bool:
            head = self.look.head
            if head is not None:
                return head.uid != uid or head.state == "ended"
            # A head that is missing in a look which lags may only not have been seen yet.
            return self.look.fresh

        return HeadReader(
            place=self._place, handle=self._handle, client=self.client(), copy=self._copy, has_ended=has_ended,
            on_end=self._woken.set, clock=self._clock,
        )  # fmt: skip

    def _send_input(self) -> None:
        handle, key = self._handle, self._key

        def send() -> None:
            try:
                if key is not None:
                    self._place.send_input(handle, key, self._show)
            except KaleDistError as error:
                self._input_error = error
            self._show("")

        self._input = threading.Thread(target=send, name=f"kale_dist input {handle.object}", daemon=True)
        self._input.start()

    def _results(self) -> Results:
        return Results(
            place=self._place, handle=self._handle, files=self._run.files, client=self.client(), look=self.look,
            on_progress=self._show,
        )  # fmt: skip

    def _show(self, activity: str) -> None:
        if activity != self.activity:
            self.activity = activity
            self._on_change()

    def _kill_if_due(self) -> None:
        if self._kill_at is not None and self._clock.monotonic() > self._kill_at:
            self._kill_at = None
            with contextlib.suppress(BackendError):
                self._place.kill(self._handle, 0.0)

    # -- the end of a run ---------------------------------------------------------------------------------------------

    def _end_if_ended(self) -> bool:
        look, copy, reader = self.look, self._copy, self._reader
        head = look.head
        if look.suspended:
            self._was_suspended = True
            if self._run.uid and not self._run.is_suspended:
                self._write_run(is_suspended=True)
        elif self._was_suspended:
            # From here on it counts how long the job waits for its pods.
            self._was_suspended = False
            self._write_run(began=self._clock.time())
        if not look.fresh:
            return False
        is_read = reader is None or reader.is_drained
        if self._decided is not None:
            return (is_read or self._lasts("decided", CANCEL_MARGIN_S)) and self._end(self._decided)
        if copy.verdict is not None:
            if not copy.is_complete and not is_read:
                return False
            is_explained = explains_loss(copy.verdict.cause, look, self._spec.topology.number_of_pods)
            if not (is_explained or records.canceller(self._files) or self._lasts("lost", EXPLAIN_S)):
                return False
            return self._end(judge(copy.verdict, look, self._spec, canceller=records.canceller(self._files)))
        is_gone = head is None and bool(self._run.uid or look.gone or look.finished)
        if is_gone or (head is not None and head.state == "ended"):
            if not is_read and reader is not None:
                reader.hurry()
                return False
            return self._end(judge(None, look, self._spec, canceller=records.canceller(self._files)))
        self._decided = self._hopeless(look)
        if self._decided is not None:
            with contextlib.suppress(BackendError):
                self._place.kill(self._handle, 0.0, self._decided.reason)
        return False

    def _hopeless(self, look: Look) -> Verdict | None:
        """How a run ends that its head will never end."""
        error = self._input_error
        if error is not None and not getattr(error, "retryable", False):
            reason = f"The snapshot could not be sent to the job: {error}"
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
        if error is not None:
            self._input = self._input_error = None
        if self._lasts("gone", HEAD_S, seen=look.gone):
            # The object was deleted without its pods (--cascade=orphan), which only the head can end now.
            client = self.client()
            if client is not None:
                with contextlib.suppress(BackendError, StoreError):
                    client.cancel(0.0)
            return judge(None, look, self._spec)
        waits = look.head is None or any(part.state == "waiting" for part in look.parts)
        trouble = look.trouble if waits and not (look.suspended or look.gone) else None
        limit_s = self._spec.cluster.pending_timeout_s
        waited_s = self._clock.time() - (self._run.began or self._record.created)
        if waits and limit_s is not None and waited_s > limit_s and not look.suspended and not self._copy.has_started:
            reason = f"The job has not started within its pending_timeout_s of {limit_s:g} s"
            reason += f". {look.trouble}" if look.trouble is not None else ""
            return Verdict(StateName.FAILED, FailureCause.TIMEOUT, reason)
        if self._lasts("trouble", GIVE_UP_S, seen=trouble is not None and not trouble.heals) and trouble is not None:
            return judge_trouble(trouble)
        is_stuck = trouble is not None and trouble.needs_action and limit_s == PENDING_TIMEOUT_S
        if self._lasts("stuck", ACT_WITHIN_S, seen=is_stuck) and trouble is not None:
            remedy = f"{trouble.remedy} Jobs wait {ACT_WITHIN_S / 60:.0f} minutes for that, or as long as pending_timeout_s= says."
            return judge_trouble(dataclasses.replace(trouble, remedy=remedy))
        part = lost_part(look)
        if self._lasts("part", HEAD_S, seen=part is not None) and part is not None:
            return judge_part(part, look, self._spec)
        return None

    def _lasts(self, name: str, seconds: float, *, seen: bool = True) -> bool:
        """Whether something was seen at each look for that long; to be asked at each look.

        Time in which this machine slept does not count: what it has seen before it slept is old.
        """
        if not seen:
            self._seen_s.pop(name, None)
            return False
        self._seen_s[name] = self._seen_s.get(name, -self._between_looks_s) + self._between_looks_s
        return self._seen_s[name] >= seconds

    def _end(self, verdict: Verdict) -> bool:
        """End the job, or have its next run."""
        if self._run.is_suspended and (verdict.cause is FailureCause.SUSPENDED or verdict.may_restart):
            # The next run begins with the next head in the same object, however long that takes.
            return False
        if self._reader is not None:
            self._reader.stop()
        if verdict.state is StateName.FAILED:
            self._results().keep_last_words(self._copy, self._heard)
        copy = self._copy
        may_go_on = verdict.may_restart and self._key is not None and not records.canceller(self._files)
        if may_go_on and self._used_restarts() < self._spec.policy.max_restarts:
            self._plan_run(verdict.reason)
            return False
        if not self._results().fetch_all(verdict, copy, self._status.status()):
            return False
        left = self._end_pods(verdict)
        if left is None:
            return False
        if copy.verdict is not None and copy.verdict.reason == verdict.reason:
            copy.release(note=left)
        else:
            if copy.verdict is None or verdict.reason not in copy.verdict.reason:
                copy.say(verdict.reason)
            events = closing_events(verdict, self._status.status(), copy.last_attempt, self._clock.time())
            copy.release(events, note=left)
        client = self.client()
        if client is not None and self.look.head is not None and self.look.head.state == "running":
            with contextlib.suppress(BackendError, StoreError):
                client.ack()
        return True

    def _end_pods(self, verdict: Verdict) -> str | None:
        """See that no pod of an ended job starts any more, and that none runs on; a head that has ended the job leaves by itself.

        Returns:
            A sentence for the status about pods that had not started. None if the place has to be asked again.
        """
        look, head, handle, noun = self.look, self.look.head, self._handle, self._place.noun
        if verdict.state is StateName.SUCCEEDED or look.gone or self._key is None:
            return ""
        if not self._run.is_started:
            handle = handle_of(self._place, self._record, records.runs(self._record.name)[-2])
        waiting = [part.name for part in look.parts if part.state == "waiting"]
        others = [part for part in look.parts if part.number and (part.state != "ended" or part.lost in _MADE_AGAIN)]
        leaves = (
            head is not None and head.uid == self._run.uid and head.lost not in _MADE_AGAIN
            and (head.state == "ended" or self._copy.verdict is not None)
        )  # fmt: skip
        if leaves and not others and len(look.parts) == self._spec.topology.number_of_pods:
            return ""
        why = verdict.reason if verdict.state is StateName.FAILED else ""
        try:
            self._place.kill(handle, 0.0, why, head_leaves=leaves)
        except BackendError as error:
            if error.retryable and not self._lasts("pods", EXPLAIN_S):
                return None
            return f"Some {noun}s of the job may still run or start, because they could not be ended: {error}"
        names = ", ".join(waiting[:_NAMED])
        return f"{len(waiting)} {noun}s had not started when the job ended, and are removed: {names}" if names else ""

    # -- the next run -------------------------------------------------------------------------------------------------

    def _used_restarts(self) -> int:
        """How many restarts all runs have used, in their heads and as runs of their own."""
        last = self._copy.last_attempt
        free = sum(run.is_free for run in records.runs(self._record.name))
        return self._run.first_attempt + last - free

    def _plan_run(self, reason: str, *, uid: str = "", is_free: bool = False) -> None:
        """End the present run and record the next one, so that it starts even if this process ends.

        Args:
            reason: Why the present run ended.
            uid: Of the next run's head, if it is there already, in the same object.
            is_free: Whether the next run does not count against `max_restarts`.
        """
        copy, run = self._copy, self._run
        if not uid and not run.files.checkpoint.exists():
            with contextlib.suppress(BackendError, StoreError):
                self.fetch(run.files.checkpoint.name)
        fresh = Run(
            number=run.number + 1,
            files=self._files.run(run.number + 1),
            object=self._handle.object if uid else self._place.object_name(self._spec.name, run.number + 1),
            uid=uid,
            first_attempt=run.first_attempt + copy.last_attempt + 1,
            began=self._clock.time(),
            is_started=bool(uid),
            is_free=is_free,
            place=self._handle.place if uid else (),
        )
        text = f"Run {run.number} of the job ended: {reason.rstrip('.')}. Run {fresh.number} starts"
        if not uid:
            text += " from the last checkpoint" if self._newest_checkpoint() else " from the beginning"
        copy.say(text)
        common = {"time": self._clock.time(), "attempt": copy.last_attempt + 1, "rank": None}
        note = {**common, "event": EventKind.NOTE, "text": text}
        state = {**common, "event": EventKind.STATE, "state": StateName.PENDING, "reason": text, "cause": ""}
        copy.release([note, state])
        records.write_run(fresh)
        self._close_run()
        self._open_newest_run()
        self.look = Look(fresh=False)
        self.wake()

    def _newest_checkpoint(self) -> bool:
        return any(run.files.checkpoint.exists() for run in records.runs(self._record.name))

    def _start_run(self) -> bool:
        """Create the objects of the run that was planned; whether the job is over because that cannot be."""
        runs = records.runs(self._record.name)
        if who := records.canceller(self._files):
            reason = f"The job was cancelled by {who}"
            return self._end(Verdict(StateName.CANCELLED, FailureCause.USER, reason))
        if self._key is None:
            return True
        checkpoints = [run.files.checkpoint for run in runs if run.files.checkpoint.exists()]
        self._show(f"Run {self._run.number} is being started")
        try:
            # What the run before it holds (GPUs, quota) is what this one needs.
            self._place.remove(handle_of(self._place, self._record, runs[-2]))
            try:
                self._handle = self._place.start(
                    self._spec,
                    self._key,
                    run=self._run.number,
                    checkpoint=checkpoints[-1] if checkpoints else None,
                    used_restarts=self._run.first_attempt - sum(run.is_free for run in runs),
                )
            except JobExistsError:
                # The follower of another machine was first, or this one before it was killed: it is the same run.
                theirs, _ = self._place.adopt(self._handle.ref, trust=None)
                self._handle = dataclasses.replace(handle_of(self._place, self._record, self._run), place=theirs.place)
        except BackendError as error:
            self.problem = f"{error}"
            self._on_change()
            if error.retryable:
                return False
            reason = f"Run {self._run.number} of the job could not be started: {error}"
            return self._end(Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason))
        finally:
            self._show("")
        place = () if self._handle.place == self._record.place else self._handle.place
        self._write_run(is_started=True, object=self._handle.object, place=place)
        self._listen()
        return False

    def _follow_new_head(self, head: Part) -> bool:
        """The object has another head: it was resumed after a suspension, or its operator made a deleted pod again."""
        reader = self._reader
        if reader is not None and not reader.is_drained:
            reader.hurry()
            return False
        is_free = self._run.is_suspended
        if is_free or self._used_restarts() < self._spec.policy.max_restarts:
            why = "it was suspended, and now it is resumed" if is_free else "its first pod was lost and made again"
            self._plan_run(why, uid=head.uid, is_free=is_free)
            return False
        reason = "The first pod of the job was lost and made again, and max_restarts allows no further run"
        return self._end(Verdict(StateName.FAILED, FailureCause.LOST, reason))
