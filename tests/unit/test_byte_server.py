"""The byte server of a head, asked over real sockets: who may, what comes, and what a cut connection leaves."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from kale_dist import wire
from kale_dist.errors import StoreError
from kale_dist.wire import (
    BlockReader,
    EventBlock,
    JobFiles,
    LineBlock,
    ProgressBlock,
    StateName,
    Stream,
    body_of,
    messages,
)
from kale_dist.wire.blobs import FolderStore, digest_of
from kale_dist.wire.events import JobState, Note
from kale_dist.wire.messages import Typed
from kale_dist.worker.agent.writer import JobWriter
from kale_dist.worker.pod import byte_server, transfers
from kale_dist.worker.pod.byte_server import BlobServer, ByteServer, ServedJob

KEY = b"k" * 32


class Agent:
    """Writes down what the server tells it."""

    def __init__(self):
        self.told = []
        self.writer = None

    def missing(self):
        return ["d"]

    def cancel(self, grace_s, *, save):
        self.told.append(("cancel", grace_s))

    def send(self, rank, message):
        self.told.append((rank, message))

    def acknowledge(self):
        self.told.append("ack")

    def offer(self, body):
        raise FileNotFoundError


class Place:
    def __init__(self, tmp_path, host="127.0.0.1", limit_bytes=1 << 30):
        self.files = JobFiles(tmp_path / "job")
        self.files.folder.mkdir()
        self.store = FolderStore(tmp_path / "blobs")
        self.agent = Agent()
        self.loop = asyncio.new_event_loop()
        self.agent.writer = JobWriter(self.files, self.loop, self.notify, limit_bytes=limit_bytes)
        self.job = ServedJob(self.agent, key=KEY, files=self.files, store=self.store, writer=self.agent.writer)
        self.server = ByteServer(host, 0, self.job)

    def notify(self):
        self.job.notify()

    def write(self, first, last):
        for number in range(first, last):
            self.agent.writer.lines(number % 3, body_of(Stream.STDOUT, [b"line %d" % number]), 1)

    def run(self, seconds=0.1):
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def close_writer(self):
        done = self.loop.create_future()
        self.agent.writer.close(lambda: (self.job.notify(), done.set_result(None)))
        self.loop.run_until_complete(done)

    def close(self):
        if not self.agent.writer.written.is_last:
            self.close_writer()
        self.loop.close()
        self.server.close()

    def stream(self, line=0, event=0):
        """The blocks of a stream, read to its end in a thread."""
        found = []

        def read():
            status, data = self.ask("GET", f"/stream?line={line}&event={event}")
            assert status == 200
            found.extend(BlockReader().feed(data))

        thread = threading.Thread(target=read)
        thread.start()
        return thread, found

    def ask(self, method, path, body=None, *, size=None, key=KEY, host="127.0.0.1", **headers):
        connection = http.client.HTTPConnection(host, self.server.port, timeout=60)
        digest = hashlib.sha256(body or b"").hexdigest() if method == "POST" else ""
        headers |= {wire.MAC_HEADER: wire.sign_request(key, method, path, digest), wire.BODY_HEADER: digest}
        if size is not None:
            headers[wire.SIZE_HEADER] = str(size)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def put(self, path, body, size=None, **settings):
        status, answer = self.ask("PUT", path, body, size=len(body) if size is None else size, **settings)
        return status, json.loads(answer)

    def send_half(self, path, half, size):
        """Start a PUT that brings only its first bytes; gives the open connection."""
        connection = socket.create_connection(("127.0.0.1", self.server.port))
        mac = wire.sign_request(KEY, "PUT", path)
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: x\r\n{wire.MAC_HEADER}: {mac}\r\n"
            f"{wire.SIZE_HEADER}: {size}\r\nContent-Length: {size}\r\n\r\n"
        )
        connection.sendall(head.encode() + half)
        return connection

    def received(self, digest):
        return json.loads(self.ask("GET", f"/blobs/{digest}/size")[1])["received"]


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.close()


# -- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/missing"),
        ("GET", "/nothing"),
        ("PUT", "/blobs/00?offset=0"),
        ("POST", "/cancel"),
        ("POST", "/send"),
        ("POST", "/ack"),
    ],
)
def test_a_wrong_key_is_told_nothing(place, method, path):
    assert place.ask(method, path, b'{"grace_s": 0}' if method != "GET" else None, key=b"x" * 32) == (403, b"")
    assert place.agent.told == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /missing HTTP/1.1\r\n\r\n",
        b"GET /missing HTTP/1.1\r\nX-Kale-Dist-Mac: \xff\r\n\r\n",
        b"BREW /missing HTTP/1.1\r\n\r\n",
        b"GET /missing HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /ack HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /missing HTTP/7\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
)
def test_what_is_no_signed_request_is_refused_without_a_word(place, request_bytes):
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=60) as connection:
        connection.sendall(request_bytes)
        try:
            answer = connection.recv(4096)
        except ConnectionResetError:
            answer = b""
    assert answer in {b"", b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"}
    assert place.ask("GET", "/missing")[0] == 200


def test_a_body_that_was_not_signed_is_refused(place):
    digest = hashlib.sha256(b'{"grace_s": 30}').hexdigest()
    mac = wire.sign_request(KEY, "POST", "/cancel", digest)
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port)
    connection.request("POST", "/cancel", b'{"grace_s": 0}', {wire.MAC_HEADER: mac, wire.BODY_HEADER: digest})
    assert connection.getresponse().status == 403
    connection.close()
    assert place.agent.told == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/files/key", None, 404),
        ("GET", "/files/../key", None, 404),
        ("GET", "/files/outcome-0-0", None, 404),
        ("GET", "/files/outcome-0-0%2f..%2fkey", None, 404),
        ("GET", "/blobs/../../etc/passwd", None, 404),
        ("GET", "/blobs/passwd", None, 400),
        ("GET", f"/blobs/{'0' * 64}", None, 404),
        ("GET", "/stream?line=x", None, 400),
        ("PUT", "/files/checkpoint?offset=0", b"x", 404),
        ("PUT", "/files/outcome-0-0?offset=0", b"x", 404),
        ("PUT", "/files/key?offset=0", b"x", 404),
        ("PUT", f"/blobs/{'0' * 64}?offset=-1", b"x", 400),
        ("PUT", f"/blobs/{'0' * 64}?offset=1", b"x", 400),
        ("POST", "/cancel", b"{}", 400),
        ("POST", "/cancel", b"no json", 400),
        ("POST", "/send", b'{"Visit": {}}', 400),
        ("POST", "/send?rank=x", b'{"Visit": {}}', 400),
        ("POST", "/send?rank=1", b'{"Visit": {}, "Go": {}}', 400),
        ("POST", "/send?rank=1", b'{"ToLive": {}}', 400),
        ("POST", "/send?rank=1", b'{"Visit": []}', 400),
        ("POST", "/send?rank=1", b'{"Restart": {"attempt": "0"}}', 400),
        ("POST", "/send?rank=1", b'{"Load": {"snapshot": "x", "ranks": 5}}', 400),
        ("POST", "/cancel", b'{"grace_s": NaN}', 400),
        ("POST", "/cancel", b'{"grace_s": -1}', 400),
        ("POST", "/missing", b"", 404),
    ],
)
def test_signed_nonsense_is_answered_and_does_nothing(place, method, path, body, status):
    place.files.key.write_bytes(b"secret")
    found, answer = place.ask(method, path, body, size=1 if method == "PUT" else None)
    assert (found, list(json.loads(answer))) == (status, ["error"])
    assert place.agent.told == []
    assert place.files.key.read_bytes() == b"secret"


@pytest.mark.parametrize("size", ["", "x", "-1", None])
def test_a_put_has_to_say_how_large_the_whole_is(place, size):
    headers = {} if size is None else {wire.SIZE_HEADER: size}
    assert place.ask("PUT", f"/blobs/{'0' * 64}?offset=0", b"x", **headers)[0] == 400


# -- what comes ------------------------------------------------------------------------------------------------------


def test_the_notebook_learns_which_blobs_are_missing(place):
    assert json.loads(place.ask("GET", "/missing")[1]) == ["d"]


def test_the_notebook_can_acknowledge_and_cancel(place):
    assert place.ask("POST", "/ack", b"")[0] == 200
    assert place.ask("POST", "/cancel", b'{"grace_s": 2.5}')[0] == 200
    assert place.agent.told == ["ack", ("cancel", 2.5)]


def test_the_notebook_has_messages_for_a_ranks_debugger_passed_on(place):
    assert place.ask("POST", "/send?rank=3", messages.encode(Typed(prompt="a", text="n")))[0] == 200
    assert place.agent.told == [(3, Typed(prompt="a", text="n"))]


def numbers(blocks, since=0):
    found = [line.sequence for block in blocks if isinstance(block, LineBlock) for line in block.lines()]
    # A stream begins with the whole record of its first line.
    return [number for number in found if number >= since]


@pytest.mark.parametrize("line", [0, 1, 150, 299, 300, 450, 1000])
def test_a_stream_begins_where_the_reader_left_off_and_ends_with_the_job(place, line):
    place.write(0, 150)
    place.run()
    place.write(150, 300)
    place.agent.writer.event(Note(text="first"))
    place.run()
    thread, found = place.stream(line, event=1)
    place.run(0.3)
    place.write(300, 450)
    place.agent.writer.record({"event": "progress", "rank": 0, "step": 1}, None)
    place.agent.writer.event(JobState(state=StateName.SUCCEEDED))
    place.close_writer()
    thread.join(20)
    assert numbers(found)[0] == min(line, 299)
    assert numbers(found, line) == list(range(line, 450))
    assert [(block.number, block.event["event"]) for block in found if isinstance(block, EventBlock)] == [(1, "state")]
    assert [block.event["step"] for block in found if isinstance(block, ProgressBlock)] == [1]
    assert found[-1].event.get("next_line") == 450 or isinstance(found[-1], ProgressBlock)


@pytest.mark.parametrize("limit_bytes", [20_000, 2_000_000])
def test_a_stream_reads_across_the_files_of_a_long_log(tmp_path, limit_bytes):
    place = Place(tmp_path, limit_bytes=limit_bytes)
    for start in range(0, 3000, 100):
        place.write(start, start + 100)
        place.run(0.02)
    kept = place.agent.writer.written.log
    early, late = place.stream(0), place.stream(2990)
    for start in range(3000, 4000, 100):
        place.write(start, start + 100)
        place.run(0.05)
    place.close()
    for thread, _ in (early, late):
        thread.join(20)
    first = numbers(early[1])[0]
    # Older files may go before the stream has begun.
    assert first == 0 if limit_bytes == 2_000_000 else first >= kept[0].first > 0
    assert numbers(early[1]) == list(range(first, 4000))
    assert numbers(late[1], 2990) == list(range(2990, 4000))


def test_two_readers_read_the_same(place):
    readers = [place.stream() for _ in range(2)]
    for start in range(0, 2000, 100):
        place.write(start, start + 100)
        place.run(0.02)
    place.close_writer()
    for thread, found in readers:
        thread.join(20)
        assert numbers(found) == list(range(2000))


def test_a_reader_that_has_left_costs_nothing(place, monkeypatch):
    monkeypatch.setattr(byte_server, "SILENCE_LIMIT_S", 0.4)
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", place.server.port)) as connection:
        mac = wire.sign_request(KEY, "GET", "/stream")
        connection.sendall(f"GET /stream HTTP/1.1\r\nHost: x\r\n{wire.MAC_HEADER}: {mac}\r\n\r\n".encode())
        assert connection.recv(100)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before


@pytest.mark.parametrize("name", ["outcome-0-3", "checkpoint", "blob"])
def test_a_download_brings_the_bytes(place, name):
    data = os.urandom(3_000_000)
    if name == "blob":
        path = f"/blobs/{place.store.put([data])}"
    else:
        (place.files.folder / name).write_bytes(data)
        path = f"/files/{name}"
    assert place.ask("GET", path) == (200, data)


def test_an_empty_file_is_a_file(place):
    place.files.checkpoint.touch()
    assert place.ask("GET", "/files/checkpoint") == (200, b"")


def test_requests_share_a_connection(place):
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port)
    headers = {wire.MAC_HEADER: wire.sign_request(KEY, "GET", "/missing")}
    for _ in range(3):
        connection.request("GET", "/missing", headers=headers)
        assert json.loads(connection.getresponse().read()) == ["d"]
        used = connection.sock
    assert connection.sock is used
    connection.close()


# -- what is brought -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(3_000_000)])
def test_a_blob_arrives_in_one_piece_or_in_many(place, content):
    digest = digest_of([content])
    step = max(1, len(content) // 3)
    for start in range(0, max(1, len(content)), step):
        piece = content[start : start + step]
        status, answer = place.put(f"/blobs/{digest}?offset={start}", piece, len(content))
        complete = start + len(piece) == len(content)
        assert (status, answer) == (201 if complete else 200, {"received": start + len(piece), "complete": complete})
    assert bytes(place.store.open(digest)) == content
    assert place.store.path(digest).stat().st_mode & 0o777 == 0o444
    assert place.put(f"/blobs/{digest}?offset=0", content) == (200, {"received": len(content), "complete": True})


def test_a_pod_whose_connection_is_cut_fetches_the_rest(place, tmp_path, monkeypatch):
    content = os.urandom(3_000_000)
    digest, sent = place.store.put([content]), []
    plain = socket.socket.sendfile

    def send(connection, file, offset, count):
        sent.append(offset)
        if len(sent) < 3:
            plain(connection, file, offset, 1_000_000)
            raise ConnectionResetError
        plain(connection, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", send)
    theirs = FolderStore(tmp_path / "theirs")
    order = SimpleNamespace(head="127.0.0.1", port=place.server.port - 2, prefix="")
    server = BlobServer(KEY, theirs)
    monkeypatch.setattr(server.is_over, "wait", lambda _: None)
    transfers.fetch(order, KEY, theirs, digest, server)
    assert bytes(theirs.open(digest)) == content
    assert sent == [0, 1_000_000, 2_000_000]
    assert theirs.list() == [digest]
    assert len(list(theirs.root.iterdir())) == 1


# -- from one relay to the next ---------------------------------------------------------------------------------------


class Sent:
    """What the head has sent: from which byte on, and how many."""

    def __init__(self, monkeypatch):
        self.parts = []
        plain = socket.socket.sendfile

        def send(connection, file, offset, count):
            self.parts.append((offset, count))
            plain(connection, file, offset, count)

        monkeypatch.setattr(socket.socket, "sendfile", send)


def dying_relay(answer):
    """The address of a relay that sends this, and is gone."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        listener.close()
        connection.recv(4096)
        connection.sendall(answer)
        connection.close()

    threading.Thread(target=serve).start()
    return listener.getsockname()


