"""The agent of all pods but the first: spawns ranks on the head's request, forwards their output, ends with its connection."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from kale_dist import wire
from kale_dist.errors import KaleDistError
from kale_dist.snapshot import loading
from kale_dist.wire import EXIT_LOST_HEAD, EXIT_TERMINATED, Assignment, Attempt, Source, messages
from kale_dist.wire.events import Event, Usage
from kale_dist.wire.messages import Answer, Done, FromRank
from kale_dist.worker.agent.fork_pool import REFILL_AFTER_S
from kale_dist.worker.agent.job_run import REPLACE_WAIT_S
from kale_dist.worker.agent.near_rank import End, NearRank
from kale_dist.worker.agent.usage import UsageWatch
from kale_dist.worker.pod import mpi, transfers
from kale_dist.worker.pod.byte_server import BlobServer
from kale_dist.worker.pod.pod import Pod, Problem
from kale_dist.worker.pod.relay_protocol import COUNT, TICKS, Channel, RelayOp, is_signed, sign

BODY_BYTES = 64 << 10
"""Lines of a rank that are sent together."""

BODY_S = 0.03
"""After some lines were sent, the next ones wait so long for each other."""

HELD_BYTES = 1 << 20
"""This much may wait for the connection; then lines and events stay in their ranks' pipes."""

_ANSWER_S = 20.0
_PART_BYTES = 256 << 10


class HeadReturnsError(Exception):
    """The head is lost and will be made again: this relay begins again in its container, and waits for it."""


