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
import time
from collections.abc import Callable
from typing import Any, Protocol

from kale_dist import contract
from kale_dist.contract import JobFiles, Order
from kale_dist.runtime.ending import End, name_ranks
from kale_dist.runtime.job_run import open_port
from kale_dist.runtime.rank_run import RankRun
from kale_dist.runtime.relay_protocol import (
    COUNT,
    MAX_FRAME_BYTES,
    TICKS,
    Channel,
    Op,
    is_signed,
    sign,
)

DEALT_AS_TREE_ABOVE = 8
"""Jobs of more agents deal their blobs as a tree: each agent passes them to two others."""

_PASSED_TO = 2
_PROOF_LIMIT_S = 10.0
_MAX_REFUSALS_SAID = 10
_HELD_BYTES = 4 << 20
_LOOK_AGAIN_S = 0.1

_GONE = (
    "its agent has ended, or can no longer be reached. The pod may have been deleted, evicted or killed (often because "
    "memory ran out), or its node has failed"
)


class Owner(Protocol):
    """Who listens: the head."""

    def relays_are_ready(self) -> None:
        """All relays have what they need."""
        ...

    def relay_refuses(self, reason: str) -> None:
        """One cannot run its ranks; a sentence that names it."""
        ...

    def relay_is_lost(self, reason: str) -> None:
        """One is lost; a sentence that names it."""
        ...

    def relay_leaves(self, reason: str) -> None:
        """The pod of one got SIGTERM; a sentence that names it."""
        ...


class _FarRank:
    """What can be done to a rank behind a relay."""

    def __init__(self, channel: Channel, run: RankRun, path: pathlib.Path) -> None:
        self.run = run
        self.path = path
        """Where its outcome goes."""
        self._channel = channel

    def let_go(self) -> None:
        self._channel.say(Op.LET_GO, self.run.rank)

    def signal(self, number: signal.Signals) -> None:
        self._channel.say(Op.SIGNAL, self.run.rank, number=int(number))

    def ask_stacks(self) -> None:
        self._channel.say(Op.STACKS, self.run.rank)


