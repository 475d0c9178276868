"""Follows one unfinished job from this process: reads its containers' logs, fetches what they made, notices their end.

All that is learnt goes into the job's folder on this machine, so that whoever reads a job reads files. Only one process
follows a job at a time (the mirror's lock); the others read, and take over when that one has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence

import docker.errors

from kale_dist import records
from kale_dist.backends import own_events
from kale_dist.backends.base import JobRef
from kale_dist.backends.docker import archive, cancelling, container_log, containers, states, submission, views
from kale_dist.backends.docker.container_log import ContainerLog
from kale_dist.backends.docker.states import LastWords
from kale_dist.backends.docker.views import ContainerView, JobView
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.mirror import Mirror
from kale_dist.contract import RankStateName, StateName
from kale_dist.engine import Engine, explained
from kale_dist.errors import BackendError, StoreError
from kale_dist.manifests.settings import WORK_FOLDER
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus
from kale_dist.transport import EventItem, Line

_LOOK_S = 1.0
_REST_S = 0.1
_LOCK_S = 2.0
_SETTLE_S = 2.0
"""From a container's end until it is believed to be the job's: the agents' own account may still be on its way."""

_HEAD_S = 40.0
"""How long pod 0's agent may take to notice that another container has ended; it loses sight of it within 30 s."""

_DRAIN_S = 20.0
_MIB = 1 << 20
_TAIL_LINES = 20


