"""Pictures that a job's ranks have shown (`plt.show()`, `display(figure)`), in the cell that waits for the job."""

from __future__ import annotations

import pathlib
import sys

from kale_dist import contract
from kale_dist.contract import EventKind


class Pictures:
    """Shows each picture of a job once.

    Args:
        events: The file of the job's events.
    """

    def __init__(self, events: pathlib.Path) -> None:
        self._events = events
        self._read = 0

    def show(self) -> None:
        """Show those that have come since the last time. Called in the thread of a cell; elsewhere nothing happens."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if not hasattr(shell, "kernel") or not self._events.exists():
            return
        from IPython.display import display

        with self._events.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for event in contract.decode_json_lines(whole):
            if event.get("event") == EventKind.DISPLAY:
                display(event["data"], raw=True)  # type: ignore[no-untyped-call]
