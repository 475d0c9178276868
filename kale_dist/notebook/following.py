"""Shows the jobs of a kernel in a terminal, from outside the kernel: their logs as they grow and one progress bar.

Jobs are found by their records, which name the kernel they were called from; a notebook need not display them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable

from kale_dist import backends, records
from kale_dist.backends.base import Backend, JobRef
from kale_dist.contract import LogLine
from kale_dist.errors import JobNotFoundError, KaleDistError
from kale_dist.notebook.terminal import Terminal
from kale_dist.status import JobStatus
from kale_dist.view import facts, plain

_LOOK_S = 0.2
_LOG_LINE = re.compile(r"\[(?:\d+|kale-dist)\] ")
_REMEMBERED_LINES = 100_000
"""A log that is longer costs no more memory; a cell that streams it so late doubles some lines."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobEnd:
    """How a job of the notebook was when the notebook had ended."""

    ref: str
    state: str
    """The name of a state, or `deleted`."""
    reason: str


class KernelJobs:
    """Follows every job that one kernel starts.

    Args:
        kernel_pid: Gives the kernel's process id; None while it has not started.
        terminal: Where to show the jobs.
    """

    def __init__(self, kernel_pid: Callable[[], int | None], terminal: Terminal) -> None:
        self._kernel_pid = kernel_pid
        self._terminal = terminal
        self._lock = threading.Lock()
        # What is there now belongs to other kernels, though one of them may have had the same process id.
        self._passed_over = {folder.name for folder in records.jobs_dir().iterdir()}
        self._logs: dict[JobRef, threading.Thread] = {}
        self._last: dict[JobRef, JobStatus] = {}
        self._lines = _Lines(terminal)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kale_dist kernel jobs", daemon=True)

    def start(self) -> None:
        """Begin to look for jobs."""
        self._thread.start()

    def begin_cell(self) -> None:
        """Note that what cells print from now on comes from another one."""
        self.settle()
        self._lines.begin_cell()

    def cell_line(self, text: str) -> None:
        """Show a line that a cell has printed, unless it is one of a job's log, as `job.stream_logs()` prints them."""
        self.settle()
        self._lines.from_cell(text)

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until the logs of all jobs that have ended are written out: what a cell prints then comes after them."""
        self._find()
        deadline = time.monotonic() + timeout_s
        for ref, thread in list(self._logs.items()):
            if thread.is_alive():
                status = _status(ref)
                if status is None or status.is_final:
                    thread.join(max(0.0, deadline - time.monotonic()))

    def cancel(self) -> None:
        """End the jobs that still run, but for those that were to outlive the kernel (`detach=True`)."""
        self._find()
        for ref, thread in list(self._logs.items()):
            status = _status(ref) if thread.is_alive() else None
            # One that is deleted in between is no less at its end.
            with contextlib.suppress(KaleDistError):
                if status is not None and not status.is_final and not records.read(ref.record_name).spec.policy.detach:
                    _backend(ref).cancel(ref)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Write out what is left, and end. Jobs that still run then are left to themselves.

        Args:
            timeout_s: Seconds to wait at most for jobs that are about to end with their kernel.
        """
        self._stopping.set()
        self._thread.join()
        self._find()
        deadline = time.monotonic() + timeout_s
        for ref, thread in self._logs.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._terminal.line(f"{ref} runs on: kale-dist logs -f {ref.name}")
        self._terminal.clear()

    def ends(self) -> tuple[JobEnd, ...]:
        """How each job is, oldest first; of one that was deleted, how it was before if that was its end."""
        found = []
        for ref in self._logs:
            status = _status(ref) or self._last.get(ref)
            found.append(
                JobEnd(ref=str(ref), state="deleted", reason="")
                if status is None
                else JobEnd(ref=str(ref), state=status.state.value, reason=facts.sentence(status, None))
            )
        return tuple(found)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            self._find()
            self._draw_bar()

    def _find(self) -> None:
        """Start to follow the jobs that are new."""
        pid = self._kernel_pid()
        with self._lock:
            for folder in records.jobs_dir().iterdir():
                if pid is None or folder.name in self._passed_over:
                    continue
                # A folder whose record is not there yet is looked at again.
                with contextlib.suppress(KaleDistError):
                    record = records.read(folder.name)
                    self._passed_over.add(folder.name)
                    if record.kernel_pid == pid:
                        self._follow(JobRef.parse(record.ref))

    def _follow(self, ref: JobRef) -> None:
        thread = threading.Thread(target=self._write_log, args=(ref,), name=f"kale_dist log {ref.name}", daemon=True)
        self._logs[ref] = thread
        thread.start()

    def _write_log(self, ref: JobRef) -> None:
        try:
            for line in _backend(ref).logs(ref, follow=True):
                self._lines.from_log(line)
            status = self._last[ref] = _backend(ref).status(ref)
        except JobNotFoundError:
            self._terminal.line(f"{ref} was deleted")
        else:
            self._terminal.line(f"{ref}: {facts.sentence(status, None)}")

    def _draw_bar(self) -> None:
        """One bar, of the youngest job that runs."""
        for ref, thread in reversed(list(self._logs.items())):
            status = _status(ref) if thread.is_alive() else None
            if status is not None and not status.is_final:
                now = time.time()
                drawn = plain.progress_line(status, now)
                bar = " · ".join(part for part in (drawn, facts.sentence(status, now), ref.name) if part)
                self._terminal.progress(str(ref), facts.percent(status), bar)
                return
        self._terminal.clear()


class _Lines:
    """Shows each line of a log once, though a cell that streams the log prints it too, sooner or later than we do.

    Args:
        terminal: Where to show lines.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._lock = threading.Lock()
        self._from_log: collections.Counter[str] = collections.Counter()
        self._from_cell: collections.Counter[str] = collections.Counter()

    def from_log(self, line: LogLine) -> None:
        """Show a line of a log, unless a cell has printed it."""
        with self._lock:
            if not _take(self._from_cell, facts.clean(str(line))):
                if len(self._from_log) >= _REMEMBERED_LINES:
                    self._from_log.clear()
                self._from_log[facts.clean(str(line))] += 1
                self._terminal.line(f"{line.prefix} {facts.log_text(line)}")

    def from_cell(self, text: str) -> None:
        """Show a line that a cell has printed, unless it was shown as one of a log."""
        with self._lock:
            if not _take(self._from_log, text):
                if _LOG_LINE.match(text):
                    self._from_cell[text] += 1
                self._terminal.line(text)

    def begin_cell(self) -> None:
        """Forget what the last cell printed: it may have looked like a line of a log without being one."""
        with self._lock:
            self._from_cell.clear()


def _take(counts: collections.Counter[str], text: str) -> bool:
    """Take one off the count of a text; false if it is 0."""
    if not counts[text]:
        del counts[text]
        return False
    counts[text] -= 1
    return True


def _backend(ref: JobRef) -> Backend:
    return backends.get(ref.backend)


def _status(ref: JobRef) -> JobStatus | None:
    try:
        return _backend(ref).status(ref)
    except JobNotFoundError:
        return None
