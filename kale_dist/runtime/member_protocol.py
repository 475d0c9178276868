"""What the agents of one job's pods say to each other: one connection from each to that of pod 0, the *head*.

Messages are JSON objects, one a line, with an `op`. A connection begins with a proof by both sides that they hold the
job's key, in which each signs both nonces:

    member: hello      version, pod, host (its name), nonce
    head:   challenge  nonce, mac
    member: proof      mac

Then, in any order and each as often as it takes (after a cut the member connects again, and both say anew what counts):

    member: ready      it has the snapshot
            refused    reason: it cannot run its ranks
            rank       attempt, rank, state, pid, done, end, gone, tail: all that is known of a rank
            moved      attempt, moves (rank to signs of progress so far), event (the last one, or null)
            stacks     attempt, rank, stacks, cpu_ticks, moves: the answer to the head's `stacks`
            cancel     reason, grace_s: the job has to end
            beat       a sign of life
    head:   blobs      it has all blobs, and other agents may fetch them
            start      attempt, seed, port: start the ranks, whose store listens there; once more for each attempt,
                       when all ranks of the one before are gone
            let-go, terminate, kill, stacks   rank
            verdict    state, cause, reason, rank, ...: how the job has ended
            beat       a sign of life
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from kale_dist.runtime.inbox import Connection
from kale_dist.runtime.loop import Loop, Timer

BEAT_S = 5.0
"""Seconds between signs of life."""

LOST_AFTER_S = 30.0
"""A connection on which nothing was heard for so long is closed; a member that cannot reach the head for so long gives up."""

MAX_STRANGER_BYTES = 4096
"""A peer that has not proved that it holds the key may send messages up to this size."""


class Op(enum.StrEnum):
    """What a message is about; the module's docstring lists the fields of each."""

    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"
    READY = "ready"
    REFUSED = "refused"
    RANK = "rank"
    MOVED = "moved"
    STACKS = "stacks"
    CANCEL = "cancel"
    BEAT = "beat"
    BLOBS = "blobs"
    START = "start"
    LET_GO = "let-go"
    TERMINATE = "terminate"
    KILL = "kill"
    VERDICT = "verdict"


def sign(key: bytes, side: str, pod: int, member_nonce: str, head_nonce: str) -> str:
    """The proof of one side.

    Args:
        key: The job's secret.
        side: "head" or "member", so that neither can send back what the other has signed.
        pod: The member's pod.
        member_nonce: What the member has drawn for this connection.
        head_nonce: What the head has drawn for it.
    """
    text = f"agents\n{side}\n{pod}\n{member_nonce}\n{head_nonce}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def is_signed(mac: object, key: bytes, side: str, pod: int, member_nonce: str, head_nonce: str) -> bool:
    """Whether a proof is the right one; takes the same time whatever is wrong with it."""
    wanted = sign(key, side, pod, member_nonce, head_nonce)
    return hmac.compare_digest(str(mac).encode("utf-8", "replace"), wanted.encode())


class Channel:
    """One end of such a connection, served by the agent's loop.

    Args:
        peer: The socket.
        loop: The agent's loop.
        on_message: Called with each message but signs of life.
        on_close: Called once when the peer has closed its end, broke off, or has been silent for too long.
    """

    def __init__(
        self,
        peer: socket.socket,
        loop: Loop,
        on_message: Callable[[dict[str, Any]], None],
        on_close: Callable[[], None],
    ) -> None:
        self.on_message = on_message
        """May be changed: who greets a peer and who works with it are not the same."""
        self.on_close = on_close
        """As above."""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(peer, MAX_STRANGER_BYTES)
        self._loop = loop
        self._heard_at = time.monotonic()
        self._is_open = True
        self._timer: Timer = loop.call_later(BEAT_S, self._beat)
        loop.when_readable(peer.fileno(), self._serve)

    def trust(self) -> None:
        """The peer has proved who it is: it may send long messages."""
        self._connection.limit_bytes = None

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; nothing if the connection is closed."""
        if self._is_open:
            self._connection.send(message)
            self._loop.also_writable(self._connection.socket.fileno(), wanted=self._connection.has_unsent)

    def close(self) -> None:
        """End the connection; `on_close` is not called."""
        if self._is_open:
            self._is_open = False
            self._timer.cancel()
            self._loop.forget(self._connection.socket.fileno())
            self._connection.close()

    def _serve(self) -> None:
        self._connection.flush()
        self._loop.also_writable(self._connection.socket.fileno(), wanted=self._connection.has_unsent)
        for message in self._connection.receive():
            self._heard_at = time.monotonic()
            if not self._is_open:
                return
            if message.get("op") != Op.BEAT:
                self._take(message)
        if not self._connection.is_open:
            self._end()

    def _take(self, message: dict[str, Any]) -> None:
        try:
            self.on_message(message)
        except (KeyError, TypeError, ValueError, AttributeError):
            # What makes no sense must not end the job.
            traceback.print_exc()

    def _beat(self) -> None:
        if time.monotonic() - self._heard_at > LOST_AFTER_S:
            self._end()
            return
        self.send({"op": Op.BEAT})
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _end(self) -> None:
        if self._is_open:
            self.close()
            self.on_close()
