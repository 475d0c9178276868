"""Requests to the head: signed, repeated after a cut, refused with a reason."""

import hashlib
import http.server
import json
import random
import socket
import threading
import urllib.parse

import pytest

from kale_dist import wire
from kale_dist.errors import BackendError, StoreError
from kale_dist.places.following.head_client import HeadClient
from kale_dist.wire import MAC_HEADER, SIZE_HEADER
from kale_dist.wire.blobs import FolderStore

KEY = b"k" * 32


class Head(http.server.BaseHTTPRequestHandler):
    """Keeps blobs, and cuts connections where a test says so."""

    def do_GET(self):
        if not self.is_signed():
            return self.answer(403, b"")
        if self.path.endswith("/size"):
            digest = self.path.split("/")[2]
            there = self.server.blobs.get(digest, b"")
            return self.answer(
                200, json.dumps({"complete": digest in self.server.whole, "received": len(there)}).encode()
            )
        path, _, query = self.path.partition("?")
        data = self.server.files.get(path)
        if data is None:
            return self.answer(404, b"")
        asked = dict(urllib.parse.parse_qsl(query))
        version = str(hash(data))
        rest = data[int(asked.get("offset", 0)) if asked.get("version") == version else 0 :]
        self.server.sent.append(len(rest))
        self.send_response(200)
        self.send_header("ETag", version)
        self.send_header("Content-Length", str(len(rest)))
        self.send_header(SIZE_HEADER, str(len(data)))
        self.end_headers()
        if self.server.cuts:
            self.server.cuts -= 1
            rest, self.close_connection = rest[: self.server.most], True
        self.wfile.write(rest)
        return None

    def do_PUT(self):
        path, _, query = self.path.partition("?")
        digest, offset = path.split("/")[2], int(query.removeprefix("offset="))
        there = self.server.blobs.setdefault(digest, b"")
        if offset != len(there):
            return self.answer(409, b"another offset")
        left = int(self.headers["Content-Length"])
        if self.server.cuts:
            self.server.cuts -= 1
            self.server.blobs[digest] += self.rfile.read(left // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        self.server.blobs[digest] += self.rfile.read(left)
        if hashlib.sha256(self.server.blobs[digest]).hexdigest() != digest:
            return self.answer(422, b"")
        assert int(self.headers[SIZE_HEADER]) == len(self.server.blobs[digest])
        self.server.whole.add(digest)
        return self.answer(201, b"{}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, body))
        self.answer(200 if self.is_signed(body) else 403, b"{}")

    def is_signed(self, body=b""):
        digest = hashlib.sha256(body).hexdigest() if self.command == "POST" else ""
        return wire.check_request(KEY, self.command, self.path, digest, self.headers[MAC_HEADER])

    def answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def head():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Head)
    server.files, server.blobs, server.whole, server.posts, server.cuts = {}, {}, set(), [], 0
    server.most, server.sent = 1 << 20, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(head):
    return HeadClient(lambda: socket.create_connection(head.server_address), KEY)


def test_requests_are_signed(head, client):
    head.files["/missing"] = b'["d"]'
    assert client.missing() == ["d"]
    client.cancel(2.5)
    client.ack()
    assert head.posts == [("/cancel", b'{"grace_s": 2.5, "save": false}'), ("/ack", b"{}")]
    with pytest.raises(BackendError, match="the key of this job here is not the one"):
        HeadClient(lambda: socket.create_connection(head.server_address), b"x" * 32).missing()


def test_a_file_comes_whole_or_not_at_all(head, client, tmp_path):
    head.files["/files/outcome-0-0"] = bytes(3 << 20)
    head.cuts = 2
    assert client.fetch_file("outcome-0-0", tmp_path / "outcome-0-0")
    assert (tmp_path / "outcome-0-0").stat().st_size == 3 << 20
    head.cuts, head.most = 5, 0
    head.files["/files/checkpoint"] = b"12345678"
    with pytest.raises(BackendError, match="cut while fetching checkpoint") as caught:
        client.fetch_file("checkpoint", tmp_path / "checkpoint")
    assert caught.value.retryable
    assert not client.fetch_file("outcome-0-7", tmp_path / "outcome-0-7")
    assert [path.name for path in tmp_path.iterdir()] == ["outcome-0-0"]


def test_a_file_comes_also_where_each_connection_is_cut_after_a_while(head, client, tmp_path):
    head.files["/files/checkpoint"] = data = random.Random(1).randbytes(6 << 20)
    head.cuts = 1000
    assert client.fetch_file("checkpoint", tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").read_bytes() == data
    assert head.sent == [(6 - part) << 20 for part in range(6)]


def test_a_file_that_is_replaced_while_it_comes_is_one_of_both(head, client, tmp_path):
    head.files["/files/checkpoint"] = bytes(2 << 20)
    head.cuts = 1

    def replace(done, _total):
        if done == 1 << 20:
            head.files["/files/checkpoint"] = b"1" * (2 << 20)

    assert client.fetch_file("checkpoint", tmp_path / "checkpoint", replace)
    assert (tmp_path / "checkpoint").read_bytes() == b"1" * (2 << 20)


def test_a_blob_that_was_cut_is_resumed_where_it_broke(head, client, tmp_path):
    store = FolderStore(tmp_path)
    small, large = store.put([b"small"]), store.put([bytes(8 << 20)])
    head.cuts = 2
    told = []
    client.upload(store, [small, large, small], lambda done, total: told.append((done, total)))
    assert head.whole == {small, large}
    assert told[-1] == ((8 << 20) + 5, (8 << 20) + 5)
    head.blobs.clear()
    client.upload(store, [large])
    assert not head.blobs


def test_a_damaged_blob_is_refused(head, client, tmp_path):
    store = FolderStore(tmp_path)
    digest = store.put([b"small"])
    store.path(digest).chmod(0o600)
    store.path(digest).write_bytes(b"smell")
    with pytest.raises(StoreError, match="damaged"):
        client.upload(store, [digest])


def test_nobody_listens(tmp_path):
    def refuse():
        raise BackendError("no such pod", retryable=True)

    with pytest.raises(BackendError, match="no such pod"):
        HeadClient(refuse, KEY).missing()
