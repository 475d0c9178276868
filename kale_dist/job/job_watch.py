"""Waiting: one thread for each backend follows its unfinished jobs and calls their subscribers.

Only this thread polls: a job is looked at when its backend reports a change, and every `_LOOK_S`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kale_dist.errors import ConfigError, JobNotFoundError, KaleDistError, WaitTimeoutError, log
from kale_dist.job import interrupts
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.status import JobStatus
from kale_dist.wire import StateName
from kale_dist.wording import show

OnStatus = Callable[[JobStatus], None]
_LOOK_S = 0.3
_GATHER_S = 0.02
"""Changes within this time are looked at together: a flood of output wakes us fifty times a second at most."""


@dataclasses.dataclass(slots=True)
class _Watched:
    """A job that has subscribers."""

    callbacks: list[OnStatus]
    due: float = 0.0
    last: JobStatus | None = None


class Watcher:
    """Follows the jobs of one backend. Its thread runs only while there is an unfinished job to follow.

    Args:
        backend: Whose jobs.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._condition = threading.Condition()
        self._jobs: dict[JobRef, _Watched] = {}
        self._woken: set[JobRef] = set()
        self._thread: threading.Thread | None = None
        backend.listen(self._wake)

    def subscribe(self, ref: JobRef, callback: OnStatus) -> Callable[[], None]:
        """Have `callback` called with every new status of a job, the present one first and the final one last.

        The last status of a job that is deleted meanwhile is `cancelled`.

        Args:
            ref: The job.
            callback: Called in the watcher's thread; its exceptions are dropped. A slow one delays the others.

        Returns:
            A function that ends the subscription; more than one call of it is fine.
        """
        with self._condition:
            watched = self._jobs.setdefault(ref, _Watched(callbacks=[]))
            watched.callbacks.append(callback)
            watched.last, watched.due = None, 0.0
            self._ensure_thread()
            self._condition.notify_all()

        def unsubscribe() -> None:
            with self._condition:
                with contextlib.suppress(ValueError):
                    watched.callbacks.remove(callback)
                if not watched.callbacks and self._jobs.get(ref) is watched:
                    del self._jobs[ref]
                self._condition.notify_all()

        return unsubscribe

    def wait(self, ref: JobRef, timeout: float | None = None, on_status: OnStatus = lambda _: None) -> JobStatus:
        """Wait for a job's end, in the caller's thread.

        Args:
            ref: The job.
            timeout: Seconds to wait at most; None for as long as it takes.
            on_status: Called with every new status before the final one, in the caller's thread.

        Returns:
            The final status.

        Raises:
            WaitTimeoutError: The time was over first.
            JobNotFoundError: There is no such job, or it was deleted meanwhile.
        """
        status = self.backend.status(ref)
        if status.is_final:
            return status
        statuses: queue.SimpleQueue[JobStatus] = queue.SimpleQueue()
        deadline = None if timeout is None else time.monotonic() + timeout
        unsubscribe = self.subscribe(ref, statuses.put)
        try:
            while not (status := statuses.get(timeout=deadline and max(0.0, deadline - time.monotonic()))).is_final:
                on_status(status)
        except queue.Empty:
            status = self.backend.status(ref)
            now = f"{status.state}: {status.reason}" if status.reason else str(status.state)
            raise WaitTimeoutError(f"{ref} has not ended within {timeout:g} s; it is {now}", str(ref)) from None
        finally:
            unsubscribe()
        return self.backend.status(ref)

    def _wake(self, ref: JobRef) -> None:
        with self._condition:
            if ref in self._jobs:
                self._woken.add(ref)
                self._condition.notify_all()

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"kale_dist watch {self.backend.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._jobs:
                    self._thread = None
                    return
                soonest = min(watched.due for watched in self._jobs.values())
                if not self._woken:
                    self._condition.wait(max(0.0, soonest - time.monotonic()))
                woken, self._woken = self._woken, set()
                now = time.monotonic()
                due = [(ref, job) for ref, job in self._jobs.items() if ref in woken or job.due <= now]
            for ref, watched in due:
                self._look(ref, watched)
            if woken:
                time.sleep(_GATHER_S)

    def _look(self, ref: JobRef, watched: _Watched) -> None:
        """Get one job's status, and call its subscribers if it is new."""
        try:
            status = self.backend.status(ref)
        except KaleDistError as error:
            last = watched.last or JobStatus(ref=str(ref))
            state = StateName.CANCELLED if isinstance(error, JobNotFoundError) else StateName.FAILED
            status = dataclasses.replace(last, state=state, reason=str(error))
        changed = status != watched.last
        watched.due = time.monotonic() + _LOOK_S
        watched.last = status
        if status.is_final:
            with self._condition:
                if self._jobs.get(ref) is watched:
                    del self._jobs[ref]
        if changed:
            for callback in tuple(watched.callbacks):
                with contextlib.suppress(Exception):
                    callback(status)


class Reasons:
    """Prints why a job waits, and its warnings, on stderr: each once, however many calls wait for the job.

    A job on this machine prints one only before it has begun, and for a person.

    Args:
        backend: Where the job runs.
        ref: The job.
    """

    def __init__(self, backend: Backend, ref: JobRef) -> None:
        self.is_shown: Callable[[], bool] = lambda: False
        """Whether a widget shows the reasons now: then nothing is printed."""
        self._backend = backend
        self._ref = ref
        self._lock = threading.Lock()
        self._logged: set[tuple[int | None, str]] = set()

    def print(self, status: JobStatus) -> None:
        """Print new warnings, and a new reason: one in which more has changed than seconds, MiB or counts of nodes."""
        new: dict[tuple[int | None, str], str] = {(None, text): text for text in status.warnings}
        is_told = self._ref.backend != "local" or (status.started is None and interrupts.has_person())
        if not status.is_final and status.reason and is_told:
            new[status.queue_position, re.sub(r"\d+", "", status.reason)] = status.reason
        if self.is_shown():
            return
        with self._lock:
            for mark, text in new.items():
                if mark not in self._logged:
                    self._logged.add(mark)
                    log(f"{self._ref}: {text}")

    @contextlib.contextmanager
    def printed(self) -> Iterator[None]:
        """Print reasons as they come, from the watcher's thread, while the caller prints the job's log, which has the warnings."""

        def show(status: JobStatus) -> None:
            with self._lock:
                self._logged.update((None, text) for text in status.warnings)
            self.print(status)

        unsubscribe = watcher(self._backend).subscribe(self._ref, show)
        try:
            yield
            show(self._backend.status(self._ref))
        finally:
            unsubscribe()


@functools.cache
def watcher(backend: Backend) -> Watcher:
    """The one watcher of a backend."""
    return Watcher(backend)


def check_timeout(timeout: Any) -> None:
    """Refuse a timeout that is neither None nor a number of seconds; 0 and less only look."""
    number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if timeout is not None and (not number or math.isnan(timeout)):
        raise ConfigError(
            "timeout", f"{show(timeout)} is not a number of seconds", "Give seconds, or None for no limit"
        )
