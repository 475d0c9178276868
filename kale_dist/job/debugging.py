"""Opens the prompt of a rank's debugger where a person waits for the job: in a notebook's cell or a terminal.

Only the main thread asks, since a cell's input and a terminal belong to it. While it does, what changes about the job comes in the
watcher's thread, which ends a prompt that the rank no longer waits at.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import signal
import threading
from collections.abc import Sequence

from kale_dist import wire
from kale_dist.errors import BackendError, log
from kale_dist.job import interrupts, job_watch
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.status import JobStatus
from kale_dist.wire.messages import Breakpoint, Typed, Visit

_WAKE = signal.SIGURG
"""Ends a prompt. By default it does nothing, so one that comes too late is harmless."""


class Prompts:
    """The prompts of one job.

    Args:
        backend: Where the job runs.
        ref: The job.
        ends: What `q` ends.
    """

    def __init__(self, backend: Backend, ref: JobRef, ends: str) -> None:
        self._backend = backend
        self._ref = ref
        self._help = f"`n` next line, `c` continue, `q` end the {ends}, `h` all commands"
        self._asked: Breakpoint | None = None
        self._now: Breakpoint | None = None
        """The breakpoint of the rank that is debugged, in the newest status."""
        self._unreachable: set[str] = set()
        self._is_closed = False

    def close(self) -> None:
        """Open no prompt from now on: this process has cancelled the job."""
        self._is_closed = True

    def open(self, status: JobStatus, ranks: Sequence[int] | None = None, *, is_wait: bool = True) -> None:
        """Have the person debug the ranks that wait at breakpoints, one after the other.

        A wait without a person opens nothing; `debug` also takes the lines of a pipe or a file.

        Args:
            status: The job's status.
            ranks: Only these ranks; None for all.
            is_wait: Whether the person waits for the job, so that an interrupt may cancel it.

        Raises:
            KeyboardInterrupt: The person has left the prompt, at which the rank still waits.
        """
        can_type = interrupts.can_answer if is_wait else interrupts.can_read
        if self._is_closed or not status.at_breakpoints or not can_type():
            return
        while waiting := [
            replica.rank
            for replica in status.at_breakpoints
            if (ranks is None or replica.rank in ranks)
            and replica.breakpoint is not None
            and replica.breakpoint.prompt not in self._unreachable
        ]:
            try:
                status = self._debug(waiting[0])
            except KeyboardInterrupt:
                if not (is_wait and interrupts.ends_job(str(self._ref))):
                    how = f"job.debug(rank={waiting[0]}) or `kale-dist debug {self._ref}` opens it"
                    log(f"Rank {waiting[0]} still waits in breakpoint(): {how}")
                raise

    def _debug(self, rank: int) -> JobStatus:
        """Have the person debug one rank until it has left its breakpoint; returns the job's status then."""
        statuses: queue.SimpleQueue[JobStatus] = queue.SimpleQueue()
        main = threading.get_ident()

        def note(status: JobStatus) -> None:
            # First this: the main thread, which the queue wakes, asks only where the rank waits now.
            self._now = _breakpoint_of(status, rank)
            statuses.put(status)
            if self._asked is not None and not self._waits_at(self._asked):
                signal.pthread_kill(main, _WAKE)

        unsubscribe = job_watch.watcher(self._backend).subscribe(self._ref, note)
        answered, line = "", ""
        try:
            while (there := _breakpoint_of(status := statuses.get(), rank)) is not None:
                if there.prompt == answered:
                    continue
                if not answered:
                    log(f"Debugger of rank {rank}: {self._help}")
                    self._backend.send(self._ref, rank, Visit())
                elif there.typed != line:
                    log(f"Another debugger of rank {rank} was first, and typed {there.typed!r}")
                typed = self._ask(there)
                answered, line = there.prompt, there.typed if typed is None else typed
                if typed is not None:
                    self._backend.send(self._ref, rank, Typed(prompt=there.prompt, text=typed))
        except BackendError as error:
            log(f"Rank {rank} cannot be debugged from here: {error}")
            self._unreachable.add(there.prompt if there is not None else "")
        finally:
            unsubscribe()
        return status

    def _ask(self, there: Breakpoint) -> str | None:
        """The line that the person types; None if the rank has left the prompt meanwhile."""
        text, newline, prompt = wire.visible(there.text, keeps_colours=True).rpartition("\n")
        print(text, end=newline, flush=True)  # noqa: T201 - a debugger's output
        if interrupts.shell() is None:
            # The terminal's lines can then be edited.
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")

        def wake(_number: int, _frame: object) -> None:
            if self._asked is not None:
                raise KeyboardInterrupt

        before = signal.signal(_WAKE, wake)
        try:
            self._asked = there
            # It may have left before a signal could end the prompt.
            return input(wire.visible(prompt)) if self._waits_at(there) else None
        except EOFError:
            # An empty line ends a statement; one that goes on behind it, as in an open bracket, is ended by what is no Python.
            end = "" if there.typed else "\0"
            return end if prompt.startswith("...") else "q" if interrupts.has_person() else "c"
        except KeyboardInterrupt:
            print(flush=True)  # noqa: T201 - the cursor is behind the prompt
            if self._waits_at(there):
                raise
            return None
        finally:
            self._asked = None
            signal.signal(_WAKE, before)

    def _waits_at(self, there: Breakpoint) -> bool:
        return self._now is not None and self._now.prompt == there.prompt


def _breakpoint_of(status: JobStatus, rank: int) -> Breakpoint | None:
    return next((replica.breakpoint for replica in status.at_breakpoints if replica.rank == rank), None)
