"""The head's side of the talk between a job's agents: who has joined, and what the others' ranks do."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from kale_dist import contract
from kale_dist.pod_order import PodOrder
from kale_dist.runtime import member_protocol
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.local_ranks import open_port
from kale_dist.runtime.loop import Loop
from kale_dist.runtime.member_protocol import Channel, Op
from kale_dist.runtime.pod_site import number_of_pods
from kale_dist.runtime.remote_rank import RemoteRank
from kale_dist.runtime.watchdog import name_ranks

AWAY_AFTER_S = 5.0
"""A member that lives connects again within a second; one that has not done so in this time is gone."""

_GONE = (
    "its agent has ended, or cannot be reached any more. The pod may have been deleted, evicted or killed (often because "
    "memory ran out), or its node has failed"
)
_PROOF_LIMIT_S = 10.0
_MAX_STRANGERS = 64
_MAX_REFUSALS_SAID = 10


class Owner(Protocol):
    """Who listens to the members: the head's agent."""

    def member_is_ready(self) -> None:
        """Another member has what it needs."""
        ...

    def member_refuses(self, reason: str) -> None:
        """A member cannot run its ranks; a sentence that names it."""
        ...

    def member_is_lost(self, reason: str) -> None:
        """A member that had started its ranks is lost; a sentence that names it."""
        ...

    def member_cancels(self, reason: str, grace_s: float) -> None:
        """A member was told that the job has to end."""
        ...

    def remote_rank_changed(self, rank: RemoteRank) -> None:
        """A member's rank has changed."""
        ...

    def remote_rank_moved(self, event: dict[str, Any] | None) -> None:
        """A member's ranks have given signs of progress."""
        ...


class _Member:
    """One other pod."""

    def __init__(self, pod: int, name: str) -> None:
        self.pod = pod
        self.name = name
        self.ranks: list[RemoteRank] = []
        self.channel: Channel | None = None
        self.is_ready = False
        self.is_lost = False
        self.is_leaving = False
        self.is_told = False
        self.left_at = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def describe(self) -> str:
        return f"Pod {self.name} ({name_ranks([rank.rank for rank in self.ranks])})"


