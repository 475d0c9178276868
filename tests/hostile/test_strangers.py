"""Others reach a job's ports and write into its pods' logs: nothing that they send ends a head, a relay or a notebook's copy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import time

import pytest
from plain_jobs import rank, reports_and_waits, wait_for_file

import kale_dist as kd
from kale_dist import wire
from kale_dist.job import records
from kale_dist.job.records import Life
from kale_dist.places.following.copy import GapError, HeadCopy
from kale_dist.wire import BlockReader, JobFiles, Source, Stream, Verdict
from kale_dist.worker.pod import relay as relay_module
from kale_dist.worker.pod.relay_protocol import FRAME, Channel, RelayOp

SEED = 20_261_125
ODD = (
    "\ud800", "\x00", "é", "", "a" * 3000, None, True, -1, 10**30, 1e999, float("nan"), [], {}, ["x"], {"op": "hello"}, "hello",
    "-1", "../key", "\x1b]0;x\x07",
)  # fmt: skip
HELLO = {"op": "hello", "agent": 1, "version": wire.VERSION, "nonce": "n"}
PROOF = {"op": "proof", "mac": "0" * 64, "serves": ["127.0.0.1", 1]}


@pytest.fixture
def job(make_bare):
    """A job of two pods whose first one waits for the other."""
    made = make_bare(rank, ranks=2, source=Source.STREAM).put_input()
    head = made.start(0)
    made.until(lambda: all(reaches(made, made.order.port + more) for more in (1, 2)))
    assert head.process.poll() is None
    return made


def reaches(job, port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def frame(message, kind=b"M"):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return FRAME.pack(len(data), kind, 0) + data


def send(port, *parts, resets=False):
    """Send to a port of the head, each part once something came back or nothing does; the peer may have closed."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as peer:
        if resets:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for at, part in enumerate(parts):
            peer.sendall(part)
            if at + 1 < len(parts):
                peer.settimeout(2)
                peer.recv(1000)


def check_that_it_still_works(job):
    """The job's second pod comes, its snapshot is sent, and both ranks give their values."""
    head = job.pods[0]
    assert head.process.poll() is None, head.termination_log.read_text()
    for digest in job.order.blobs:
        assert head.ask("PUT", f"/blobs/{digest}?offset=0", bytes(job.store.open(digest)))[0] == 201
    job.start(1)
    assert job.end() == [0, 0], job.text()


NESTED = b'{"op":"hello","agent":1,"version":%d,"nonce":' % wire.VERSION + b"[" * 1900 + b"]" * 1900 + b"}"


@pytest.mark.parametrize(
    "frames",
    [
        (frame({**HELLO, "nonce": "\ud800"}),),
        (frame(HELLO), frame({**PROOF, "mac": "\ud800"})),
        (frame(NESTED),),
        (frame({**HELLO, "agent": []}), frame(PROOF)),
    ],
    ids=["half of a pair", "half of a pair as proof", "nested", "no number"],
)
def test_one_packet_at_the_relays_port_ends_nothing(job, frames):
    send(job.order.port + 1, *frames)
    check_that_it_still_works(job)


def test_connections_that_are_reset_at_once_end_nothing(job):
    for _ in range(300):
        send(job.order.port + 1, resets=True)
        send(job.order.port + 2, resets=True)
    check_that_it_still_works(job)


def test_a_head_that_has_no_descriptor_left_lives_on(job):
    # What the head imports for its first connection it has before.
    send(job.order.port + 1, frame(HELLO), frame(PROOF))
    assert job.pods[0].ask("GET", "/missing")[0] in (200, 404)
    pid = job.pods[0].process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, hard))
    for _ in range(20):
        send(job.order.port + 1, frame(HELLO))
    time.sleep(1.5)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    check_that_it_still_works(job)


# -- by chance: 20,000 frames, the same each time ----------------------------------------------------------------------


