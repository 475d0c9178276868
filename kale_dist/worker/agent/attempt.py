"""One attempt at work, as the agent that judges it sees it: its ranks are started, watched, judged and ended by one task."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kale_dist.wire import Assignment, Attempt, EndsWith, FailureCause, Order, RankStateName, StateName, Verdict, events
from kale_dist.wire.messages import Answer, CellFailed
from kale_dist.worker.agent import ending
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.agent.hang_watch import HangWatch
from kale_dist.worker.agent.history import History
from kale_dist.worker.agent.losses import Losses
from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.agent.saving import Saving
from kale_dist.worker.agent.usage import UsageWatch
from kale_dist.worker.agent.writer import JobWriter

FAILURE_GRACE_S = 1.0
"""From SIGTERM to SIGKILL when a job has failed: all its ranks are gone within 2 s."""

EXIT_LIMIT_S = 7.0
"""A rank that was let go ends by itself in 5 s at most; if even that fails, it is killed."""

_FILE_LIMIT_S = 20.0
"""How long rank 0 of a job that has failed may finish the checkpoint that it is writing."""

_LOOK_EACH_S = 0.05
_ALIVE = (RankStateName.PENDING, RankStateName.STARTING, RankStateName.RUNNING)


class Elsewhere(Protocol):
    """Looks after the ranks of other agents."""

    @property
    def ready(self) -> list[int]:
        """Numbers of the agents that have what they need."""

    @property
    def missing(self) -> dict[int, str]:
        """Where the agents are that have not joined, or are not ready, by their numbers."""

    def spawn(self, attempt: Attempt, ranks: Sequence[Rank]) -> None:
        """Have the agents start their ranks."""

    def dismiss_leavers(self) -> None:
        """Let agents end that are asked to: no rank is left with them."""

    def explain_loss(self) -> str:
        """A sentence on the agent that is gone; empty if all are there."""


class Beside(Protocol):
    """Runs beside the ranks of an attempt."""

    def start(self, attempt: Attempt) -> None:
        """Called when the ranks have been started."""

    def stop(self) -> None:
        """Called when they have ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What all attempts of a job work with."""

    order: Order
    """The job, with this agent's own folder, store, key and process."""
    loop: asyncio.AbstractEventLoop
    pool: ForkPool
    """Where this agent's ranks come from."""
    writer: JobWriter
    """The job's files."""
    elsewhere: Elsewhere | None = None
    """None: all ranks are this agent's."""
    is_limited: bool = False
    """Whether ranks' output is rate-limited."""
    beside: Beside | None = None
    """None for nothing."""
    history: History = dataclasses.field(default_factory=History)
    """What the ranks have used and waited for."""


