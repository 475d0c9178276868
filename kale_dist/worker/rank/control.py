"""A rank's end of the socket to its agent."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import socket
import threading

from kale_dist.wire import Assignment, decode, messages
from kale_dist.wire.messages import FromRank, Go, PassOver, Save, ToLive, ToRank, Typed

_LOOK_AGAIN_MS = 200


class Control:
    """The socket. Several threads may use it at once."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._pending = b""
        self._lock = threading.Lock()
        self._messages: collections.deque[Go | Typed | PassOver] = collections.deque()
        self._live: collections.deque[ToLive] = collections.deque()
        self._is_asked_to_save = False
        self._pid = os.getpid()

    def receive_assignment(self) -> tuple[Assignment, int | None] | None:
        """The assignment and, if there is one, the descriptor by which it opens its store. None if the agent has no use for us."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
        while more := b"\n" not in data and self._socket.recv(1 << 16):
            data += more
        line, newline, self._pending = data.partition(b"\n")
        return (decode(Assignment, json.loads(line)), descriptors[0] if descriptors else None) if newline else None

    def send(self, message: FromRank) -> None:
        """Send the agent a message. Without an agent this process is about to be killed."""
        with contextlib.suppress(OSError):
            self._socket.sendall(messages.encode(message))

    def is_asked_to_save(self) -> bool:
        """Whether the agent has asked for a checkpoint since the last call. Never waits; False in a process that the rank has forked."""
        if os.getpid() != self._pid:
            return False
        self._receive()
        asked, self._is_asked_to_save = self._is_asked_to_save, False
        return asked

    def receive(self) -> Go | Typed | PassOver | None:
        """Wait for the agent's next message that is for one breakpoint or the rank's end; None if the agent is gone."""
        while self._receive() or self._messages:
            if self._messages:
                return self._messages.popleft()
            # Not for ever: another thread may take the message.
            self._wait(_LOOK_AGAIN_MS)
        return None

    def receive_live(self, limit_s: float) -> list[ToLive] | None:
        """The messages to live ranks that have come within a limit; None if the agent is gone. For one thread alone."""
        if not self._live:
            self._wait(limit_s * 1000)
        is_there = self._receive()
        received = [self._live.popleft() for _ in range(len(self._live))]
        return received if received or is_there else None

    def wait_for_go(self) -> None:
        """Wait until the agent has no more need of this process, or is gone. Answers to a prompt that is over may come before."""
        while not isinstance(self.receive(), Go | None):
            pass

    def _wait(self, limit_ms: float) -> None:
        """Wait until something has come. Two threads may, but not with one object."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(limit_ms)

    def _receive(self) -> bool:
        """Take what has come; whether the agent is still there."""
        with self._lock:
            try:
                data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            lines, newline, self._pending = (self._pending + (data or b"")).rpartition(b"\n")
            message: ToRank
            for message in messages.read(lines + newline):
                if isinstance(message, Save):
                    self._is_asked_to_save = True
                elif isinstance(message, ToLive):
                    self._live.append(message)
                else:
                    self._messages.append(message)
        return data != b""
