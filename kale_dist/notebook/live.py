"""Shows a job below a notebook's cell, as a widget or a picture, and the figures that its ranks show.

No thread prints, because its output would appear below the cell that runs at the time. The last picture is drawn in the
caller's thread, so that an executed notebook keeps it.
"""

from __future__ import annotations

import importlib.util
import pathlib
import time
import uuid
from typing import Any

from kale_dist.errors import JobNotFoundError
from kale_dist.job import interrupts, view
from kale_dist.job.handle import Job, inside
from kale_dist.job.reader import EventReader
from kale_dist.wire import visible
from kale_dist.wire.events import Display


def show(job: Job[Any], *, as_object: bool = False) -> Any:
    """Show a job below the cell that runs; or return what marimo shows: the widget, or text.

    A notebook that a person uses shows a widget, if `anywidget` is installed; other notebooks show a picture, which is
    replaced when a wait for the job ends. A terminal prints the present state once.
    """
    shell, has_widgets = interrupts.shell(), importlib.util.find_spec("anywidget") is not None
    try:
        status = job.status
    except JobNotFoundError:
        print(repr(job))  # noqa: T201 - the job was deleted, so there is nothing to update
        return None
    if has_widgets and (as_object or interrupts.is_interactive()):
        from kale_dist.notebook.widget import JobWidget

        widget = JobWidget(job)
        return widget.start() if as_object else widget.show()
    if getattr(shell, "kernel", None) is not None:
        return _show_picture(job, is_final=status.is_final)
    text = view.text(status, list(job.logs(tail=view.LOG_LINES)), time.time())
    return text if as_object else print(text)  # noqa: T201 - a terminal's last value


def _show_picture(job: Job[Any], *, is_final: bool) -> None:
    from IPython.display import publish_display_data

    transient = {"display_id": f"kale-dist-{uuid.uuid4().hex}"}
    publish_display_data(job._repr_mimebundle_(), transient=transient)  # type: ignore[no-untyped-call]

    def draw() -> None:
        nonlocal is_final
        if not is_final:
            is_final = job.done()
            publish_display_data(job._repr_mimebundle_(), transient=transient, update=True)  # type: ignore[no-untyped-call]

    inside(job).after_wait.append(draw)


_HARMLESS = ("text/plain", "image/png", "image/jpeg", "image/gif", "image/webp")
"""What runs no code in a page. A page trusts what a cell shows, with its scripts."""


class Pictures:
    """Shows the figures of a job's ranks (`plt.show()`, `display(figure)`) in the cell that waits for the job.

    Args:
        events: The file of the job's events.
        is_own: Whether this user has the job's key. What another user's job shows is text or a picture, and nothing else.
    """

    def __init__(self, events: pathlib.Path, *, is_own: bool) -> None:
        self._events = EventReader(events)
        self._is_own = is_own

    def show(self) -> None:
        """Show the figures that arrived since the last call. Called in a cell's thread; does nothing without a kernel."""
        if not hasattr(interrupts.shell(), "kernel"):
            return
        from IPython.display import display

        for event in self._events.read():
            data = event.what.data if isinstance(event.what, Display) else {}
            if not self._is_own:
                found = {kind: data[kind] for kind in _HARMLESS if isinstance(data.get(kind), str)}
                data = {kind: visible(text, keeps_colours=True) for kind, text in found.items()}
            if data:
                display(data, raw=True)  # type: ignore[no-untyped-call]
