"""One job with all its attempts, judged by the agent that speaks for it: from the order to the last event.

When a rank is lost and the order allows another attempt, all ranks are ended, and once none is left all are started
again. What a job's own code raises, a lack of memory, a deadline, a lost pod and a cancel end the job at once.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from kale_dist.contract import EventKind, FailureCause, JobOrder, RankStateName, StateName
from kale_dist.errors import KaleDistError
from kale_dist.runtime import ending
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.fork_pool import ForkPool
from kale_dist.runtime.hang_watch import HangWatch
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.local_ranks import LocalRanks
from kale_dist.runtime.loop import Loop, Timer
from kale_dist.runtime.rank_run import Rank, RankRun

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
        writer: The job's files. Whoever opened it closes it.
        on_end: Called once, when no rank is left and the last event is written.
        others: The job's ranks that other agents run. They are judged, ended and let go like this agent's own;
            whoever made them hands on what happens to `rank_changed`.
        start_others: Starts those; called with the attempt, rank 0's seed and the port of its store.
        ship: As for `LocalRanks`.
    """

    def __init__(
        self,
        order: JobOrder,
        loop: Loop,
        pool: ForkPool,
        writer: JobWriter,
        on_end: Callable[[], None],
        *,
        others: Sequence[Rank] = (),
        start_others: Callable[[int, int, int], None] | None = None,
        ship: Callable[[RankRun], bool] | None = None,
    ) -> None:
        self.order = order
        """The job, with the attempt that it is at."""
        self.seed = secrets.randbits(31) if order.seed is None else order.seed
        """That of rank 0."""
        self.verdict: Verdict | None = None
        """How the job ends, as soon as that is settled."""
        self._loop = loop
        self._pool = pool
        self._writer = writer
        self._on_end = on_end
        self._start_others = start_others
        self._ship = ship
        self._watch: HangWatch | None = None
        self._deadline: Timer | None = None
        self._timers: list[Timer] = []
        self._failures: list[Rank] = []
        self._loss: Verdict | None = None
        self._is_over = False
        self._away: Callable[[], str] = str
        self._others = others
        self.local = self._make_ranks()
        self._ranks: list[Rank] = [*self.local.ranks, *others]

    def _make_ranks(self) -> LocalRanks:
        return LocalRanks(
            self.order,
            self._loop,
            self._pool,
            self._writer,
            on_change=self.rank_changed,
            on_move=lambda _, event: self.moved(event),
            on_refusal=lambda reason: self.fail(FailureCause.NOT_STARTED, reason),
            on_all_forked=self._all_forked,
            ship=self._ship,
        )

    def start(self) -> None:
        """Start the ranks. What cannot be done is told as an event of the job, never raised."""
        self._writer.event(EventKind.STATE, state=str(StateName.STARTING), reason="", cause="")
        if self.order.note:
            self._writer.log.say(self.order.note)
            self._writer.event(EventKind.NOTE, text=self.order.note)
        self._start_ranks()

    def _start_ranks(self) -> None:
        try:
            port = self.local.listen()
            if self._start_others is not None:
                self._start_others(self.order.attempt, self.seed, port)
            self.local.start(self.seed)
        except (OSError, KaleDistError) as error:
            self.fail(FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
            return
        self._watch = HangWatch(
            self._ranks, self._loop, self._writer, self.order.stall_warn_s, self.order.stall_timeout_s, self.fail
        )
        if self.verdict is not None or self._loss is not None:
            self._watch.stop()

    def cancel(self, cause: FailureCause, reason: str, grace_s: float) -> None:
        """End the job, whatever it is at; a job that is ending already is only hastened.

        Args:
            cause: Why.
            reason: The same as a sentence.
            grace_s: Seconds from SIGTERM to SIGKILL.
        """
        if self.verdict is None:
            self._conclude(Verdict(StateName.CANCELLED, cause, reason), grace_s)
        elif not self._is_over:
            self._timers.append(self._loop.call_later(grace_s, self._kill))

    def fail(self, cause: FailureCause, reason: str) -> None:
        """End the job as failed; nothing if its fate is settled already. After a stall it may be tried again."""
        if self.verdict is None:
            self._conclude(Verdict(StateName.FAILED, cause, reason, may_restart=cause is FailureCause.STALLED))

    def moved(self, event: dict[str, Any] | None) -> None:
        """A rank has given a sign of progress: an event, or (None) a line of output."""
        if self._watch is not None:
            self._watch.moved(event)

    def when_peers_are_lost(self, explain: Callable[[], str]) -> None:
        """Have somebody explain errors that only say that another rank cannot be reached.

        Args:
            explain: Gives a sentence, or nothing if it knows of no reason.
        """
        self._away = explain

    def _all_forked(self) -> None:
        # The time of all attempts together is limited.
        if self.order.timeout_s is not None and self._deadline is None:
            self._deadline = self._loop.call_later(self.order.timeout_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self.fail(
            FailureCause.TIMEOUT,
            f"The job ran longer than its timeout_s of {self.order.timeout_s:g} s. "
            "Give it more time, or leave timeout_s out",
        )

    # -- what ranks do ----------------------------------------------------------------------------------------------

    def rank_changed(self, rank: Rank) -> None:
        """A rank's `state`, `done`, `end` or `is_gone` has changed."""
        if self.verdict is None and self._loss is None:
            self._judge(rank)
        elif rank.done is not None and rank.end is None:
            rank.let_go()
        self._go_on_if_all_are_gone()

    def _judge(self, rank: Rank) -> None:
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
                delay_s = ending.BLAME_AFTER_S if not self._others else ending.BLAME_FAR_AFTER_S
                self._timers.append(self._loop.call_later(delay_s, self._blame))
        elif rank.done is not None:
            if all(other.done is not None and other.done["ok"] for other in self._ranks):
                self._conclude(Verdict(StateName.SUCCEEDED, None, ""))
            elif self._watch is not None:
                self._watch.rank_done()
        elif all(other.state is RankStateName.RUNNING for other in self._ranks):
            self._writer.event(EventKind.STATE, state=str(StateName.RUNNING), reason="", cause="")

    def _blame(self) -> None:
        if self.verdict is not None or self._loss is not None:
            return
        sentence = self._away() if all(ending.lost_peer(rank) for rank in self._failures) else ""
        if sentence:
            self.fail(FailureCause.DIED, sentence)
        else:
            self._conclude(ending.blame(self._failures))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _conclude(self, verdict: Verdict, grace_s: float = FAILURE_GRACE_S) -> None:
        """The job's fate is settled, or that of its attempt: let those go that are done, end the others."""
        if verdict.may_restart and self._loss is None and self.order.attempt < self.order.max_restarts:
            self._loss = verdict
        else:
            self.verdict = verdict
        self.local.end()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._watch is not None:
            self._watch.stop()
        for rank in self._ranks:
            if rank.done is not None:
                rank.let_go()
            else:
                rank.terminate()
        self._timers.append(self._loop.call_later(grace_s, self._kill_unfinished))
        self._timers.append(self._loop.call_later(max(grace_s, EXIT_LIMIT_S), self._kill))
        self._go_on_if_all_are_gone()

    def _kill_unfinished(self) -> None:
        for rank in self._ranks:
            if rank.done is None:
                rank.kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _go_on_if_all_are_gone(self) -> None:
        if self._is_over or (self.verdict is None and self._loss is None):
            return
        if all(rank.is_gone for rank in self._ranks):
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            self.local.close()
            if self.verdict is not None:
                self._finish(self.verdict)
            elif self._loss is not None:
                self._begin_again(self._loss)

    def _begin_again(self, loss: Verdict) -> None:
        """No rank of the lost attempt is left: start all again."""
        self._loss = None
        self._failures.clear()
        self.order = dataclasses.replace(self.order, attempt=self.order.attempt + 1)
        count = f"attempt {self.order.attempt + 1} of {self.order.max_restarts + 1}"
        self._writer.begin_attempt(self.order.attempt)
        self._writer.log.say(f"{loss.reason}. All ranks are started again: {count}")
        self._writer.event(
            EventKind.STATE, state=str(StateName.STARTING), reason=f"Starting again, {count}: {loss.reason}", cause=""
        )
        self.local = self._make_ranks()
        self._ranks = [*self.local.ranks, *self._others]
        self._start_ranks()

    def _finish(self, verdict: Verdict) -> None:
        """No rank is left: write the last event."""
        self._is_over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if verdict.may_restart and self.order.max_restarts:
            count = f"This was attempt {self.order.attempt + 1} of {self.order.max_restarts + 1}"
            verdict = self.verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}. {count}")
        self._writer.flush_progress()
        if verdict.reason:
            self._writer.log.say(verdict.reason)
        self._writer.event(
            EventKind.STATE,
            state=str(verdict.state),
            reason=verdict.reason,
            cause=str(verdict.cause or ""),
            failed_rank=verdict.rank,
        )
        self._on_end()