class RunningAttempt:
    """The ranks of one attempt, and how it ends.

    Args:
        site: What it works with.
        attempt: Its number and members.
        on_forked: Called once, when all ranks have a process.
        is_last: Whether no other attempt may follow.
    """

    def __init__(self, site: Site, attempt: Attempt, on_forked: Callable[[], None], *, is_last: bool) -> None:
        self.ranks = [
            Rank(number, site.writer, self._rank_changed, self._take_event, self._take_answer)
            for number in range(attempt.world_size)
        ]
        self.world_size = attempt.world_size
        self.lost: list[Rank] = []
        """Ranks without which the others carry on."""
        self.verdict: Verdict | None = None
        """How the attempt ends, as soon as that is decided."""
        self._site = site
        self._attempt = attempt
        self._is_last = is_last
        self._on_forked = on_forked
        # A change of one of n ranks is not a reason to look at all n.
        self._unforked = set(range(attempt.world_size))
        self._waited_for = set(self._unforked)
        """Ranks that do not run the function yet."""
        self._near = self.ranks[: attempt.members[0].processes]
        self._ends_with = site.order.ends_with
        self.saving = Saving(self.ranks, site.loop, site.writer)
        self._losses = Losses()
        self._failed: list[Rank] = []
        self._dispensable: list[set[int]] = []
        """From each set, all ranks but one may be lost: the others carry on."""
        self._grace_s = FAILURE_GRACE_S
        self._changed = asyncio.Event()
        self._watch: HangWatch | None = None

    async def run(self, stores: list[int]) -> Verdict:
        """Start the ranks, wait until it is decided how they end, and end those that are left.

        Args:
            stores: Descriptors by which the first ranks open their store; closed once they have them.

        Returns:
            How the attempt ended. No rank is left.
        """
        site, order = self._site, self._site.order
        usage = UsageWatch(order, site.loop, self._near_pids, self._send_usage, self._look_back)
        site.history.begin_attempt(self.world_size)
        self._watch = HangWatch(
            self.ranks,
            site.loop,
            site.writer,
            has_far_ranks=site.elsewhere is not None,
            stall_warn_s=order.policy.stall_warn_s,
            stall_timeout_s=order.policy.stall_timeout_s,
            breakpoint_wait_s=order.debugging.breakpoint_wait_s,
            fail=self.fail,
        )
        try:
            usage.start()
            self._start_ranks(stores)
            verdict = await self._judge()
            self.saving.go_on()
        finally:
            self._watch.stop()
            await self._end_ranks()
            usage.stop()
            self._look_back(is_last=True)
            if site.beside is not None:
                site.beside.stop()
        # While the ranks ended for another attempt, the job may have been cancelled.
        return self.verdict or verdict

    async def find_hang(self, limit_s: float) -> str:
        """Where the ranks hang, as `HangWatch` finds it; empty if they do not."""
        return await self._watch.find_hang(limit_s) if self._watch is not None else ""

    def fail(self, cause: FailureCause, reason: str) -> None:
        """End the attempt, and the job with it. After a stall another attempt may follow."""
        self.end(Verdict(StateName.FAILED, cause, reason, may_restart=cause is FailureCause.STALLED))

    def end(self, verdict: Verdict, grace_s: float | None = None) -> None:
        """Decide how the attempt ends. The first verdict counts, unless it leads to another attempt and this one does not.

        Args:
            verdict: How it ends.
            grace_s: Seconds from SIGTERM to SIGKILL. If the attempt is ending already, they shorten its grace.
        """
        if self.verdict is None:
            self._grace_s = FAILURE_GRACE_S if grace_s is None else grace_s
        elif grace_s is not None:
            self._site.loop.call_later(grace_s, self._kill, self.ranks)
        # The first one stands, unless another attempt would follow: after a loss that the job may have, or where pods wait for ranks.
        if (last := self.verdict) is None or (
            last.may_restart and (last.state is StateName.PENDING or not self._is_last)
        ):
            self.verdict = verdict
        self._changed.set()

    def save_first(self, then: Callable[[], None], limit_s: float, *, are_leaving: bool = False) -> None:
        """Have the ranks save that can, and call a function once all of them have.

        Args:
            then: Called at once if none can save, or their end is decided; else at the latest after `limit_s`, and when the attempt
                ends in another way before.
            limit_s: Seconds.
            are_leaving: Whether they are ended then: one that fails after it was asked to save has left.
        """
        self.saving.first(then, limit_s, are_leaving=are_leaving, is_decided=self.verdict is not None)

    # -- the task, step by step ---------------------------------------------------------------------------------------

    def _start_ranks(self, stores: list[int]) -> None:
        site, attempt = self._site, self._attempt
        if site.elsewhere is not None:
            site.elsewhere.spawn(attempt, self.ranks)
        for rank in self._near:
            rank.process = process = site.pool.take()
            assignment = Assignment(order=site.order, attempt=attempt, rank=rank.rank)
            process.start(rank, assignment, stores.pop(0) if stores else None, is_limited=site.is_limited)
        if site.beside is not None:
            site.beside.start(attempt)

    async def _judge(self) -> Verdict:
        """Wait until it is decided how the attempt ends: by what its ranks do, or by `end`."""
        waits_for_all = self._ends_with is EndsWith.ALL
        await self._until(lambda: self._is_over or (bool(self._failed) and not waits_for_all))
        # Of several ranks that fail at once, the one that drew the others along may be reported last.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                ending.BLAME_AFTER_S if self._site.elsewhere is None else ending.BLAME_FAR_AFTER_S
            ):
                await self._until(lambda: self._is_over or any(rank.done is None for rank in self._failed))
        if self.verdict is None:
            is_success = not self._failed or (self._is_over and not self._are_all_over)
            self.verdict = Verdict(StateName.SUCCEEDED, None, "") if is_success else self._blame()
            reports = [rank.done for rank in self.ranks if rank.done is not None and rank.done.weights]
            if is_success and len({one.weights for one in reports}) > 1:
                self._site.writer.log(reports[0].copies)
                self._site.writer.event(events.Note(text=reports[0].copies, warns=True))
        return self.verdict

    async def _end_ranks(self) -> None:
        """Let those go that are done, end the others by SIGTERM, and what is left later by SIGKILL."""
        for rank in reversed(self.ranks):
            if rank is self.ranks[0] and self.verdict is not None and self.verdict.cause is FailureCause.ERROR:
                await self._wait_for_file()
            if rank.done is not None:
                rank.let_go()
            else:
                rank.terminate()
        if not await self._are_gone_within(self._grace_s):
            self._kill([rank for rank in self.ranks if rank.done is None])
            if not await self._are_gone_within(EXIT_LIMIT_S - self._grace_s):
                self._kill(self.ranks)
                await self._are_gone_within(None)

    async def _wait_for_file(self) -> None:
        """Let rank 0 finish the checkpoint that it is writing: what a later call resumes from."""
        for _ in range(round(_FILE_LIMIT_S / _LOOK_EACH_S)):
            if self.ranks[0].is_gone or not self._is_writing:
                return
            await asyncio.sleep(_LOOK_EACH_S)

    @property
    def _is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(pathlib.Path(self._site.order.folder).glob(".checkpoint.*.part"))

    async def _are_gone_within(self, limit_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not all(rank.is_gone for rank in self.ranks):
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the ranks meet a condition, or the end is decided."""
        while self.verdict is None and not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- what ranks do ------------------------------------------------------------------------------------------------

    def _rank_changed(self, rank: Rank) -> None:
        """A rank's `state`, `done` or `end` has changed."""
        has_failed = rank.done is not None and not rank.done.ok
        if rank.done is not None or rank.end is not None:
            # After the save that it was asked for, a rank may end by an exit code.
            has_failed = has_failed and rank.rank not in self.saving.leavers
            self.saving.note(rank.rank, can=False)
        if rank.end is not None and rank.state in _ALIVE:
            if rank.done is None and self.verdict is None and self._can_lose(rank.rank):
                self.lost.append(rank)
                self._site.history.forget(rank.rank)
                rank.record(RankStateName.LOST)
                self._site.writer.log(f"{ending.blame([rank]).reason}. The other ranks carry on without it")
            else:
                is_stopped = self.verdict is not None and not has_failed and rank not in self._failed
                rank.record(ending.rank_state(rank, stopped=is_stopped))
        if rank.pid and rank.rank in self._unforked:
            self._unforked.remove(rank.rank)
            if not self._unforked:
                self._on_forked()
        if self.verdict is None:
            self._take_change(rank, has_failed=has_failed)
        elif rank.done is not None and rank.end is None:
            rank.let_go()
        self._changed.set()

    def _take_change(self, rank: Rank, *, has_failed: bool) -> None:
        """Note what a change of one rank means while the end is not decided."""
        if has_failed or (rank.end is not None and rank.done is None and rank not in self.lost):
            if rank not in self._failed:
                self._failed.append(rank)
        elif rank.done is not None:
            if self._watch is not None and self._ends_with is EndsWith.ANY_FAILURE:
                self._watch.rank_done()
        elif rank.state is RankStateName.RUNNING:
            self._waited_for.discard(rank.rank)
            if not self._waited_for:
                self._site.writer.event(events.JobState(state=StateName.RUNNING))

    def _take_event(self, event: events.Event) -> None:
        """A rank has sent an event."""
        if event.rank is None or event.rank >= self.world_size:
            return
        match event.what:
            case events.Dispensable(sets=sets):
                self._dispensable = [set(ranks) for ranks in sets]
            case events.Saves() as saves:
                self.saving.can_resume = self.saving.can_resume or saves.resumes
                self.saving.note(event.rank, can=saves.can, has_saved=saves.has_saved)
            case events.CheckpointWritten(asked=True):
                self.saving.note(event.rank, can=True, has_saved=True)
            case events.RankProgress() as progress:
                if self._watch is not None:
                    self._watch.progressed(progress)
                self._site.history.take_progress(event.rank, progress)
                if (loss := self._losses.take(event.rank, progress)) is not None:
                    self._site.writer.event(loss)
            case events.Usage() as usage:
                self._site.history.take_usage(event.rank, usage)

    def _take_answer(self, answer: Answer) -> None:
        """A live rank has answered. Those that wait in a collective for one whose cell has failed would wait for ever."""
        if not (answer.ok or answer.is_refused):
            for rank in self.ranks:
                rank.send(CellFailed(number=answer.number))

    @property
    def _are_all_over(self) -> bool:
        return all(rank.done is not None or rank.end is not None for rank in self.ranks)

    @property
    def _is_over(self) -> bool:
        """Whether the ranks are through whose end is the attempt's."""
        first = self.ranks[0]
        is_first_enough = self._ends_with is EndsWith.RANK_0 and first.done is not None and first.done.ok
        return is_first_enough or self._are_all_over

    def _can_lose(self, rank: int) -> bool:
        """Whether the others can carry on without this rank and those that were lost before."""
        gone = {rank, *(one.rank for one in self.lost)}
        return (
            0 not in gone and gone <= set().union(*self._dispensable) and all(one - gone for one in self._dispensable)
        )

    def _blame(self) -> Verdict:
        """The verdict on the ranks that failed."""
        elsewhere = self._site.elsewhere
        # If the ranks failed only because they missed a lost one, that one is to blame.
        are_followers = all(ending.lost_peer(rank) for rank in self._failed)
        if elsewhere is not None and are_followers and (sentence := elsewhere.explain_loss()):
            may_restart = self._site.order.may_lose_pods
            return Verdict(StateName.FAILED, FailureCause.LOST, sentence, may_restart=may_restart)
        verdict = ending.blame([*self.lost, *self._failed] if are_followers else self._failed)
        if before := [rank.rank for rank in self.lost if rank.rank != verdict.rank]:
            return dataclasses.replace(verdict, reason=f"{verdict.reason}. Lost before: {ending.name_ranks(before)}")
        return verdict

    # -- inside -------------------------------------------------------------------------------------------------------

    def _near_pids(self) -> Mapping[int, int]:
        return {rank.pid: rank.rank for rank in self._near if rank.pid and rank.end is None}

    def _send_usage(self, rank: int, usage: events.Usage) -> None:
        self._site.history.take_usage(rank, usage)
        self._site.writer.event(usage, rank)

    def _look_back(self, *, is_last: bool = False) -> None:
        """Record a moment of the history if one is due, and what holds the training up if that has just come out."""
        writer, history = self._site.writer, self._site.history
        if (moment := history.moment(time.monotonic(), is_last=is_last)) is not None:
            writer.event(moment)
        if sentence := history.bottleneck():
            writer.log(sentence)
            writer.event(events.Note(text=sentence))

    @staticmethod
    def _kill(ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.kill()
