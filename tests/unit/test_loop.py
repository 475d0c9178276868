"""The agent's loop and its connections."""

from __future__ import annotations

import os
import socket

import pytest

from kale_dist.runtime.inbox import Connection
from kale_dist.runtime.loop import Loop


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield Connection(ours), theirs
    ours.close()
    theirs.close()


def test_calls_come_in_the_order_of_their_moments(loop):
    called = []
    loop.call_later(0.02, lambda: called.append("second"))
    loop.call_later(0.01, lambda: called.append("first"))
    loop.call_later(0.0, lambda: called.append("never")).cancel()
    while len(called) < 2:
        loop.step()
    assert called == ["first", "second"]


def test_a_descriptor_that_an_earlier_call_has_forgotten_is_not_called(loop):
    pipes = [os.pipe() for _ in range(2)]
    called = []

    def forget_all():
        called.append(1)
        for reader, _ in pipes:
            loop.forget(reader)

    for reader, writer in pipes:
        loop.when_readable(reader, forget_all)
        os.write(writer, b"x")
    loop.step()
    assert called == [1]
    for pipe in pipes:
        for end in pipe:
            os.close(end)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b'{"op":"a"}\n{"op":"b"}\n'], ["a", "b"]),
        ([b'{"op":', b'"a"}\n{"op"', b':"b"}\n'], ["a", "b"]),
        ([b"nonsense\n[1]\n", b'{"op":"a"}\n'], ["a"]),
        ([b'{"op":"a"}'], []),
    ],
)
def test_messages_are_whole_however_they_arrive(ends, pieces, expected):
    connection, theirs = ends
    received = []
    for piece in pieces:
        theirs.sendall(piece)
        received += connection.receive()
    assert [message["op"] for message in received] == expected
    assert connection.is_open
    theirs.close()
    assert connection.receive() == []
    assert not connection.is_open


def test_a_peer_that_does_not_read_blocks_nobody(ends):
    connection, theirs = ends
    for number in range(20_000):
        connection.send({"op": "wake", "job": "x" * 50, "number": number}, optional=True)
    assert connection.has_unsent
    connection.send({"op": "last"})
    data = b""
    while not data.endswith(b'{"op":"last"}\n'):
        data += theirs.recv(1 << 20)
        connection.flush()
    assert not connection.has_unsent
    assert data.count(b"\n") < 20_000


def test_a_peer_that_is_gone_is_no_error(ends):
    connection, theirs = ends
    theirs.close()
    connection.send({"op": "wake"})
    connection.send({"op": "wake"})
    assert not connection.has_unsent
