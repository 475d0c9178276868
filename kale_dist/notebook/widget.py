"""A job as a live widget: the parts of its picture (`view`), updated one by one, its live log, and buttons.

A thread polls the job and sends changes: lines at most 35 times a second, the rest twice, and nothing while no
page shows the widget. Clicks arrive as messages. The kernel handles them while a cell runs if kernel and front end have
subshells, else after the cell.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import math
import pathlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import anywidget
import traitlets
from IPython import get_ipython

from kale_dist import wire, wording
from kale_dist.errors import JobNotFoundError, KaleDistError
from kale_dist.job import view
from kale_dist.job.handle import Job, inside
from kale_dist.job.reader import LogReader
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts
from kale_dist.wire import LogLine, RankStateName, StateName

KEPT_LINES = 5000
"""How many of the log's last lines are kept for pages; the job's log has all of them."""

MAX_DOWNLOAD_BYTES = 64 << 20
"""The end of a longer log is downloaded."""

_LINES_EACH_S = 0.028
_PARTS_EACH_S = 0.5
_MOST_OF_A_CORE = 0.05
"""Pictures of very many metrics, each of which takes long to draw, are drawn less often."""
_MANY_RANKS = 8
_TABLE_EACH_S = 1.0
"""The table of many ranks is folded, and larger than all else together."""
_FOLDED_EACH_S = 5.0
"""The same while it is folded and no rank's state changes: a page that waits for a cell opens what it has."""
_PICTURE_EACH_S = 2.0
_SAVED_EACH_S = 5.0
"""The same while a widget is shown, for notebooks that are saved."""
_UNSEEN_EACH_S = 1.0
_ANSWER_S = 8.0
"""A page with widgets answers within this time, while the kernel can receive it; else a picture replaces the widget."""

_FIRST_PAGE = "the page of the cell"
_NO_WIDGETS = (
    f"This page shows no widgets, only this picture. For the live view, {wording.GET_WIDGETS}, "
    "reload the page, and show the job again."
)
STATIC = pathlib.Path(__file__).parent / "static"
"""Scripts and styles of the pages, the form's too."""

P = ParamSpec("P")
R = TypeVar("R")


