"""Follows one life of a job: connects to its head, copies what that sends, and finds out how the life has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Sequence

from kale_dist.errors import BackendError, KaleDistError, SnapshotDamagedError, StoreError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, Place, PlacedJob
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Life, Record
from kale_dist.job.spec.job_spec import WARM
from kale_dist.job.spec.place_settings import PENDING_TIMEOUT_S
from kale_dist.places.following.copy import FollowerClock, HeadCopy, HeadReader
from kale_dist.places.following.head_client import HeadClient
from kale_dist.places.following.sight import Sight
from kale_dist.places.following.verdict import RETRIED, explains_loss, judge, judge_part, judge_trouble, lost_part
from kale_dist.places.following.warm_place import prefix_of
from kale_dist.wire import FIRST_SIGNAL, FailureCause, JobFiles, StateName, Verdict
from kale_dist.wording import listed

HEAD_DECIDES_S = 40.0
"""A head learns within 30 s (TCP's) that another pod is gone, and ends the job. If it has not done so 10 s later, it never will:
that pod ended before it had reached the head."""

GIVE_UP_S = 5.0
"""A trouble that does not heal ends the job after so long: the first look may have seen only a part of its pods."""

ACT_WITHIN_S = 300.0
"""How long a job waits for a person to mend what does not heal by itself, unless its call gives `pending_timeout_s`."""

EXPLAIN_S = 10.0
"""How long a place may need to report why a pod that the head has lost is gone."""

CANCEL_MARGIN_S = 10.0
"""The pods of a cancelled job are killed so long after the grace of its ranks."""

MADE_AGAIN = RETRIED - {"killed"}
"""Losses of pods that their controller may make again."""

MAX_PODS, MAX_LINES, MAX_BYTES = 3, 20, 1 << 14
"""How many failed pods have their last output copied into the log, and how much of it: the first failures show why."""

_NAMED = 5
_MIB = 1 << 20


def handles_of(place: Place, record: Record, life: Life) -> list[PlacedJob]:
    """The handles of all objects that there may be of a job: while it is renewed, of the lost one and of the next."""
    there, name = handle_of(place, record, life), place.object_name(record.spec.name, life.number)
    return [there] if life.is_started else [there, dataclasses.replace(there, life=life.number, object=name)]


def handle_of(place: Place, record: Record, life: Life) -> PlacedJob:
    """The handle by which a place finds a recorded job: the object that there is, until a renewal is through the one before."""
    number = life.number if life.is_started else life.number - 1
    return PlacedJob(
        ref=JobRef.parse(record.ref),
        object=life.object or place.object_name(record.spec.name, number),
        life=number,
        first_attempt=life.first_attempt,
        spec=record.spec,
        place=life.place or record.place,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """A job that is followed, and who wants to know of it."""

    place: Place
    record: Record
    key: bytes | None
    """None if this user does not have it."""
    files: JobFiles
    status: JobReader
    clock: FollowerClock
    on_lines: Callable[[], None]
    """Called when the log here has grown."""
    on_change: Callable[[], None]
    """Called when the job's status may have changed."""
    show: Callable[[str], None]
    """Called with what the follower does at the moment that takes time, as a sentence; empty for nothing."""


class HeadReach:
    """The way to the head of a life, from any thread.

    Args:
        job: The job.
        life: Its present one.
    """

    def __init__(self, job: Followed, life: Life) -> None:
        self.handle = handle_of(job.place, job.record, life)
        self._job = job

    def client(self) -> HeadClient | None:
        """A client of the head; None if this user has no key."""
        job, handle = self._job, self.handle
        return None if job.key is None else HeadClient(lambda: job.place.connect(handle), job.key, prefix_of(handle))

    def ask(self, request: Callable[[HeadClient], None]) -> bool | None:
        """Send a request to the head; returns whether the head has it, and None if it may get it later."""
        try:
            if (client := self.client()) is not None:
                request(client)
                return True
        except (BackendError, StoreError) as error:
            return None if isinstance(error, BackendError) and error.retryable else False
        return False

    def fetch(self, name: str, *, head_runs: bool) -> bool:
        """Fetch a file as it is now: from the head while it runs, else from the place.

        Args:
            name: Of an outcome, or `checkpoint`.
            head_runs: Whether the head can be asked.

        Returns:
            Whether the file was there.

        Raises:
            StoreError: The file cannot be written here.
            BackendError: The place, or a head that runs, cannot be reached.
        """
        job, handle, client = self._job, self.handle, self.client()
        target, unreached = job.files.folder / name, None
        if client is not None and head_runs:
            try:
                if client.fetch_file(handle.name_at_head(name), target, self._show_fetched):
                    return True
            except BackendError as error:
                unreached = error
        came = job.place.fetch(handle, name, target)
        if unreached is not None and not came:
            # The head may have it still.
            raise unreached
        return came

    def _show_fetched(self, done: int, total: int) -> None:
        if total > _MIB:
            self._job.show(f"Fetching results: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB")


class FollowedLife:
    """One life of a job, whose folder this process alone writes.

    Args:
        job: The job.
        life: Its present one.
        sight: What the place reports.
        on_end: Called when a thread of the life's may have something new.
    """

    def __init__(self, job: Followed, life: Life, sight: Sight, on_end: Callable[[], None]) -> None:
        self.record = life
        self.reach = HeadReach(job, life)
        self.copy = HeadCopy(job.files, life, job.on_lines, job.on_change)
        self.reader: HeadReader | None = None
        """Reads what the head sends; None before there is something to read."""
        self._job = job
        self._sight = sight
        self._on_end = on_end
        self._input: threading.Thread | None = None
        self._input_error: KaleDistError | None = None
        self._decided: Verdict | None = None
        self._with_last_words: set[str] = set()
        self._was_suspended = False
        self.unreached: BackendError | None = None
        """Why a file that the head or its place may still have could not be fetched, at the last try."""
        self.resumes_with_less = False
        """Whether the next life begins before the last checkpoint that this one wrote."""
        self._fetched: list[str] = []
        """Names of what has come after the head's verdict: there is no later one."""

    def write(self, **changes: object) -> None:
        """Change the record."""
        self.record = dataclasses.replace(self.record, **changes)  # type: ignore[arg-type]
        records.write_life(self._job.files, self.record)

    def close(self) -> None:
        """Stop reading, and close the files."""
        if self.reader is not None:
            self.reader.stop()
        self.copy.close()

    # -- while its head runs ------------------------------------------------------------------------------------------

    @property
    def has_another_head(self) -> bool:
        """Whether the object has a new head: it was resumed, or its controller has made a lost pod again."""
        head, (known, _, life) = self._sight.look.head, self.record.uid.partition(".")
        now, _, next_life = head.uid.partition(".") if head is not None else ("", "", "")
        # A process that follows anew may know of fewer lives of a container than the one before.
        return bool(known and now) and (now != known or int(next_life or 0) > int(life or 0))

    @property
    def is_current(self) -> bool:
        """Whether all is here that a head which runs had when it was asked."""
        return self.reader is not None and self.reader.is_current

    @property
    def is_read(self) -> bool:
        """Whether all is read that a head which is gone has left; if not, a connection that may wait for it is ended."""
        if self.reader is None or self.reader.is_drained:
            return True
        self.reader.hurry()
        return False

    def check(self) -> None:
        """Check that what the head sends can be written.

        Raises:
            StoreError: It could not be.
        """
        if self.reader is not None and self.reader.error is not None:
            raise self.reader.error

    def attend(self) -> None:
        """Connect to the head, and send it what it needs, as soon as it runs."""
        look, head = self._sight.look, self._sight.look.head
        if head is not None:
            if not self.record.uid:
                self.write(uid=head.uid)
            if head.state != "waiting" and self.reader is None:
                self.reader = self._read_head()
            if head.state == "running" and self._input is None:
                self._send_input()
        self._note_suspension(is_suspended=bool(look.suspended))

    def _read_head(self) -> HeadReader:
        uid, job = self.record.uid, self._job

        def has_ended() -> bool:
            head = self._sight.look.head
            if head is not None:
                return head.uid != uid or head.state == "ended"
            # In a look that is not up to date, the head may only be missing so far.
            return self._sight.look.fresh

        return HeadReader(
            place=job.place, handle=self.reach.handle, client=self.reach.client(), copy=self.copy, has_ended=has_ended,
            on_end=self._on_end, clock=job.clock,
        )  # fmt: skip

    def _send_input(self) -> None:
        handle, job = self.reach.handle, self._job

        def send() -> None:
            try:
                if job.key is not None:
                    job.place.send_input(handle, job.key, job.show)
            except KaleDistError as error:
                self._input_error = error
            job.show("")

        self._input = threading.Thread(target=send, name=f"kale_dist input {handle.object}", daemon=True)
        self._input.start()

    def _note_suspension(self, *, is_suspended: bool) -> None:
        """Record whether the job is suspended. `pending_timeout_s` counts from the end of a suspension."""
        if is_suspended and self.record.uid and not self.record.is_suspended:
            self.write(is_suspended=True)
        elif self.record.is_suspended and not is_suspended and self._sight.head_runs:
            # It was resumed before its pods were gone.
            self.write(is_suspended=False)
        if self._was_suspended and not is_suspended:
            self.write(began=self._job.clock.time())
        self._was_suspended = is_suspended

    @property
    def used_restarts(self) -> int:
        """How many restarts are used by now."""
        return self.record.used_restarts + self.copy.last_attempt - self.record.first_attempt - self.copy.free

    # -- its end ------------------------------------------------------------------------------------------------------

    def find_verdict(self) -> Verdict | None:
        """The verdict on a life that has ended, and of which everything is read; None for any other.

        One that its head will never end is killed first.
        """
        sight, copy, reader = self._sight, self.copy, self.reader
        look, head, is_read = sight.look, sight.look.head, reader is None or reader.is_drained
        if self._decided is not None:
            return self._decided if is_read or sight.lasts("decided", CANCEL_MARGIN_S) else None
        if copy.verdict is not None:
            if not copy.is_complete and not is_read:
                return None
            is_explained = explains_loss(copy.verdict.cause, look, self._job.record.spec.topology.number_of_pods)
            is_known = is_explained or records.canceller(self._job.files) or sight.lasts("lost", EXPLAIN_S)
            return self._judge(copy.verdict) if is_known else None
        is_gone = head is None and bool(self.record.uid or look.gone or look.finished)
        if is_gone or (head is not None and head.state == "ended"):
            return self._judge(None) if self.is_read else None
        self._decided = self._give_up(look)
        if self._decided is not None:
            with contextlib.suppress(BackendError):
                self._job.place.kill(self.reach.handle, 0.0, self._decided.reason)
        return None

    @property
    def is_overdue(self) -> bool:
        """Whether no rank has started within `pending_timeout_s`."""
        limit_s = self._job.record.spec.cluster.pending_timeout_s
        began = self.record.began or self._job.record.created
        return limit_s is not None and self._job.clock.time() - began > limit_s and not self.copy.has_started

    def _judge(self, reported: Verdict | None) -> Verdict:
        canceller = records.canceller(self._job.files)
        return judge(reported, self._sight.look, self._job.status.status(), canceller=canceller)

    def _give_up(self, look: Look) -> Verdict | None:
        """The verdict on a life that its head will never end; None while the head may still end it."""
        job, sight, error = self._job, self._sight, self._input_error
        if error is not None and not getattr(error, "retryable", False):
            reason = f"The snapshot could not be sent to the job: {error}"
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason)
        if error is not None:
            self._input = self._input_error = None
        if sight.lasts("gone", HEAD_DECIDES_S, seen=look.gone):
            # The object was deleted without its pods (--cascade=orphan), which only the head can end now.
            self.reach.ask(lambda head: head.cancel(0.0))
            return judge(None, look, job.status.status())
        waits = look.head is None or any(part.state == "waiting" for part in look.parts)
        # A head whose ranks have run waits for pods that are made again, so long as it can go on with them.
        head_waits = look.replaces and sight.head_runs and self.copy.has_started
        trouble = look.trouble if waits and not (look.suspended or look.gone or head_waits) else None
        limit_s = job.record.spec.cluster.pending_timeout_s
        if look.is_over_unheard:
            return judge(None, look, job.status.status())
        if waits and self.is_overdue and not look.suspended:
            reason = f"The job has not started within its pending_timeout_s of {limit_s:g} s"
            reason += f". {look.trouble}" if look.trouble is not None else ""
            return Verdict(StateName.FAILED, FailureCause.TIMEOUT, reason)
        if sight.lasts("trouble", GIVE_UP_S, seen=trouble is not None and not trouble.heals) and trouble is not None:
            return judge_trouble(trouble)
        is_stuck = trouble is not None and trouble.needs_action and limit_s == PENDING_TIMEOUT_S
        if sight.lasts("stuck", ACT_WITHIN_S, seen=is_stuck) and trouble is not None:
            remedy = f"{trouble.remedy} Jobs wait {ACT_WITHIN_S / 60:.0f} minutes for that, or as long as pending_timeout_s= says."
            return judge_trouble(dataclasses.replace(trouble, remedy=remedy))
        part = lost_part(look)
        if head_waits and part is not None and (part.lost in MADE_AGAIN or (part.exit_code or 0) >= FIRST_SIGNAL):
            part = None
        if look.trouble is not None and look.trouble.cause is FailureCause.USER:
            # The pods of a job that a person has ended are deleted one by one; many take longer than this waits.
            part = None
        if sight.lasts("part", HEAD_DECIDES_S, seen=part is not None) and part is not None:
            return judge_part(part, look, job.status.status())
        return None

    def goes_on(self, verdict: Verdict) -> bool:
        """Whether the same object gets another head after this one: it was suspended, or its controller makes the first pod again."""
        if self.record.is_suspended and (verdict.cause is FailureCause.SUSPENDED or verdict.may_restart):
            return True
        look, reported, head = self._sight.look, self.copy.verdict, self._sight.look.head
        has_judged = (
            reported.cause is not FailureCause.SUSPENDED
            if reported is not None
            else head is not None and head.exit_code == 1
        )
        is_over = has_judged or look.finished or records.canceller(self._job.files)
        was_killed = head is not None and not head.lost and (head.exit_code or 0) >= FIRST_SIGNAL
        return (verdict.may_restart or was_killed) and look.returns_head and not is_over

    def keep_last_words(self) -> None:
        """Copy the last output of other pods that failed into the log: their agents may not have reached the head."""
        parts = self._sight.look.parts
        failed = [part for part in parts if part.number and part.state == "ended" and part.exit_code]
        for part in [part for part in failed[:MAX_PODS] if part.uid not in self._with_last_words]:
            self._with_last_words.add(part.uid)
            with contextlib.suppress(BackendError):
                text_of_pod = self._job.place.last_words(self.reach.handle, part, MAX_BYTES).decode(errors="replace")
                for line in [text for text in text_of_pod.splitlines() if text.strip()][-MAX_LINES:]:
                    self.copy.log(f"pod {part.number}: {line}")

    def fetch_results(self, verdict: Verdict) -> bool:
        """Fetch the outcomes of a job that has ended, and the last checkpoint of one that has not succeeded.

        Returns:
            Whether nothing more is waited for.
        """
        spec, copy, files = self._job.record.spec, self.copy, self._job.files
        if self._job.key is None or spec.kind == WARM:
            return True
        status, is_success = self._job.status.status(), verdict.state is StateName.SUCCEEDED
        # Parameter servers, and the workers that serve them, are ended when the chief returns, and return nothing.
        returning = status.replicas[:1] if spec.cluster.servers else status.replicas
        ranks = [replica.rank for replica in returning if replica.rank not in verdict.lost] if is_success else []
        if verdict.rank is not None and copy.verdict is not None:
            ranks.append(verdict.rank)
        names = [files.outcome(copy.last_attempt, rank).name for rank in ranks]
        if status.checkpoint_epoch is not None and not is_success:
            names.append(files.checkpoint.name)
        missing = self._fetch(names)
        if not missing or (self.unreached is None and not is_success):
            return True
        if self._waits_for(missing):
            return False
        why = self.unreached or "the head ended before they were fetched"
        copy.log(f"Results could not be fetched: {listed(missing, _NAMED)} ({why})")
        return True

    def fetch_checkpoint(self) -> str | None:
        """Fetch the last checkpoint for the next life.

        Returns:
            From where the training resumes, as the end of a sentence; None while the checkpoint is waited for.
        """
        spec, files = self._job.record.spec, self._job.files
        missing, last = self._fetch([files.checkpoint.name]), self._job.status.status().checkpoint_epoch
        # A store has it, too, and the next head reads it there.
        if missing and self.unreached is not None and self._waits_for(missing, asks_place=not spec.store):
            return None
        # What a store had may be older.
        here = None if last is None else _epoch_of(files.checkpoint)
        if last is None or here == last:
            return "from the last checkpoint" if files.checkpoint.exists() else "from the beginning"
        self.resumes_with_less = not spec.store
        begins = "from the beginning" if here is None else f"from epoch {here}"
        begins = "from the last checkpoint in its store" if spec.store else begins
        return f"{begins}, because the checkpoint of epoch {last} could not be fetched"

    def _fetch(self, names: Sequence[str]) -> list[str]:
        """Fetch those files that are not here; returns the names of those that did not come, and notes why in `unreached`.

        A checkpoint that is here may be an earlier one.
        """
        missing, self.unreached = list[str](), None
        checkpoint = self._job.files.checkpoint
        for name in names:
            if name in self._fetched or (name != checkpoint.name and checkpoint.with_name(name).exists()):
                continue
            try:
                came = self.reach.fetch(name, head_runs=self._sight.head_runs)
            except BackendError as error:
                came, self.unreached = False, error
            (self._fetched if came else missing).append(name)
        return missing

    def _waits_for(self, missing: Sequence[str], *, asks_place: bool = False) -> bool:
        """Whether to ask for files once more: for `collect_wait_s`, as long as the head keeps them.

        Args:
            missing: Their names.
            asks_place: Whether the place is asked, too, if the head does not run.
        """
        is_kept = (self._sight.head_runs and self._decided is None) or asks_place
        if not is_kept or self._sight.lasts("results", self._job.record.spec.cluster.collect_wait_s):
            return False
        self._job.show(f"{listed(missing, _NAMED)} could not be fetched yet")
        return True

    def end_pods(self, verdict: Verdict) -> str | None:
        """Have the place end all pods of a job that has ended, so that none starts later. A head with a verdict ends by itself.

        Returns:
            A sentence for the status about pods that had not started. None if the place has to be asked again.
        """
        job, look, head, noun = self._job, self._sight.look, self._sight.look.head, self._job.place.noun
        if verdict.state is StateName.SUCCEEDED or look.gone or job.key is None:
            return ""
        waiting = [part.name for part in look.parts if part.state == "waiting"]
        others = [part for part in look.parts if part.number and (part.state != "ended" or part.lost in MADE_AGAIN)]
        leaves = (
            head is not None and head.uid == self.record.uid and head.lost not in MADE_AGAIN
            and (head.state == "ended" or self.copy.verdict is not None)
        )  # fmt: skip
        if leaves and not others and len(look.parts) == job.record.spec.topology.number_of_pods:
            return ""
        why = verdict.reason if verdict.state is StateName.FAILED else ""
        try:
            job.place.kill(self.reach.handle, 0.0, why, head_leaves=leaves)
        except BackendError as error:
            if error.retryable and not self._sight.lasts("pods", EXPLAIN_S):
                return None
            return f"Some {noun}s of the job may still run or start, because they could not be ended: {error}"
        return f"Not started when the job ended, and removed: {listed(waiting, _NAMED)}" if waiting else ""


def _epoch_of(path: pathlib.Path) -> int | None:
    """The finished epochs of a checkpoint; None if there is none that can be read."""
    from kale_dist.worker.training import checkpoint

    with contextlib.suppress(SnapshotDamagedError, OSError):
        return checkpoint.read(path).epoch
    return None


def next_life(life: FollowedLife, now: float, *, head: Part | None = None) -> Life:
    """The record of the life after one that has ended, once its last events are written.

    Args:
        life: The one that has ended.
        now: Seconds since 1970.
        head: The same object's next head; None if another object is made.
    """
    before, (first_line, first_event) = life.record, life.copy.end()
    is_free = head is not None and before.is_suspended
    return Life(
        number=before.number + (head is None),
        object="" if head is None else before.object,
        place=before.place,
        is_started=head is not None,
        uid="" if head is None else head.uid,
        began=now,
        used_restarts=life.used_restarts + (not is_free),
        first_attempt=life.copy.last_attempt + 1,
        first_line=first_line,
        first_event=first_event,
    )
