"""The protocol between a head and its relays: frames over one connection, after a proof of the job's key.

A frame is `length kind rank payload`. Kinds of the relay's frames: `M` a message of a rank or of the relay itself (JSON),
`O` finished lines of a rank (how many, and the body), `E` its events, `S` its stacks, `F` bytes of its outcome file. A
head sends only `M`. Before anything else:

    relay  {"op": "hello", "agent": n, "version": v, "nonce": a}
    head   {"op": "challenge", "nonce": b, "mac": ...}     so that a relay runs nothing for a head without the key
    relay  {"op": "proof", "mac": ...}
    head   {"op": "welcome"}, or {"op": "over"} where the run has started without this relay
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

FRAME = struct.Struct(">IcI")
COUNT = struct.Struct(">I")
TICKS = struct.Struct(">Q")

MAX_FRAME_BYTES = 64 << 20
MAX_STRANGERS_FRAME_BYTES = 4096
"""The same for a peer that has not proved yet that it holds the key."""

GONE_AFTER_S = 30
"""A peer whose host does not answer TCP itself for so long is gone."""

NO_RANK = 0xFFFFFFFF


class Op(enum.StrEnum):
    """What a message is about."""

    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"
    WELCOME = "welcome"
    OVER = "over"
    FETCH = "fetch"
    """Head to relay: fetch the blobs from `host`."""
    READY = "ready"
    """Relay to head: it has the blobs, and can load them."""
    REFUSED = "refused"
    """Relay to head: it cannot run its ranks; `reason`."""
    LEAVING = "leaving"
    """Relay to head: its pod got SIGTERM; `reason`."""
    SPAWN = "spawn"
    """Head to relay: start a rank; `attempt`, `port`, `seed`."""
    SIGNAL = "signal"
    """Head to relay: send a rank the signal `number`."""
    STACKS = "stacks"
    """Head to relay: ask a rank for its stacks."""
    LET_GO = "let-go"
    """Head to relay: a rank that is done may end."""
    RUN = "run"
    """Head to relay: run `command`, by which mpirun takes the pod in, for the `attempt`."""
    END = "end"
    """Head to relay: the run is over."""
    FORKED = "forked"
    """Relay to head: a rank has a process; `pid`."""
    SAID = "said"
    """Relay to head: a rank has said `message` over its control socket."""
    OUTCOME = "outcome"
    """Relay to head: `bytes` of a rank's outcome follow as `F` frames; 0 where there is none."""
    ENDED = "ended"
    """Relay to head: a rank's process is over; `end`."""


class Channel(asyncio.Protocol):
    """One connection between a head and a relay.

    Args:
        on_frame: Called with each frame's kind, rank and payload.
        on_close: Called once when the connection has ended.
    """

    def __init__(self, on_frame: Callable[[bytes, int, bytes], None], on_close: Callable[[], None]) -> None:
        self.on_frame = on_frame
        self.on_close = on_close
        self.limit_bytes = MAX_STRANGERS_FRAME_BYTES
        self.peer_host = ""
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio calls it."""
        self._transport = transport  # type: ignore[assignment] # a socket's transport can write
        transport.set_write_buffer_limits(high=1 << 20)  # type: ignore[attr-defined]
        self.peer_host = str(transport.get_extra_info("peername")[0])
        connection: socket.socket = transport.get_extra_info("socket")
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_AFTER_S // 3),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE_AFTER_S // 6),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000),
        ):
            connection.setsockopt(level, name, value)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        del exc
        self._transport = None
        self.may_write.set()
        self.on_close()

    def pause_writing(self) -> None:
        """As asyncio calls it."""
        self.may_write.clear()

    def resume_writing(self) -> None:
        """As asyncio calls it."""
        self.may_write.set()

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        self._data += data
        at = 0
        while len(self._data) - at >= FRAME.size:
            size, kind, rank = FRAME.unpack_from(self._data, at)
            if size > self.limit_bytes:
                self.close()
                return
            stop = at + FRAME.size + size
            if len(self._data) < stop:
                break
            payload = bytes(memoryview(self._data)[at + FRAME.size : stop])
            at = stop
            if not self.is_open:
                return
            self.on_frame(kind, rank, payload)
        del self._data[:at]

    def send(self, kind: bytes, rank: int, *payload: bytes) -> None:
        """Send a frame; nothing where the connection has ended. Never waits."""
        if self._transport is not None and not self._transport.is_closing():
            size = sum(map(len, payload))
            self._transport.writelines((FRAME.pack(size, kind, rank), *payload))

    def say(self, op: Op, rank: int = NO_RANK, **fields: Any) -> None:
        """Send a message."""
        self.send(b"M", rank, json.dumps({"op": op, **fields}).encode())

    def hold(self, *, is_held: bool) -> None:
        """Whether to stop reading: what the peer sends then waits there."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                (self._transport.pause_reading if is_held else self._transport.resume_reading)()

    def close(self) -> None:
        """End the connection, after what was sent."""
        if self._transport is not None:
            self._transport.close()


def sign(key: bytes, role: str, agent: int, relays_nonce: str, heads_nonce: str) -> str:
    """A proof of the key, bound to this connection by both nonces."""
    text = f"relay\n{role}\n{agent}\n{relays_nonce}\n{heads_nonce}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def is_signed(mac: object, key: bytes, role: str, agent: int, relays_nonce: str, heads_nonce: str) -> bool:
    """Whether a proof is right. Takes the same time for all wrong ones."""
    return hmac.compare_digest(sign(key, role, agent, relays_nonce, heads_nonce).encode(), str(mac).encode())
