"""Shows the jobs that a kernel starts in a terminal: their live logs, their progress, and their ends.

It finds them by their records, which name the kernel; the notebook need not display them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from kale_dist import wire
from kale_dist.calls import verbs
from kale_dist.errors import JobNotFoundError, KaleDistError
from kale_dist.job import records
from kale_dist.job.handle import Job
from kale_dist.job.spec.job_spec import WARM
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts, plain

_LOOK_S = 0.2
_ENDED_LOG_S = 1.0
_END_S = 5.0
"""How long to wait for jobs that end with their kernel."""

_STEP_PERCENT = 10
_REMEMBERED_LINES = 100_000


class Terminal:
    """Writes whole lines from several threads. A closed pipe (`| head`) ends the output, but not the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Write a line."""
        encoding = self._stream.encoding or "utf-8"
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._stream.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobEnd:
    """The state of a notebook's job at the notebook's end."""

    ref: str
    state: str
    """The name of a state, or `deleted`."""
    reason: str = ""


class KernelJobs:
    """Follows every job that one kernel starts.

    Args:
        kernel_pid: Returns the kernel's process id; None before its start.
        terminal: Where to show the jobs.
    """

    def __init__(self, kernel_pid: Callable[[], int | None], terminal: Terminal) -> None:
        self._kernel_pid = kernel_pid
        self._terminal = terminal
        self._lock = threading.Lock()
        # Jobs of earlier kernels with the same process id.
        self._seen = {folder.name for folder in records.jobs_dir().iterdir()}
        self._jobs: dict[Job[Any], threading.Thread] = {}
        self._last: dict[Job[Any], JobStatus] = {}
        # A cell that streams a log prints the same lines; each line is shown once.
        self._from_log: collections.Counter[str] = collections.Counter()
        self._from_cell: collections.Counter[str] = collections.Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kale_dist kernel jobs", daemon=True)
        self._thread.start()

    def begin_cell(self) -> None:
        """Note that the next cell begins."""
        self._await_ended_logs()
        with self._lock:
            self._from_cell.clear()

    def cell_line(self, text: str) -> None:
        """Show a line that a cell has printed."""
        self._await_ended_logs()
        self._show(text, self._from_log, self._from_cell if wire.PREFIX.match(text) else None)

    def cancel(self) -> None:
        """Cancel the running jobs, except those that may outlive the kernel (`detach=True`)."""
        self._find()
        for job in self._running():
            # It may be deleted meanwhile.
            with contextlib.suppress(KaleDistError):
                if not job.spec.policy.detach:
                    job.cancel()

    def stop(self) -> tuple[JobEnd, ...]:
        """Wait shortly for jobs that end with the kernel, show the rest of their logs, and return each job's state."""
        self._stopping.set()
        self._thread.join()
        self._find()
        deadline = time.monotonic() + _END_S
        for job, thread in self._jobs.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._terminal.line(f"{job.ref} keeps running: kale-dist logs -f {job.ref}")
        ends = []
        for job in self._jobs:
            status = self._status(job)
            state, reason = (status.state.value, facts.sentence(status, None)) if status else ("deleted", "")
            ends.append(JobEnd(ref=job.ref, state=state, reason=reason))
        return tuple(ends)

    def _run(self) -> None:
        shown: collections.Counter[Job[Any]] = collections.Counter()
        while not self._stopping.wait(_LOOK_S):
            self._find()
            for job in self._running():
                status = self._status(job)
                step = (facts.percent(status) or 0) // _STEP_PERCENT if status else 0
                if status is not None and not status.is_final and step > shown[job]:
                    shown[job] = step
                    now = time.time()
                    self._terminal.line(
                        f"{plain.progress_line(status, now)} · {facts.sentence(status, now)} · {job.name}"
                    )

    def _find(self) -> None:
        """Start to follow new jobs."""
        pid = self._kernel_pid()
        with self._lock:
            for folder in records.jobs_dir().iterdir() if pid is not None else ():
                # A folder gets its record a moment after it is made.
                if folder.name not in self._seen:
                    with contextlib.suppress(KaleDistError):
                        record = records.read(folder.name)
                        self._seen.add(folder.name)
                        # Warm pods outlive the notebook; the note at their creation shows how they are ended.
                        if record.kernel_pid == pid and record.spec.kind != WARM:
                            job = verbs.attach(record.ref)
                            self._jobs[job] = threading.Thread(target=self._write_log, args=(job,), daemon=True)
                            self._jobs[job].start()

    def _write_log(self, job: Job[Any]) -> None:
        try:
            for line in job.logs(follow=True):
                if len(self._from_log) > _REMEMBERED_LINES:
                    self._from_log.clear()
                self._show(wire.visible(str(line)), self._from_cell, self._from_log)
            status = self._last[job] = job.status
            self._terminal.line(f"{job.ref}: {facts.sentence(status, None)}")
        except JobNotFoundError:
            self._terminal.line(f"{job.ref} was deleted")
        except KaleDistError as error:
            self._terminal.line(f"{job.ref}: {error}")

    def _show(self, text: str, others: collections.Counter[str], own: collections.Counter[str] | None) -> None:
        """Show a line unless the other source (log or cell) has shown it."""
        with self._lock:
            if others[text] > 0:
                others[text] -= 1
                return
            if own is not None:
                own[text] += 1
            self._terminal.line(text)

    def _await_ended_logs(self) -> None:
        """Wait for the logs of ended jobs, so that lines that a cell prints after a job's end are shown after its log."""
        self._find()
        for job in self._running():
            status = self._status(job)
            if status is not None and status.is_final:
                self._jobs[job].join(_ENDED_LOG_S)

    def _running(self) -> list[Job[Any]]:
        """The jobs whose log has not ended."""
        return [job for job, thread in list(self._jobs.items()) if thread.is_alive()]

    def _status(self, job: Job[Any]) -> JobStatus | None:
        """A job's status; of a deleted job, its last status."""
        try:
            return job.status
        except JobNotFoundError:
            return self._last.get(job)