def mutated(draw, data):
    """Bytes with some of them changed, cut off, doubled or put in."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0 if data:
                data[at % len(data)] = draw.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = draw.randbytes(draw.choice((1, 4, 50)))
            case _:
                data[at:at] = data[max(0, at - draw.randint(1, 40)) : at]
    return bytes(data)


def odd(draw, message):
    """A message with one field of another kind, or one field more or less."""
    name = draw.choice([*message, "more"])
    changed = {**message, name: draw.choice(ODD)}
    if draw.random() < 0.2:
        del changed[name]
    return changed


def stranger_frames(draw):
    first, second = odd(draw, HELLO) if draw.random() < 0.5 else HELLO, odd(draw, PROOF)
    parts = [frame(first, draw.choice((b"M", b"M", b"M", b"O", b"\xff")))]
    if first == HELLO:
        parts.append(frame(second))
    if draw.random() < 0.4:
        parts[-1] = mutated(draw, parts[-1])
    return parts


def stranger_request(draw):
    method, path = (
        draw.choice(("GET", "PUT", "POST", "BREW")),
        draw.choice(("/stream?line=0", "/missing", "/send", "/jobs/x/ack")),
    )
    text = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\n{wire.MAC_HEADER}: {'0' * 64}\r\n{wire.BODY_HEADER}: {'0' * 64}\r\n"
        f"Content-Length: {draw.choice((0, 5, -1, 10**30, '0x1', ''))}\r\n\r\nhello"
    )
    return mutated(draw, text.encode())


@pytest.mark.nightly
def test_a_head_outlives_8_000_frames_of_strangers(job):
    draw, began = random.Random(SEED), time.monotonic()
    for _ in range(4_000):
        send(job.order.port + 1, *stranger_frames(draw), resets=draw.random() < 0.1)
        send(job.order.port + 2, stranger_request(draw), resets=draw.random() < 0.1)
    assert time.monotonic() - began < 30
    check_that_it_still_works(job)


@pytest.mark.nightly
def test_a_head_and_its_rank_outlive_2_000_odd_messages_for_live_and_debugged_ranks(make_bare, tmp_path):
    job, draw = make_bare(wait_for_file, str(tmp_path / "go"), ranks=1).put_input(), random.Random(SEED)
    head = job.start(0)
    job.until_running()
    tells = (
        {"Typed": {"prompt": "p", "text": "n"}},
        {"Give": {"number": 1, "name": "n", "ranks": [0], "attempt": 0, "expression": "1"}},
        {"Interrupt": {"number": 1, "attempt": 0}},
        {"Restart": {"attempt": 7}},
    )
    for _ in range(2_000):
        ((name, fields),) = draw.choice(tells).items()
        told = {name: odd(draw, fields)} if draw.random() < 0.7 else odd(draw, {name: fields})
        rank = draw.choice(["0", "-1", "x", "9" * 30])
        with contextlib.suppress(OSError):
            assert head.ask("POST", f"/send?rank={rank}", json.dumps(told).encode())[0] in {200, 400}
    (tmp_path / "go").touch()
    assert job.end() == [0], job.text()


def test_a_local_agent_and_its_job_outlive_2_000_odd_messages_at_its_socket(tmp_path):
    go, draw = tmp_path / "go", random.Random(SEED)
    running = kd.launch(reports_and_waits, str(tmp_path), number_of_processes=1, on="local")
    address = records.read(running.name).agent_socket
    while not running.metrics:
        time.sleep(0.1)
    orders = [
        {"op": "take", "order": {"job": "x", "folder": str(tmp_path / "none"), "port": 1}},
        {"op": "cancel", "job": "x", "grace_s": 1.0, "save": True},
        {"op": "send", "job": running.name, "rank": 0, "message": {"Typed": {"prompt": "p", "text": "n"}}},
    ]
    for _ in range(2_000):
        line = json.dumps(odd(draw, draw.choice(orders))).encode() + b"\n"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(wire.socket_address(address))
            peer.sendall(mutated(draw, line) if draw.random() < 0.5 else line)
    assert not running.done(), running.status
    go.touch()
    running.result(60)


@pytest.mark.nightly
def test_a_relay_outlives_1_000_answers_of_others_at_the_heads_address(monkeypatch):
    draw, answers = random.Random(SEED), []

    async def answer(reader, writer):
        with contextlib.suppress(OSError):
            writer.write(answers[-1])
            await writer.drain()
            writer.close()

    class Place:
        pod, listen = 1, "127.0.0.1"

    class Pod:
        key, place, store = b"k" * 32, Place, None

    async def scene():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        played = relay_module.Relay(Pod)
        for _ in range(1_000):
            said = frame(odd(draw, {"op": "challenge", "nonce": "n", "mac": "0" * 64}))
            answers.append(mutated(draw, said) if draw.random() < 0.5 else said)
            channel = await Channel.connect(*server.sockets[0].getsockname())
            assert (await asyncio.wait_for(played._prove(channel), 10)).get("op") != RelayOp.WELCOME
            channel.close()
        server.close()

    asyncio.run(scene())


@pytest.mark.nightly
def test_a_notebooks_copy_outlives_9_000_blocks_of_others_in_a_pods_log(tmp_path):
    draw, files = random.Random(SEED), JobFiles(tmp_path)
    copy = HeadCopy(files, Life(), lambda: None, lambda: None)
    state = {
        "event": "state",
        "state": "running",
        "attempt": 0,
        "time": 1.0,
        "rank": None,
        "cause": None,
        "next_line": 3,
    }
    for number in range(3_000):
        data = b"".join((
            wire.encode_lines(number, 1, 0, 0, wire.body_of(Stream.STDOUT, [b"a", b"b"]), 2),
            wire.encode_event(number, odd(draw, {**state, "state": draw.choice(("running", "failed", "x"))})),
            wire.encode_progress(odd(draw, {"event": "progress", "rank": 0, "attempt": 0})),
        ))  # fmt: skip
        reader = BlockReader()
        for step in (mutated(draw, data), b"\n"):
            with contextlib.suppress(GapError):
                copy.take(reader.feed(step), missing="a test left them out")
        with contextlib.suppress(GapError):
            copy.take(reader.finish(), missing="a test left them out")
        Verdict.parse(mutated(draw, json.dumps(odd(draw, state)).encode()))
    copy.close()
    assert files.events.stat().st_size < 64 << 20
