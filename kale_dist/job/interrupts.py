"""Decides what an interrupt does while a call waits for a job.

In a notebook the stop button is pressed to get the cell back: the first interrupt ends the waiting, and only a second
one within `SECOND_WITHIN_S` ends the job. In a script, and in a kernel without a front end, the first one ends
the job, as Ctrl-C ends any program. There is no prompt.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kale_dist.errors import KaleDistError, tracebacks

SECOND_WITHIN_S = 10.0

_lock = threading.Lock()
_last_interrupt = -math.inf


def shell() -> Any:
    """IPython's shell of this process; None without one. IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def is_interactive() -> bool:
    """Whether this is a kernel with a person at its front end; False in scripts, terminals and executed notebooks."""
    kernel = getattr(shell(), "kernel", None)
    # A front end sends with each cell whether it can answer input(); tools that execute notebooks cannot.
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", True))


def can_answer() -> bool:
    """Whether this thread can ask a person: a cell's input and a terminal belong to the main thread."""
    return threading.current_thread() is threading.main_thread() and has_person()


def can_read() -> bool:
    """Whether this thread gets lines from a person, a pipe or a file."""
    if can_answer():
        return True
    is_alone = getattr(shell(), "kernel", None) is None and threading.current_thread() is threading.main_thread()
    with contextlib.suppress(AttributeError, ValueError):
        return is_alone and sys.stdin.readable()
    return False


def has_person() -> bool:
    """Whether this process has a cell with a front end, or a terminal."""
    if getattr(shell(), "kernel", None) is not None:
        return is_interactive()
    # Some programs have no standard input, or have closed it.
    with contextlib.suppress(AttributeError, ValueError):
        return sys.stdin.isatty()
    return False


def running_cell() -> int | None:
    """The number of the notebook's cell that this thread runs; None in scripts, terminals and other threads."""
    if getattr(shell(), "kernel", None) is None or threading.current_thread() is not threading.main_thread():
        return None
    return int(shell().execution_count)


@contextlib.contextmanager
def passing_on(ref: str, cancel: Callable[[], None]) -> Iterator[None]:
    """Handle a KeyboardInterrupt in a wait or a submission: cancel the job or let it run, print which, and raise it again.

    Args:
        ref: The job's reference, for the printed line.
        cancel: Cancels the job without waiting.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        shorten(error)
        if is_interactive() and not _is_second():
            _log(
                f"{ref} keeps running. To cancel it, interrupt again within {SECOND_WITHIN_S:.0f} s, or call job.cancel()"
            )
            raise
        try:
            cancel()
            _log(f"{ref} is cancelled")
        except KaleDistError as error:
            _log(f"{ref} could not be cancelled: {error}")
        except KeyboardInterrupt:
            _log(goes_on(ref))
        raise


def goes_on(ref: str) -> str:
    """The line for a person who leaves a job by a second interrupt."""
    return f"{ref} goes on. To end it: kale-dist cancel {ref}"


def shorten(error: KeyboardInterrupt) -> None:
    """Have a notebook show an interrupt with the user's own lines alone."""
    error._render_traceback_ = functools.partial(tracebacks.for_notebook, error)  # type: ignore[attr-defined]


def ends_job() -> bool:
    """Whether an interrupt of a wait that comes now cancels the job."""
    return not is_interactive() or time.monotonic() - _last_interrupt < SECOND_WITHIN_S


def _is_second() -> bool:
    global _last_interrupt  # noqa: PLW0603 - the two interrupts may come in different waits, of different jobs
    now = time.monotonic()
    with _lock:
        second = now - _last_interrupt < SECOND_WITHIN_S
        _last_interrupt = -math.inf if second else now
    return second


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for the person who pressed the key
