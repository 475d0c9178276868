"""The byte server of a pod, asked over real sockets: who may, what comes, and what a cut connection leaves."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import threading

import pytest
from kale_dist.runtime.pod_server import PodServer

from kale_dist import contract, transport
from kale_dist.blobs import FolderStore, digest_of
from kale_dist.contract import JobFiles, Stream
from kale_dist.runtime import pod_server
from kale_dist.runtime.output import LogWriter
from kale_dist.transport import FrameReader

KEY = b"k" * 32


class Agent:
    """Writes down what the server tells it."""

    def __init__(self):
        self.told = []

    def status(self):
        return {"state": "running", "missing": ["d"], "verdict": None}

    def cancel(self, grace_s):
        self.told.append(("cancel", grace_s))

    def acknowledged(self):
        self.told.append("ack")

    def blob_arrived(self, digest):
        self.told.append(("blob", digest))

    def outcome_arrived(self, name):
        self.told.append(("outcome", name))


class Place:
    def __init__(self, tmp_path, host="127.0.0.1"):
        self.files = JobFiles(tmp_path / "job")
        self.files.folder.mkdir()
        self.store = FolderStore(tmp_path / "blobs")
        self.agent = Agent()
        self.server = PodServer(host, 0, key=KEY, pod=2, files=self.files, store=self.store, handler=self.agent)

    def ask(self, method, path, body=None, *, size=None, key=KEY, host="127.0.0.1", **headers):
        connection = http.client.HTTPConnection(host, self.server.port, timeout=60)
        digest = hashlib.sha256(body or b"").hexdigest() if method == "POST" else ""
        headers[transport.MAC_HEADER] = transport.sign_request(key, method, path, digest)
        if size is not None:
            headers[transport.SIZE_HEADER] = str(size)
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
        mac = transport.sign_request(KEY, "PUT", path)
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: x\r\n{transport.MAC_HEADER}: {mac}\r\n"
            f"{transport.SIZE_HEADER}: {size}\r\nContent-Length: {size}\r\n\r\n"
        )
        connection.sendall(head.encode() + half)
        return connection

    def received(self, digest):
        return json.loads(self.ask("GET", f"/blobs/{digest}/size")[1])["received"]


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.server.close()


# -- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/status"), ("GET", "/nothing"), ("PUT", "/blobs/00?offset=0"), ("POST", "/cancel"), ("POST", "/ack")],
)
def test_a_wrong_key_is_told_nothing(place, method, path):
    assert place.ask(method, path, b'{"grace_s": 0}' if method != "GET" else None, key=b"x" * 32) == (403, b"")
    assert place.agent.told == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /status HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\nX-Kale-Dist-Mac: \xff\r\n\r\n",
        b"BREW /status HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /ack HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /status HTTP/7\r\n\r\n",
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
    assert place.ask("GET", "/status")[0] == 200


def test_a_body_that_was_not_signed_is_refused(place):
    mac = transport.sign_request(KEY, "POST", "/cancel", hashlib.sha256(b'{"grace_s": 30}').hexdigest())
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port)
    connection.request("POST", "/cancel", b'{"grace_s": 0}', {transport.MAC_HEADER: mac})
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
        ("GET", "/log?from=x", None, 400),
        ("PUT", "/files/checkpoint?offset=0", b"x", 404),
        ("PUT", "/files/key?offset=0", b"x", 404),
        ("PUT", f"/blobs/{'0' * 64}?offset=-1", b"x", 400),
        ("PUT", f"/blobs/{'0' * 64}?offset=1", b"x", 400),
        ("POST", "/cancel", b"{}", 400),
        ("POST", "/cancel", b"no json", 400),
        ("POST", "/cancel", b'{"grace_s": NaN}', 400),
        ("POST", "/cancel", b'{"grace_s": -1}', 400),
        ("POST", "/status", b"", 404),
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
    headers = {} if size is None else {transport.SIZE_HEADER: size}
    assert place.ask("PUT", f"/blobs/{'0' * 64}?offset=0", b"x", **headers)[0] == 400


# -- what comes ------------------------------------------------------------------------------------------------------


def test_status_tells_what_lies_in_the_pod(place):
    place.files.outcome(1, 12).write_bytes(b"12345")
    (place.files.folder / ".outcome-1-13.part").write_bytes(b"x")
    log = LogWriter(place.files.log, 0, lambda: None)
    log.lines(0, Stream.STDOUT, [b"a", b"b"])
    log.close()
    place.files.events.write_bytes(contract.encode_record({"event": "note"}) * 3)
    status = {
        "pod": 2,
        "state": "running",
        "missing": ["d"],
        "outcomes": {"1-12": 5},
        "checkpoint": None,
        "next_line": 2,
        "next_event": 3,
        "verdict": None,
    }
    assert json.loads(place.ask("GET", "/status")[1]) == status
    place.files.checkpoint.write_bytes(b"123")
    assert json.loads(place.ask("GET", "/status")[1])["checkpoint"] == 3


def test_the_notebook_can_acknowledge_and_cancel(place):
    assert place.ask("POST", "/ack", b"")[0] == 200
    assert place.ask("POST", "/cancel", b'{"grace_s": 2.5}')[0] == 200
    assert place.agent.told == ["ack", ("cancel", 2.5)]


def test_a_log_comes_in_replies_of_bounded_size(place):
    log = LogWriter(place.files.log, 0, lambda: None)
    for _ in range(20):
        log.lines(1, Stream.STDOUT, [b"x" * 1_000_000])
    log.close()
    sequences = []
    while reply := place.ask("GET", f"/log?from={len(sequences)}")[1]:
        assert len(reply) < transport.MAX_REPLY_BYTES + (2 << 20)
        sequences += [contract.parse_line(line).sequence for line in reply.splitlines()]
    assert sequences == list(range(20))


def test_events_come_signed_from_any_number_on(place):
    events = [{"event": "note", "text": str(number) * 20_000} for number in range(5)]
    place.files.events.write_bytes(b"".join(map(contract.encode_record, events)) + b'{"torn')
    reply = place.ask("GET", "/events?from=2")[1]
    reader = FrameReader(KEY, 2)
    items = [item for line in reply.splitlines() for item in reader.feed(b"!" + line)]
    assert [(item.number, item.event, item.trusted) for item in items] == [
        (number, events[number], True) for number in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("wanted", "status", "got"),
    [(None, 200, b"0123456789"), ("bytes=0-", 206, b"0123456789"), ("bytes=7-", 206, b"789"), ("bytes=10-", 416, b"")],
)
@pytest.mark.parametrize("name", ["outcome-0-3", "checkpoint", "blob"])
def test_a_download_goes_on_where_it_was_cut(place, name, wanted, status, got):
    if name == "blob":
        path = f"/blobs/{place.store.put([b'0123456789'])}"
    else:
        (place.files.folder / name).write_bytes(b"0123456789")
        path = f"/files/{name}"
    assert place.ask("GET", path, **({"Range": wanted} if wanted else {})) == (status, got)


def test_an_empty_file_is_a_file(place):
    place.files.checkpoint.touch()
    assert place.ask("GET", "/files/checkpoint") == (200, b"")


def test_requests_share_a_connection(place):
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port)
    headers = {transport.MAC_HEADER: transport.sign_request(KEY, "GET", "/status")}
    for _ in range(3):
        connection.request("GET", "/status", headers=headers)
        assert connection.getresponse().read().startswith(b"{")
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
    assert place.agent.told == [("blob", digest)]
    assert place.put(f"/blobs/{digest}?offset=0", content) == (200, {"received": len(content), "complete": True})
    assert place.agent.told == [("blob", digest)]


def test_a_wrong_digest_is_refused_and_the_blob_can_come_again(place):
    digest = digest_of([b"right"])
    status, answer = place.put(f"/blobs/{digest}?offset=0", b"wrong")
    assert status == 422
    assert digest in answer["error"]
    assert list(place.store.root.iterdir()) == []
    assert place.put(f"/blobs/{digest}?offset=0", b"right")[0] == 201


def test_a_piece_that_does_not_fit_is_told_where_to_go_on(place):
    content = os.urandom(20_000_000)
    digest = digest_of([content])
    assert place.put(f"/blobs/{digest}?offset=5", content[5:], len(content)) == (409, {"received": 0})
    place.put(f"/blobs/{digest}?offset=0", content[:1000], len(content))
    assert place.put(f"/blobs/{digest}?offset=0", content) == (409, {"received": 1000})
    assert place.put(f"/blobs/{digest}?offset=1000", content[1000:], len(content))[0] == 201


@pytest.mark.parametrize("hangs", [True, False])
def test_an_upload_that_was_cut_or_hangs_is_continued_by_another(place, hangs):
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


def test_whoever_was_cut_off_learns_where_to_go_on_for_good(place):
    content = os.urandom(300_000)
    digest = digest_of((content,))
    connection = place.send_half(f"/blobs/{digest}?offset=0", content[:100_000], len(content))
    while place.received(digest) < 100_000:
        pass
    status, answer = place.ask("GET", f"/blobs/{digest}/size?settled=1")
    assert (status, json.loads(answer)) == (200, {"received": 100_000, "complete": False})
    with contextlib.suppress(OSError):
        connection.sendall(content[100_000:200_000])
    assert place.received(digest) == 100_000
    place.put(f"/blobs/{digest}?offset=100000", content[100_000:], len(content))
    assert place.store.open(digest) == content
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
    assert place.agent.told == [("blob", digest)]


def test_another_agents_outcome_arrives(place):
    assert place.put("/files/outcome-0-7?offset=0", b"signed", 12)[0] == 200
    assert not place.files.outcome(0, 7).exists()
    assert place.put("/files/outcome-0-7?offset=6", b" bytes", 12)[0] == 201
    assert place.files.outcome(0, 7).read_bytes() == b"signed bytes"
    assert place.agent.told == [("outcome", "outcome-0-7")]


def test_a_full_disk_is_said_and_costs_only_the_part(place):
    blocked = place.store.root
    blocked.write_bytes(b"a file where the folder should be")
    content = os.urandom(2_000_000)
    digest = digest_of([content])
    status, answer = place.put(f"/blobs/{digest}?offset=0", content)
    assert status == 507
    assert "could not be written" in answer["error"]
    blocked.unlink()
    assert place.put(f"/blobs/{digest}?offset=0", content)[0] == 201


def test_a_silent_connection_is_closed(place, monkeypatch):
    monkeypatch.setattr(pod_server._Request, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=60) as connection:
        connection.sendall(b"GET /stat")
        assert connection.recv(100) == b""


def test_every_address_is_listened_on(tmp_path):
    place = Place(tmp_path, host="")
    assert place.ask("GET", "/status")[0] == 200
    if socket.has_dualstack_ipv6():
        assert place.ask("GET", "/status", host="::1")[0] == 200
    place.server.close()


def test_a_taken_port_is_an_error_and_a_closed_one_is_free(place, tmp_path):
    settings = {"key": KEY, "pod": 0, "files": place.files, "store": place.store, "handler": place.agent}
    with pytest.raises(OSError, match="in use"):
        PodServer("127.0.0.1", place.server.port, **settings)
    port = place.server.port
    place.server.close()
    again = PodServer("127.0.0.1", port, **settings)
    again.close()
