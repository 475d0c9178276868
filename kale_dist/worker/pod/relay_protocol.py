"""The protocol between a head and its relays: frames over one connection, after a proof of the job's key.

A frame is `length kind rank payload`. Kinds, in both directions: `M` a message between head and relay (JSON), `R` one to or from a
rank (the line of `wire.messages`). From a relay alone: `O` finished lines of a rank (how many, and the body), `E` its events, `S` its
stacks, `F` bytes of its outcome file. Before anything else:

    relay  {"op": "hello", "agent": n, "version": v, "nonce": a}
    head   {"op": "challenge", "nonce": b, "mac": ...}     so that a relay runs nothing for a head without the key
    relay  {"op": "proof", "mac": ..., "serves": address of its blobs}
    head   {"op": "welcome"}, or {"op": "over"} where the job is over, or its pod was lost too often

A pod that was made again sends the same, and takes the place of the one before it.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import json
import socket
import struct
from typing import Any, Self

FRAME = struct.Struct(">IcI")
COUNT = struct.Struct(">I")
TICKS = struct.Struct(">Q")

MAX_FRAME_BYTES = 64 << 20
MAX_STRANGERS_FRAME_BYTES = 4096
"""The same for a peer that has not proved yet that it holds the key."""

READ_BYTES = 1 << 20
"""What is read ahead of a connection at most; beyond twice that the peer has to wait."""

GONE_AFTER_S = 30
"""A peer whose host does not answer TCP itself for so long is gone."""

NO_RANK = 0xFFFFFFFF


class RelayOp(enum.StrEnum):
    """What a message is about."""

    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"
    WELCOME = "welcome"
    OVER = "over"
    FETCH = "fetch"
    """Head to relay: it has the blobs, which may be fetched there, or first from the relay that serves at `source`."""
    READY = "ready"
    """Relay to head: it has the blobs (in warm pods those of `job`), and its fork server has imported torch."""
    REFUSED = "refused"
    """Relay to head: it cannot run its ranks; `reason`."""
    LEAVING = "leaving"
    """Relay to head: its pod got SIGTERM; `reason`. It gets `END` when no rank is left in it."""
    ORDER = "order"
    """Head to relay, in warm pods: the next `job`, as `Pod.of_job` takes it. It answers `READY` again."""
    SPAWN = "spawn"
    """Head to relay: start its ranks of the `attempt`."""
    SIGNAL = "signal"
    """Head to relay: send a rank the signal `number`."""
    STACKS = "stacks"
    """Head to relay: ask a rank for its stacks."""
    ROOM = "room"
    """Head to relay: whether there is room for lines and events (`is_there`); else they stay with their ranks. The connection
    itself is always read: TCP would take one that is not for broken after `GONE_AFTER_S`."""
    RUN = "run"
    """Head to relay: run `command`, by which mpirun takes the pod in, for the `attempt`."""
    END = "end"
    """Head to relay: the job is over."""
    FORKED = "forked"
    """Relay to head: a rank has a process; `pid`."""
    OUTCOME = "outcome"
    """Relay to head: a rank's outcome has come as `F` frames; `bytes` are all of them. The rank's message follows."""
    ENDED = "ended"
    """Relay to head: a rank's process is over; `end`."""


class Channel:
    """One connection between a head and a relay.

    Args:
        reader: As asyncio gives it.
        writer: As asyncio gives it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=1 << 20)
        self.may_send = True
        """Whether the head has room for lines and events, as it has reported."""
        # A peer that has gone already has no address.
        self.peer_host = str((writer.get_extra_info("peername") or ("",))[0])
        self.own_host = str((writer.get_extra_info("sockname") or ("",))[0])
        self.serves: object = None
        """Host and port where the relay serves blobs to others, as it has reported."""
        connection: socket.socket = writer.get_extra_info("socket")
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_AFTER_S // 3),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE_AFTER_S // 6),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000),
        ):
            connection.setsockopt(level, name, value)

    @classmethod
    async def connect(cls, host: str, port: int) -> Self:
        """Connect to a head.

        Raises:
            OSError: It cannot be reached.
        """
        return cls(*await asyncio.open_connection(host, port, limit=READ_BYTES))

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return not self._writer.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    async def read(self, limit_bytes: int = MAX_FRAME_BYTES) -> tuple[bytes, int, bytes] | None:
        """The kind, rank and payload of the next frame; None at the end, which a frame above the limit is too."""
        try:
            size, kind, rank = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            if size > limit_bytes:
                return None
            return kind, rank, await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def read_from_stranger(self) -> dict[str, Any]:
        """The next message of a peer that has not proved yet that it holds the key; empty if it sends anything else."""
        frame = await self.read(MAX_STRANGERS_FRAME_BYTES)
        try:
            message = json.loads(frame[2]) if frame is not None and frame[0] == b"M" else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return {}
        texts = [message.get(name, "") for name in ("nonce", "mac")]
        return message if all(isinstance(text, str) and text.isascii() for text in texts) else {}

    def send(self, kind: bytes, rank: int, *payload: bytes) -> None:
        """Send a frame; nothing where the connection has ended. Never waits."""
        if self.is_open:
            self._writer.writelines((FRAME.pack(sum(map(len, payload)), kind, rank), *payload))

    def send_message(self, op: RelayOp, rank: int = NO_RANK, **fields: Any) -> None:
        """Send a message."""
        self.send(b"M", rank, json.dumps({"op": op, **fields}).encode())

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent.

        Raises:
            OSError: The connection has ended.
        """
        await self._writer.drain()

    def close(self) -> None:
        """End the connection, after what was sent."""
        self._writer.close()


def sign(key: bytes, role: str, agent: int, relays_nonce: str, heads_nonce: str) -> str:
    """A proof of the key, bound to this connection by both nonces."""
    text = f"relay\n{role}\n{agent}\n{relays_nonce}\n{heads_nonce}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def is_signed(mac: str, key: bytes, role: str, agent: int, relays_nonce: str, heads_nonce: str) -> bool:
    """Whether a proof is right. Takes the same time for all wrong ones."""
    return hmac.compare_digest(sign(key, role, agent, relays_nonce, heads_nonce), mac)