class Relay:
    """Serves one head in its life.

    Args:
        pod: The pod.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._joining: asyncio.Task[Channel | None] | None = None
        self._head: Channel | None = None
        self._ranks: dict[int, _Forwarder] = {}
        self._usage: UsageWatch | None = None
        self._may_fetch = asyncio.Event()
        self._server = BlobServer(pod.key, pod.store)
        self._is_terminating = False
        self._is_staged = False

    def terminate(self) -> None:
        """The pod got SIGTERM: the head decides what that means for the job."""
        self._is_terminating = True
        if self._head is not None:
            self._head.send_message(
                RelayOp.LEAVING, reason="it received SIGTERM: it was evicted, or the job was deleted or suspended"
            )
        elif self._joining is not None:
            self._joining.cancel()

    async def run(self) -> int:
        """Serve the head until the job is over; gives the exit code.

        Raises:
            Problem: The head cannot be reached, or is not that of this job.
            HeadReturnsError: The head is lost, and another one will come.
        """
        if self._is_terminating:
            return EXIT_TERMINATED
        self._server.listen(self._pod.place.listen)
        self._joining = asyncio.ensure_future(self._join())
        try:
            head = await self._joining
        except asyncio.CancelledError:
            return EXIT_TERMINATED
        except TimeoutError:
            return EXIT_LOST_HEAD
        if head is None:
            sys.stderr.write("kale_dist: the job goes on or has ended without this pod, which has nothing to do\n")
            return 0
        self._bringing = asyncio.ensure_future(self._bring(head))
        is_over = await self._serve(head)
        self._bringing.cancel()
        self._server.is_over.set()
        head.close()
        if self._usage is not None:
            self._usage.stop()
        if is_over:
            return EXIT_TERMINATED if self._is_terminating else 0
        # With the connection this pod's part of the attempt has ended: its ranks end with this process.
        sys.stderr.write("kale_dist: the connection to the first pod's agent has ended, and with it this pod's ranks\n")
        if self._pod.order.returns_head and not self._is_terminating:
            # From here on, SIGTERM waits until the agent that begins again has a handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            raise HeadReturnsError
        return EXIT_TERMINATED if self._is_terminating else EXIT_LOST_HEAD

    # -- the connection ---------------------------------------------------------------------------------------------

    async def _join(self) -> Channel | None:
        """Connect to the head and prove the key to each other; None if the job goes on without this pod.

        Raises:
            TimeoutError: The head that was lost has not come back: this pod's place may be what it waits for.
        """
        order, began = self._pod.order, time.monotonic()
        while True:
            channel, answer = None, dict[str, Any]()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    channel = await Channel.connect(order.head, order.port + 1)
                    answer = await self._prove(channel)
            if channel is not None and answer.get("op") == RelayOp.WELCOME:
                # Not where this is awaited: SIGTERM may come before that goes on.
                self._head = channel
                return channel
            if channel is not None:
                channel.close()
            if answer.get("op") == RelayOp.OVER:
                return None
            waited_s = time.monotonic() - began
            if self._pod.place.has_lost_head:
                if waited_s > REPLACE_WAIT_S:
                    raise TimeoutError
            elif waited_s > order.start_wait_s:
                raise Problem(
                    f"the first pod's agent at {order.head}:{order.port + 1} could not be reached within "
                    f"{order.start_wait_s:.0f} s: look at the first pod, or at network policies"
                )
            # The head is usually there a moment later; if not, the relays of a large job must not ask all at once.
            await asyncio.sleep(random.uniform(0.1, min(2.0, 0.2 + waited_s / 2)))  # noqa: S311 - no secret

    async def _prove(self, channel: Channel) -> dict[str, Any]:
        """Prove the key to each other; gives the head's answer. A head without the key gets no proof: it runs nothing here."""
        key, agent, ours = self._pod.key, self._pod.place.pod, secrets.token_hex(16)
        channel.send_message(RelayOp.HELLO, agent=agent, version=wire.VERSION, nonce=ours)
        challenge = await channel.read_from_stranger()
        theirs = challenge.get("nonce", "")
        if not is_signed(challenge.get("mac", ""), key, "head", agent, ours, theirs):
            return {}
        serves = self._pod.place.listen or channel.own_host, self._server.port
        channel.send_message(RelayOp.PROOF, mac=sign(key, "relay", agent, ours, theirs), serves=serves)
        return await channel.read_from_stranger()

    async def _serve(self, head: Channel) -> bool:
        """Do what the head wants until the connection ends; whether the job was over by then."""
        while (frame := await head.read()) is not None:
            kind, rank, payload = frame
            if kind == b"R":
                if (forwarder := self._ranks.get(rank)) is not None:
                    forwarder.process.send(payload)
                continue
            message = json.loads(payload)
            if message["op"] == RelayOp.END:
                return True
            self._take_message(head, rank, message)
        return False

    def _take_message(self, head: Channel, rank: int, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == RelayOp.FETCH:
            self._server.source = message.get("source") and tuple(message["source"])
            self._may_fetch.set()
        elif op == RelayOp.ORDER:
            self._begin(head, message["job"])
        elif op == RelayOp.ROOM:
            head.may_send = bool(message["is_there"])
        elif op == RelayOp.SPAWN:
            self._spawn(head, wire.decode(Attempt, message["attempt"]))
        elif op == RelayOp.RUN:
            refuse = functools.partial(_refuse, head)
            mpi.run_daemon(str(message["command"]), self._pod.place.work, int(message["attempt"]), refuse)
        elif (forwarder := self._ranks.get(rank)) is None:
            return
        elif op == RelayOp.SIGNAL:
            forwarder.process.signal(signal.Signals(int(message["number"])))
        elif op == RelayOp.STACKS:
            forwarder.process.ask_stacks()

    # -- what the head wants ----------------------------------------------------------------------------------------

    def _begin(self, head: Channel, job: Mapping[str, Any]) -> None:
        """Serve the next job of warm pods: no rank of the one before is left."""
        self._bringing.cancel()
        if self._usage is not None:
            self._usage.stop()
        before, warm = self._pod, self._pod.within or self._pod
        self._pod = Pod.of_job(warm, job)
        if before is not warm:
            before.end_job({*before.order.blobs, *self._pod.order.blobs})
        self._ranks, self._usage, self._is_staged, self._may_fetch = {}, None, False, asyncio.Event()
        self._bringing = asyncio.ensure_future(self._bring(head))

    async def _bring(self, head: Channel) -> None:
        """Get the blobs, have the fork server import torch, and report it: others may be ended so that this pod can join."""
        is_warm = bool(self._pod.order.idle_s)
        try:
            if self._pod.order.source is Source.STREAM:
                await self._may_fetch.wait()
            if not is_warm:
                await asyncio.to_thread(transfers.bring, self._pod, server=self._server)
                self._pod.renew_pool()
        except Exception as error:  # noqa: BLE001 - this pod's ranks cannot start, and it has to report why
            _refuse(head, str(error) if isinstance(error, KaleDistError) else f"{type(error).__name__}: {error}")
            return
        await self._pod.pool.warm()
        if not is_warm and self._pod.within is None:
            # From here no rank is forked that the job does not need.
            self._pod.pool.wanted_spares = 0
        head.send_message(RelayOp.READY, job=self._pod.job.get("id"))

    def _spawn(self, head: Channel, attempt: Attempt) -> None:
        order = self._pod.own_order
        if not self._is_staged:
            self._is_staged = True
            loading.stage_modules(self._pod.store, order.snapshot, self._pod.files.modules)
            self._usage = UsageWatch(order, self._pod.loop, self._pids, functools.partial(self._send_usage, head))
            self._usage.start()
        mine = next(member for member in attempt.members if member.agent == self._pod.place.pod)
        for rank in mine.ranks:
            process, number = self._pod.pool.take(), attempt.number
            outcome = self._pod.files.outcome(number, rank)
            self._ranks[rank] = forwarder = _Forwarder(rank, number, process, head, outcome, self._pod.loop)
            process.start(forwarder, Assignment(order=order, attempt=attempt, rank=rank), None, is_limited=True)
        self._pod.pool.refill(REFILL_AFTER_S)

    def _pids(self) -> Mapping[int, int]:
        return {one.process.pid: rank for rank, one in self._ranks.items() if one.process.pid and not one.is_over}

    def _send_usage(self, head: Channel, rank: int, usage: Usage) -> None:
        event = Event(usage, time.time(), rank, self._ranks[rank].attempt)
        head.send(b"E", rank, wire.encode_json(event.record()))


def _refuse(head: Channel, reason: str) -> None:
    head.send_message(RelayOp.REFUSED, reason=reason)


class _Forwarder:
    """Hands on what one rank does; a `near_rank.Listener`."""

    def __init__(
        self,
        rank: int,
        attempt: int,
        process: NearRank,
        head: Channel,
        outcome: pathlib.Path,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self.process = process
        self.is_over = False
        self._head = head
        self._outcome = outcome
        self._loop = loop
        self._bodies: list[bytes] = []
        self._count = self._bytes = 0
        self._is_gathering = False
        self._sending: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether more lines and events may come."""
        return self._head.may_send and self._head.unsent_bytes < HELD_BYTES

    def forked(self, pid: int) -> None:
        """The rank has a process."""
        self._head.send_message(RelayOp.FORKED, self.rank, pid=pid)

    def output(self, body: bytes, count: int) -> None:
        """The rank has written lines: they are sent at once, or with others a moment later."""
        self._bodies.append(body)
        self._bytes += len(body)
        self._count += count
        if self._bytes >= BODY_BYTES or not self._is_gathering:
            self._flush()

    def events(self, data: bytes) -> None:
        """The rank has sent events."""
        self._flush()
        self._head.send(b"E", self.rank, data)

    def message(self, message: FromRank) -> None:
        """The rank has sent a message over its control socket."""
        self._flush()
        if isinstance(message, Done) or (isinstance(message, Answer) and message.gives):
            self._sending = asyncio.ensure_future(self._send_outcome(message))
        else:
            self._head.send(b"R", self.rank, messages.encode(message))

    def stacks(self, dump: bytes, cpu_ticks: int) -> None:
        """The rank has answered `ask_stacks`."""
        self._head.send(b"S", self.rank, TICKS.pack(cpu_ticks), dump)

    def ended(self, end: End) -> None:
        """The rank's process has ended."""
        self.is_over = True
        if self._sending is not None and not self._sending.done():
            self._sending.add_done_callback(lambda _: self.ended(end))
            return
        self._flush()
        self._head.send_message(RelayOp.ENDED, self.rank, end=dataclasses.asdict(end))

    def _flush(self) -> None:
        """Send the lines there are."""
        if self._bodies:
            self._head.send(b"O", self.rank, COUNT.pack(self._count), *self._bodies)
            self._bodies, self._count, self._bytes = [], 0, 0
            if not self._is_gathering:
                self._is_gathering = True
                self._loop.call_later(BODY_S, self._gathered)

    def _gathered(self) -> None:
        self._is_gathering = False
        self._flush()

    async def _send_outcome(self, message: FromRank) -> None:
        """Send the outcome file that a rank has written, and then the rank's message about it."""
        size = 0
        with contextlib.suppress(OSError), self._outcome.open("rb") as file:
            while data := await asyncio.to_thread(file.read, _PART_BYTES):
                self._head.send(b"F", self.rank, data)
                size += len(data)
                await self._head.drain()
        self._head.send_message(RelayOp.OUTCOME, self.rank, bytes=size)
        self._head.send(b"R", self.rank, messages.encode(message))
