"""The agent and its forkserver never wait for each other, however many ranks are asked for at once."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import socket

import pytest

from kale_dist.wire import Assignment, Attempt, Order
from kale_dist.worker.agent import fork_pool
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.rank import forkserver
from kale_dist.worker.rank.forkserver import ForkServer

MANY = 1000


def open_descriptors():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


class Listener:
    """Writes down what becomes of a rank."""

    has_room = True

    def __init__(self):
        self.end = None

    def ended(self, end):
        self.end = end


class Server:
    """The other end of a pool's socket, which answers when it is told to."""

    def __init__(self, connection):
        self.connection = connection
        self.connection.setblocking(False)

    def take(self):
        """Requests that are there, with their descriptors closed as a forkserver closes them."""
        found = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.connection, forkserver.MAX_MESSAGE_BYTES, 8)
            except BlockingIOError:
                return found
            for descriptor in descriptors:
                os.close(descriptor)
            found.append(json.loads(data))

    def refuse(self, requests):
        for request in requests:
            self.connection.send(json.dumps({"refused": request["fork"], "error": "no room"}).encode() + b"\n")


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_thousand_ranks_can_be_asked_of_a_forkserver_that_does_not_answer(loop):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = ForkPool(loop, spares=0)
    pool.adopt(ours, 0)
    order = Order(job="j", object="j", number_of_processes=MANY, processes_per_agent=MANY, snapshot="")
    attempt = Attempt.form(order, [0], number=0, port=1, seed=0)
    listeners = [Listener() for _ in range(MANY)]
    before = open_descriptors()
    for rank, listener in enumerate(listeners):
        assignment = Assignment(order=order, attempt=attempt, rank=rank)
        pool.take().start(listener, assignment, None)
    # Descriptors are made as they are asked for: a thousand ranks at once would take ten thousand.
    assert open_descriptors() - before <= 6 * fork_pool.MOST_ASKED
    server = Server(theirs)
    answered = 0
    while answered < MANY:
        requests = server.take()
        assert 0 < len(requests) <= fork_pool.MOST_ASKED
        answered += len(requests)
        server.refuse(requests)
        loop.run_until_complete(asyncio.sleep(0.01))
    while not all(listener.end for listener in listeners):
        loop.run_until_complete(asyncio.sleep(0.01))
    assert all("no room" in listener.end.reason for listener in listeners)
    pool.close()
    theirs.close()
    assert open_descriptors() <= before


def test_a_forkserver_never_waits_for_an_agent_that_does_not_read():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkServer(theirs)
    for number in range(5 * MANY):
        server._send({"ended": number, "status": 0, "by_signal": False})
    ours.settimeout(60)
    found = []
    while len(found) < 5 * MANY:
        found.append(json.loads(ours.recv(1 << 16))["ended"])
        server._flush()
    assert found == list(range(5 * MANY))
    ours.close()
    theirs.close()
