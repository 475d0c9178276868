"""Those without the key open many connections, send slowly, and announce much: a head keeps its memory and its threads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import pathlib
import socket
import threading
import time
import types

import pytest

from kale_dist import wire
from kale_dist.places.following.head_client import HeadClient
from kale_dist.wire import JobFiles
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.agent.writer import JobWriter
from kale_dist.worker.pod.byte_server import ByteServer, ServedJob

KEY = b"k" * 32


@pytest.fixture
def head(tmp_path):
    """A byte server, and what it was asked for."""
    loop, told = asyncio.new_event_loop(), []
    writer = JobWriter(JobFiles(tmp_path), loop, lambda: None)
    asked = types.SimpleNamespace(
        missing=list, cancel=lambda *_, **how: told.append(how), acknowledge=lambda: told.append("ack")
    )
    files, store = JobFiles(tmp_path), FolderStore(tmp_path / "blobs")
    server = ByteServer("127.0.0.1", 0, ServedJob(asked, key=KEY, files=files, store=store, writer=writer))
    yield types.SimpleNamespace(server=server, told=told, client=HeadClient(lambda: connect(server), KEY))
    closed = loop.create_future()
    writer.close(lambda: closed.set_result(None))
    loop.run_until_complete(closed)
    loop.close()
    server.close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), 20)


def threads():
    return threading.active_count()


def test_at_most_64_connections_without_the_key_stay_and_the_notebook_still_gets_through(head):
    before = threads()
    with contextlib.ExitStack() as opened:
        peers = [opened.enter_context(connect(head.server)) for _ in range(200)]
        for peer in peers[:100]:
            with contextlib.suppress(ConnectionError):
                assert peer.recv(1) == b""
        assert threads() - before <= 70
        assert head.client.missing() == []
        head.client.ack()
    assert head.told == ["ack"]


@pytest.mark.parametrize("drip", [b"", b"X"])
def test_headers_that_do_not_come_within_seconds_end_their_connection(head, drip):
    began = time.monotonic()
    with connect(head.server) as peer:
        peer.sendall(b"GET /missing HTTP/1.1\r\nX: ")
        peer.settimeout(0.2)
        while True:
            assert time.monotonic() - began < 10
            try:
                peer.sendall(drip)
                if not peer.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break


def test_a_body_is_not_read_before_its_signature_is_right(head):
    digest = hashlib.sha256(b"x").hexdigest()
    mac = wire.sign_request(b"x" * 32, "POST", "/ack", digest)
    with connect(head.server) as peer:
        peer.sendall(
            f"POST /ack HTTP/1.1\r\n{wire.MAC_HEADER}: {mac}\r\n{wire.BODY_HEADER}: {digest}\r\nContent-Length: 1000000\r\n\r\n".encode()
        )
        peer.settimeout(3)
        assert peer.recv(100).startswith(b"HTTP/1.1 403 ")
    assert head.told == []


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="reads /proc")
def test_endless_headers_take_no_memory(head):
    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    with contextlib.ExitStack() as opened:
        for _ in range(30):
            peer = opened.enter_context(connect(head.server))
            with contextlib.suppress(OSError):
                peer.sendall(b"GET / HTTP/1.1\r\n" + (b"A: " + b"a" * 65_000 + b"\r\n") * 90)
        assert resident() - before < 60 << 20


def test_a_notebook_of_the_version_before_gets_a_sentence(head):
    with connect(head.server) as peer:
        body = json.dumps({"grace_s": 1.0}).encode()
        mac = wire.sign_request(KEY, "POST", "/cancel", hashlib.sha256(body).hexdigest())
        peer.sendall(
            f"POST /cancel HTTP/1.1\r\n{wire.MAC_HEADER}: {mac}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        answer = peer.recv(1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"another version of kale_dist" in answer
    assert head.told == []
