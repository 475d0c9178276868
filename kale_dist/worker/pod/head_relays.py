"""The head's side of its relays: who has joined, what their ranks do, who is lost."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kale_dist import wire
from kale_dist.wire import Attempt, FailureCause, JobFiles, Order, messages
from kale_dist.worker.agent.ending import name_ranks
from kale_dist.worker.agent.job_run import JobRun
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.pod.pod import Pod
from kale_dist.worker.pod.relay_protocol import COUNT, NO_RANK, READ_BYTES, TICKS, Channel, RelayOp, is_signed, sign

LOST_AFTER_S = 1.0
"""If the head gets SIGTERM this soon after a relay did, the job was suspended or deleted."""

_PROOF_LIMIT_S = 10.0
_MAX_STRANGERS = 64
"""Connections that have not proved the key; one more closes the oldest."""
_MAX_REFUSALS_LOGGED = 10

_GONE = (
    "its agent has ended, or can no longer be reached. The pod may have been deleted, evicted or killed (often because "
    "memory ran out), or its node has failed"
)


class _FarRank:
    """What can be done to a rank behind a relay."""

    def __init__(self, channel: Channel, rank: Rank, outcome: pathlib.Path) -> None:
        self.rank = rank
        self.outcome = outcome
        """Where its outcome goes."""
        self._channel = channel

    @property
    def part(self) -> pathlib.Path:
        """Where its outcome lies until it is whole."""
        return self.outcome.with_name(f".{self.outcome.name}.part")

    def send(self, line: bytes) -> None:
        self._channel.send(b"R", self.rank.rank, line)

    def signal(self, number: signal.Signals) -> None:
        self._channel.send_message(RelayOp.SIGNAL, self.rank.rank, number=int(number))

    def ask_stacks(self) -> None:
        self._channel.send_message(RelayOp.STACKS, self.rank.rank)


class _Relay:
    """One other pod."""

    def __init__(self, agent: int, name: str) -> None:
        self.agent = agent
        self.name = name
        self.channel: Channel | None = None
        self.has_joined = False
        self.is_ready = False
        self.is_leaving = False
        """Whether its pod got SIGTERM."""
        self.was_lost = False
        """Whether it was lost with ranks of the newest attempt."""
        self.losses = 0
        """How often it was lost."""
        self.is_dismissed = False
        """Whether it knows that the job goes on without it, or is over."""
        self.far: dict[int, _FarRank] = {}
        """Its ranks in the newest attempt."""

    @property
    def ranks(self) -> list[Rank]:
        """Its ranks that have not ended."""
        return [far.rank for far in self.far.values() if far.rank.end is None]

    def describe(self) -> str:
        """Its name, and its ranks if it has any yet."""
        return f"Pod {self.name} ({name_ranks(list(self.far))})" if self.far else f"Pod {self.name}"


class HeadsRelays:
    """The relays of a job, as its head sees them.

    Args:
        order: The job.
        key: Its secret.
        files: The job's folder.
        listener: Where relays connect to.
        log: Writes a line into the log.
    """

    def __init__(
        self, order: Order, key: bytes, files: JobFiles, listener: socket.socket, *, log: Callable[[str], None]
    ) -> None:
        self._key = key
        self._listener = listener
        self._refusals = 0
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._is_over = False
        self._job: Mapping[str, Any] = {}
        """What warm pods run; see `Pod.of_job`."""
        self._take_up(order, files, log)
        self._relays = {agent: _Relay(agent, pod_name(order, agent)) for agent in range(1, order.agents)}
        self._server: asyncio.Server | None = None

    def _take_up(self, order: Order, files: JobFiles, log: Callable[[str], None]) -> None:
        self._files = files
        self._log = log
        self._may_be_lost = order.policy.max_restarts if order.replaces_pods else 0
        """How often each relay may be lost."""
        self._is_range = len(order.sizes) > 1
        self._has_blobs = False
        self._sources = collections.deque[Channel | None]((None, None))
        """Who passes the blobs on to the next relays: each pod to two others. None is the head."""
        self._has_room = True

    def begin(self, pod: Pod, judge: JobRun, log: Callable[[str], None]) -> None:
        """Have the relays of warm pods serve the next job, or none between two.

        Args:
            pod: This pod, with the job.
            judge: As for `serve`.
            log: As for this class.
        """
        self._judge, self._job = judge, pod.job
        self._take_up(pod.order, pod.files, log)
        for relay in self._relays.values():
            relay.far, relay.was_lost, relay.losses = {}, False, 0
            if relay.channel is not None and pod.job:
                relay.is_ready = False
                relay.channel.send_message(RelayOp.ORDER, job=dict(pod.job))

    async def serve(self, job: JobRun) -> None:
        """Begin to accept relays.

        Args:
            job: Is notified of relays that are ready, are lost, or cannot run their ranks.
        """
        self._judge = job
        self._listener.settimeout(0)
        self._server = await asyncio.start_server(self._serve, sock=self._listener, backlog=1024, limit=READ_BYTES)

    @property
    def missing(self) -> dict[int, str]:
        """Names of the pods that have not joined, or are not ready, by the numbers of their agents."""
        return {relay.agent: relay.name for relay in self._relays.values() if not relay.is_ready}

    @property
    def ready(self) -> list[int]:
        """Numbers of the agents that have what they need."""
        return [relay.agent for relay in self._relays.values() if relay.is_ready]

    @property
    def connected(self) -> int:
        """How many are connected now."""
        return sum(relay.channel is not None for relay in self._relays.values())

    @property
    def never_came(self) -> int:
        """How many may still come and have to learn that the job is over; of a range, the controller ends them."""
        return 0 if self._is_range else sum(not relay.has_joined for relay in self._relays.values())

    @property
    def may_return(self) -> int:
        """How many were lost, may be made again, and have to learn that the job is over."""
        lost = (relay for relay in self._relays.values() if relay.has_joined and relay.channel is None)
        return sum(not relay.is_dismissed for relay in lost) if self._may_be_lost and not self._is_range else 0

    @property
    def are_all_there(self) -> bool:
        """Whether none that has joined is gone."""
        return all(relay.channel is not None for relay in self._relays.values() if relay.has_joined)

    def explain_loss(self) -> str:
        """A sentence on the relay that is gone; empty if all are there."""
        for relay in self._relays.values():
            if relay.was_lost:
                return f"{relay.describe()} is gone: {_GONE}"
        return ""

    def deal_blobs(self) -> None:
        """The head has all blobs: the others may fetch them."""
        self._has_blobs = True
        for relay in self._relays.values():
            if relay.channel is not None:
                self._deal_to(relay.channel)

    def _deal_to(self, channel: Channel) -> None:
        source = None
        while self._sources and (source := self._sources.popleft()) is not None and not source.is_open:
            source = None
        channel.send_message(RelayOp.FETCH, source=source and source.serves)
        if channel.serves:
            self._sources.extend((channel, channel))

    def limit(self, *, has_room: bool) -> None:
        """Have relays send lines and events only while there is room for them."""
        if has_room != self._has_room:
            self._has_room = has_room
            for relay in self._relays.values():
                if relay.channel is not None:
                    relay.channel.send_message(RelayOp.ROOM, is_there=has_room)

    def spawn(self, attempt: Attempt, ranks: Sequence[Rank]) -> None:
        """Have relays start those ranks of an attempt that are theirs."""
        # Once for all: with many pods it is long.
        spawn = json.dumps({"op": RelayOp.SPAWN, "attempt": dataclasses.asdict(attempt)}).encode()
        for relay in self._relays.values():
            relay.far, relay.was_lost = {}, False
        for member in attempt.members[1:]:
            relay = self._relays[member.agent]
            if relay.channel is not None:
                relay.far = {
                    number: _FarRank(relay.channel, ranks[number], self._files.outcome(attempt.number, number))
                    for number in member.ranks
                }
                for number, far in relay.far.items():
                    ranks[number].process = far
                relay.channel.send(b"M", NO_RANK, spawn)

    def hosts(self) -> list[str]:
        """Addresses of the other pods, by their number."""
        channels = (relay.channel for relay in self._relays.values())
        return ["" if channel is None else channel.peer_host.removeprefix("::ffff:") for channel in channels]

    def run(self, host: str, command: str, attempt: int) -> None:
        """Have the pod at an address run a command of mpirun's."""
        for relay, there in zip(self._relays.values(), self.hosts(), strict=True):
            if there == host and relay.channel is not None:
                relay.channel.send_message(RelayOp.RUN, command=command, attempt=attempt)

    def dismiss_leavers(self) -> None:
        """Let pods end that got SIGTERM: no rank is left in them."""
        for relay in self._relays.values():
            if relay.is_leaving and relay.channel is not None:
                relay.channel.send_message(RelayOp.END)

    def end(self) -> None:
        """The job is over: relays may leave, and those that come later learn of it."""
        self._is_over = True
        for relay in self._relays.values():
            if relay.channel is not None:
                relay.is_dismissed = True
                relay.channel.send_message(RelayOp.END)

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for relay in self._relays.values():
            if relay.channel is not None:
                relay.channel.close()

    # -- one connection, in a task of its own ---------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = relay = None
            self._strangers[writer] = None
            if len(self._strangers) > _MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
            # Whatever a stranger sends ends its own connection and nothing else.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_PROOF_LIMIT_S):
                    channel = Channel(reader, writer)
                    relay = await self._prove(channel)
            self._strangers.pop(writer, None)
            if channel is not None and relay is not None and self._welcome(relay, channel):
                await self._listen(relay, channel)
        except asyncio.CancelledError:
            # This process ends.
            pass
        finally:
            writer.close()

    async def _prove(self, channel: Channel) -> _Relay | None:
        """The relay that a peer proves to be; None if it is none of this job."""
        hello = await channel.read_from_stranger()
        agent, theirs, ours = hello.get("agent"), hello.get("nonce", ""), secrets.token_hex(16)
        relay = self._relays.get(agent) if isinstance(agent, int) else None
        if relay is None or hello.get("op") != RelayOp.HELLO or hello.get("version") != wire.VERSION:
            return None
        channel.send_message(RelayOp.CHALLENGE, nonce=ours, mac=sign(self._key, "head", relay.agent, theirs, ours))
        proof = await channel.read_from_stranger()
        if not is_signed(proof.get("mac", ""), self._key, "relay", relay.agent, theirs, ours):
            if proof and self._refusals < _MAX_REFUSALS_LOGGED:
                self._refusals += 1
                self._log(f"A pod at {channel.peer_host} that does not hold this job's key was refused")
            return None
        channel.serves = proof.get("serves")
        return relay

    def _welcome(self, relay: _Relay, channel: Channel) -> bool:
        """Take in a relay that has proved the key; whether the job goes on with it."""
        if self._is_over or relay.losses > self._may_be_lost:
            channel.send_message(RelayOp.OVER)
            relay.has_joined, relay.is_dismissed = True, True
            return False
        if relay.channel is not None:
            # Its pod was made again, and the end of the old one is not known here yet.
            self._lose(relay, relay.channel)
        relay.has_joined, relay.is_leaving, relay.channel = True, False, channel
        channel.send_message(RelayOp.WELCOME)
        if self._job:
            channel.send_message(RelayOp.ORDER, job=dict(self._job))
        if not self._has_room:
            channel.send_message(RelayOp.ROOM, is_there=False)
        if self._has_blobs:
            self._deal_to(channel)
        return True

    async def _listen(self, relay: _Relay, channel: Channel) -> None:
        try:
            while relay.channel is channel and (frame := await channel.read()) is not None:
                await self._take(relay, *frame)
        finally:
            if relay.channel is channel:
                self._lose(relay, channel)

    def _lose(self, relay: _Relay, channel: Channel) -> None:
        """A connection has ended, and with it the pod's ranks; the same process never connects again."""
        relay.channel, relay.is_ready = None, False
        channel.close()
        relay.losses += not relay.is_leaving
        lost = relay.ranks
        relay.was_lost = bool(lost)
        if not self._is_over and (lost or not relay.is_leaving):
            self._judge.lose_pod(f"{relay.describe()} is gone: {_GONE}", has_ranks=bool(lost))
        for rank in lost:
            rank.ended(End(reason="its pod was lost"))

    def _leave(self, relay: _Relay, reason: str) -> None:
        """A pod got SIGTERM, and this one did not: the job was neither suspended nor deleted."""
        if not relay.is_leaving:
            # It is gone, and was made again.
            return
        if relay.ranks:
            self._judge.pod_leaves(reason)
        elif relay.channel is not None:
            relay.channel.send_message(RelayOp.END)
            self._judge.lose_pod(reason, has_ranks=False)

    async def _take(self, relay: _Relay, kind: bytes, rank: int, payload: bytes) -> None:
        far = relay.far.get(rank)
        if kind == b"M":
            await self._take_message(relay, far, json.loads(payload))
        elif far is None:
            return
        elif kind == b"R":
            for message in messages.read(payload):
                far.rank.message(message)
        elif kind == b"O":
            far.rank.output(payload[COUNT.size :], COUNT.unpack_from(payload)[0])
            self.limit(has_room=far.rank.has_room)
        elif kind == b"E":
            far.rank.events(payload)
            self.limit(has_room=far.rank.has_room)
        elif kind == b"S":
            far.rank.stacks(payload[TICKS.size :], TICKS.unpack_from(payload)[0])
        elif kind == b"F":
            # The rank is done when all of it is here: a large value may take longer than a job may stand still.
            far.rank.moved()
            await asyncio.to_thread(_append, far.part, payload)

    async def _take_message(self, relay: _Relay, far: _FarRank | None, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == RelayOp.READY:
            # What it had ready for the job before may have crossed the order of this one.
            relay.is_ready = not relay.is_leaving and message.get("job") == self._job.get("id")
            self._judge.pod_is_ready()
        elif op == RelayOp.REFUSED:
            reason = f"{relay.describe()} cannot run its part: {message['reason']}"
            self._judge.fail(FailureCause.NOT_STARTED, reason)
        elif op == RelayOp.LEAVING:
            relay.is_ready, relay.is_leaving = False, True
            reason = f"{relay.describe()} is gone: {message['reason']}"
            asyncio.get_running_loop().call_later(LOST_AFTER_S, self._leave, relay, reason)
        elif far is None:
            return
        elif op == RelayOp.FORKED:
            far.rank.forked(int(message["pid"]))
        elif op == RelayOp.OUTCOME:
            await asyncio.to_thread(_complete, far.part, far.outcome, int(message["bytes"]))
        elif op == RelayOp.ENDED:
            end = message["end"]
            far.rank.ended(End(**{**end, "tail": tuple(end["tail"])}))


def pod_name(order: Order, agent: int) -> str:
    """Name of a pod by its number, as its controller names it; its number where the head is not named so."""
    # Pods of a Service's domain, such as those of a Job, are named `x-0.x`, and have five characters appended.
    head = order.head.partition(".")[0]
    if agent == 0:
        return head
    server = agent - (order.agents - order.servers)
    if server >= 0:
        return f"{head.removesuffix('-chief-0')}-ps-{server}"
    for ending, workers, index in (
        ("-master-0", "-worker", agent - 1),
        ("-launcher", "-worker", agent - 1),
        ("-chief-0", "-worker", agent - 1),
        ("-0", "", agent),
    ):
        if head.endswith(ending):
            return f"{head.removesuffix(ending)}{workers}-{index}"
    return str(agent)


def _append(part: pathlib.Path, data: bytes) -> None:
    # A full disk: the rank's end is known all the same, and its value is missed where it is asked for.
    with contextlib.suppress(OSError), part.open("ab") as file:
        file.write(data)


def _complete(part: pathlib.Path, outcome: pathlib.Path, size: int) -> None:
    with contextlib.suppress(OSError):
        if part.stat().st_size == size:
            part.replace(outcome)
