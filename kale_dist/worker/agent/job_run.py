"""One run of a job, judged by the agent that is its head: from the order to the last event, with all its attempts.

When a rank or a pod is lost and the order allows another attempt, all ranks are ended, and once none is left all are
started again, as soon as the pods that they need are ready: a lost pod is made again by its controller. The death of a rank
that the others can do without (`context.may_lose`) ends nothing. What a job's own code raises, a deadline and a cancel end
the job at once, and so does a rank that ran out of memory, if it was needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping

from kale_dist.errors import KaleDistError
from kale_dist.snapshot import loading
from kale_dist.wire import (
    CANCEL_GRACE_S,
    SAVE_LIMIT_S,
    Attempt,
    EventKind,
    FailureCause,
    JobFiles,
    StateName,
    Verdict,
)
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.agent.attempt import RunningAttempt, Site
from kale_dist.worker.agent.fork_pool import REFILL_AFTER_S

REPLACE_WAIT_S = 600.0
"""How long an attempt waits for pods that were lost: their controller makes them again."""

SAY_MISSING_EACH_S = 30.0
"""The log says this often which pods are not ready."""


class JobRun:
    """Runs the attempts of one run and writes down what becomes of them.

    Args:
        site: What the attempts work with. The owner of the writer has to close it after `write_end`.
    """

    def __init__(self, site: Site) -> None:
        self.order = site.order
        self.verdict: Verdict | None = None
        """How the job ends; None until its last attempt has ended."""
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
        self._is_cancelled = False
        self._deadline: asyncio.TimerHandle | None = None

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
            told = f"The agent that ran the job failed: {type(error).__name__}: {error}"
            self.verdict = Verdict(StateName.FAILED, FailureCause.AGENT_DIED, told)
            self._site.loop.call_exception_handler({"message": told, "exception": error})
        if self._deadline is not None:
            self._deadline.cancel()
        return self.verdict

    def cancel(self, cause: FailureCause, reason: str, grace_s: float, *, save: bool = False) -> None:
        """End the job, in any state. If it is ending already, shorten its grace.

        Args:
            cause: Why.
            reason: The same as a sentence.
            grace_s: Seconds from SIGTERM to SIGKILL.
            save: Whether ranks that can write one more checkpoint first. Only the first time: a second cancel ends them.
        """
        verdict = Verdict(StateName.CANCELLED, cause, reason)
        if not save or self._is_cancelled:
            self._end(verdict, grace_s)
            return
        self._is_cancelled = True
        if self._running is not None and self._running.can_save:
            grace_s = min(grace_s, CANCEL_GRACE_S)
        self.save_first(functools.partial(self._end, verdict, grace_s))

    def save_first(self, then: Callable[[], None], limit_s: float = SAVE_LIMIT_S) -> None:
        """Have the ranks write a checkpoint, and call a function once it is written; at once if they cannot.

        Args:
            then: Called exactly once. Unless it ends the attempt or the job, the ranks train on.
            limit_s: Seconds after which it is called in any case.
        """
        if self._running is None:
            then()
        else:
            self._running.save_first(then, limit_s)

    def fail(self, cause: FailureCause, reason: str) -> None:
        """End the job as failed; nothing if its end is decided already."""
        self._end(Verdict(StateName.FAILED, cause, reason))

    def pod_is_ready(self) -> None:
        """Another pod can run ranks."""
        self._changed.set()

    def lose_pod(self, reason: str, *, has_ranks: bool) -> None:
        """A pod is lost: all ranks start again once its controller has made it again, or the job ends.

        Args:
            reason: A sentence.
            has_ranks: Whether ranks are lost with it. Without any, it is missed only while an attempt waits for pods.
        """
        if has_ranks or self._running is None:
            self._end(Verdict(StateName.FAILED, FailureCause.LOST, reason, may_restart=self.order.replaces_pods))

    def pod_leaves(self, reason: str) -> None:
        """A pod with ranks got SIGTERM, and ends when none is left in it."""
        self.save_first(functools.partial(self.lose_pod, reason, has_ranks=True))

    def _end(self, verdict: Verdict, grace_s: float | None = None) -> None:
        if self._running is not None:
            self._running.end(verdict, grace_s)
        elif self._stop is None or self._stop.may_restart:
            self._stop = verdict
            self._changed.set()

    def write_end(self, verdict: Verdict) -> None:
        """Write the last event: the verdict that `run` returned."""
        writer, most, reason = self._site.writer, self.order.policy.max_restarts, verdict.reason
        if verdict.may_restart and most:
            reason = f"{reason}. This was attempt {writer.attempt + 1} of {most + 1}"
        if reason:
            writer.say(reason)
        writer.event(EventKind.STATE, **dataclasses.replace(verdict, reason=reason, lost=self._lost).fields())

    # -- attempts -----------------------------------------------------------------------------------------------------

    async def _run_attempts(self) -> Verdict:
        """Run one attempt after the other, until one ends in a way that another could not better."""
        writer, most, reason = self._site.writer, self.order.policy.max_restarts, ""
        while True:
            verdict = await self._wait_for_agents(reason) or await self._run_attempt(reason)
            if not verdict.may_restart or writer.attempt >= most:
                return verdict
            if self._site.relays is not None:
                self._site.relays.dismiss_leavers()
            count = f"attempt {writer.attempt + 2} of {most + 1}"
            writer.begin_attempt(writer.attempt + 1)
            self._lost = ()
            writer.say(f"{verdict.reason}. All ranks are started again: {count}")
            reason = f"Starting again, {count}: {verdict.reason}"

    async def _wait_for_agents(self, reason: str) -> Verdict | None:
        """Wait until this agent has what it needs, and as many others are ready as an attempt has to have.

        Args:
            reason: Why there is another attempt; empty for the first.

        Returns:
            None if the attempt can begin. Otherwise what has ended the wait: a cancel, a pod that was lost meanwhile, or
            pods that did not come in time.
        """
        writer = self._site.writer
        limit_s = REPLACE_WAIT_S if self._has_started else self.order.start_wait_s
        give_up_at = limit_s + (time.monotonic() if self._has_started else self._began_at)
        say_at = time.monotonic() + SAY_MISSING_EACH_S
        if reason and not self._can_begin:
            text = f"Waits for {_name_pods(self._missing)}. {reason}"
            writer.event(EventKind.STATE, state=str(StateName.STARTING), reason=text, cause="")
        while self._stop is None and not self._can_begin:
            now, names = time.monotonic(), ", ".join(self._missing.values())
            if self._may_start and now >= give_up_at:
                return self._miss_pods(names, limit_s, reason)
            if now >= say_at and names:
                say_at = now + SAY_MISSING_EACH_S
                writer.say(f"Waiting for pods: {names}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(say_at, give_up_at) - now if self._may_start else None):
                    await self._changed.wait()
        stop, self._stop = self._stop, None
        return stop

    @property
    def _agents(self) -> list[int]:
        """The agents that are ready, this one first."""
        return [0, *(() if self._site.relays is None else self._site.relays.ready)]

    @property
    def _missing(self) -> dict[int, str]:
        """The names of the pods that are not ready, by their agents' numbers."""
        return {} if self._site.relays is None else self._site.relays.missing

    @property
    def _can_begin(self) -> bool:
        return self._may_start and self.order.size_with(len(self._agents)) > 0

    def _miss_pods(self, names: str, limit_s: float, reason: str) -> Verdict:
        """The verdict on a job whose pods did not come in time."""
        look = "Look at their state: they may be waiting for a node, a GPU or their image"
        if not reason:
            told = f"The job could not start: not all of its pods were there within {limit_s:.0f} s. Missing: {names}. {look}"
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, told)
        told = f"{reason}. These pods were not there again within {limit_s:.0f} s: {names}. {look}"
        return Verdict(StateName.FAILED, FailureCause.LOST, told)

    async def _run_attempt(self, reason: str) -> Verdict:
        """Form the next attempt from the agents that are ready, and run it to its end.

        Args:
            reason: Why there is another attempt; empty for the first.
        """
        site, order, writer = self._site, self.order, self._site.writer
        writer.event(EventKind.STATE, state=str(StateName.STARTING), reason=reason, cause="")
        if order.note and not writer.attempt:
            writer.say(order.note)
            writer.event(EventKind.NOTE, text=order.note)
        try:
            loading.stage_modules(
                FolderStore(pathlib.Path(order.store)), order.snapshot, JobFiles(order.folder).modules
            )
            listener = self._listen()
        except (OSError, KaleDistError) as error:
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
        self._has_started = True
        number, port = writer.attempt, listener.getsockname()[1]
        attempt = Attempt.form(order, self._agents, number=number, port=port, seed=self._seed)
        writer.event(EventKind.ATTEMPT, members=[dataclasses.asdict(member) for member in attempt.members])
        is_last = number >= order.policy.max_restarts
        self._running = running = RunningAttempt(site, attempt, self._all_are_forked, is_last=is_last)
        try:
            return await running.run(listener)
        finally:
            self._running, self._lost = None, tuple(rank.rank for rank in running.lost)

    def _listen(self) -> socket.socket:
        """Open the port of rank 0's store, so that no rank ever finds it closed.

        Raises:
            OSError: The port is taken. In an attempt after the first another one is opened instead.
        """
        backlog = max(128, self.order.number_of_processes)
        address = "" if self._port else "127.0.0.1"
        try:
            listener = open_port(address, self._port, backlog)
        except OSError:
            # A process that the lost rank has left behind may hold it.
            if not self._site.writer.attempt:
                raise
            listener = open_port(address, 0, backlog)
        listener.settimeout(0)
        self._port = listener.getsockname()[1]
        return listener

    def _all_are_forked(self) -> None:
        """All ranks of an attempt have a process. The time of all attempts together is limited."""
        self._site.pool.refill(REFILL_AFTER_S)
        limit_s = self.order.policy.timeout_s
        if limit_s is not None and self._deadline is None:
            told = f"The job ran longer than its timeout_s of {limit_s:g} s. Give it more time, or leave timeout_s out"
            end = functools.partial(self.fail, FailureCause.TIMEOUT, told)
            self._deadline = self._site.loop.call_later(limit_s, self.save_first, end)


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


def _name_pods(names: Mapping[int, str]) -> str:
    """`a pod: x-worker-0`, `2 pods: x-worker-0, x-worker-1`."""
    return f"{'a pod' if len(names) == 1 else f'{len(names)} pods'}: {', '.join(names.values())}"
