"""A member's side of the talk between a job's agents: the connection to pod 0's agent, made anew when it is cut."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kale_dist import contract
from kale_dist.pod_order import PodOrder
from kale_dist.runtime import member_protocol
from kale_dist.runtime.loop import Loop, Timer
from kale_dist.runtime.mailbox import Mailbox
from kale_dist.runtime.member_protocol import LOST_AFTER_S, Channel, Op

_CONNECT_LIMIT_S = 5.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 1.0

SAY_EACH_S = 30.0
"""An agent that waits says so this often."""

REFUSED_AFTER_S = 3.0
"""If nobody listens any more at the head's port for so long, its agent has ended: it listens as long as it lives."""


class HeadLink:
    """Keeps a connection to the head until it is closed.

    Args:
        order: The job.
        key: Its secret.
        pod: This pod.
        loop: The agent's loop.
        mailbox: Of the agent.
        on_join: Called each time that the head has proved who it is; what counts has to be said anew then.
        on_message: Called with what it says.
        on_lost: Called once with a sentence when the head cannot be had (any more).
        say: Writes a line into the log.
    """

    def __init__(
        self,
        order: PodOrder,
        key: bytes,
        pod: int,
        loop: Loop,
        mailbox: Mailbox,
        *,
        on_join: Callable[[], None],
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._order = order
        self._key = key
        self._pod = pod
        self._loop = loop
        self._mailbox = mailbox
        self._on_join = on_join
        self._on_message = on_message
        self._on_lost = on_lost
        self._say = say
        self._said_at = time.monotonic()
        self._channel: Channel | None = None
        self._is_joined = False
        self._was_joined = False
        self._is_closed = False
        self._nonce = ""
        self._deadline = time.monotonic() + order.start_wait_s
        self._refused_since: float | None = None
        self._problem = ""
        self._timer: Timer | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._connect()

    def send(self, message: dict[str, Any]) -> None:
        """Tell the head; nothing if it is away now (`on_join` is the moment to say again what counts)."""
        if self._channel is not None and self._is_joined:
            self._channel.send(message)

    def close(self) -> None:
        """End the connection and look for no other."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is not None:
            self._channel.close()

    # -- connecting -------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect in a thread: looking up a name may take many seconds."""
        threading.Thread(target=self._try_to_connect, name="head-link", daemon=True).start()

    def _try_to_connect(self) -> None:
        address = (self._order.head, self._order.port + 1)
        try:
            peer = socket.create_connection(address, timeout=_CONNECT_LIMIT_S)
        except OSError as error:
            problem = f"{self._order.head}: {error.strerror or error}"
            is_refused = isinstance(error, ConnectionRefusedError)
            self._mailbox.post(lambda: self._failed(problem, is_refused=is_refused))
        else:
            self._mailbox.post(lambda: self._connected(peer))

    def _connected(self, peer: socket.socket) -> None:
        if self._is_closed:
            peer.close()
            return
        self._nonce = secrets.token_hex(16)
        self._channel = Channel(peer, self._loop, self._greet, self._cut)
        self._channel.send(
            {
                "op": Op.HELLO,
                "version": contract.VERSION,
                "pod": self._pod,
                "host": socket.gethostname(),
                "nonce": self._nonce,
            }
        )

    def _failed(self, problem: str, *, is_refused: bool) -> None:
        now = time.monotonic()
        self._problem = problem
        self._refused_since = (self._refused_since or now) if is_refused else None
        self._try_later()

    def _try_later(self) -> None:
        if self._is_closed:
            return
        now = time.monotonic()
        is_refused = self._refused_since is not None and now - self._refused_since > REFUSED_AFTER_S
        if now > self._deadline or (self._was_joined and is_refused):
            self._is_closed = True
            self._on_lost(self._describe_loss())
            return
        if now - self._said_at > SAY_EACH_S:
            self._said_at = now
            self._say(f"Waiting for the agent of {self._order.head}: {self._problem}")
        self._timer = self._loop.call_later(self._pause_s, self._connect)
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 1.5)

    def _describe_loss(self) -> str:
        detail = f" ({self._problem})" if self._problem else ""
        if self._was_joined:
            return (
                f"The agent of {self._order.head} is gone{detail}, and with it rank 0: the ranks of this pod were ended"
            )
        return f"The agent of {self._order.head} could not be reached within {self._order.start_wait_s:.0f} s{detail}"

    def _cut(self) -> None:
        """The connection has ended."""
        self._channel = None
        if self._is_joined:
            self._is_joined = False
            self._deadline = time.monotonic() + LOST_AFTER_S
            self._problem, self._refused_since, self._pause_s = "", None, _FIRST_PAUSE_S
        self._try_later()

    # -- who it is --------------------------------------------------------------------------------------------------

    def _greet(self, message: dict[str, Any]) -> None:
        channel = self._channel
        if channel is None:
            return
        theirs = str(message.get("nonce"))
        is_head = message.get("op") == Op.CHALLENGE and member_protocol.is_signed(
            message.get("mac"), self._key, "head", self._pod, self._nonce, theirs
        )
        if not is_head:
            # An earlier job of the same name may still answer there for a while.
            self._problem = f"whoever answers at {self._order.head} does not hold this job's key"
            channel.close()
            self._cut()
            return
        mac = member_protocol.sign(self._key, "member", self._pod, self._nonce, theirs)
        channel.send({"op": Op.PROOF, "mac": mac})
        channel.trust()
        channel.on_message = self._on_message
        self._is_joined = self._was_joined = True
        self._on_join()
