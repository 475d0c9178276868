"""A job as live output of a notebook's cell: a widget, or one picture that is replaced in place while the job runs.

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
from kale_dist.contract import LogLine
from kale_dist.errors import JobNotFoundError
from kale_dist.following.reader import LogReader
from kale_dist.job import Job, inside
from kale_dist.status import JobStatus

_SHORTEST_S, _LONGEST_S = 0.25, 2.0
_SHARE = 600.0
"""A job that has run for ten minutes is drawn once a second: a server keeps all pictures for a browser that is away."""


def show(job: Job[Any]) -> None:
    """Show a job below the cell that runs, and keep the picture up to date until the job ends.

    A widget, if its packages are installed and a person uses the notebook; else a picture that is replaced as a whole.
    In a terminal, and wherever pictures cannot be replaced, the present state is printed once.

    Args:
        job: The job.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    try:
        status = job.status
    except JobNotFoundError:
        print(repr(job))  # noqa: T201 - the job was deleted: there is nothing to be kept up to date
        return
    if getattr(shell, "kernel", None) is None:
        print(view.text(status, list(job.logs(tail=view.LOG_LINES)), time.time()))  # noqa: T201 - a terminal's last value
    elif interrupts.is_interactive() and importlib.util.find_spec("anywidget") is not None:
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
        self._draw()
        if not self._ended.is_set():
            # A wait for the job sees its end before the thread does.
            inside(self._job).after_wait.append(self._draw)
            threading.Thread(target=self._follow, name=f"kale_dist view {self._job.name}", daemon=True).start()

    def _follow(self) -> None:
        began, drawing_s = time.monotonic(), 0.0
        # Drawing takes at most a tenth of the time, however many metrics there are.
        while not self._ended.wait(
            max(min(max(_SHORTEST_S, (time.monotonic() - began) / _SHARE), _LONGEST_S), 10 * drawing_s)
        ):
            before = time.monotonic()
            self._draw()
            drawing_s = time.monotonic() - before

    def _draw(self) -> None:
        """Draw the picture, if the job has changed and its last picture is not there yet."""
        with self._lock:
            if self._ended.is_set():
                return
            try:
                # Asked before the log is read: the last picture then has the last lines.
                status = self._job.status
            except JobNotFoundError:
                self._ended.set()
                return
            is_first = self._shown is None
            lines = tuple(self._log.tail(view.LOG_LINES) if is_first else self._log.read())
            self._tail.extend(lines)
            if lines or status != self._shown:
                self._shown = status
                self._publish(status, update=not is_first)
            if status.is_final:
                self._ended.set()

    def _publish(self, status: JobStatus, *, update: bool) -> None:
        from IPython.display import publish_display_data

        now, tail = time.time(), tuple(self._tail)
        # Once the interpreter ends, nothing can be shown any more.
        with contextlib.suppress(RuntimeError):
            publish_display_data(  # type: ignore[no-untyped-call]
                {"text/plain": view.text(status, tail, now), "text/html": view.html(status, tail, now)},
                transient={"display_id": self._display_id},
                update=update,
            )
