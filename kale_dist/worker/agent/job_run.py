"""One job with all its attempts, judged by the agent that is its head: from the order to the last event.

When a rank is lost and the order allows another attempt, all ranks are ended, and once none is left all are started
again; the death of a rank that the others can do without (`context.may_lose`) ends nothing. What a job's own code raises,
a deadline, a lost pod and a cancel end the job at once, and so does a rank that ran out of memory, if it was needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from kale_dist.errors import KaleDistError
from kale_dist.snapshot import loading
from kale_dist.wire import (
    Assignment,
    EndsWith,
    EventKind,
    FailureCause,
    JobFiles,
    Order,
    RankStateName,
    StateName,
    context,
)
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.agent import ending
from kale_dist.worker.agent.ending import Verdict
from kale_dist.worker.agent.fork_pool import REFILL_AFTER_S, ForkPool
from kale_dist.worker.agent.hang_watch import HangWatch
from kale_dist.worker.agent.rank_run import RankRun
from kale_dist.worker.agent.usage import UsageWatch
from kale_dist.worker.agent.writer import JobWriter
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.mpi import Mpirun

FAILURE_GRACE_S = 1.0
"""From SIGTERM to SIGKILL when a job has failed: all its ranks are gone within 2 s."""

EXIT_LIMIT_S = 7.0
"""A rank that was let go ends by itself in 5 s at most; if even that fails, it is killed."""


class JobRun:
    """Runs the ranks of a job and writes down what becomes of them.

    Args:
        order: The job, with this agent's own folder, store, key and process.
        loop: The agent's loop.
        pool: Where this agent's ranks come from.
        writer: The job's files. `on_end` has to close it.
        on_end: Called once, when no rank is left and the last event is on its way.
        relays: Who looks after the ranks of other agents; None: all ranks are this agent's.
        holds_floods: Whether ranks' output is held to a rate.
        before_end: Called when no rank is left, before the last event.
        mpirun: What runs beside the ranks; None for nothing.
    """

    def __init__(
        self,
        order: Order,
        loop: asyncio.AbstractEventLoop,
        pool: ForkPool,
        writer: JobWriter,
        on_end: Callable[[], None],
        *,
        relays: HeadsRelays | None = None,
        holds_floods: bool = False,
        before_end: Callable[[], None] = lambda: None,
        mpirun: Mpirun | None = None,
    ) -> None:
        self.order = order
        self.attempt = 0
        self.seed = secrets.randbits(31) if order.seed is None else order.seed
        """That of rank 0."""
        self.verdict: Verdict | None = None
        """How the job ends, as soon as that is decided."""
        self._loop = loop
        self._pool = pool
        self._writer = writer
        self._on_end = on_end
        self._relays = relays
        self._holds_floods = holds_floods
        self._before_end = before_end
        self._mpirun = mpirun
        self._files = JobFiles(order.folder)
        self._near = order.ranks_of(0)
        self._port = order.port
        self._watch: HangWatch | None = None
        self._usage: UsageWatch | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._failed_ranks: list[RankRun] = []
        self._dispensable: list[set[int]] = []
        """From each set, all ranks but one may be lost: the others carry on."""
        self._lost_ranks: list[RankRun] = []
        self._restart_reason: Verdict | None = None
        self._is_over = False
        self._all_forked = False
        self.ranks = self._make_ranks()

    def _make_ranks(self) -> list[RankRun]:
        return [
            RankRun(rank, self._writer, self.rank_changed, self._take_event) for rank in range(self.order.world_size)
        ]

    def start(self) -> None:
        """Start the ranks. Failures are reported as events of the job, never raised."""
        self._writer.event(EventKind.STATE, state=str(StateName.STARTING), reason="", cause="")
        if self.order.note:
            self._writer.say(self.order.note)
            self._writer.event(EventKind.NOTE, text=self.order.note)
        self._start_ranks()

    def _start_ranks(self) -> None:
        try:
            listener = self._listen()
            loading.stage_modules(FolderStore(pathlib.Path(self.order.store)), self.order.snapshot, self._files.modules)
        except (OSError, KaleDistError) as error:
            self.fail(FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
            return
        self._usage = UsageWatch(self.order, self._loop, self._near_pids, self._tell_usage)
        self._usage.start()
        for run in self.ranks:
            if run.rank not in self._near and self._relays is not None:
                self._relays.spawn(run, self.attempt, self._port, self.seed)
        for run in self.ranks[: len(self._near)]:
            assignment = Assignment(
                order=self.order, rank=run.rank, attempt=self.attempt, port=self._port, seed=self.seed
            )
            run.process = process = self._pool.take()
            process.start(run, assignment, listener if run.rank == 0 else None, is_held=self._holds_floods)
        if self._mpirun is not None:
            self._mpirun.start(self.attempt)
        self._watch = HangWatch(
            self.ranks,
            self._loop,
            self._writer,
            has_far_ranks=self._relays is not None,
            stall_warn_s=self.order.policy.stall_warn_s,
            stall_timeout_s=self.order.policy.stall_timeout_s,
            fail=self.fail,
        )

    def _listen(self) -> socket.socket:
        """Open the port of rank 0's store, so that no rank ever finds it closed.

        Raises:
            OSError: The port is taken. In an attempt after the first another one is opened instead.
        """
        backlog = max(128, self.order.world_size)
        address = "" if self._port else "127.0.0.1"
        try:
            listener = open_port(address, self._port, backlog)
        except OSError:
            # A process that the lost rank has left behind may hold it.
            if not self.attempt:
                raise
            listener = open_port(address, 0, backlog)
        listener.settimeout(0)
        self._port = listener.getsockname()[1]
        return listener

    def _near_pids(self) -> Mapping[int, int]:
        return {run.pid: run.rank for run in self.ranks if run.rank in self._near and run.pid and run.end is None}

    def _tell_usage(self, rank: int, fields: dict[str, int | str | None]) -> None:
        self._writer.event(EventKind.USAGE, rank, **fields)

    def cancel(self, cause: FailureCause, reason: str, grace_s: float) -> None:
        """End the job, in any state. If it is ending already, shorten its grace.

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
        """End the job as failed; nothing if that is decided already. After a stall it may be tried again."""
        if self.verdict is None:
            self._conclude(Verdict(StateName.FAILED, cause, reason, may_restart=cause is FailureCause.STALLED))

    def _can_lose(self, rank: int) -> bool:
        """Whether the others can carry on without this rank and those that were lost before."""
        gone = {rank, *(run.rank for run in self._lost_ranks)}
        return (
            0 not in gone and gone <= set().union(*self._dispensable) and all(one - gone for one in self._dispensable)
        )

    def _take_event(self, event: dict[str, Any]) -> None:
        if event.get("event") == context.DISPENSABLE:
            self._dispensable = [set(ranks) for ranks in event["sets"]]
        elif event.get("event") == EventKind.PROGRESS and self._watch is not None:
            self._watch.progressed(event)

    def _time_is_up(self) -> None:
        self.fail(
            FailureCause.TIMEOUT,
            f"The job ran longer than its timeout_s of {self.order.policy.timeout_s:g} s. "
            "Give it more time, or leave timeout_s out",
        )

    # -- what ranks do ----------------------------------------------------------------------------------------------

    def rank_changed(self, run: RankRun) -> None:
        """A rank's `state`, `done` or `end` has changed."""
        is_ending = self.verdict is not None or self._restart_reason is not None
        if run.end is not None and run.state in _ALIVE:
            has_failed = run in self._failed_ranks or (run.done is not None and not run.done["ok"])
            if run.done is None and not is_ending and self._can_lose(run.rank):
                self._lost_ranks.append(run)
                run.record_end(RankStateName.LOST)
                self._writer.say(f"{ending.blame([run]).reason}. The other ranks carry on without it")
            else:
                run.record_end(ending.rank_state(run, stopped=is_ending and not has_failed))
        if not self._all_forked and all(other.pid for other in self.ranks):
            self._all_forked = True
            self._pool.refill(REFILL_AFTER_S)
            # The time of all attempts together is limited.
            if self.order.policy.timeout_s is not None and self._deadline is None:
                self._deadline = self._loop.call_later(self.order.policy.timeout_s, self._time_is_up)
        if not is_ending:
            self._judge(run)
        elif run.done is not None and run.end is None:
            run.let_go()
        self._go_on_if_all_are_gone()

    def _judge(self, run: RankRun) -> None:
        """Look at what a change of one rank means for the job."""
        failed = run.done is not None and not run.done["ok"]
        is_lost = run in self._lost_ranks
        died = run.end is not None and run.done is None and not is_lost
        are_over = all(other.done is not None or other.end is not None for other in self.ranks)
        if failed or died:
            if run not in self._failed_ranks:
                self._failed_ranks.append(run)
            # Of several ranks that fail at once, the one that drew the others along may be heard of last.
            if are_over or (died and self.order.ends_with is not EndsWith.ALL):
                self._blame()
            elif len(self._failed_ranks) == 1 and self.order.ends_with is not EndsWith.ALL:
                delay_s = ending.BLAME_AFTER_S if self._relays is None else ending.BLAME_FAR_AFTER_S
                self._timers.append(self._loop.call_later(delay_s, self._blame))
        elif run.done is not None or is_lost:
            if are_over and self._failed_ranks:
                self._blame()
            elif are_over or (run.rank == 0 and self.order.ends_with is EndsWith.RANK_0):
                self._conclude(Verdict(StateName.SUCCEEDED, None, ""))
            elif self._watch is not None and not is_lost and self.order.ends_with is EndsWith.ANY_FAILURE:
                self._watch.rank_done()
        elif all(other.state is RankStateName.RUNNING for other in self.ranks):
            self._writer.event(EventKind.STATE, state=str(StateName.RUNNING), reason="", cause="")

    def _blame(self) -> None:
        if self.verdict is not None or self._restart_reason is not None:
            return
        sentence = ""
        if self._relays is not None and all(ending.lost_peer(run) for run in self._failed_ranks):
            sentence = self._relays.explain_loss()
        if sentence:
            self.fail(FailureCause.LOST, sentence)
        else:
            # If the ranks failed only because they missed a lost one, that one is to blame.
            are_followers = all(ending.lost_peer(run) for run in self._failed_ranks)
            verdict = ending.blame([*self._lost_ranks, *self._failed_ranks] if are_followers else self._failed_ranks)
            before = [run.rank for run in self._lost_ranks if run.rank != verdict.rank]
            told = f"{verdict.reason}. Lost before: {ending.name_ranks(before)}" if before else verdict.reason
            self._conclude(dataclasses.replace(verdict, reason=told))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _conclude(self, verdict: Verdict, grace_s: float = FAILURE_GRACE_S) -> None:
        """The end of the job, or of its attempt, is decided: let those go that are done, end the others."""
        if verdict.may_restart and self._restart_reason is None and self.attempt < self.order.policy.max_restarts:
            self._restart_reason = verdict
        else:
            self.verdict = verdict
        self._cancel_timers()
        self._timers.append(self._loop.call_later(grace_s, self._kill_unfinished))
        self._timers.append(self._loop.call_later(max(grace_s, EXIT_LIMIT_S), self._kill))
        for run in self.ranks:
            if run.done is not None:
                run.let_go()
            else:
                run.terminate()
        self._go_on_if_all_are_gone()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._watch is not None:
            self._watch.stop()

    def _kill_unfinished(self) -> None:
        for run in self.ranks:
            if run.done is None:
                run.kill()

    def _kill(self) -> None:
        for run in self.ranks:
            run.kill()

    def _go_on_if_all_are_gone(self) -> None:
        if self._is_over or (self.verdict is None and self._restart_reason is None):
            return
        if all(run.is_gone for run in self.ranks):
            self._cancel_timers()
            if self._usage is not None:
                self._usage.stop()
            if self._mpirun is not None:
                self._mpirun.stop()
            if self.verdict is not None:
                self._finish(self.verdict)
            elif self._restart_reason is not None:
                self._begin_again(self._restart_reason)

    def _begin_again(self, loss: Verdict) -> None:
        """No rank of the lost attempt is left: start all again."""
        self._restart_reason = None
        self._failed_ranks.clear()
        self._lost_ranks.clear()
        self._dispensable.clear()
        self._all_forked = False
        self.attempt += 1
        count = f"attempt {self.attempt + 1} of {self.order.policy.max_restarts + 1}"
        self._writer.begin_attempt(self.attempt)
        self._writer.say(f"{loss.reason}. All ranks are started again: {count}")
        self._writer.event(
            EventKind.STATE, state=str(StateName.STARTING), reason=f"Starting again, {count}: {loss.reason}", cause=""
        )
        self.ranks = self._make_ranks()
        self._start_ranks()

    def _finish(self, verdict: Verdict) -> None:
        """No rank is left: write the last event."""
        self._is_over = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._before_end()
        reason = verdict.reason
        if verdict.may_restart and self.order.policy.max_restarts:
            reason = f"{reason}. This was attempt {self.attempt + 1} of {self.order.policy.max_restarts + 1}"
        if reason:
            self._writer.say(reason)
        self._writer.event(
            EventKind.STATE,
            state=str(verdict.state),
            reason=reason,
            cause=str(verdict.cause or ""),
            failed_rank=verdict.rank,
            lost=[run.rank for run in self._lost_ranks],
        )
        self._on_end()


_ALIVE = (RankStateName.PENDING, RankStateName.STARTING, RankStateName.RUNNING)


def open_port(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket.

    Args:
        host: Address to listen on; empty for all, of both IP versions.
        port: Port; 0 for any that is free.
        backlog: Connections that may wait.

    Raises:
        OSError: The port is taken.
    """
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)