class Follower:
    """One job's follower; its thread ends with the job.

    Args:
        engine: Where the job runs.
        ref: The job.
        spec: What was submitted.
        key: The job's secret bytes; None if this user has none.
        reader: Of the job's folder.
        on_change: Called when something about the job has changed.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        ref: JobRef,
        spec: JobSpec,
        key: bytes | None,
        reader: JobReader,
        on_change: Callable[[], None],
    ) -> None:
        self.activity = ""
        """What it is doing that takes time, as a sentence."""
        self.view = JobView()
        """What the engine says of the job."""
        self._engine = engine
        self._ref = ref
        self._spec = spec
        self._key = key
        self._reader = reader
        self._on_change = on_change
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._logs: dict[str, ContainerLog] = {}
        self._ahead_s = 0.0
        self._kill_at: float | None = None
        self._failing_since: float | None = None
        self._end: JobStatus | None = None
        self._verdict_at: float | None = None
        self._mirror = Mirror(
            records.files(ref.record_name),
            key,
            job=spec.name,
            world_size=spec.topology.number_of_processes,
            fill=self._fill,
            fill_events=self._fill_events,
        )
        self._thread = threading.Thread(target=self._run, name=f"kale_dist follow {spec.name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still follows."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Follow no more; what the job does from here on is found later."""
        self._stopped.set()
        self._woken.set()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait until it has stopped."""
        self._thread.join(timeout_s)

    def kill_by(self, moment: float) -> None:
        """Kill the containers if their agents have not ended the job by then.

        Args:
            moment: Of `time.monotonic()`.
        """
        self._kill_at = moment

    def fetch(self, name: str) -> None:
        """Bring a file of the first container's agent, or an outcome, into the job's folder.

        Raises:
            StoreError: It is not there, or cannot be written here.
            BackendError: The engine does not give it.
        """
        number = 0
        if name.startswith("outcome-"):
            number = int(name.rpartition("-")[2]) // self._spec.topology.processes_per_pod
        item = next((item for item in self.view.containers if item.number == number), None)
        if item is None:
            raise StoreError(f"The container with {name} of {self._ref} is not there any more")
        with explained(f"fetching {name} from the container {item.name}"):
            try:
                stream, _ = self._engine.api.get_archive(item.id, f"{WORK_FOLDER}/job/{name}")
            except docker.errors.NotFound as error:
                raise StoreError(f"The container {item.name} has no {name}") from error
            with contextlib.closing(stream):
                archive.save_file(stream, records.files(self._ref.record_name).folder / name, self._progress)

    # -- inside, in the thread ----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken.set()
        self._on_change()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._mirror.try_lock():
                self._look()
                self._kill_if_due()
                if self._reader.status().is_final:
                    return
                self._woken.wait(_LOCK_S)
                self._woken.clear()
            with contextlib.closing(self._mirror):
                while not self._stopped.is_set() and not self._step():
                    self._woken.wait(_LOOK_S)
                    # A log that talks wakes all the time.
                    self._stopped.wait(_REST_S)
                    self._woken.clear()
        except (BackendError, StoreError):
            # The job's folder was deleted.
            return
        finally:
            for log in self._logs.values():
                log.stop()
            self.activity = ""
            self._on_change()

    def _look(self) -> None:
        try:
            self.view = views.look(self._engine, self._spec.name, self.view)
        except BackendError as error:
            self.view = dataclasses.replace(self.view, problem=f"{error}")

    def _step(self) -> bool:
        """Look at everything once; whether the job is over."""
        if self._reader.status().is_final:
            return True
        before = self.view
        self._look()
        if self.view != before:
            self._on_change()
        for item in self.view.containers:
            if item.has_started and item.id not in self._logs:
                self._logs[item.id] = self._open_log(item)
        for log in self._logs.values():
            log.look()
        self._kill_if_due()
        if self._mirror.verdict is not None:
            return self._end_well()
        return self._end_badly()

    def _open_log(self, item: ContainerView) -> ContainerLog:
        if not self._logs:
            self._ahead_s = _clock_difference(self._engine)

        def has_ended() -> bool:
            # Asked anew: what was seen last may be a second old.
            with contextlib.suppress(Exception):
                return not self._engine.api.inspect_container(item.id)["State"]["Running"]
            return any(other.id == item.id and other.has_ended for other in self.view.containers)

        return ContainerLog(
            engine=self._engine,
            container=item.id,
            number=item.number,
            mirror=self._mirror,
            key=self._key,
            ahead_s=self._ahead_s,
            has_ended=has_ended,
            on_items=self._wake,
        )

    def _kill_if_due(self) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_at = None
            with contextlib.suppress(BackendError):
                submission.signal_all(self._engine, self._spec.name, "SIGKILL")

    def _progress(self, done: int, total: int) -> None:
        self.activity = f"Fetching the results: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB"
        self._on_change()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_well(self) -> bool:
        """Pod 0's agent has given its verdict: fetch what did not fit into the log, then let everybody see it."""
        verdict = self._mirror.verdict or {}
        failed = verdict.get("state") != StateName.SUCCEEDED
        names = self._missing()
        if failed and self._mirror.waits_for_acknowledgement:
            names.append("checkpoint")
        for name in names:
            try:
                self.fetch(name)
            except (BackendError, StoreError, OSError) as error:
                self.activity = f"The results could not be fetched yet: {error}"
            else:
                self.activity = ""
        if self._verdict_at is None:
            self._verdict_at = time.monotonic()
        waited_s = time.monotonic() - self._verdict_at
        if not self._is_drained() and (self._missing() or not (self._is_told() or waited_s > _DRAIN_S)):
            return False
        if reason := states.better_reason(verdict, self.view):
            self._mirror.record_event({**verdict, "reason": reason})
        self._mirror.release_final()
        return True

    def _missing(self) -> list[str]:
        """Names of the outcomes that there are and that are not here."""
        verdict = self._mirror.verdict or {}
        names = set(self._mirror.outcomes)
        if self._key is not None and verdict.get("state") == StateName.SUCCEEDED:
            ranks = range(self._spec.topology.number_of_processes)
            names |= {f"outcome-{verdict.get('attempt', 0)}-{rank}" for rank in ranks}
        folder = records.files(self._ref.record_name).folder
        return sorted(name for name in names if not (folder / name).exists())

    def _is_told(self) -> bool:
        """Whether every rank's end is here, which its agent tells after the rank's last line."""
        ended = (RankStateName.SUCCEEDED, RankStateName.FAILED, RankStateName.STOPPED)
        return all(replica.state in ended for replica in self._reader.status().replicas)

    def _is_drained(self) -> bool:
        """Whether nothing will come any more."""
        if self.view.problem or not self.view.was_seen:
            return False
        alive = any(not item.has_ended for item in self.view.containers)
        return not alive and all(log.is_drained for log in self._logs.values())

    def _end_badly(self) -> bool:
        """The engine may know of an end that no agent could tell of."""
        view = self.view
        if view.problem or not view.was_seen:
            return False
        head = next((item for item in view.containers if item.number == 0), None)
        over = not view.containers or all(item.has_ended for item in view.containers)
        failed = states.failed_container(view)
        if self._end is None and not over and failed is None and head is not None:
            self._failing_since = None
            return False
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        waited_s = time.monotonic() - self._failing_since
        if self._end is None:
            # Only the first container's agent judges the job. Once it is gone and read, nobody says more.
            speaks = head is not None and not head.has_ended
            unread = head is not None and head.id in self._logs and not self._logs[head.id].is_drained
            if waited_s < (_HEAD_S if speaks else _DRAIN_S if unread else _SETTLE_S):
                return False
            words = self._last_words(failed) if failed is not None else LastWords()
            folder = records.files(self._ref.record_name).folder
            person = cancelling.canceller(folder)
            self._end = states.ended(self._reader.status(), view, self._spec, words, person=person, now=time.time())
            self._failing_since = time.monotonic()
            if not over:
                with contextlib.suppress(BackendError):
                    submission.signal_all(self._engine, self._spec.name, "SIGTERM")
                self.kill_by(time.monotonic() + _SETTLE_S)
            return False
        if not self._is_drained() and waited_s < _DRAIN_S:
            return False
        self._write(self._end)
        return True

    def _last_words(self, item: ContainerView) -> LastWords:
        verdict = line = ""
        with contextlib.suppress(docker.errors.APIError, StoreError):
            stream, _ = self._engine.api.get_archive(item.id, containers.TERMINATION_FILE)
            verdict = archive.read_file(stream).decode(errors="replace")
        with contextlib.suppress(docker.errors.APIError):
            said = self._engine.api.logs(item.id, tail=_TAIL_LINES).decode(errors="replace").splitlines()
            plain = [text for text in said if text.strip() and text[:1] not in "~!=.:"]
            line = next(
                (text for text in reversed(plain) if text.startswith("kale_dist: ")), plain[-1] if plain else ""
            )
        return LastWords(verdict=verdict, line=line)

    def _write(self, status: JobStatus) -> None:
        """Keep the engine's verdict."""
        own_events.record_ranks(self._mirror, status)
        own_events.record_state(self._mirror, status)
        self._mirror.release_final()

    # -- gaps ---------------------------------------------------------------------------------------------------------

    def _fill(self, uid: str, number: int, first: int, last: int) -> Sequence[Line] | None:
        """Lines that a container's stream has skipped, from its whole log."""
        with contextlib.suppress(Exception):
            # An engine that has dropped them denies nothing.
            return container_log.lines_between(self._engine, uid, number, first, last) or None
        return None

    def _fill_events(self, uid: str, number: int, first: int, last: int) -> Sequence[EventItem] | None:
        """Events that a container's stream has skipped, from its whole log."""
        with contextlib.suppress(Exception):
            return container_log.events_between(self._engine, uid, self._key, number, first, last)
        return None


def _clock_difference(engine: Engine) -> float:
    """By how much the engine's clock is ahead of this machine's, in seconds."""
    with contextlib.suppress(Exception):
        text = str(engine.api.info()["SystemTime"])
        whole, _, rest = text.partition(".")
        zone = "+00:00" if text.endswith("Z") else rest[-6:]
        return dt.datetime.fromisoformat(whole.removesuffix("Z") + zone).timestamp() - time.time()
    return 0.0
