"""A job, judged by the agent that is its head: from the order to the last event, with all its attempts.

When a rank or a pod is lost and the order allows another attempt, all ranks are ended, and once none is left all are
started again, as soon as the pods that they need are ready: a lost pod is made again by its controller. The death of a rank
that the others can do without (`context.may_lose`) ends nothing. What a job's own code raises, a deadline and a cancel end
the job at once, and so does a rank that ran out of memory, if it was needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
import secrets
import socket
import time

from kale_dist.errors import KaleDistError
from kale_dist.snapshot import loading
from kale_dist.wire import CANCEL_GRACE_S, Attempt, FailureCause, JobFiles, StateName, Verdict
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.events import JobState, Members, Note
from kale_dist.wire.messages import Restart, ToAgent
from kale_dist.worker.agent import ending
from kale_dist.worker.agent.attempt import RunningAttempt, Site
from kale_dist.worker.agent.fork_pool import REFILL_AFTER_S

REPLACE_WAIT_S = 600.0
"""How long an attempt waits for pods that were lost: their controller makes them again."""

GATHER_S = 30.0
"""How long the first attempt waits for more pods once there are enough for the fewest ranks of a range."""

GROW_EACH_S = 60.0
"""An attempt lasts so long before all ranks start again because there are pods for more of them."""

LOG_MISSING_EACH_S = 30.0
"""How often the pods that are not ready are logged."""


class JobRun:
    """Runs the attempts of a job and writes down what becomes of them.

    Args:
        site: What the attempts work with. The owner of the writer has to close it after `write_end`.
    """

    def __init__(self, site: Site) -> None:
        self.order = site.order
        self.verdict: Verdict | None = None
        """How the job ends; None until its last attempt has ended."""
        self.used_before = site.order.used_restarts
        """How many restarts earlier heads of the job have used; changed before `start`."""
        self._site = site
        self._seed = secrets.randbits(31) if site.order.seed is None else site.order.seed
        self._port = site.order.port
        self._began_at = time.monotonic()
        self._may_start = False
        self._has_started = False
        """Whether ranks were ever started."""
        self._running: RunningAttempt | None = None
        """The attempt at work; None while its agents are waited for."""
        self._lost: tuple[int, ...] = ()
        """Ranks without which the last attempt carried on."""
        self._stop: Verdict | None = None
        """What ends the wait for agents."""
        self._changed = asyncio.Event()
        self.is_cancelled = False
        """Whether the ranks were asked to save and then to end."""
        self._free = 0
        """How many attempts were begun only to have more ranks, and do not count as restarts."""
        self._deadline: asyncio.Task[None] | None = None

    def start(self) -> None:
        """This agent has what its ranks need: let `run` begin."""
        self._may_start = True
        self._changed.set()

    async def run(self) -> Verdict:
        """Run the attempts. Failures are reported as events of the job, never raised.

        Returns:
            How the job ended. No rank is left.
        """
        try:
            self.verdict = await self._run_attempts()
        except Exception as error:  # noqa: BLE001 - our own fault, because of which no job may wait forever
            reason = f"The agent that ran the job failed: {type(error).__name__}: {error}"
            self.verdict = Verdict(StateName.FAILED, FailureCause.AGENT_DIED, reason)
            self._site.loop.call_exception_handler({"message": reason, "exception": error})
        if self._deadline is not None:
            self._deadline.cancel()
        return self.verdict

    def cancel(self, cause: FailureCause, reason: str, grace_s: float, *, save: bool = False) -> None:
        """End the job, in any state. If it is ending already, shorten its grace.

        Args:
            cause: Why.
            reason: The same as a sentence.
            grace_s: Seconds from SIGTERM to SIGKILL.
            save: Whether ranks that can save first, in as many seconds. Only the first time: a second cancel ends them.
        """
        verdict = Verdict(StateName.CANCELLED, cause, reason)
        if not save:
            self._end(verdict, grace_s)
        elif self.is_cancelled:
            self._end(verdict, min(grace_s, CANCEL_GRACE_S))
        else:
            self.is_cancelled = True
            self._save_and_end(verdict, grace_s)

    def _save_and_end(self, verdict: Verdict, grace_s: float) -> None:
        """Have the ranks that can save do so, and end all: within `grace_s`, or `CANCEL_GRACE_S` after all have saved."""
        running, began = self._running, time.monotonic()

        def end() -> None:
            left_s = CANCEL_GRACE_S
            if running is None or not running.saving.have_all_saved:
                left_s = max(left_s, grace_s - (time.monotonic() - began))
            self._end(verdict, min(grace_s, left_s))

        if running is None:
            end()
        else:
            running.save_first(end, grace_s, are_leaving=True)

    @property
    def can_resume(self) -> bool:
        """Whether the ranks write a checkpoint when they are asked to, within an epoch, too, and resume from it by themselves."""
        return self._running is not None and self._running.saving.can_resume

    def send(self, rank: int, message: ToAgent) -> None:
        """Do what a notebook's message asks for, in a rank, or with -1 in all. Without such a rank nothing happens."""
        if self._running is None:
            return
        if isinstance(message, Restart):
            if message.attempt == self._site.writer.attempt:
                self._running.end(Verdict(StateName.PENDING, None, "The notebook restarts the ranks", may_restart=True))
        elif rank < len(self._running.ranks):
            for one in self._running.ranks if rank < 0 else [self._running.ranks[rank]]:
                one.send(message)

    def fail(self, cause: FailureCause, reason: str) -> None:
        """End the job as failed; nothing if its end is decided already."""
        self._end(Verdict(StateName.FAILED, cause, reason))

    def pod_is_ready(self) -> None:
        """Another pod can run ranks. An attempt at work with fewer than there might be is started again with more, but not at once."""
        self._changed.set()

    async def _grow(self, running: RunningAttempt) -> None:
        """Have the ranks start again in more pods where there are any, from a checkpoint that they write before: no batch is lost."""
        has_logged_why = False
        while running.verdict is None:
            await asyncio.sleep(GROW_EACH_S)
            while self._size <= running.world_size:
                self._changed.clear()
                await self._changed.wait()
            there_are = f"There are pods for {self._size} processes instead of {running.world_size}"
            if running.saving.can_resume:
                # Where the step cannot be resumed within an epoch, they write it at the epoch's end. At a breakpoint they write none.
                saved = asyncio.Event()
                running.save_first(saved.set, math.inf)
                await saved.wait()
                if running.verdict is None and running.saving.has_saved and self._size > running.world_size:
                    running.end(Verdict(StateName.PENDING, None, there_are, may_restart=True))
            elif not has_logged_why:
                has_logged_why = True
                self._site.writer.log(
                    f"{there_are}. All ranks start again in them after a loss, or as soon as they can write a checkpoint within an epoch"
                )

    def lose_pod(self, reason: str, *, has_ranks: bool) -> None:
        """A pod is lost: all ranks start again once its controller has made it again, or the job ends.

        Args:
            reason: A sentence.
            has_ranks: Whether ranks are lost with it. Without any, it is missed only while an attempt waits for pods.
        """
        if has_ranks or self._running is None:
            self._end(self._lost_pod(reason))

    def pod_leaves(self, reason: str) -> None:
        """A pod with ranks got SIGTERM, and ends when none is left in it."""
        self._save_and_end(self._lost_pod(reason), self.order.policy.grace_s)

    def _lost_pod(self, reason: str) -> Verdict:
        return Verdict(StateName.FAILED, FailureCause.LOST, reason, may_restart=self.order.may_lose_pods)

    def _end(self, verdict: Verdict, grace_s: float | None = None) -> None:
        if self._running is not None:
            self._running.end(verdict, grace_s)
        elif self._stop is None or self._stop.may_restart:
            self._stop = verdict
            self._changed.set()

    def write_end(self, verdict: Verdict) -> None:
        """Write the last event: the verdict that `run` returned."""
        reason = verdict.reason
        if verdict.may_restart and self.order.policy.max_restarts:
            reason = f"{reason}. This was attempt {self._count(0)}"
        verdict = dataclasses.replace(verdict, reason=reason, lost=self._lost)
        if reason:
            self._site.writer.log(ending.log_line(verdict))
        self._site.writer.event(verdict.last_state)

    # -- attempts -----------------------------------------------------------------------------------------------------

    async def _run_attempts(self) -> Verdict:
        """Run one attempt after the other, until one ends in a way that another could not better."""
        writer, reason = self._site.writer, ""
        while True:
            verdict = await self._wait_for_agents(reason) or await self._run_attempt(reason)
            is_larger = verdict.state is StateName.PENDING
            if not is_larger and (not verdict.may_restart or self._is_last):
                return verdict
            if self._site.elsewhere is not None:
                self._site.elsewhere.dismiss_leavers()
            self._free += is_larger
            count = f"attempt {self._count(1)}"
            writer.begin_attempt(writer.attempt + 1)
            self._lost = ()
            writer.log(f"{verdict.reason}. All ranks are started again: {count}")
            reason = f"Starting again, {count}: {verdict.reason}"

    @property
    def used_restarts(self) -> int:
        """How often the ranks were restarted because something was lost."""
        return self.used_before + self._site.writer.attempt - self._free

    @property
    def _is_last(self) -> bool:
        """Whether another loss would end the job."""
        return self.used_restarts >= self.order.policy.max_restarts

    def _count(self, ahead: int) -> str:
        """`2 of 3`: which attempt this one is, or one that many ahead, and how many there may be."""
        return f"{self.used_restarts + self._free + 1 + ahead} of {self.order.policy.max_restarts + 1 + self._free}"

    async def _wait_for_agents(self, reason: str) -> Verdict | None:
        """Wait until this agent has what it needs, and as many others are ready as an attempt has to have.

        Args:
            reason: Why there is another attempt; empty for the first.

        Returns:
            None if the attempt can begin. Otherwise what has ended the wait: a cancel, a pod that was lost meanwhile, or
            pods that did not come in time.
        """
        writer = self._site.writer
        limit_s = self.order.start_wait_s
        if self._has_started:
            limit_s = REPLACE_WAIT_S if self.order.replaces_pods else 0.0
        give_up_at = limit_s + (time.monotonic() if self._has_started else self._began_at)
        log_at, has_enough = time.monotonic() + LOG_MISSING_EACH_S, False
        if reason and not self._size:
            pods = "a pod" if len(self._missing) == 1 else f"{len(self._missing)} pods"
            text = f"Waits for {pods}: {', '.join(self._missing.values())}. {reason}"
            writer.event(JobState(state=StateName.STARTING, reason=text))
        while self._stop is None and not self._can_begin:
            now, names = time.monotonic(), ", ".join(self._missing.values())
            if self._size and not has_enough:
                has_enough, give_up_at = True, now + GATHER_S
            if self._may_start and now >= give_up_at:
                if self._size:
                    break
                return self._miss_pods(names, limit_s, reason)
            if now >= log_at and names:
                log_at = now + LOG_MISSING_EACH_S
                writer.log(f"Waiting for pods: {names}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(log_at, give_up_at) - now if self._may_start else None):
                    await self._changed.wait()
        stop, self._stop = self._stop, None
        return stop

    @property
    def _agents(self) -> list[int]:
        """The agents that are ready, this one first."""
        return [0, *(() if self._site.elsewhere is None else self._site.elsewhere.ready)]

    @property
    def _missing(self) -> dict[int, str]:
        """The names of the pods that are not ready, by their agents' numbers."""
        return {} if self._site.elsewhere is None else self._site.elsewhere.missing

    @property
    def _size(self) -> int:
        """The world size of an attempt that begins now; 0 if there are too few agents."""
        return self.order.size_with(len(self._agents)) if self._may_start else 0

    @property
    def _can_begin(self) -> bool:
        """Whether an attempt begins at once: only the first one waits for more agents than it has to have."""
        return self._size == self.order.number_of_processes or (self._has_started and self._size > 0)

    def _miss_pods(self, names: str, limit_s: float, reason: str) -> Verdict:
        """The verdict on a job whose pods did not come in time."""
        look = "Look at their state: they may be waiting for a node, a GPU or their image"
        if not reason:
            sentence = f"The job could not start: not enough of its pods were there within {limit_s:.0f} s. Missing: {names}. {look}"
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, sentence)
        sentence = f"{reason}. These pods were not there again within {limit_s:.0f} s: {names}. {look}"
        return Verdict(StateName.FAILED, FailureCause.LOST, sentence)

    async def _run_attempt(self, reason: str) -> Verdict:
        """Form the next attempt from the agents that are ready, and run it to its end.

        Args:
            reason: Why there is another attempt; empty for the first.
        """
        site, order, writer = self._site, self.order, self._site.writer
        writer.event(JobState(state=StateName.STARTING, reason=reason, free=self._free))
        if order.note and not writer.attempt:
            writer.log(order.note)
            writer.event(Note(text=order.note))
        try:
            loading.stage_modules(
                FolderStore(pathlib.Path(order.store)), order.snapshot, JobFiles(order.folder).modules
            )
            attempt = Attempt.form(
                order, self._agents, number=writer.attempt, port=self._port, seed=self._seed,
                restarts=self.used_before + writer.attempt,
            )  # fmt: skip
            stores = _own_stores(attempt) if attempt.is_on_one_machine else [self._listen()]
            attempt = dataclasses.replace(attempt, port=self._port or _free_port())
        except (OSError, KaleDistError) as error:
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
        self._has_started = True
        writer.event(Members(members=attempt.members))
        self._running = running = RunningAttempt(site, attempt, self._all_are_forked, is_last=self._is_last)
        growing = asyncio.ensure_future(self._grow(running))
        try:
            return await running.run(stores)
        finally:
            growing.cancel()
            self._running, self._lost = None, tuple(rank.rank for rank in running.lost)

    def _listen(self) -> int:
        """Open the port of rank 0's store to the other machines, so that no rank ever finds it closed; gives its descriptor.

        Raises:
            OSError: The port is taken. In an attempt after the first another one is opened instead.
        """
        backlog = max(128, self.order.number_of_processes)
        try:
            listener = open_port("", self._port, backlog)
        except OSError:
            # A process that the lost rank has left behind may hold it.
            if not self._site.writer.attempt:
                raise
            listener = open_port("", 0, backlog)
        listener.settimeout(0)
        self._port = listener.getsockname()[1]
        return listener.detach()

    def _all_are_forked(self) -> None:
        """All ranks of an attempt have a process. The time of all attempts together is limited."""
        self._site.pool.refill(REFILL_AFTER_S)
        limit_s = self.order.policy.timeout_s
        if limit_s is not None and self._deadline is None:
            self._deadline = self._site.loop.create_task(self._end_after(limit_s))

    async def _end_after(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)
        hang = await self._running.find_hang(limit_s) if self._running is not None else ""
        why = f", and hangs: {hang}. The log has all stacks" if hang else ". Give it more time, or leave timeout_s out"
        text = f"The job ran longer than its timeout_s of {limit_s:g} s{why}"
        # A rank that hangs saves nothing; its own handler of SIGTERM gets its time.
        end = self._end if hang else self._save_and_end
        end(Verdict(StateName.FAILED, FailureCause.TIMEOUT, text), self.order.policy.grace_s)


def _own_stores(attempt: Attempt) -> list[int]:
    """Where the ranks of one machine find each other: a descriptor for each, of a file that has no name, so that no other user can open it."""
    store = os.memfd_create("kale_dist store")
    try:
        return [os.dup(store) for _ in range(attempt.world_size)]
    finally:
        os.close(store)


def _free_port() -> int:
    """A port of the loopback interface on which nobody listens: for stores that the user's code makes there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


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
