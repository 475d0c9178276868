"""One run of a job, judged by the agent that is its head: from the order to the last event, with all its attempts.

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
from typing import Any

from kale_dist.errors import KaleDistError
from kale_dist.snapshot import loading
from kale_dist.wire import Attempt, EventKind, FailureCause, JobFiles, StateName, Verdict
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.agent.attempt import RunningAttempt, Site
from kale_dist.worker.agent.fork_pool import REFILL_AFTER_S


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
        self._may_start = asyncio.Event()
        self._running: RunningAttempt | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """All agents are ready: let `run` begin."""
        self._may_start.set()

    async def run(self) -> Verdict:
        """Run the attempts. Failures are reported as events of the job, never raised.

        Returns:
            How the job ended. No rank is left.
        """
        await self._may_start.wait()
        if self.verdict is None:
            writer, note = self._site.writer, self.order.note
            writer.event(EventKind.STATE, state=str(StateName.STARTING), reason="", cause="")
            if note:
                writer.say(note)
                writer.event(EventKind.NOTE, text=note)
            try:
                self.verdict = await self._run_attempts()
            except Exception as error:  # noqa: BLE001 - our own fault, because of which no job may wait forever
                told = f"The agent that ran the job failed: {type(error).__name__}: {error}"
                self.verdict = Verdict(StateName.FAILED, FailureCause.AGENT_DIED, told)
                self._site.loop.call_exception_handler({"message": told, "exception": error})
        if self._deadline is not None:
            self._deadline.cancel()
        return self.verdict

    def cancel(self, cause: FailureCause, reason: str, grace_s: float) -> None:
        """End the job, in any state. If it is ending already, shorten its grace.

        Args:
            cause: Why.
            reason: The same as a sentence.
            grace_s: Seconds from SIGTERM to SIGKILL.
        """
        self._end(Verdict(StateName.CANCELLED, cause, reason), grace_s)

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """Pass a notebook's message on to the debugger of a rank; see `Rank.tell`. Without such a rank nothing happens."""
        if self._running is not None and 0 <= rank < len(self._running.ranks):
            self._running.ranks[rank].tell(message)

    def fail(self, cause: FailureCause, reason: str) -> None:
        """End the job as failed; nothing if its end is decided already."""
        self._end(Verdict(StateName.FAILED, cause, reason))

    def _end(self, verdict: Verdict, grace_s: float | None = None) -> None:
        if self._running is not None:
            self._running.end(verdict, grace_s)
        elif self.verdict is None:
            self.verdict = verdict
            self._may_start.set()

    def write_end(self, verdict: Verdict) -> None:
        """Write the last event: the verdict that `run` returned."""
        writer, most, reason = self._site.writer, self.order.policy.max_restarts, verdict.reason
        if verdict.may_restart and most:
            reason = f"{reason}. This was attempt {writer.attempt + 1} of {most + 1}"
        if reason:
            writer.say(reason)
        lost = () if self._running is None else tuple(rank.rank for rank in self._running.lost)
        writer.event(EventKind.STATE, **dataclasses.replace(verdict, reason=reason, lost=lost).fields())

    # -- attempts -----------------------------------------------------------------------------------------------------

    async def _run_attempts(self) -> Verdict:
        """Run one attempt after the other, until one ends in a way that another could not better."""
        writer, most = self._site.writer, self.order.policy.max_restarts
        while True:
            verdict = await self._run_attempt()
            if not verdict.may_restart or writer.attempt >= most:
                return verdict
            count = f"attempt {writer.attempt + 2} of {most + 1}"
            writer.begin_attempt(writer.attempt + 1)
            writer.say(f"{verdict.reason}. All ranks are started again: {count}")
            reason = f"Starting again, {count}: {verdict.reason}"
            writer.event(EventKind.STATE, state=str(StateName.STARTING), reason=reason, cause="")

    async def _run_attempt(self) -> Verdict:
        """Form the next attempt from the agents that are ready, and run it to its end."""
        site, order, relays = self._site, self.order, self._site.relays
        try:
            loading.stage_modules(
                FolderStore(pathlib.Path(order.store)), order.snapshot, JobFiles(order.folder).modules
            )
            listener = self._listen()
        except (OSError, KaleDistError) as error:
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"The ranks could not be started: {error}")
        agents = [0] if relays is None else [0, *relays.ready]
        number, port = site.writer.attempt, listener.getsockname()[1]
        attempt = Attempt.form(order, agents, number=number, port=port, seed=self._seed)
        site.writer.event(EventKind.ATTEMPT, members=[dataclasses.asdict(member) for member in attempt.members])
        self._running = RunningAttempt(site, attempt, self._all_are_forked)
        return await self._running.run(listener)

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
            self._deadline = self._site.loop.call_later(limit_s, self.fail, FailureCause.TIMEOUT, told)


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
