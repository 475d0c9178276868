"""A job's folder on this machine, filled from the logs of its pods: no line or event twice, none silently missing.

Whatever reads a job reads its folder (`contract.JobFiles`), wherever the job runs. A mirror writes there what the
pods' agents say (`transport`): their lines go into one `log`, numbered anew from 0, pods interleaved as they come and
each pod's lines in order; their events into `events`; small outcomes, once their signature was checked, into files of
their own.

A pod's lines and events are numbered, so that what arrives twice is dropped, and what is missing is asked for and,
if nobody has it, said (`pod_copy`). Pods are told apart by their UID. How far each was copied outlives the process
(`journal`).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kale_dist import contract, transport
from kale_dist.backends.journal import Batch, FolderLock, Journal, PodCursor
from kale_dist.backends.pod_copy import HEAD, FillEvents, FillLines, PodCopy
from kale_dist.contract import EventKind, JobFiles, StateName
from kale_dist.errors import KaleDistError
from kale_dist.runtime import outcome
from kale_dist.transport import EventItem, Heartbeat, Item, Line, OutcomeItem, Plain


class Mirror:
    """Writes what pods say into their job's folder. Any thread may call; without the lock nothing is written.

    What writes raises `StoreError` if the disk is full (what was written until then counts, the rest can be taken
    again), and `JobNotFoundError` if the job was deleted.

    Args:
        files: The job's folder.
        key: The job's secret; None if this user does not have it: events are believed then, and outcomes not kept.
        job: The job's name, which its outcomes are signed with.
        world_size: How many ranks there are.
        fill: Asks for lines that a stream has skipped. Other pods go on meanwhile.
        fill_events: Asks for events; None: those that a stream has skipped are lost.
    """

    def __init__(
        self,
        files: JobFiles,
        key: bytes | None,
        *,
        job: str,
        world_size: int,
        fill: FillLines,
        fill_events: FillEvents | None = None,
    ) -> None:
        self._folder = files.folder
        self._key = key
        self._job = job
        self._world_size = world_size
        self._fill = fill
        self._fill_events = fill_events
        self._lock = threading.RLock()
        self._folder_lock = FolderLock(files.folder / "mirror.lock")
        self._journal: Journal | None = None
        self._pods: dict[str, PodCopy] = {}
        self._progress: dict[str, dict[str, Any]] = {}
        self._outcomes: set[str] = set()
        self._came_by_log: set[str] = set()
        self._has_checkpoint = False
        self.is_continued = False
        """Whether an earlier mirror has read some of the job's pods."""

    def try_lock(self) -> bool:
        """Become the only mirror of this job, on this machine and in this process.

        Returns:
            Whether it is; False while another one is at work.

        Raises:
            JobNotFoundError: The job was deleted.
            StoreError: The account of what was copied is damaged.
        """
        with self._lock:
            if self._journal is None:
                if not self._folder_lock.take():
                    return False
                try:
                    journal = Journal(self._folder)
                    self._recall(journal.files)
                    self._journal, self.is_continued = journal, bool(journal.pods)
                except BaseException:
                    self._folder_lock.free()
                    raise
            return True

    def close(self) -> None:
        """Give the lock back. What comes afterwards is dropped; the next mirror asks for it again."""
        with self._lock:
            pods, self._pods = tuple(self._pods.values()), {}
        for pod in pods:
            # Not for one that is just being asked for lines: that would wait for the network.
            if pod.lock.acquire(blocking=False):
                with contextlib.suppress(KaleDistError):
                    pod.settle()
                pod.lock.release()
        with self._lock:
            journal, self._journal = self._journal, None
            if journal is not None:
                with contextlib.suppress(KaleDistError):
                    journal.save()
                journal.close()
                self._folder_lock.free()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The final state event of pod 0's agent, once it is here. Readers see it after `release_final`."""
        with self._lock:
            return None if self._journal is None else self._journal.verdict

    @property
    def outcomes(self) -> Sequence[str]:
        """Names of the outcomes that agents have announced; none without the key."""
        with self._lock:
            return sorted(self._outcomes)

    @property
    def waits_for_acknowledgement(self) -> bool:
        """Whether pod 0 has something that no log brings and waits until it was fetched, if it has no store."""
        with self._lock:
            verdict = self.verdict
            wants_checkpoint = verdict is not None and verdict.get("state") != StateName.SUCCEEDED
            return (wants_checkpoint and self._has_checkpoint) or bool(self._outcomes - self._came_by_log)

    def next_line(self, pod_uid: str) -> int:
        """Number of the first line of a pod that is not here."""
        return self._cursor(pod_uid).next_line

    def next_event(self, pod_uid: str) -> int:
        """Number of the first event of a pod that is not here."""
        return self._cursor(pod_uid).next_event

    @property
    def unfinished(self) -> dict[str, int]:
        """UID and number of the pods that were read, here or by an earlier mirror, and not to their ends."""
        with self._lock:
            pods = {} if self._journal is None else self._journal.pods
            return {uid: pod.number for uid, pod in pods.items() if not pod.is_finished}

    # -- what the backend says -----------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Add lines of the backend's own to the log."""
        with self._lock:
            if self._journal is not None:
                self._journal.append_text(Batch("log"), [line.encode() for line in text.splitlines()])

    def record_event(self, event: dict[str, Any]) -> None:
        """Add an event of the backend's own. Readers see it at once, also a final one."""
        with self._lock:
            if self._journal is not None:
                self._journal.append_events(Batch("events"), [event])

    def release_final(self) -> None:
        """Let readers see the verdict. A second time changes nothing."""
        with self._lock:
            journal = self._journal
            if journal is not None and journal.verdict is not None and not journal.is_released:
                journal.append_events(Batch("events"), [journal.verdict])
                journal.is_released = True
                journal.save()

    def begin_attempt(self, attempt: int) -> None:
        """The job goes on in new pods. How the pods before have ended, and what they hold, is of no use any more.

        Args:
            attempt: The first one that the new pods make.
        """
        with self._lock:
            journal = self._journal
            if journal is None:
                return
            journal.first_attempt = attempt
            if journal.verdict is not None and (journal.verdict.get("attempt") or 0) < attempt:
                journal.verdict, journal.is_released = None, False
                journal.save()
            self._outcomes = {name for name in self._outcomes if int(name.split("-")[1]) >= attempt}
            self._has_checkpoint = False

    # -- what the pods say ---------------------------------------------------------------------------------------------

    def begin(self, pod_uid: str, pod: int) -> None:
        """A stream of a pod's log is opened: lines without a number that were seen may come again."""
        with self._taking(pod_uid, pod) as copy:
            if copy is not None:
                copy.begin()

    def finish(self, pod_uid: str, pod: int, *, is_whole: bool) -> None:
        """A pod is read no more. A second time changes nothing.

        Args:
            pod_uid: UID of the pod.
            pod: Its number.
            is_whole: Whether it was read to its end; if not, that is said.
        """
        with self._taking(pod_uid, pod) as copy:
            if copy is not None:
                copy.finish(is_whole=is_whole)

    def refuse(self, pod_uid: str, pod: int) -> None:
        """An event came that is not signed by this job (`FrameReader.rejected`): say so, once for each pod."""
        with self._taking(pod_uid, pod) as copy:
            if copy is not None:
                copy.refuse("event")

    def take(self, pod_uid: str, pod: int, items: Sequence[Item]) -> None:
        """Take what was read of a pod's log: lines first, then outcomes, then events.

        Args:
            pod_uid: UID of the pod.
            pod: Its number.
            items: In their order. What was taken before is dropped.
        """
        with self._taking(pod_uid, pod) as copy:
            if copy is None:
                return
            copy.take_text(item for item in items if isinstance(item, Line | Plain))
            for item in items:
                if isinstance(item, OutcomeItem):
                    self._take_outcome(copy, item)
            copy.take_events(item for item in items if isinstance(item, EventItem) and item.number is not None)
            self._take_progress(item for item in items if isinstance(item, EventItem) and item.number is None)
            for item in items:
                if isinstance(item, Heartbeat):
                    copy.close_gap(item.next_line)
                    copy.close_event_gap(item.next_event)

    @contextlib.contextmanager
    def _taking(self, uid: str, number: int) -> Iterator[PodCopy | None]:
        """The pod, for this thread alone; None without the lock."""
        with self._lock:
            found = self._pods.get(uid)
            if found is None and self._journal is not None:
                found = self._pods[uid] = PodCopy(
                    uid,
                    self._journal.pods.setdefault(uid, PodCursor(number)),
                    self._journal,
                    fill=self._fill,
                    fill_events=self._fill_events,
                    trusts_all=self._key is None,
                    on_events=self._learn,
                )
        with found.lock if found is not None else contextlib.nullcontext():
            yield found

    def _cursor(self, uid: str) -> PodCursor:
        with self._lock:
            pods = {} if self._journal is None else self._journal.pods
            return pods.get(uid) or PodCursor(HEAD)

    def _take_progress(self, items: Iterable[EventItem]) -> None:
        """Keep each rank's last progress and last usage."""
        newer = False
        with self._lock:
            for item in items:
                name, moment = contract.last_name(item.event), item.event.get("time")
                is_believed = (item.trusted or self._key is None) and self._is_rank(item.event.get("rank"))
                if is_believed and name is not None and isinstance(moment, int | float):
                    known = self._progress.get(name, {}).get("time")
                    # A stream that is taken up again begins with what is past.
                    if not isinstance(known, int | float) or known < moment:
                        self._progress[name] = item.event
                        newer = True
            if newer and self._journal is not None:
                self._journal.replace(self._journal.files.progress, contract.encode_record(self._progress))

    def _take_outcome(self, copy: PodCopy, item: OutcomeItem) -> None:
        if self._key is None or not self._is_rank(item.rank):
            return
        with self._lock:
            if self._journal is None:
                return
            path = self._journal.files.outcome(item.attempt, item.rank)
            arrived = path.with_name(f".{path.name}.part")
            is_signed = path.exists()
            if not is_signed:
                self._journal.replace(arrived, item.data)
                is_signed = outcome.is_signed(
                    arrived, key=self._key, job=self._job, attempt=item.attempt, rank=item.rank
                )
                if is_signed:
                    arrived.replace(path)
                else:
                    arrived.unlink()
            if is_signed:
                self._came_by_log.add(path.name)
        if not is_signed:
            copy.refuse("outcome")

    def _is_rank(self, rank: object) -> bool:
        return type(rank) is int and 0 <= rank < self._world_size

    def _learn(self, events: Iterable[dict[str, Any]]) -> None:
        """Remember what agents have announced that may have to be fetched."""
        for event in events:
            rank, attempt = event.get("rank"), event.get("attempt")
            with self._lock:
                if self._journal is not None and (attempt or 0) < self._journal.first_attempt:
                    continue
                match event.get("event"):
                    case EventKind.CHECKPOINT:
                        self._has_checkpoint = True
                    case EventKind.OUTCOME if self._key and self._is_rank(rank) and type(attempt) is int:
                        self._outcomes.add(f"outcome-{max(attempt, 0)}-{rank}")

    def _recall(self, files: JobFiles) -> None:
        """What earlier mirrors have written."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            known = json.loads(files.progress.read_bytes())
            self._progress = {rank: event for rank, event in known.items() if isinstance(event, dict)}
        with files.events.open("rb") as file:
            for line in file:
                if b'"outcome"' in line or b'"checkpoint"' in line:
                    self._learn(contract.decode_records(line))
        for name in self._outcomes:
            with contextlib.suppress(FileNotFoundError):
                if (files.folder / name).stat().st_size <= transport.SMALL_OUTCOME_BYTES:
                    self._came_by_log.add(name)