def fetched(place, folder, digest, source):
    """What a relay gets that is to fetch a blob from another one, and whether it still would."""
    order = SimpleNamespace(head="127.0.0.1", port=place.server.port - 2, prefix="")
    server = BlobServer(KEY, FolderStore(folder))
    server.source = source
    transfers.fetch(order, KEY, server.store, digest, server)
    assert server.coming == {}
    return bytes(server.store.open(digest)), server.source


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda data: b"", id="says nothing"),
        pytest.param(lambda data: b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", id="has it not"),
        pytest.param(lambda data: with_head(data[:1_000_000], len(data), len(data)), id="dies within its answer"),
        pytest.param(lambda data: with_head(data[:1_000_000], 1_000_000, len(data)), id="dies when it has sent all that it has"),
    ],
)  # fmt: skip
def test_the_head_sends_only_what_the_relay_that_is_gone_has_not_sent(place, tmp_path, monkeypatch, answer):
    data = os.urandom(3_000_000)
    digest, sent = place.store.put([data]), Sent(monkeypatch)
    got, source = fetched(place, tmp_path / "theirs", digest, dying_relay(answer(data)))
    assert (got, source) == (data, None)
    there = 1_000_000 if len(answer(data)) > 1_000_000 else 0
    assert sent.parts == [(there, 3_000_000 - there)]


