"""Follows one unfinished job: has its log copied, decides how its runs ended, fetches its results, starts its next run.

A follower writes everything into the job's folder on this machine, so that every reader of a job reads files. One process
follows a job at a time (a lock in its folder). The other processes read, and one of them takes over when the first ends.

A run is one life of a head, identified by the head's UID. If a run lost pods through no fault of the job, the next one resumes
from the last checkpoint, as long as `max_restarts` allows it; a run after a suspended one does not count. Its object is named
`<name>-2`: if that name is taken, the follower of another machine was first, and this one follows the same run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kale_dist.errors import BackendError, JobExistsError, KaleDistError, StoreError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, Place, RunHandle
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Record, Run
from kale_dist.job.spec.job_spec import WARM, JobSpec
from kale_dist.job.spec.place_settings import PENDING_TIMEOUT_S
from kale_dist.places.following.client import HeadClient
from kale_dist.places.following.copy import Clock, HeadReader, RunCopy
from kale_dist.places.following.verdict import (
    RETRIED,
    closing_events,
    explains_loss,
    judge,
    judge_part,
    judge_trouble,
    lost_part,
)
from kale_dist.places.following.warm import prefix_of
from kale_dist.wire import SAVE_LIMIT_S, EventKind, FailureCause, StateName, Verdict
from kale_dist.wire.blobs import FolderStore

LOOK_S = 1.0
"""How often a follower looks at a place that reports no change."""

FIRST_LOOK_S = 10.0
"""How long the first status of a job waits for the place."""

LOCK_S = 2.0
"""How often a process that does not follow tries to get the lock."""

HEAD_S = 40.0
"""A head learns within 30 s (TCP's) that another pod is gone, and ends the run. If it has not done so 10 s later, it never will:
that pod ended before it had reached the head."""

GIVE_UP_S = 5.0
"""A trouble that does not heal ends the job after so long: the first look may have seen only a part of the run."""

ACT_WITHIN_S = 300.0
"""How long a job waits for a person to mend what does not heal by itself, unless its `pending_timeout_s` says otherwise."""

EXPLAIN_S = 10.0
"""How long a place may need to report why a pod that the head has lost is gone."""

MAX_PODS, MAX_LINES, MAX_BYTES = 3, 20, 1 << 14
"""How many failed pods have their last output copied into the log, and how much of it: the first that failed say why."""

_NAMED = 5
_ACK_S = 5.0
_MIB = 1 << 20
FIRST_SIGNAL = 128
"""Pods with an exit code from here on may be made again: a signal has ended them, or they had lost the head."""

_MADE_AGAIN = RETRIED - {"killed"}
"""Losses of pods that their controller may make again."""

CANCEL_MARGIN_S = 10.0
"""The pods of a cancelled job are killed so long after the grace of its ranks."""


def handle_of(place: Place, record: Record, run: Run) -> RunHandle:
    """The handle by which a place finds a recorded run."""
    return RunHandle(
        ref=JobRef.parse(record.ref),
        object=run.object or place.object_name(record.spec.name, run.number),
        run=run.number,
        spec=record.spec,
        place=run.place or record.place,
    )


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
        clock: Clock | None = None,
    ) -> None:
        self.look = Look(fresh=False)
        """The place's last report."""
        self.problem = ""
        """Why the place does not answer, or why the job's folder cannot be written, as a sentence."""
        self.activity = ""
        """What the follower does at the moment that takes time, as a sentence."""
        self._place = place
        self._record = record
        self._spec: JobSpec = record.spec
        # Warm pods that are lost are not made again: the next call makes others.
        self._max_restarts = 0 if record.spec.kind == WARM else record.spec.policy.max_restarts
        self._key = key
        self._on_lines = on_lines
        self._on_change = on_change
        self._clock = clock or Clock()
        self._files = records.files(record.name)
        self._status = JobReader(record.name, lambda _: True)
        self._take_newest_run()
        self._opened: RunCopy | None = None
        self._reader: HeadReader | None = None
        self._input: threading.Thread | None = None
        self._input_error: KaleDistError | None = None
        self._kill_at: float | None = None
        self._last_checkpoint: pathlib.Path | None = None
        """A run's checkpoint that came after its end: there is no later one."""
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
        """Whether the thread still follows the job."""
        return self._thread.is_alive()

    @property
    def _copy(self) -> RunCopy:
        if self._opened is None:
            raise StoreError(f"{self._files.folder} is followed by another process")
        return self._opened

    def wait_for_look(self) -> None:
        """Wait for the first look, and if the head has ended for the verdict: a new process then shows no outdated status first."""
        self._looked.wait(FIRST_LOOK_S)
        # Only the first status waits: large results take a while.
        self._looked.set()

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
            grace_s: Seconds that ranks may take to end by themselves.
            save: Whether ranks that can write one more checkpoint before.

        Raises:
            BackendError: Neither head nor place can be reached.
        """
        records.mark_cancelled(self._files)
        self._kill_at = self._clock.monotonic() + (SAVE_LIMIT_S if save else 0.0) + grace_s + CANCEL_MARGIN_S
        if not self._ask_head(lambda head: head.cancel(grace_s, save=save)):
            self._place.kill(self._handle, grace_s)
        self._woken.set()

    def tell(self, rank: int, message: Mapping[str, Any], blobs: Iterable[str]) -> bool:
        """Have the head pass a message on to a rank, once it has some blobs; returns whether the head has it."""

        def tell(head: HeadClient) -> None:
            head.upload(FolderStore(records.blobs_dir()), blobs)
            head.tell(rank, message)

        return self._ask_head(tell)

    def fetch(self, name: str) -> bool:
        """Fetch a file of the newest run as it is now: from the head while it runs, else from the place.

        Args:
            name: Of an outcome, or `checkpoint`.

        Returns:
            Whether the file was there.

        Raises:
            StoreError: The file cannot be written here.
            BackendError: The place, or a head that runs, cannot be reached.
        """
        files, handle, client = self._run.files, self._handle, self._client()
        target, unreached = files.folder / name, None
        if client is not None and self._head_runs:
            try:
                client.fetch_file(name, target, self._show_fetched)
            except BackendError as error:
                unreached = error
            except StoreError:
                if not files.folder.exists():
                    raise
            else:
                return True
            finally:
                self._show("")
        came = self._place.fetch(handle, name, target)
        if unreached is not None and not came:
            # The head may have it still.
            raise unreached
        return came

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._listen()
        try:
            with records.opened_lock(self._files) as lock:
                while not records.try_lock(lock):
                    # Another process follows the job. This one only looks, for the status that it shows.
                    self._take_newest_run()
                    self._look()
                    self._kill_if_due()
                    if self._stopped.is_set() or self._status.status().is_final:
                        return
                    self._wait(LOCK_S)
                self._open_newest_run()
                while not self._stopped.is_set() and not self._step():
                    self._wait(LOOK_S)
        except KaleDistError as error:
            # The disk is full, and the next call for the job's status tries again. Or the job was deleted.
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
        """Do what the job needs now: start its run, connect to its head, send its input, end it.

        Returns:
            Whether the job is over.
        """
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
        if (head := self.look.head) is not None:
            if not self._run.uid:
                self._write_run(uid=head.uid)
            if head.uid != self._run.uid:
                return self._follow_new_head(head)
            if head.state != "waiting" and self._reader is None:
                self._reader = self._read_head()
            if head.state == "running" and self._input is None:
                self._send_input()
        self._note_suspension()
        verdict = self._find_verdict() if self.look.fresh else None
        return verdict is not None and self._end(verdict)

    # -- one run ------------------------------------------------------------------------------------------------------

    def _take_newest_run(self) -> None:
        self._run = records.runs(self._record.name)[-1]
        self._handle = handle_of(self._place, self._record, self._run)

    def _open_newest_run(self) -> None:
        self._take_newest_run()
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
            # In a look that is not up to date, the head may only be missing so far.
            return self.look.fresh

        return HeadReader(
            place=self._place, handle=self._handle, client=self._client(), copy=self._copy, has_ended=has_ended,
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

    def _client(self) -> HeadClient | None:
        """A client of the newest run's head; None if this user has no key."""
        handle = self._handle
        return (
            None if self._key is None else HeadClient(lambda: self._place.connect(handle), self._key, prefix_of(handle))
        )

    def _ask_head(self, request: Callable[[HeadClient], None]) -> bool:
        """Send a request to the head; returns whether the head has it."""
        client = self._client()
        with contextlib.suppress(BackendError, StoreError):
            if client is not None:
                request(client)
                return True
        return False

    @property
    def _head_runs(self) -> bool:
        return self.look.head is not None and self.look.head.state == "running"

    def _show(self, activity: str) -> None:
        if activity != self.activity:
            self.activity = activity
            self._on_change()

    def _show_fetched(self, done: int, total: int) -> None:
        if total > _MIB:
            self._show(f"Fetching results: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB")

    def _kill_if_due(self) -> None:
        if self._kill_at is not None and self._clock.monotonic() > self._kill_at:
            self._kill_at = None
            with contextlib.suppress(BackendError):
                self._place.kill(self._handle, 0.0)

    # -- the end of a run ---------------------------------------------------------------------------------------------

    def _note_suspension(self) -> None:
        """Record whether the run is suspended. `pending_timeout_s` counts from the end of a suspension."""
        is_suspended = bool(self.look.suspended)
        if is_suspended and self._run.uid and not self._run.is_suspended:
            self._write_run(is_suspended=True)
        elif self._run.is_suspended and not is_suspended and self._head_runs:
            # The run was resumed before its pods were gone.
            self._write_run(is_suspended=False)
        if self._was_suspended and not is_suspended:
            self._write_run(began=self._clock.time())
        self._was_suspended = is_suspended

    def _find_verdict(self) -> Verdict | None:
        """The verdict on a run that has ended, and of which everything is read; None for any other run.

        A run that its head will never end is killed first.
        """
        look, copy, reader, head = self.look, self._copy, self._reader, self.look.head
        is_read = reader is None or reader.is_drained
        if self._decided is not None:
            return self._decided if is_read or self._lasts("decided", CANCEL_MARGIN_S) else None
        if copy.verdict is not None:
            if not copy.is_complete and not is_read:
                return None
            is_explained = explains_loss(copy.verdict.cause, look, self._spec.topology.number_of_pods)
            is_known = is_explained or records.canceller(self._files) or self._lasts("lost", EXPLAIN_S)
            return self._judge(copy.verdict) if is_known else None
        is_gone = head is None and bool(self._run.uid or look.gone or look.finished)
        if is_gone or (head is not None and head.state == "ended"):
            if reader is None or reader.is_drained:
                return self._judge(None)
            reader.hurry()
            return None
        self._decided = self._give_up(look)
        if self._decided is not None:
            with contextlib.suppress(BackendError):
                self._place.kill(self._handle, 0.0, self._decided.reason)
        return None

    def _judge(self, said: Verdict | None) -> Verdict:
        return judge(said, self.look, self._status.status(), canceller=records.canceller(self._files))

    def _give_up(self, look: Look) -> Verdict | None:
        """The verdict on a run that its head will never end; None while the head may still end it."""
        error = self._input_error
        if error is not None and not getattr(error, "retryable", False):
            reason = f"The snapshot could not be sent to the job: {error}"
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
        if error is not None:
            self._input = self._input_error = None
        if self._lasts("gone", HEAD_S, seen=look.gone):
            # The object was deleted without its pods (--cascade=orphan), which only the head can end now.
            self._ask_head(lambda head: head.cancel(0.0))
            return judge(None, look, self._status.status())
        waits = look.head is None or any(part.state == "waiting" for part in look.parts)
        # A head whose ranks have run waits for pods that are made again, so long as it can go on with them.
        head_waits = look.replaces and self._head_runs and self._copy.has_started
        trouble = look.trouble if waits and not (look.suspended or look.gone or head_waits) else None
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
        if head_waits and part is not None and (part.lost in _MADE_AGAIN or (part.exit_code or 0) >= FIRST_SIGNAL):
            part = None
        if look.trouble is not None and look.trouble.cause is FailureCause.USER:
            # The pods of a job that a person has ended are deleted one by one; many take longer than this waits.
            part = None
        if self._lasts("part", HEAD_S, seen=part is not None) and part is not None:
            return judge_part(part, look, self._status.status())
        return None

    def _lasts(self, name: str, seconds: float, *, seen: bool = True) -> bool:
        """Count how long a condition has been seen at every look; called at every look.

        Time in which this machine slept does not count.

        Returns:
            Whether that is `seconds` or more.
        """
        if not seen:
            self._seen_s.pop(name, None)
            return False
        self._seen_s[name] = self._seen_s.get(name, -self._between_looks_s) + self._between_looks_s
        return self._seen_s[name] >= seconds

    def _end(self, verdict: Verdict) -> bool:
        """End the job with a verdict, or plan its next run.

        Returns:
            Whether the job is over. If not, it is asked again at the next look.
        """
        is_suspended = self._run.is_suspended and (verdict.cause is FailureCause.SUSPENDED or verdict.may_restart)
        if is_suspended or (verdict.may_restart and self._head_comes_back):
            # The next run begins with the next head of the same object.
            return False
        if self._reader is not None:
            self._reader.stop()
        if verdict.state is StateName.FAILED:
            self._keep_last_words()
        copy, join = self._copy, self._thread.join
        may_go_on = verdict.may_restart and self._key is not None and not records.canceller(self._files)
        if may_go_on and self._used_restarts() < self._max_restarts:
            self._plan_run(verdict.reason)
            return False
        if not self._fetch_results(verdict):
            return False
        left = self._end_pods(verdict)
        if left is None:
            return False
        # A command exits once the job has ended; the head, and in warm pods the next job, waits to hear that the results are here.
        atexit.register(join, _ACK_S)
        if copy.verdict is not None and copy.verdict.reason == verdict.reason:
            copy.release(note=left)
        else:
            if copy.verdict is None or verdict.reason not in copy.verdict.reason:
                copy.say(verdict.reason)
            events = closing_events(verdict, self._status.status(), copy.last_attempt, self._clock.time())
            copy.release(events, note=left)
        if self._head_runs:
            self._ask_head(HeadClient.ack)
        atexit.unregister(join)
        return True

    @property
    def _head_comes_back(self) -> bool:
        """Whether the controller makes the first pod again, which was lost: it has not judged the job."""
        look, said, head = self.look, self._copy.verdict, self.look.head
        has_judged = (
            said.cause is not FailureCause.SUSPENDED if said is not None else head is not None and head.exit_code == 1
        )
        return look.returns_head and not (has_judged or look.finished or records.canceller(self._files))

    def _end_pods(self, verdict: Verdict) -> str | None:
        """Have the place end all pods of a job that has ended, so that none starts later. A head with a verdict ends by itself.

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

    # -- what the end of a run needs ----------------------------------------------------------------------------------

    def _fetch_results(self, verdict: Verdict) -> bool:
        """Fetch the outcomes of a run that has ended, and the last checkpoint of one that has not succeeded.

        Returns:
            Whether everything is here that will ever be.
        """
        if self._key is None or self._spec.kind == WARM:
            return True
        copy, files, status = self._copy, self._run.files, self._status.status()
        is_success = verdict.state is StateName.SUCCEEDED
        # Parameter servers, and the workers that serve them, are ended when the chief returns, and return nothing.
        returning = status.replicas[:1] if self._spec.cluster.servers else status.replicas
        ranks = [replica.rank for replica in returning if replica.rank not in verdict.lost] if is_success else []
        if verdict.rank is not None and copy.verdict is not None:
            ranks.append(verdict.rank)
        names = [files.outcome(copy.last_attempt, rank).name for rank in ranks]
        if status.checkpoint_epoch is not None and not is_success:
            names.append(files.checkpoint.name)
        missing = [name for name in names if not self._is_here(name)]
        if not missing or not is_success:
            return True
        if self._head_runs:
            # Results are worth waiting for: the head keeps them for `collect_wait_s`.
            self._show("The results could not be fetched yet")
            return False
        what = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
        copy.say(f"Results could not be fetched, because the head ended before they were fetched: {what}")
        return True

    def _is_here(self, name: str) -> bool:
        """Whether a file of the run is here, after an attempt to fetch it. A checkpoint that is here may be an earlier one."""
        path = self._run.files.folder / name
        is_earlier = path == self._run.files.checkpoint != self._last_checkpoint
        if is_earlier or not path.exists():
            with contextlib.suppress(BackendError):
                if self.fetch(name) and is_earlier:
                    self._last_checkpoint = path
        return path.exists()

    def _keep_last_words(self) -> None:
        """Copy the last output of other pods that failed into the log: their agents may not have reached the head."""
        failed = [part for part in self.look.parts if part.number and part.state == "ended" and part.exit_code]
        for part in [part for part in failed[:MAX_PODS] if part.uid not in self._heard]:
            self._heard.add(part.uid)
            with contextlib.suppress(BackendError):
                said = self._place.last_words(self._handle, part, MAX_BYTES).decode(errors="replace")
                for line in [text for text in said.splitlines() if text.strip()][-MAX_LINES:]:
                    self._copy.say(f"pod {part.number}: {line}")

    # -- the next run -------------------------------------------------------------------------------------------------

    def _used_restarts(self) -> int:
        """How often the job was restarted, as an attempt of the same head or as another run."""
        free = sum(run.free for run in records.runs(self._record.name))
        return self._run.first_attempt + self._copy.last_attempt - free - self._copy.free

    def _plan_run(self, reason: str, *, uid: str = "", is_free: bool = False) -> None:
        """End the present run, and record the next one: it is started even if this process ends before.

        Args:
            reason: Why the present run ended.
            uid: Of the next run's head, if the same object has it already.
            is_free: Whether the next run does not count against `max_restarts`.
        """
        copy, run = self._copy, self._run
        if not uid:
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
            free=copy.free + is_free,
            place=self._handle.place if uid else (),
        )
        text = f"Run {run.number} of the job ended: {reason.rstrip('.')}. Run {fresh.number} starts"
        if not uid:
            text += " from the last checkpoint" if self._checkpoints() else " from the beginning"
        copy.say(text)
        common = {"time": self._clock.time(), "attempt": copy.last_attempt + 1, "rank": None}
        note = {**common, "event": EventKind.NOTE, "text": text}
        state = {**common, "event": EventKind.STATE, "state": StateName.PENDING, "reason": text, "cause": ""}
        copy.release([note, state])
        records.write_run(fresh)
        self._close_run()
        self._open_newest_run()
        self.look = Look(fresh=False)
        self._woken.set()

    def _checkpoints(self) -> list[pathlib.Path]:
        """The checkpoints of all runs that are here, the newest last."""
        return [run.files.checkpoint for run in records.runs(self._record.name) if run.files.checkpoint.exists()]

    def _start_run(self) -> bool:
        """Create the objects of the run that was planned.

        Returns:
            Whether the job is over, because it was cancelled or the run cannot be started.
        """
        runs = records.runs(self._record.name)
        if who := records.canceller(self._files):
            reason = f"The job was cancelled by {who}"
            return self._end(Verdict(StateName.CANCELLED, FailureCause.USER, reason))
        if self._key is None:
            return True
        self._show(f"Run {self._run.number} is being started")
        try:
            # This run needs the GPUs and the quota of the one before it.
            self._place.remove(handle_of(self._place, self._record, runs[-2]))
            try:
                self._handle = self._place.start(
                    self._spec,
                    self._key,
                    run=self._run.number,
                    checkpoint=next(reversed(self._checkpoints()), None),
                    used_restarts=self._run.first_attempt - sum(run.free for run in runs),
                )
            except JobExistsError:
                # The follower of another machine has started this run, or a process that was killed since.
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
        """Begin the next run with an object's new head: the object was resumed, or its operator made a deleted pod again."""
        reader = self._reader
        if reader is not None and not reader.is_drained:
            reader.hurry()
            return False
        is_free = self._run.is_suspended
        # A head that comes back counts for itself.
        if is_free or self.look.returns_head or self._used_restarts() < self._max_restarts:
            why = "it was suspended, and now it is resumed" if is_free else "its first pod was lost and made again"
            self._plan_run(why, uid=head.uid, is_free=is_free)
            return False
        reason = "The first pod of the job was lost and made again, and max_restarts allows no further run"
        return self._end(Verdict(StateName.FAILED, FailureCause.LOST, reason))
