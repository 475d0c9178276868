"""An agent's end of a connection that carries messages as JSON lines. Standard library only."""

from __future__ import annotations

import socket
from typing import Any

from kale_dist import contract

_MAX_UNSENT_BYTES = 1 << 20


class Connection:
    """Messages over a stream socket, never waiting for the peer.

    Args:
        peer: The socket; set to non-blocking.
        limit_bytes: A peer that sends a longer message is cut off. None: no limit.
    """

    def __init__(self, peer: socket.socket, limit_bytes: int | None = None) -> None:
        self.socket = peer
        self.is_open = True
        self.limit_bytes = limit_bytes
        """May be changed once it is known who the peer is."""
        self._chunks: list[bytes] = []
        self._unsent = bytearray()
        peer.settimeout(0)

    @property
    def has_unsent(self) -> bool:
        """Whether the peer has to read before more can be sent."""
        return bool(self._unsent)

    def receive(self) -> list[dict[str, Any]]:
        """Whole messages that have arrived. Sets `is_open` to False at the end of the peer's messages."""
        received: list[dict[str, Any]] = []
        while self.is_open:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            self._chunks.append(data)
            # Joined only at a line end: an order of some megabytes arrives in many pieces.
            if b"\n" in data:
                whole, _, rest = b"".join(self._chunks).rpartition(b"\n")
                self._chunks = [rest]
                received.extend(contract.decode_records(whole))
            elif self.limit_bytes is not None and sum(map(len, self._chunks)) > self.limit_bytes:
                self.is_open = False
        return received

    def send(self, message: dict[str, Any], *, optional: bool = False) -> None:
        """Send a message, or keep it until the peer reads.

        Args:
            message: The message.
            optional: Whether it may be dropped while older ones are unread.
        """
        if optional and self._unsent:
            return
        if len(self._unsent) < _MAX_UNSENT_BYTES:
            self._unsent += contract.encode_record(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the peer has room."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self.socket.close()