def with_head(data, length, size):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s: %d\r\n\r\n" % (length, wire.SIZE_HEADER.encode(), size) + data


def test_a_relay_whose_job_is_over_fetches_no_longer_and_keeps_no_part_of_a_blob(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_server, "_COMING_WAIT_S", 0.1)
    near, far = BlobServer(KEY, FolderStore(tmp_path / "near")), BlobServer(KEY, FolderStore(tmp_path / "far"))
    near.listen("127.0.0.1")
    digest = digest_of([b"never"])
    near.coming, far.source = {digest: byte_server.NOT_YET}, ("127.0.0.1", near.port)
    threading.Timer(0.2, far.is_over.set).start()
    with pytest.raises(StoreError, match="no longer needed"):
        transfers.fetch(SimpleNamespace(prefix=""), KEY, far.store, digest, far)
    assert list(far.store.root.iterdir()) == []


def test_wrong_bytes_of_a_relay_are_refused_and_come_from_the_head(place, tmp_path, monkeypatch):
    data = os.urandom(3_000_000)
    digest, sent = place.store.put([data]), Sent(monkeypatch)
    wrong = with_head(bytes(len(data)), len(data), len(data))
    assert fetched(place, tmp_path / "theirs", digest, dying_relay(wrong)) == (data, None)
    assert sent.parts == [(0, 3_000_000)]


