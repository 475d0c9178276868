"""Decides what an interrupt does while a call waits for a job.

In a notebook the stop button is pressed to get the cell back: the first interrupt ends the waiting, and only a second
one within `SECOND_WITHIN_S` ends the job, in another wait for it or after the cell. Where another cell runs, it ends that
cell alone. In a script, and in a kernel without a front end, the first one ends the job, as Ctrl-C ends any program. There
is no prompt.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kale_dist.errors import KaleDistError, tracebacks

SECOND_WITHIN_S = 10.0

_lock = threading.Lock()
_last = "", -math.inf
"""The job whose wait was interrupted last, and when."""


def shell() -> Any:
    """IPython's shell of this process; None without one. IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def is_interactive() -> bool:
    """Whether this is a kernel with a person at its front end; False in scripts, terminals and executed notebooks."""
    kernel = getattr(shell(), "kernel", None)
    # A front end sends with each cell whether it can answer input(); tools that execute notebooks cannot.
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", True))


def _has_stop_button() -> bool:
    """Whether a person gets a cell back by an interrupt: here, or in a cell of marimo."""
    return is_interactive() or bool(getattr(sys.modules.get("marimo"), "running_in_notebook", bool)())


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
        if _has_stop_button() and not _is_second(ref):
            _log(
                f"{ref} keeps running. To cancel it, interrupt again within {SECOND_WITHIN_S:.0f} s, or call job.cancel()"
            )
            with contextlib.suppress(AttributeError):  # a kernel that is not ipykernel
                _take_next_while_idle(ref, cancel)
        else:
            _cancel(ref, cancel)
        raise


def _cancel(ref: str, cancel: Callable[[], None]) -> None:
    try:
        cancel()
        _log(f"{ref} is cancelled")
    except KaleDistError as error:
        _log(f"{ref} could not be cancelled: {error}")
    except KeyboardInterrupt:
        _log(goes_on(ref))


def _take_next_while_idle(ref: str, cancel: Callable[[], None]) -> None:
    """Have a second interrupt cancel the job also after the cell, where ipykernel ignores it.

    After each message ipykernel puts back the handler that it saved before it.
    """
    ipython = shell()
    before = ipython.kernel.saved_sigint_handler

    def leave(*_: Any) -> None:
        if ipython.kernel.saved_sigint_handler is take:
            ipython.kernel.saved_sigint_handler = before
            ipython.events.unregister("pre_run_cell", leave)
            if signal.getsignal(signal.SIGINT) is take:
                signal.signal(signal.SIGINT, before)

    def take(*_: Any) -> None:
        leave()
        if _is_second(ref):
            threading.Thread(target=_cancel, args=(ref, cancel), daemon=True).start()

    ipython.kernel.saved_sigint_handler = take
    ipython.events.register("pre_run_cell", leave)
    ipython.kernel.io_loop.call_later(SECOND_WITHIN_S, leave)


def goes_on(ref: str) -> str:
    """The line for a person who leaves a job by a second interrupt."""
    return f"{ref} goes on. To end it: kale-dist cancel {ref}"


def shorten(error: KeyboardInterrupt) -> None:
    """Have a notebook show an interrupt with the user's own lines alone."""
    error._render_traceback_ = functools.partial(tracebacks.for_notebook, error)  # type: ignore[attr-defined]


def ends_job(ref: str) -> bool:
    """Whether an interrupt of a wait for this job that comes now cancels it."""
    return not _has_stop_button() or (_last[0] == ref and time.monotonic() - _last[1] < SECOND_WITHIN_S)


def _is_second(ref: str) -> bool:
    global _last  # noqa: PLW0603 - the two interrupts may come in different waits
    now = time.monotonic()
    with _lock:
        second = _last[0] == ref and now - _last[1] < SECOND_WITHIN_S
        _last = ("", -math.inf) if second else (ref, now)
    return second


def _log(line: str) -> None:
    # In one piece: a thread's line may come while another cell begins.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