class _Outcome:
    """An outcome file that is arriving; a thread writes it, and its relay is not read while too much waits."""

    def __init__(self, path: pathlib.Path, size: int, channel: Channel, then: Callable[[], None]) -> None:
        self._path = path
        self._left = size
        self._channel = channel
        self._then = then
        self._parts: collections.deque[bytes] = collections.deque()
        self._waiting = 0
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all its bytes have come."""
        return self._left <= 0

    def take(self, data: bytes) -> None:
        """Take its next bytes."""
        self._left -= len(data)
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting > _HELD_BYTES:
            self._channel.hold(is_held=True)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            while self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                await asyncio.to_thread(_append, part, data)
                self._waiting -= len(data)
                self._channel.hold(is_held=False)
            if self.is_whole:
                await asyncio.to_thread(part.replace, self._path)
        except OSError:
            # A full disk: the rank's end is known all the same, and its value is missed where it is asked for.
            self._parts.clear()
            self._channel.hold(is_held=False)
        self._writing = None
        if self.is_whole:
            self._then()
        elif self._parts:
            self._writing = asyncio.create_task(self._write())


class _Relay:
    """One other pod."""

    def __init__(self, agent: int, name: str, ranks: range) -> None:
        self.agent = agent
        self.name = name
        self.ranks = ranks
        self.channel: Channel | None = None
        self.has_joined = False
        self.is_ready = False
        self.passes_to = _PASSED_TO
        """How many others may still fetch blobs from it."""
        self.far: dict[int, _FarRank] = {}
        self.outcomes: dict[int, _Outcome] = {}

    def describe(self) -> str:
        """Its name and ranks."""
        return f"Pod {self.name} ({name_ranks(list(self.ranks))})"


class HeadsRelays:
    """The relays of a job, as its head sees them.

    Args:
        order: The job.
        key: Its secret.
        files: The job's folder.
        host: Address to listen on; empty for all.
        owner: Called when relays are ready, refuse, leave or are lost.
        say: Writes a line into the log.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, order: Order, key: bytes, files: JobFiles, host: str, owner: Owner, say: Callable[[str], None]
    ) -> None:
        self._order = order
        self._key = key
        self._files = files
        self._owner = owner
        self._say = say
        self._refusals = 0
        self._waiting_for_blobs: collections.deque[_Relay] = collections.deque()
        self._has_blobs = False
        self._passes_to = _PASSED_TO
        self._is_over = False
        self._relays = {
            agent: _Relay(agent, pod_name(order, agent), order.ranks_of(agent)) for agent in range(1, order.agents)
        }
        self._strangers: set[_Stranger] = set()
        self._listener = open_port(host, order.port + 1, 1024)
        self._listener.settimeout(0)
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        """Begin to accept relays."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._stranger, sock=self._listener, backlog=1024)

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
        self._deal()

    def spawn(self, run: RankRun, attempt: int, port: int, seed: int) -> None:
        """Have the rank's relay start it."""
        relay = self._relays[run.rank // self._order.processes_per_agent]
        if relay.channel is None:
            return
        far = _FarRank(relay.channel, run, self._files.outcome(attempt, run.rank))
        relay.far[run.rank] = far
        run.process = far
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

    # -- who comes --------------------------------------------------------------------------------------------------

    def _stranger(self) -> Channel:
        stranger = _Stranger(self._key, self._judge)
        self._strangers.add(stranger)
        return stranger.channel

    def _judge(self, stranger: _Stranger) -> None:
        """A peer has proved who it is, or has not."""
        self._strangers.discard(stranger)
        relay = self._relays.get(stranger.agent) if stranger.is_proved else None
        if relay is None:
            stranger.channel.close()
            if stranger.has_wrong_key and self._refusals < _MAX_REFUSALS_SAID:
                self._refusals += 1
                self._say(f"A pod at {stranger.channel.peer_host} that does not hold this job's key was refused")
            return
        channel = stranger.channel
        if self._is_over or relay.has_joined:
            # Its pod was made again, or came too late: a run does not change its pods.
            channel.say(Op.OVER)
            channel.close()
            relay.has_joined = True
            return
        relay.has_joined, relay.channel = True, channel
        channel.limit_bytes = MAX_FRAME_BYTES
        channel.on_frame = lambda kind, rank, payload: self._take(relay, kind, rank, payload)
        channel.on_close = lambda: self._left(relay)
        channel.say(Op.WELCOME)
        self._waiting_for_blobs.append(relay)
        self._deal()

    def _deal(self) -> None:
        """Tell relays where to fetch the blobs from."""
        is_tree = self._order.agents > DEALT_AS_TREE_ABOVE
        while self._has_blobs and self._waiting_for_blobs:
            source = None
            if is_tree and not self._passes_to:
                ready = [relay for relay in self._relays.values() if relay.is_ready and relay.passes_to]
                if not ready:
                    return
                source = ready[0]
            relay = self._waiting_for_blobs.popleft()
            if relay.channel is None:
                continue
            if source is None or source.channel is None:
                self._passes_to = max(0, self._passes_to - 1)
                relay.channel.say(Op.FETCH, host=self._order.head)
            else:
                source.passes_to -= 1
                relay.channel.say(Op.FETCH, host=source.channel.peer_host)

    def _left(self, relay: _Relay) -> None:
        """A connection has ended. There is no other one: a cut between pods ends the run."""
        relay.channel, relay.is_ready = None, False
        is_news = any(not far.run.is_gone for far in relay.far.values())
        if not self._is_over:
            self._owner.relay_is_lost(f"{relay.describe()} is gone: {_GONE}")
        relay.outcomes.clear()
        for far in relay.far.values() if is_news else ():
            far.run.is_held = False
            if far.run.end is None:
                far.run.ended(End(reason="its pod was lost"))
            else:
                far.run.outcome_arrived()

    # -- what they say ----------------------------------------------------------------------------------------------

    def _take(self, relay: _Relay, kind: bytes, rank: int, payload: bytes) -> None:
        far = relay.far.get(rank)
        if kind == b"M":
            self._take_message(relay, far, json.loads(payload))
        elif far is None:
            return
        elif kind == b"O":
            far.run.output(payload[COUNT.size :], COUNT.unpack_from(payload)[0])
        elif kind == b"E":
            far.run.events(payload)
            if not far.run.has_room and relay.channel is not None:
                relay.channel.hold(is_held=True)
                asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._read_again, relay, far.run)
        elif kind == b"S":
            far.run.stacks(payload[TICKS.size :], TICKS.unpack_from(payload)[0])
        elif kind == b"F" and (outcome := relay.outcomes.get(rank)) is not None:
            outcome.take(payload)

    def _read_again(self, relay: _Relay, run: RankRun) -> None:
        if relay.channel is None:
            return
        if run.has_room:
            relay.channel.hold(is_held=False)
        else:
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._read_again, relay, run)

    def _take_message(self, relay: _Relay, far: _FarRank | None, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == Op.READY:
            relay.is_ready = True
            self._deal()
            if not self.missing:
                self._owner.relays_are_ready()
        elif op == Op.REFUSED:
            self._owner.relay_refuses(f"{relay.describe()} cannot run its part: {message['reason']}")
        elif op == Op.LEAVING:
            self._owner.relay_leaves(f"{relay.describe()} is gone: {message['reason']}")
        elif far is None:
            return
        elif op == Op.FORKED:
            far.run.forked(int(message["pid"]))
        elif op == Op.SAID:
            if "done" in message["message"]:
                # Its outcome is on its way; the rank is not gone before it is here.
                far.run.is_held = True
            far.run.message(message["message"])
        elif op == Op.OUTCOME:
            self._await_outcome(relay, far, int(message["bytes"]))
        elif op == Op.ENDED:
            end = message["end"]
            far.run.ended(End(**{**end, "tail": tuple(end["tail"])}))

    @staticmethod
    def _await_outcome(relay: _Relay, far: _FarRank, size: int) -> None:
        def arrived() -> None:
            relay.outcomes.pop(far.run.rank, None)
            far.run.outcome_arrived()

        if size and relay.channel is not None:
            relay.outcomes[far.run.rank] = _Outcome(far.path, size, relay.channel, arrived)
        else:
            arrived()


@dataclasses.dataclass(eq=False)
class _Stranger:
    """A peer that has not proved yet that it holds the key."""

    key: bytes
    on_end: Callable[[_Stranger], None]
    agent: int = 0
    is_proved: bool = False
    has_wrong_key: bool = False

    def __post_init__(self) -> None:
        self._theirs = ""
        self._ours = secrets.token_hex(16)
        self._is_over = False
        self.channel = Channel(self._take, self._finish)
        self._limit = asyncio.get_running_loop().call_later(_PROOF_LIMIT_S, self._finish)

    def _take(self, kind: bytes, _rank: int, payload: bytes) -> None:
        message: Any = None
        with contextlib.suppress(ValueError):
            message = json.loads(payload) if kind == b"M" else None
        if not isinstance(message, dict):
            message = {}
        agent = message.get("agent")
        if not self.agent and message.get("op") == Op.HELLO and isinstance(agent, int) and agent > 0:
            self.agent, self._theirs = agent, str(message.get("nonce"))
            if message.get("version") == contract.VERSION:
                mac = sign(self.key, "head", agent, self._theirs, self._ours)
                self.channel.say(Op.CHALLENGE, nonce=self._ours, mac=mac)
                return
        elif self.agent and message.get("op") == Op.PROOF:
            self.is_proved = is_signed(message.get("mac"), self.key, "relay", self.agent, self._theirs, self._ours)
            self.has_wrong_key = not self.is_proved
        self._finish()

    def _finish(self) -> None:
        self._limit.cancel()
        if not self._is_over:
            self._is_over = True
            self.on_end(self)


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


def _append(path: pathlib.Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def waited_text(missing: list[str], began_at: float, limit_s: float) -> tuple[str, bool]:
    """What to say of pods that have not joined, and whether they have been waited for too long."""
    names = ", ".join(missing)
    if time.monotonic() - began_at < limit_s:
        return f"Waiting for pods: {names}", False
    return (
        f"The job could not start: not all of its pods were there within {limit_s:.0f} s. Missing: {names}. "
        "Look at their state: they may be waiting for a node, a GPU or their image"
    ), True