def test_a_relay_that_cannot_be_reached_is_left_out(place, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = listener.getsockname()
    digest = place.store.put([b"small"])
    assert fetched(place, tmp_path / "theirs", digest, gone) == (b"small", None)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_a_relay_passes_on_what_it_has_of_a_blob_that_is_coming(place, tmp_path, monkeypatch, size):
    monkeypatch.setattr(byte_server, "_COMING_WAIT_S", 0.1)
    data = os.urandom(size)
    digest, near = digest_of([data]), BlobServer(KEY, FolderStore(tmp_path / "near"))
    near.listen("127.0.0.1")
    near.store.root.mkdir()
    near.coming = {digest: byte_server.NOT_YET}
    got = []
    far = threading.Thread(
        target=lambda: got.append(fetched(place, tmp_path / "far", digest, ("127.0.0.1", near.port)))
    )
    far.start()
    part = near.store.root / "part"
    with part.open("wb", buffering=0) as file:
        for start in range(0, size, 500_000):
            file.write(data[start : start + 500_000])
            near.coming[digest] = part, size
            time.sleep(0.05)
    assert not got or size
    part.rename(near.store.path(digest))
    del near.coming[digest]
    far.join(20)
    # The head does not have it at all.
    assert got == [(data, ("127.0.0.1", near.port))]


def test_a_relay_serves_blobs_to_those_with_the_key_and_nothing_else(place, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_server, "_COMING_WAIT_S", 0.0)
    digest, near = digest_of([b"x"]), BlobServer(KEY, FolderStore(tmp_path / "near"))
    near.listen("127.0.0.1")
    place.server.close()
    place.server.port, port = near.port, place.server.port
    near.store.put([b"x"])
    assert place.ask("GET", f"/blobs/{digest}") == (200, b"x")
    assert place.ask("GET", f"/blobs/{digest}", key=b"n" * 32) == (403, b"")
    assert place.ask("GET", "/blobs/..%2fkey")[0] == 400
    for method, path in (
        ("GET", "/stream"),
        ("PUT", f"/blobs/{digest}"),
        ("POST", "/cancel"),
        ("GET", "/files/checkpoint"),
        ("GET", "/"),
    ):
        assert place.ask(method, path, b"" if method != "GET" else None)[0] == 404
    assert place.ask("GET", f"/blobs/{digest_of([b'other'])}")[0] == 404
    place.server.port = port


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_wrong_digest_is_refused_and_the_blob_can_come_again(place):
    digest = digest_of([b"right"])
    status, answer = place.put(f"/blobs/{digest}?offset=0", b"wrong")
    assert status == 422
    assert digest in answer["error"]
    assert not place.store.exists(digest)
    assert place.put(f"/blobs/{digest}?offset=0", b"right")[0] == 201


def test_a_piece_that_does_not_fit_is_told_where_to_go_on(place):
    content = os.urandom(20_000_000)
    digest = digest_of([content])
    assert place.put(f"/blobs/{digest}?offset=5", content[5:], len(content)) == (409, {"received": 0})
    place.put(f"/blobs/{digest}?offset=0", content[:1000], len(content))
    assert place.put(f"/blobs/{digest}?offset=0", content) == (409, {"received": 1000})
    assert place.put(f"/blobs/{digest}?offset=1000", content[1000:], len(content))[0] == 201


@pytest.mark.parametrize("hangs", [True, False])
def test_an_upload_that_was_cut_or_hangs_is_continued_by_another(place, hangs, monkeypatch):
    monkeypatch.setattr(byte_server._Request, "timeout", 2.0)
    content = os.urandom(500_000)
    digest = digest_of([content])
    connection = place.send_half(f"/blobs/{digest}?offset=0", content[:200_000], len(content))
    while place.received(digest) < 200_000:
        pass
    if not hangs:
        connection.close()
    assert place.put(f"/blobs/{digest}?offset=200000", content[200_000:], len(content))[0] == 201
    assert bytes(place.store.open(digest)) == content
    connection.close()


def test_many_uploads_of_one_blob_give_one_blob(place):
    content = os.urandom(3_000_000)
    digest = digest_of([content])

    def upload():
        while True:
            try:
                received = place.received(digest)
                if received >= len(content):
                    return
                place.put(f"/blobs/{digest}?offset={received}", content[received:], len(content))
            except (OSError, http.client.HTTPException):
                continue

    threads = [threading.Thread(target=upload) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bytes(place.store.open(digest)) == content


def test_a_full_disk_is_said_and_costs_only_the_part(place):
    blocked = place.store.root
    blocked.write_bytes(b"a file where the folder should be")
    content = os.urandom(2_000_000)
    digest = digest_of([content])
    status, answer = place.put(f"/blobs/{digest}?offset=0", content)
    assert status == 507
    assert "cannot keep a part of the snapshot" in answer["error"]
    blocked.unlink()
    assert place.put(f"/blobs/{digest}?offset=0", content)[0] == 201


def test_a_silent_connection_is_closed(place, monkeypatch):
    monkeypatch.setattr(byte_server._Request, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=60) as connection:
        connection.sendall(b"GET /stat")
        assert connection.recv(100) == b""


def test_every_address_is_listened_on(tmp_path):
    place = Place(tmp_path, host="")
    assert place.ask("GET", "/missing")[0] == 200
    if socket.has_dualstack_ipv6():
        assert place.ask("GET", "/missing", host="::1")[0] == 200
    place.close()


def test_a_taken_port_is_an_error_and_a_closed_one_is_free(place, tmp_path):
    with pytest.raises(OSError, match="in use"):
        ByteServer("127.0.0.1", place.server.port, place.job)
    port = place.server.port
    place.server.close()
    again = ByteServer("127.0.0.1", port, place.job)
    again.close()
