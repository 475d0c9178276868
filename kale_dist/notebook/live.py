"""A job as live output of a notebook's cell: one picture, replaced in place while the job runs.

Only the display is updated, through its own identifier; nothing is ever printed from a thread, for such output would
land in whichever cell runs at the time. The last picture is drawn in the caller's thread when a wait for the job ends,
so that it is the one which an executed notebook keeps.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import sys
import threading
import time
import uuid
from typing import Any

from kale_dist import interrupts, view
from kale_dist.following.reader import LogReader
from kale_dist.contract import LogLine
from kale_dist.errors import JobNotFoundError
from kale_dist.job import Job, inside
from kale_dist.status import JobStatus

_SHORTEST_S = 0.25
_LONGEST_S = 2.0
_SLOWDOWN = 600.0
"""A job that has run for ten minutes is drawn once a second: a server keeps all pictures for a browser that is away."""

_DRAWING_SHARE = 10.0
"""Drawing takes at most one part in so many of the time, however many metrics there are."""


def show(job: Job[Any]) -> None:
    """Show a job below the cell that runs, and keep the picture up to date until the job ends.

    A widget, if its packages are installed and somebody sits in front of the notebook; else a picture that is replaced
    as a whole. In a terminal, and wherever pictures cannot be replaced, the present state is printed once.

    Args:
        job: The job.
    """
    if (gone := _gone(job)) is not None:
        print(gone)  # noqa: T201 - there is nothing to be kept up to date
    elif not _front_end_updates():
        print(view.text(*_look(job)))  # noqa: T201 - what a terminal shows for the last value of an input
    elif _has_widgets():
        from kale_dist.notebook.widget import JobWidget

        JobWidget(job).show()
    else:
        LiveView(job).start()


class LiveView:
    """One picture of one job.

    Args:
        job: The job.
    """

    def __init__(self, job: Job[Any]) -> None:
        self._job = job
        self._display_id = f"kale-dist-{uuid.uuid4().hex}"
        self._log = LogReader(inside(job).files)
        self._tail: collections.deque[LogLine] = collections.deque(maxlen=view.LOG_LINES)
        self._lock = threading.Lock()
        self._shown: JobStatus | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Draw the first picture now; a thread of the library draws the others."""
        self._draw(first=True)
        if self._ended.is_set():
            return
        # Whoever waits sees the job's end before the thread below does.
        inside(self._job).after_wait.append(self.refresh)
        threading.Thread(target=self._follow, name=f"kale_dist view {self._job.name}", daemon=True).start()

    def refresh(self) -> None:
        """Draw the picture now, if the job has changed and its last picture is not there yet."""
        if not self._ended.is_set():
            self._draw()

    def _follow(self) -> None:
        began = time.monotonic()
        while True:
            before = time.monotonic()
            self.refresh()
            now = time.monotonic()
            pause = min(max(_SHORTEST_S, (now - began) / _SLOWDOWN), _LONGEST_S)
            if self._ended.wait(max(pause, _DRAWING_SHARE * (now - before))):
                return

    def _draw(self, *, first: bool = False) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            try:
                # Asked before the log is read: the last picture then has the last lines.
                status = self._job.status
            except JobNotFoundError:
                self._ended.set()
                return
            lines = tuple(self._log.tail(view.LOG_LINES) if first else self._log.read())
            self._tail.extend(lines)
            if first or lines or status != self._shown:
                self._shown = status
                self._publish(status, update=not first)
            if status.is_final:
                self._ended.set()

    def _publish(self, status: JobStatus, *, update: bool) -> None:
        from IPython.display import publish_display_data

        now, tail = time.time(), tuple(self._tail)
        # Once the interpreter ends there is nobody to show anything to.
        with contextlib.suppress(RuntimeError):
            publish_display_data(  # type: ignore[no-untyped-call]
                {"text/plain": view.text(status, tail, now), "text/html": view.html(status, tail, now)},
                transient={"display_id": self._display_id},
                update=update,
            )


def _gone(job: Job[Any]) -> str | None:
    """One line about a job that was deleted."""
    try:
        _ = job.status
    except JobNotFoundError:
        return repr(job)
    return None


def _look(job: Job[Any]) -> tuple[JobStatus, list[LogLine], float]:
    return job.status, list(job.logs(tail=view.LOG_LINES)), time.time()


def _front_end_updates() -> bool:
    """Whether this is a kernel, whose front ends can replace what they show."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _has_widgets() -> bool:
    return interrupts.is_interactive() and importlib.util.find_spec("anywidget") is not None
