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

from kale_dist.errors import BackendError, say
from kale_dist.job import interrupts, watch
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.status import Breakpoint, JobStatus

_WAKE = signal.SIGURG
"""Ends a prompt. By default it does nothing, so one that comes too late is harmless."""

_HELP = "`n` next line, `c` continue, `q` end the job, `h` all commands"


class Prompts:
    """The prompts of one job.

    Args:
        backend: Where the job runs.
        ref: The job.
    """

    def __init__(self, backend: Backend, ref: JobRef) -> None:
        self._backend = backend
        self._ref = ref
        self._asked: Breakpoint | None = None
        self._is_stale = False
        self._unreachable: set[str] = set()

    def open(self, status: JobStatus, ranks: Sequence[int] | None = None) -> None:
        """Have the person debug the ranks that wait at breakpoints, one after the other. Without a person nothing happens.

        Args:
            status: The job's status.
            ranks: Only these ranks; None for all.

        Raises:
            KeyboardInterrupt: The person has left the prompt, at which the rank still waits.
        """
        if not status.at_breakpoints or not interrupts.can_answer():
            return
        while waiting := [
            replica.rank
            for replica in status.at_breakpoints
            if (ranks is None or replica.rank in ranks)
            and replica.breakpoint is not None
            and replica.breakpoint.prompt not in self._unreachable
        ]:
            status = self._debug(waiting[0])

    def _debug(self, rank: int) -> JobStatus:
        """Have the person debug one rank until it has left its breakpoint; returns the job's status then."""
        statuses: queue.SimpleQueue[JobStatus] = queue.SimpleQueue()
        main = threading.get_ident()

        def note(status: JobStatus) -> None:
            statuses.put(status)
            asked, now = self._asked, _breakpoint_of(status, rank)
            if asked is not None and (now is None or now.prompt != asked.prompt):
                self._is_stale = True
                signal.pthread_kill(main, _WAKE)

        unsubscribe = watch.watcher(self._backend).subscribe(self._ref, note)
        answered, line = "", ""
        try:
            while (there := _breakpoint_of(status := statuses.get(), rank)) is not None:
                if there.prompt == answered:
                    continue
                if not answered:
                    say(f"Rank {rank} waits in breakpoint() at {there.where}. {_HELP}")
                    self._backend.tell(self._ref, rank, {})
                elif there.typed != line:
                    say(f"Another debugger of rank {rank} was first, and typed {there.typed!r}")
                typed = self._ask(there)
                answered, line = there.prompt, there.typed if typed is None else typed
                if typed is not None:
                    self._backend.tell(self._ref, rank, {"prompt": there.prompt, "input": typed})
        except BackendError as error:
            say(f"Rank {rank} cannot be debugged from here: {error}")
            self._unreachable.add(there.prompt if there is not None else "")
        except KeyboardInterrupt:
            say(
                f"Rank {rank} still waits in breakpoint(): job.debug(rank={rank}) or `kale-dist debug {self._ref}` opens it"
            )
            raise
        finally:
            unsubscribe()
        return status

    def _ask(self, there: Breakpoint) -> str | None:
        """The line that the person types; None if the rank has left the prompt meanwhile."""
        text, newline, prompt = there.text.rpartition("\n")
        print(text, end=newline, flush=True)  # noqa: T201 - a debugger's output
        if interrupts.shell() is None:
            # The terminal's lines can then be edited.
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")

        def wake(_number: int, _frame: object) -> None:
            if self._asked is not None:
                raise KeyboardInterrupt

        before = signal.signal(_WAKE, wake)
        self._is_stale = False
        try:
            self._asked = there
            return input(prompt)
        except EOFError:
            return "q"
        except KeyboardInterrupt:
            print(flush=True)  # noqa: T201 - the cursor is behind the prompt
            if not self._is_stale:
                raise
            return None
        finally:
            self._asked = None
            signal.signal(_WAKE, before)


def _breakpoint_of(status: JobStatus, rank: int) -> Breakpoint | None:
    return next((replica.breakpoint for replica in status.at_breakpoints if replica.rank == rank), None)
