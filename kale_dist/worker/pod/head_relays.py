"""The head's side of its relays: who has joined, what their ranks do, who is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from kale_dist import wire
from kale_dist.wire import FailureCause, JobFiles, Order
from kale_dist.worker.agent.ending import name_ranks
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.agent.rank_run import RankRun
from kale_dist.worker.pod.relay_protocol import COUNT, READ_BYTES, TICKS, Channel, Op, is_signed, sign

LOST_AFTER_S = 1.0
"""If the head gets SIGTERM this soon after a relay did, the job was suspended or deleted."""

_PROOF_LIMIT_S = 10.0
_MAX_REFUSALS_SAID = 10
_LOOK_AGAIN_S = 0.1

_GONE = (
    "its agent has ended, or can no longer be reached. The pod may have been deleted, evicted or killed (often because "
    "memory ran out), or its node has failed"
)


class _FarRank:
    """What can be done to a rank behind a relay."""

    def __init__(self, channel: Channel, run: RankRun, outcome: pathlib.Path) -> None:
        self.run = run
        self.outcome = outcome
        """Where its outcome goes."""
        self._channel = channel

    @property
    def part(self) -> pathlib.Path:
        """Where its outcome lies until it is whole."""
        return self.outcome.with_name(f".{self.outcome.name}.part")

    def let_go(self) -> None:
        self._channel.say(Op.LET_GO, self.run.rank)

    def signal(self, number: signal.Signals) -> None:
        self._channel.say(Op.SIGNAL, self.run.rank, number=int(number))

    def ask_stacks(self) -> None:
        self._channel.say(Op.STACKS, self.run.rank)


class _Relay:
    """One other pod."""

    def __init__(self, agent: int, name: str, ranks: range) -> None:
        self.agent = agent
        self.name = name
        self.ranks = ranks
        self.channel: Channel | None = None
        self.has_joined = False
        self.is_ready = False
        self.far: dict[int, _FarRank] = {}

    def describe(self) -> str:
        """Its name and ranks."""
        return f"Pod {self.name} ({name_ranks(list(self.ranks))})"


class HeadsRelays:
    """The relays of a job, as its head sees them.

    Args:
        order: The job.
        key: Its secret.
        files: The job's folder.
        listener: Where relays connect to.
        on_ready: Called when all relays have what they need.
        fail: Ends the job, with the cause and a sentence: a relay cannot run its ranks, or is lost.
        say: Writes a line into the log.
    """

    def __init__(
        self,
        order: Order,
        key: bytes,
        files: JobFiles,
        listener: socket.socket,
        *,
        on_ready: Callable[[], None],
        fail: Callable[[FailureCause, str], None],
        say: Callable[[str], None],
    ) -> None:
        self._order = order
        self._key = key
        self._files = files
        self._listener = listener
        self._on_ready = on_ready
        self._fail = fail
        self._say = say
        self._refusals = 0
        self._has_blobs = False
        self._is_over = False
        self._relays = {
            agent: _Relay(agent, pod_name(order, agent), order.ranks_of(agent)) for agent in range(1, order.agents)
        }
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        """Begin to accept relays."""
        self._listener.settimeout(0)
        self._server = await asyncio.start_server(self._serve, sock=self._listener, backlog=1024, limit=READ_BYTES)

    @property
    def missing(self) -> list[str]:
        """Names of the pods that have not joined, or are not ready."""
        return [relay.name for relay in self._relays.values() if not relay.is_ready]

    @property
    def connected(self) -> int:
        """How many are connected now."""
        return sum(relay.channel is not None for relay in self._relays.values())

    @property
    def never_came(self) -> int:
        """How many may still come and have to learn that the run is over."""
        return sum(not relay.has_joined for relay in self._relays.values())

    def explain_loss(self) -> str:
        """Which relay is gone, as a sentence; empty if all are there."""
        for relay in self._relays.values():
            if relay.has_joined and relay.channel is None:
                return f"{relay.describe()} is gone: {_GONE}"
        return ""

    def deal_blobs(self) -> None:
        """The head has all blobs: the others may fetch them."""
        self._has_blobs = True
        for relay in self._relays.values():
            if relay.channel is not None:
                relay.channel.say(Op.FETCH)

    def spawn(self, run: RankRun, attempt: int, port: int, seed: int) -> None:
        """Have the rank's relay start it."""
        relay = self._relays[run.rank // self._order.processes_per_agent]
        if relay.channel is None:
            return
        run.process = relay.far[run.rank] = _FarRank(relay.channel, run, self._files.outcome(attempt, run.rank))
        relay.channel.say(Op.SPAWN, run.rank, attempt=attempt, port=port, seed=seed)

    def hosts(self) -> list[str]:
        """Addresses of the other pods, by their number."""
        channels = (relay.channel for relay in self._relays.values())
        return ["" if channel is None else channel.peer_host.removeprefix("::ffff:") for channel in channels]

    def run(self, host: str, command: str, attempt: int) -> None:
        """Have the pod at an address run a command of mpirun's."""
        for relay, there in zip(self._relays.values(), self.hosts(), strict=True):
            if there == host and relay.channel is not None:
                relay.channel.say(Op.RUN, command=command, attempt=attempt)

    def end(self) -> None:
        """The run is over: relays may leave, and those that come later learn of it."""
        self._is_over = True
        for relay in self._relays.values():
            if relay.channel is not None:
                relay.channel.say(Op.END)

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for relay in self._relays.values():
            if relay.channel is not None:
                relay.channel.close()

    # -- one connection, in a task of its own ---------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            relay = await asyncio.wait_for(self._welcome(channel), _PROOF_LIMIT_S)
            if relay is not None:
                await self._listen(relay, channel)
        except (TimeoutError, asyncio.CancelledError):
            # Too slow a stranger, or this process ends.
            pass
        finally:
            channel.close()

    async def _welcome(self, channel: Channel) -> _Relay | None:
        """The relay that a peer proves to be; None if it is none of this job, or the run goes on without it."""
        hello = await channel.read_from_stranger()
        agent, theirs, ours = hello.get("agent"), str(hello.get("nonce")), secrets.token_hex(16)
        relay = self._relays.get(agent) if isinstance(agent, int) else None
        if relay is None or hello.get("op") != Op.HELLO or hello.get("version") != wire.VERSION:
            return None
        channel.say(Op.CHALLENGE, nonce=ours, mac=sign(self._key, "head", relay.agent, theirs, ours))
        proof = await channel.read_from_stranger()
        if not is_signed(proof.get("mac"), self._key, "relay", relay.agent, theirs, ours):
            if proof and self._refusals < _MAX_REFUSALS_SAID:
                self._refusals += 1
                self._say(f"A pod at {channel.peer_host} that does not hold this job's key was refused")
            return None
        if self._is_over or relay.has_joined:
            # Its pod was made again, or came too late: a run does not change its pods.
            channel.say(Op.OVER)
            relay.has_joined = True
            return None
        relay.has_joined, relay.channel = True, channel
        channel.say(Op.WELCOME)
        if self._has_blobs:
            channel.say(Op.FETCH)
        return relay

    async def _listen(self, relay: _Relay, channel: Channel) -> None:
        try:
            while (frame := await channel.read()) is not None:
                await self._take(relay, *frame)
        finally:
            # There is no other connection: a cut between pods ends the run.
            relay.channel, relay.is_ready = None, False
            if not self._is_over:
                self._fail(FailureCause.LOST, f"{relay.describe()} is gone: {_GONE}")
            for far in relay.far.values():
                if far.run.end is None:
                    far.run.ended(End(reason="its pod was lost"))

    async def _take(self, relay: _Relay, kind: bytes, rank: int, payload: bytes) -> None:
        far = relay.far.get(rank)
        if kind == b"M":
            await self._take_message(relay, far, json.loads(payload))
        elif far is None:
            return
        elif kind == b"O":
            far.run.output(payload[COUNT.size :], COUNT.unpack_from(payload)[0])
        elif kind == b"E":
            far.run.events(payload)
            # What it sends meanwhile waits there.
            while not far.run.has_room:  # noqa: ASYNC110 - a disk that has room again has no event
                await asyncio.sleep(_LOOK_AGAIN_S)
        elif kind == b"S":
            far.run.stacks(payload[TICKS.size :], TICKS.unpack_from(payload)[0])
        elif kind == b"F":
            # The rank is done when all of it is here: a large value may take longer than a job may stand still.
            far.run.moved()
            await asyncio.to_thread(_append, far.part, payload)

    async def _take_message(self, relay: _Relay, far: _FarRank | None, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == Op.READY:
            relay.is_ready = True
            if not self.missing:
                self._on_ready()
        elif op == Op.REFUSED:
            told = f"{relay.describe()} cannot run its part: {message['reason']}"
            self._fail(FailureCause.NOT_STARTED, told)
        elif op == Op.LEAVING:
            told = f"{relay.describe()} is gone: {message['reason']}"
            asyncio.get_running_loop().call_later(LOST_AFTER_S, self._fail, FailureCause.LOST, told)
        elif far is None:
            return
        elif op == Op.FORKED:
            far.run.forked(int(message["pid"]))
        elif op == Op.SAID:
            if "bytes" in message:
                await asyncio.to_thread(_complete, far.part, far.outcome, int(message["bytes"]))
            far.run.message(message["message"])
        elif op == Op.ENDED:
            end = message["end"]
            far.run.ended(End(**{**end, "tail": tuple(end["tail"])}))


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


def waited_text(missing: list[str], began_at: float, limit_s: float) -> tuple[str, bool]:
    """What to say of pods that have not joined, and whether they have been waited for too long."""
    names = ", ".join(missing)
    if time.monotonic() - began_at < limit_s:
        return f"Waiting for pods: {names}", False
    return (
        f"The job could not start: not all of its pods were there within {limit_s:.0f} s. Missing: {names}. "
        "Look at their state: they may be waiting for a node, a GPU or their image"
    ), True