class Members:
    """The other pods of a job.

    Args:
        order: The job.
        key: Its secret.
        loop: The agent's loop.
        host: Address to listen on; empty for all.
        owner: Who is told.
        say: Writes a line into the log.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, order: PodOrder, key: bytes, loop: Loop, host: str, owner: Owner, say: Callable[[str], None]
    ) -> None:
        self._key = key
        self._loop = loop
        self._owner = owner
        self._say = say
        self._strangers: set[_Stranger] = set()
        self._refusals = 0
        self._has_blobs = False
        self._start: dict[str, Any] | None = None
        self._attempt = 0
        self._verdict: dict[str, Any] | None = None
        self._members = {pod: _Member(pod, pod_name(order, pod)) for pod in range(1, number_of_pods(order))}
        for member in self._members.values():
            first = member.pod * order.processes_per_pod
            member.ranks = [
                RemoteRank(rank, member.send, owner.remote_rank_changed)
                for rank in range(first, min(first + order.processes_per_pod, order.world_size))
            ]
        self._listener = open_port(host, order.port + 1, 128)
        self._listener.settimeout(0)
        loop.when_readable(self._listener.fileno(), self._accept)

    @property
    def ranks(self) -> list[RemoteRank]:
        """The ranks of all members, by number."""
        return [rank for member in self._members.values() for rank in member.ranks]

    @property
    def missing(self) -> list[str]:
        """Names of the pods that have not joined, or are not ready."""
        return [member.name for member in self._members.values() if not member.is_ready or member.channel is None]

    @property
    def connected(self) -> int:
        """How many are connected now."""
        return sum(member.channel is not None for member in self._members.values())

    @property
    def untold(self) -> int:
        """How many may still come and do not know yet how the job has ended."""
        return sum(not (member.is_told or member.is_lost) for member in self._members.values())

    def give_up_absent(self) -> None:
        """Whoever is away now does not count any more."""
        for member in self._members.values():
            if member.channel is None:
                self._lose(member, "its pod was lost")

    def explain_loss(self) -> str:
        """Which pods cannot be reached now, as a sentence; empty if all can."""
        away = [member for member in self._members.values() if member.channel is None]
        if not away:
            return ""
        return f"{away[0].describe()} is gone: {_GONE}"

    def tell_of_blobs(self) -> None:
        """The head has all blobs: the others may fetch them."""
        self._has_blobs = True
        self._tell({"op": Op.BLOBS})

    def start(self, attempt: int, seed: int, port: int) -> None:
        """Have all members start their ranks. For another attempt, all ranks of the one before have to be gone.

        Args:
            attempt: The attempt.
            seed: Rank 0's.
            port: Where rank 0's store listens.
        """
        self._attempt = attempt
        self._start = {"op": Op.START, "attempt": attempt, "seed": seed, "port": port}
        for rank in self.ranks:
            rank.started()
        self._tell(self._start)

    def conclude(self, verdict: Verdict) -> None:
        """Tell all members how the job has ended; they leave then."""
        self._verdict = {"op": Op.VERDICT, **dataclasses.asdict(verdict)}
        for member in self._members.values():
            self._tell_verdict(member)

    def close(self) -> None:
        """End all connections."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for stranger in self._strangers:
            stranger.channel.close()
        for member in self._members.values():
            if member.channel is not None:
                member.channel.close()

    def _tell_verdict(self, member: _Member) -> None:
        if self._verdict is not None and member.channel is not None:
            member.is_told = True
            member.send(self._verdict)

    def _tell(self, message: dict[str, Any]) -> None:
        for member in self._members.values():
            member.send(message)

    # -- who comes --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            peer, address = self._listener.accept()
            if len(self._strangers) >= _MAX_STRANGERS:
                peer.close()
                return
            stranger = _Stranger(peer, self._loop, self._key)
            self._strangers.add(stranger)
            stranger.on_end = lambda: self._judge(stranger, str(address[0]))

    def _judge(self, stranger: _Stranger, address: str) -> None:
        """A stranger has proved who it is, or has not."""
        self._strangers.discard(stranger)
        member = self._members.get(stranger.pod) if stranger.is_proved else None
        if member is not None:
            self._join(member, stranger.channel)
            return
        stranger.channel.close()
        if stranger.has_wrong_key and self._refusals < _MAX_REFUSALS_SAID:
            self._refusals += 1
            self._say(f"A pod at {address} that does not hold this job's key was refused")

    def _join(self, member: _Member, channel: Channel) -> None:
        if member.is_lost:
            channel.close()
            return
        if member.channel is not None:
            member.channel.close()
        member.channel = channel
        channel.on_message = lambda message: self._take(member, message)
        channel.on_close = lambda: self._left(member)
        if self._has_blobs:
            member.send({"op": Op.BLOBS})
        if self._start is not None:
            member.send(self._start)
        for rank in member.ranks:
            rank.repeat()
        self._tell_verdict(member)

    def _left(self, member: _Member) -> None:
        """A connection has ended: the member has left, is lost, or comes back."""
        member.channel, member.is_ready = None, False
        if member.is_leaving:
            self._lose(member, "its pod was told to end")
        elif self._verdict is None and self._start is not None:
            left_at = member.left_at = time.monotonic()
            self._loop.call_later(AWAY_AFTER_S, lambda: self._check_lost(member, left_at))

    def _check_lost(self, member: _Member, left_at: float) -> None:
        if member.channel is not None or member.left_at != left_at or self._verdict is not None:
            return
        self._owner.member_is_lost(f"{member.describe()} is gone: {_GONE}")
        self._lose(member, "its pod was lost")

    @staticmethod
    def _lose(member: _Member, reason: str) -> None:
        member.is_lost = True
        for rank in member.ranks:
            if not rank.is_gone:
                rank.lose(reason)

    # -- what they say ----------------------------------------------------------------------------------------------

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        match message.get("op"):
            case Op.READY:
                member.is_ready = True
                self._owner.member_is_ready()
            case Op.REFUSED:
                self._owner.member_refuses(f"{member.describe()} cannot run its part: {message['reason']}")
                for rank in member.ranks:
                    if not rank.is_gone:
                        rank.lose(str(message["reason"]))
            case Op.CANCEL:
                member.is_leaving = True
                self._owner.member_cancels(str(message["reason"]), max(0.0, float(message["grace_s"])))
            case Op.RANK | Op.STACKS | Op.MOVED if message["attempt"] != self._attempt:
                # It was on its way when the attempt began, or the member has not heard of it yet.
                pass
            case Op.RANK:
                self._rank(member, message).take(message)
            case Op.STACKS:
                self._rank(member, message).take_stacks(message)
            case Op.MOVED:
                for rank in member.ranks:
                    rank.moves = int(message["moves"].get(str(rank.rank), rank.moves))
                self._owner.remote_rank_moved(message["event"])

    @staticmethod
    def _rank(member: _Member, message: dict[str, Any]) -> RemoteRank:
        for rank in member.ranks:
            if rank.rank == message["rank"]:
                return rank
        raise ValueError(f"pod {member.pod} has no rank {message['rank']}")


class _Stranger:
    """A peer that has not proved yet that it holds the key."""

    def __init__(self, peer: socket.socket, loop: Loop, key: bytes) -> None:
        self.pod = 0
        self.is_proved = False
        self.has_wrong_key = False
        self.on_end: Callable[[], None] = lambda: None
        self._key = key
        self._theirs = ""
        self._ours = secrets.token_hex(16)
        self.channel = Channel(peer, loop, self._take, self._finish)
        self._limit = loop.call_later(_PROOF_LIMIT_S, self._finish)

    def _take(self, message: dict[str, Any]) -> None:
        pod = message.get("pod")
        if not self.pod and message.get("op") == Op.HELLO and isinstance(pod, int) and pod > 0:
            self.pod, self._theirs = pod, str(message.get("nonce"))
            if message.get("version") == contract.VERSION:
                mac = member_protocol.sign(self._key, "head", pod, self._theirs, self._ours)
                self.channel.send({"op": Op.CHALLENGE, "nonce": self._ours, "mac": mac})
                return
        elif self.pod and message.get("op") == Op.PROOF:
            self.is_proved = member_protocol.is_signed(
                message.get("mac"), self._key, "member", self.pod, self._theirs, self._ours
            )
            self.has_wrong_key = not self.is_proved
            if self.is_proved:
                self.channel.trust()
        self._finish()

    def _finish(self) -> None:
        self._limit.cancel()
        self.on_end()


def pod_name(order: PodOrder, pod: int) -> str:
    """Name of a pod by its number, as the operator names it; its number where pod 0 is not named so."""
    if pod == 0:
        return order.head
    for ending, index in (("-master-0", pod - 1), ("-worker-0", pod)):
        if order.head.endswith(ending):
            return f"{order.head.removesuffix(ending)}-worker-{index}"
    return str(pod)
