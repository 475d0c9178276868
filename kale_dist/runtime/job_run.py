"""One attempt of one job on this agent, from the order to the last event."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import signal
import socket
from collections.abc import Callable
from typing import Any

from kale_dist.blobs import FolderStore
from kale_dist.contract import EventKind, FailureCause, JobFiles, JobOrder, RankStateName, StateName
from kale_dist.errors import KaleDistError
from kale_dist.runtime import ending, loading
from kale_dist.runtime.fork_pool import REFILL_AFTER_S, ForkPool
from kale_dist.runtime.hang_watch import HangWatch
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.loop import Loop, Timer
from kale_dist.runtime.rank_run import RankRun

FAILURE_GRACE_S = 1.0
"""From SIGTERM to SIGKILL when a job has failed: all its ranks are gone within 2 s."""

EXIT_LIMIT_S = 7.0
"""A rank that was let go ends by itself in 5 s at most; if even that fails, it is killed."""


class JobRun:
    """Runs the ranks of a job and writes down what becomes of them.

    Args:
        order: The job.
        loop: The agent's loop.
        pool: Where ranks come from.
        on_change: Called after files of the job have changed.
        on_end: Called once, when no rank is left and the last event is written.

    Raises:
        OSError: The job's folder cannot be written.
    """

    def __init__(
        self,
        order: JobOrder,
        loop: Loop,
        pool: ForkPool,
        on_change: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.order = order
        self._loop = loop
        self._pool = pool
        self._on_end = on_end
        self._files = JobFiles(pathlib.Path(order.folder))
        self._writer = JobWriter(self._files, order.attempt, loop, on_change)
        self._seed = secrets.randbits(31) if order.seed is None else order.seed
        self._listener: socket.socket | None = None
        self._port = order.master_port
        self._watch: HangWatch | None = None
        self._timers: list[Timer] = []
        self._verdict: ending.Verdict | None = None
        self._failures: list[RankRun] = []
        self._is_over = False
        first = order.first_rank
        self._ranks = [
            RankRun(rank, loop, self._writer, self._rank_changed, self._moved)
            for rank in range(first, first + order.local_world_size)
        ]

    def start(self) -> None:
        """Start the ranks. What cannot be done is told as an event of the job, never raised."""
        self._writer.event(EventKind.STATE, state=str(StateName.STARTING), reason="", cause="")
        if self.order.note:
            self._writer.log.say(self.order.note)
            self._writer.event(EventKind.NOTE, text=self.order.note)
        try:
            loading.stage_modules(FolderStore(pathlib.Path(self.order.store)), self.order.snapshot, self._files.modules)
            self._listen()
            for rank in self._ranks:
                if self._verdict is not None:
                    break
                rank.start(self._pool, self._assign)
        except (OSError, KaleDistError) as error:
            self._conclude(
                ending.Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
            )
            return
        self._watch = HangWatch(
            self._ranks, self._loop, self._writer, self.order.stall_warn_s, self.order.stall_timeout_s, self._fail
        )
        if self._verdict is not None:
            self._watch.stop()

    def cancel(self, cause: FailureCause, reason: str, grace_s: float) -> None:
        """End the job, whatever it is at; a job that is ending already is only hastened.

        Args:
            cause: Why.
            reason: The same as a sentence.
            grace_s: Seconds from SIGTERM to SIGKILL.
        """
        if self._verdict is None:
            self._conclude(ending.Verdict(StateName.CANCELLED, cause, reason), grace_s)
        elif not self._is_over:
            self._timers.append(self._loop.call_later(grace_s, self._kill))

    def _listen(self) -> None:
        """Open the port of rank 0's store, so that no rank ever finds it closed."""
        if not self._port and not self.order.first_rank:
            self._listener = socket.create_server((self.order.master_addr, 0), backlog=max(128, self.order.world_size))
            self._listener.settimeout(0)
            self._port = self._listener.getsockname()[1]

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _assign(self, rank: RankRun) -> None:
        if self._verdict is not None:
            if rank.process is not None:
                rank.process.signal_group(signal.SIGKILL)
            return
        assignment = {"order": self.order.to_json(), "rank": rank.rank, "port": self._port, "seed": self._seed}
        listener = self._listener.fileno() if self._listener is not None and rank.rank == 0 else None
        try:
            rank.assign(assignment, listener)
        except OSError as error:
            self._fail(FailureCause.NOT_STARTED, f"Rank {rank.rank} did not take its assignment: {error}")
            return
        if listener is not None:
            # From here the port belongs to rank 0 alone: with it, it closes.
            self._close_listener()
        if all(other.pid for other in self._ranks):
            self._pool.refill(REFILL_AFTER_S)
            if self.order.timeout_s is not None:
                self._timers.append(self._loop.call_later(self.order.timeout_s, self._time_is_up))

    def _time_is_up(self) -> None:
        self._fail(
            FailureCause.TIMEOUT,
            f"The job ran longer than its timeout_s of {self.order.timeout_s:g} s. "
            "Give it more time, or leave timeout_s out",
        )

    def _fail(self, cause: FailureCause, reason: str) -> None:
        if self._verdict is None:
            self._conclude(ending.Verdict(StateName.FAILED, cause, reason))

    def _moved(self, event: dict[str, Any] | None) -> None:
        if self._watch is not None:
            self._watch.moved(event)

    # -- what ranks do ----------------------------------------------------------------------------------------------

    def _rank_changed(self, rank: RankRun) -> None:
        if rank.end is not None:
            rank.record_end(ending.rank_state(rank, stopped=self._verdict is not None and rank not in self._failures))
        if self._verdict is None:
            self._judge(rank)
        elif rank.done is not None and rank.end is None and rank.process is not None:
            rank.process.let_go()
        if self._verdict is not None and all(self._is_gone(other) for other in self._ranks):
            self._finish()

    @staticmethod
    def _is_gone(rank: RankRun) -> bool:
        return rank.process is None or rank.end is not None

    def _judge(self, rank: RankRun) -> None:
        """Look at what a change of one rank means for the job."""
        failed = rank.done is not None and not rank.done["ok"]
        died = rank.end is not None and rank.done is None
        if failed or died:
            if rank not in self._failures:
                self._failures.append(rank)
            # Of several ranks that fail at once, the one that drew the others along may be heard of last.
            if died or all(other.done is not None or other.end is not None for other in self._ranks):
                self._blame()
            elif len(self._failures) == 1:
                self._timers.append(self._loop.call_later(ending.BLAME_AFTER_S, self._blame))
        elif rank.done is not None:
            if all(other.done is not None and other.done["ok"] for other in self._ranks):
                self._conclude(ending.Verdict(StateName.SUCCEEDED, None, ""))
            elif self._watch is not None:
                self._watch.rank_done()
        elif all(other.state is RankStateName.RUNNING for other in self._ranks):
            self._writer.event(EventKind.STATE, state=str(StateName.RUNNING), reason="", cause="")

    def _blame(self) -> None:
        if self._verdict is None:
            self._conclude(ending.blame(self._failures))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _conclude(self, verdict: ending.Verdict, grace_s: float = FAILURE_GRACE_S) -> None:
        """The job's fate is settled: let those go that are done, end the others."""
        self._verdict = verdict
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._watch is not None:
            self._watch.stop()
        for rank in self._ranks:
            if rank.process is None or rank.end is not None:
                continue
            if rank.done is not None:
                rank.process.let_go()
            elif not rank.pid:
                self._pool.discard(rank.process)
                rank.process = None
            else:
                rank.process.signal_group(signal.SIGTERM)
                # A stopped process gets no other signal before it goes on.
                rank.process.signal_group(signal.SIGCONT)
        self._timers.append(self._loop.call_later(grace_s, self._kill_unfinished))
        self._timers.append(self._loop.call_later(max(grace_s, EXIT_LIMIT_S), self._kill))
        if all(self._is_gone(rank) for rank in self._ranks):
            self._finish()

    def _kill_unfinished(self) -> None:
        for rank in self._ranks:
            if rank.done is None and rank.end is None and rank.process is not None:
                rank.process.signal_group(signal.SIGKILL)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.end is None and rank.process is not None:
                rank.process.signal_group(signal.SIGKILL)

    def _finish(self) -> None:
        """No rank is left: write the last event and close everything."""
        if self._is_over or self._verdict is None:
            return
        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        self._close_listener()
        verdict = self._verdict
        self._writer.flush_progress()
        if verdict.reason:
            self._writer.log.say(verdict.reason)
        self._writer.event(
            EventKind.STATE, state=str(verdict.state), reason=verdict.reason, cause=str(verdict.cause or "")
        )
        with contextlib.suppress(OSError):
            self._writer.close()
        self._on_end()