def _of_no_cell(function: Callable[P, R]) -> Callable[P, R]:
    """Detach the messages that a function sends from the cell that runs.

    ipykernel sends a page's answers to the subshell that wrote to its widget last, and takes a message that belongs to a
    cell for one of the main shell: a click would then wait for the cell that runs.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = getattr(get_ipython(), "kernel", None)
        parent = getattr(kernel, "_shell_parent", None)
        if not isinstance(parent, contextvars.ContextVar):
            return function(*args, **kwargs)

        def inside() -> R:
            parent.set({})
            return function(*args, **kwargs)

        return contextvars.copy_context().run(inside)

    return call


def _has_subshells(kernel: Any) -> bool:
    """Whether the page can send messages to the kernel while a cell runs: its requests then have a `subshell_id`."""
    parent = kernel.get_parent("shell") if getattr(kernel, "_supports_kernel_subshells", False) else {}
    return "subshell_id" in parent.get("header", {})


class JobWidget(anywidget.AnyWidget):
    """The model of all views of one job.

    Args:
        job: The job.
    """

    _esm = "".join((STATIC / f"{name}.js").read_text() for name in ("page", "charts", "job"))
    _css = STATIC / "widget.css"

    identity = traitlets.Unicode().tag(sync=True)
    ref = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    state = traitlets.Unicode().tag(sync=True)
    world_size = traitlets.Int(0).tag(sync=True)
    job_number = traitlets.Int(0).tag(sync=True)
    plan_word = traitlets.Unicode().tag(sync=True)
    closing = traitlets.Unicode().tag(sync=True)
    head = traitlets.Unicode().tag(sync=True)
    progress = traitlets.Unicode().tag(sync=True)
    error = traitlets.Unicode().tag(sync=True)
    curves = traitlets.Unicode().tag(sync=True)
    history = traitlets.Unicode().tag(sync=True)
    ranks = traitlets.Unicode().tag(sync=True)
    notes = traitlets.Unicode().tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)

    @_of_no_cell
    def __init__(self, job: Job[Any]) -> None:
        identity = uuid.uuid4().hex
        super().__init__(identity=identity, model_id=identity)
        self._display_id = f"kale-dist-{identity}"
        self._lock = threading.RLock()
        # The page of the cell shows the widget, but may be able to report that only after the cell.
        self._seen_by = {_FIRST_PAGE: False}
        """The views that are seen, and whether their table of many ranks is open."""
        self._woken = threading.Event()
        self._is_shown = False
        self._has_answered = True
        self._is_picture = False
        self._can_answer_since = math.inf
        self._take(job)
        self.on_msg(self._receive)

    def show(self) -> None:
        """Show the widget below the cell that runs; front ends without widgets get the picture as HTML or text."""
        from IPython.display import publish_display_data

        publish_display_data(self._bundle(), transient={"display_id": self._display_id})  # type: ignore[no-untyped-call]
        self._is_shown = True
        self._has_answered = False
        shell = get_ipython()
        if _has_subshells(shell.kernel):
            self._can_answer_since = time.monotonic()
        else:
            shell.events.register("pre_run_cell", self._begin_cell)
            shell.events.register("post_run_cell", self._end_cell)
        self.start()

    def _begin_cell(self, _info: Any) -> None:
        self._can_answer_since = math.inf

    def _end_cell(self, _result: Any) -> None:
        self._can_answer_since = time.monotonic()

    def _note_answer(self) -> None:
        """Record that a page has loaded the widget, and show the widget again if a picture had replaced it."""
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
            if self._is_picture:
                self._is_picture = False
                self._replace()

    def _replace_if_unanswered(self) -> None:
        """Replace the widget by a picture if no page has answered in time."""
        with self._lock:
            is_late = time.monotonic() - self._can_answer_since >= _ANSWER_S
            if is_late and not self._has_answered and not self._is_picture:
                self._is_picture = True
                self._replace()

    def _replace(self) -> None:
        """Publish the output again; the notebook's file keeps the last one, for viewers without widgets."""
        from IPython.display import publish_display_data

        if self._is_shown:
            # The front end may be gone.
            with contextlib.suppress(Exception):
                publish_display_data(  # type: ignore[no-untyped-call]
                    self._bundle(), transient={"display_id": self._display_id}, update=True
                )

    # -- what is shown ------------------------------------------------------------------------------------------------

    def _take(self, job: Job[Any]) -> None:
        with self._lock:
            self._job = job
            self._log = LogReader(inside(job).files)
            self._lines: collections.deque[LogLine] = collections.deque(self._log.tail(KEPT_LINES), maxlen=KEPT_LINES)
            self._next = len(self._lines)
            self._status: JobStatus | None = None
            self._is_over = False
            self._pictured_at = self._ranked_at = float("-inf")
            self._ranked: list[RankStateName] = []
        self._draw()
        inside(job).after_wait.append(self._draw)
        # A page that can answer and does not gets the picture, which shows them, too.
        inside(job).reasons.is_shown = lambda: self._has_answered or self._can_answer_since < math.inf

    def _bundle(self) -> dict[str, Any]:
        """The output in all its formats, of which a front end shows the richest that it knows."""
        tail, now = tuple(self._lines)[-view.LOG_LINES :], time.time()
        bundle: dict[str, Any] = {}
        remark = _NO_WIDGETS if self._is_picture else ""
        if not self._is_picture:
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2, "version_minor": 0, "model_id": self.model_id,
            }  # fmt: skip
        if self._status is not None:
            bundle["text/plain"] = "\n\n".join(filter(None, (view.text(self._status, tail, now), remark)))
            bundle["text/html"] = view.html(self._status, tail, now, is_frozen=not self._is_picture, remark=remark)
        return bundle

    @_of_no_cell
    def _draw(self) -> None:
        """Update the parts; traitlets sends only those that have changed."""
        with self._lock:
            if self._is_over:
                return
            try:
                status = self._job.status
            except JobNotFoundError:
                self._is_over = True
                return
            if status.is_final:
                # Read after the final status, so that the last lines are there.
                self._read_log()
            drawn_before = self._pictured_at
            states = [replica.state for replica in status.replicas]
            is_read = any(self._seen_by.values()) or states != self._ranked
            due_s = _TABLE_EACH_S if is_read else _FOLDED_EACH_S
            is_few = len(states) <= _MANY_RANKS or status.is_final
            shows_ranks = is_few or time.monotonic() - self._ranked_at >= due_s
            if shows_ranks:
                self._ranked, self._ranked_at = states, time.monotonic()
            shows_history = self._status is None or status.history is not self._status.history
            found = view.parts(status, time.time(), shows_ranks=shows_ranks, shows_history=shows_history)
            with self.hold_sync():
                self.ref = wire.visible(status.ref)
                self.name = facts.name(status)
                self.state = status.state.value
                self.world_size = len(status.replicas)
                self.plan_word = "Copy YAML" if self._job.ref.startswith("kubernetes") else "Copy plan"
                # What pods have not got yet comes from the kernel; other front ends than Jupyter may end it with the page.
                goes = self._job.spec.policy.detach or not status.ref.startswith("local://")
                kernel = " and end the kernel" if goes and status.state is StateName.RUNNING else ""
                is_shown = not status.is_final and (kernel or get_ipython() is not None)
                self.closing = f"You may close this page{kernel}: the job goes on" if is_shown else ""
                for part, drawn in found.items():
                    setattr(self, part, drawn)
                is_new = self._status is None or status.state is not self._status.state
                every_s = _PICTURE_EACH_S if self._is_picture else _SAVED_EACH_S
                if is_new or time.monotonic() - self._pictured_at >= every_s:
                    self._pictured_at = time.monotonic()
                    tail = tuple(self._lines)[-view.LOG_LINES :]
                    self.picture = view.html(status, tail, time.time(), is_frozen=True)
            self._status = status
            self._is_over = status.is_final
            if self._is_over or (self._is_picture and self._pictured_at > drawn_before):
                self._replace()

    def _read_log(self) -> None:
        """Read new lines, and send them if a page shows the widget."""
        with self._lock:
            fresh = list(self._log.read())
            if fresh:
                self._lines.extend(fresh)
                first, self._next = self._next, self._next + len(fresh)
                if self._seen_by:
                    self._send_lines(max(first, self._next - KEPT_LINES))

    def _send_lines(self, first: int) -> None:
        """Send the kept lines from this number on."""
        oldest = self._next - len(self._lines)
        first = max(first, oldest)
        # From the end: a deque counts to its middle slowly, and the new lines of a flood are its last ones.
        fresh = itertools.islice(reversed(self._lines), self._next - first)
        lines = [(line.rank, line.prefix, facts.log_text(line)) for line in fresh]
        if lines:
            self.send({"first": first, "lines": lines[::-1]})

    # -- the thread ---------------------------------------------------------------------------------------------------

    def start(self) -> JobWidget:
        """Start to follow the job, as `show` does, too. Returns the widget."""
        threading.Thread(target=self._follow, name=f"kale_dist widget {self._job.name}", daemon=True).start()
        return self

    @_of_no_cell
    def _follow(self) -> None:
        drawn = took_s = 0.0
        job = self._job
        while self._job is job and not (self._is_over and (self._has_answered or self._is_picture)):
            # The front end may be gone, or the kernel about to end.
            with contextlib.suppress(Exception):
                if self._seen_by:
                    self._read_log()
                since_s = time.monotonic() - drawn
                is_due = bool(self._seen_by) and since_s >= took_s / _MOST_OF_A_CORE
                # A hidden page gets a new state, too, because it may outlive the kernel.
                if since_s >= _PARTS_EACH_S and (
                    is_due or self._status is None or job.status.state is not self._status.state
                ):
                    took_s = time.thread_time()
                    self._draw()
                    drawn, took_s = time.monotonic(), time.thread_time() - took_s
                self._replace_if_unanswered()
            self._woken.wait(_LINES_EACH_S if self._seen_by else _UNSEEN_EACH_S)
            self._woken.clear()

    # -- messages from pages ------------------------------------------------------------------------------------------

    @_of_no_cell
    def _receive(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        self._note_answer()
        seen = str(message.get("view", ""))
        match message.get("tell"):
            case "here":
                self._note_view(seen, message)
            case "gone":
                with self._lock:
                    self._seen_by.pop(seen, None)
        actions: dict[Any, Callable[[], dict[str, Any] | None]] = {
            "cancel": self._cancel, "retry": self._retry, "plan": lambda: {"plan": inside(self._job).plan()},
        }  # fmt: skip
        asked = message.get("ask")
        if asked == "download":
            self._download(seen)
        elif asked in actions:
            try:
                answer = actions[asked]() or {}
            except KaleDistError as error:
                answer = {"say": str(error)}
            self.send({"view": seen, **answer})

    def _note_view(self, seen: str, message: dict[str, Any]) -> None:
        visible, first = bool(message.get("visible")), message.get("next")
        with self._lock:
            self._seen_by.pop(_FIRST_PAGE, None)
            if visible:
                self._seen_by[seen] = bool(message.get("table"))
                self._read_log()
                self._send_lines(first if isinstance(first, int) else 0)
                self._draw()
            else:
                self._seen_by.pop(seen, None)
        self.send({"view": seen, "heard": "visible" if visible else "hidden"})
        self._woken.set()

    def _cancel(self) -> dict[str, Any]:
        self._job.cancel()
        return {"say": "Being cancelled"}

    def _retry(self) -> dict[str, Any]:
        job = self._job.retry()
        self._take(job)
        self.job_number += 1
        self.start()
        return {"say": f"This is a new job: kd.attach({job.ref!r})"}

    def _download(self, seen: str) -> None:
        text: collections.deque[bytes] = collections.deque()
        size = 0
        for line in self._job.logs():
            text.append(f"{line}\n".encode("utf-8", "replace"))
            size += len(text[-1])
            while size > MAX_DOWNLOAD_BYTES:
                size -= len(text.popleft())
        self.send({"view": seen, "file": f"{self._job.name}.log"}, buffers=[b"".join(text)])
