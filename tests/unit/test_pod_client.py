"""The notebook's requests to a pod's agent, over real sockets to the real server: what arrives, also over bad lines."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading

import pytest

from kale_dist import contract
from kale_dist.backends.pod_client import PodClient
from kale_dist.blobs import FolderStore
from kale_dist.contract import JobFiles, Stream
from kale_dist.errors import BackendError, StoreError
from kale_dist.runtime.pod_server import PodServer

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
        self.told.append(digest)

    def outcome_arrived(self, name):
        self.told.append(name)


class Cut:
    """A connection that breaks after so many bytes in either direction."""

    def __init__(self, connection, after):
        self.connection = connection
        self.after = after
        self.count = 0

    def sendall(self, data, flags=0):
        self.connection.sendall(memoryview(data)[: max(0, self.after - self.count)])
        self._carry(len(data))

    def makefile(self, mode="r"):
        return CutFile(self, self.connection.makefile(mode))

    def close(self):
        self.connection.close()

    def _carry(self, size):
        self.count += size
        if self.count > self.after:
            self.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("cut")


class CutFile:
    def __init__(self, cut, file):
        self.cut = cut
        self.file = file

    def readline(self, limit=-1):
        line = self.file.readline(limit)
        self.cut._carry(len(line))
        return line

    def read(self, size=-1):
        data = self.file.read(size)
        self.cut._carry(len(data))
        return data

    def readinto(self, buffer):
        count = self.file.readinto1(buffer)
        self.cut._carry(count)
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


class Pod:
    def __init__(self, tmp_path):
        self.files = JobFiles(tmp_path / "job")
        self.files.folder.mkdir()
        self.store = FolderStore(tmp_path / "pod-blobs")
        self.agent = Agent()
        self.server = PodServer("127.0.0.1", 0, key=KEY, pod=2, files=self.files, store=self.store, handler=self.agent)
        self.cuts = []
        self.connections = 0

    def connect(self):
        self.connections += 1
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        return Cut(connection, self.cuts.pop(0)) if self.cuts else connection

    def client(self, key=KEY, **settings):
        return PodClient(self.connect, key, **settings)


@pytest.fixture
def pod(tmp_path):
    made = Pod(tmp_path)
    yield made
    made.server.close()


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "blobs")


def test_status_and_instructions(pod):
    client = pod.client()
    assert client.status()["state"] == "running"
    assert client.status()["pod"] == 2
    client.cancel(2.5)
    client.ack()
    assert pod.agent.told == [("cancel", 2.5), "ack"]


def test_log_and_events_go_on_where_they_are_asked_to(pod):
    texts = [b"%d" % number for number in range(10)] + [b"x" * 100_000, b"~0 0 0 0 o x", b"\xff\x00"]
    pod.files.log.write_bytes(contract.frame_lines(0, 1, 0, 3, Stream.STDOUT, texts))
    pod.files.events.write_bytes(b"".join(contract.encode_record({"event": "note", "text": str(n)}) for n in range(5)))
    client = pod.client()
    assert [line.sequence for line in client.log(8)] == [8, 9, 10, 11, 12]
    assert [line.framed.split(b" ", 5)[5] for line in client.log(0)] == texts
    assert [(item.number, item.event["text"], item.trusted) for item in client.events(3)] == [
        (3, "3", True),
        (4, "4", True),
    ]
    assert (client.log(13), list(client.events(5))) == ((), [])
    # Signed by another pod than the one that is asked for.
    assert list(pod.client(pod=1).events(0)) == []


def test_a_long_log_comes_in_several_replies(pod):
    pod.files.log.write_bytes(contract.frame_lines(0, 1, 0, 0, Stream.STDOUT, [b"%0900d" % n for n in range(20_000)]))
    client, numbers, replies = pod.client(), [], 0
    while lines := client.log(len(numbers)):
        numbers += [line.sequence for line in lines]
        replies += 1
    assert numbers == list(range(20_000))
    assert replies > 1


# -- up ------------------------------------------------------------------------------------------------------------------


def test_blobs_arrive_and_what_is_there_is_not_sent_again(pod, store):
    digests = [store.put([os.urandom(size)]) for size in (0, 1, 5_000, 3 << 20)]
    told = []
    assert pod.client().upload(store, digests, lambda *done: told.append(done)) == 5_001 + (3 << 20)
    assert sorted(pod.agent.told) == sorted(digests)
    assert all(bytes(pod.store.open(digest)) == bytes(store.open(digest)) for digest in digests)
    assert told[-1] == (5_001 + (3 << 20),) * 2
    assert told == sorted(told)
    assert pod.connections == 1
    pod.client().upload(store, digests)
    assert len(pod.agent.told) == 4


@pytest.mark.parametrize("after", [100, 1_000, 70_000, 5 << 20, (8 << 20) + 600])
def test_an_upload_that_is_cut_is_taken_up_again(pod, store, after):
    digests = [store.put([os.urandom(8 << 20)]), store.put([b"small"])]
    pod.cuts = [after]
    pod.client().upload(store, digests)
    assert pod.connections == 2
    assert all(pod.store.exists(digest) for digest in digests)


def test_a_line_that_is_cut_ever_again_gets_there_as_long_as_it_brings_something(pod, store):
    digest = store.put([os.urandom(8 << 20)])
    pod.cuts = [1 << 20] * 20
    pod.client().upload(store, [digest])
    assert pod.store.exists(digest)


def test_a_line_that_brings_nothing_is_given_up(pod, store):
    digest = store.put([os.urandom(2 << 20)])
    pod.cuts = [10] * 3
    with pytest.raises(BackendError, match=rf"cut while sending blob {digest[:12]} .*2,097,152 bytes") as caught:
        pod.client().upload(store, [digest])
    assert caught.value.retryable
    assert pod.connections == 3


class Liar:
    """A store whose bytes are not what their names say."""

    def open(self, digest):
        return memoryview(bytearray(b"other" * 1000))


@pytest.mark.parametrize("digest", ["0" * 64])
def test_bytes_that_are_not_what_their_name_says_are_refused(pod, digest):
    with pytest.raises(StoreError, match=rf"{digest} did not arrive .*damaged"):
        pod.client().upload(Liar(), [digest])
    assert not pod.store.exists(digest)


def test_a_blob_that_is_not_there_is_said(pod, store):
    with pytest.raises(StoreError):
        pod.client().upload(store, ["0" * 64])


# -- down ----------------------------------------------------------------------------------------------------------------


def test_a_file_replaces_the_one_that_is_there(pod, tmp_path):
    data, target, told = os.urandom(3 << 20), tmp_path / "here", []
    pod.files.outcome(0, 1).write_bytes(data)
    target.write_bytes(b"old")
    pod.client().fetch_file("outcome-0-1", target, lambda *done: told.append(done))
    assert target.read_bytes() == data
    assert told[-1] == (len(data), len(data))
    pod.files.checkpoint.write_bytes(b"")
    pod.client().fetch_file("checkpoint", target)
    assert target.read_bytes() == b""
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["outcome-0-1", "checkpoint"])
@pytest.mark.parametrize("after", [10, 300, 2 << 20])
def test_a_download_that_is_cut_is_taken_up_again(pod, tmp_path, name, after):
    data = os.urandom(8 << 20)
    (pod.files.folder / name).write_bytes(data)
    pod.cuts = [after]
    pod.client().fetch_file(name, tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == data
    assert pod.connections == 2


def test_a_download_that_brings_nothing_leaves_the_old_file(pod, tmp_path):
    pod.files.outcome(0, 1).write_bytes(os.urandom(8 << 20))
    target = tmp_path / "here"
    target.write_bytes(b"old")
    pod.cuts = [50, 50, 50]
    with pytest.raises(BackendError, match="cut while fetching outcome-0-1") as caught:
        pod.client().fetch_file("outcome-0-1", target)
    assert caught.value.retryable
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "job"]


def test_a_checkpoint_that_changes_on_the_way_is_never_mixed(pod, tmp_path):
    old, new = b"o" * (8 << 20), b"n" * (8 << 20)
    pod.files.checkpoint.write_bytes(old)
    pod.cuts = [3 << 20]

    def replace(done, total):
        fresh = pod.files.folder / "fresh"
        fresh.write_bytes(new)
        fresh.replace(pod.files.checkpoint)

    pod.client().fetch_file("checkpoint", tmp_path / "here", replace)
    assert (tmp_path / "here").read_bytes() == new


@pytest.mark.parametrize("name", ["outcome-0-7", "checkpoint", "key", "../key"])
def test_a_file_that_is_not_there_is_said(pod, tmp_path, name):
    with pytest.raises(StoreError, match="The pod has no "):
        pod.client().fetch_file(name, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_full_disk_is_said(pod, tmp_path):
    pod.files.outcome(0, 1).write_bytes(os.urandom(3 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        with pytest.raises(StoreError, match=r"could not be written on the notebook's side: File too large"):
            pod.client().fetch_file("outcome-0-1", tmp_path / "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]


def test_two_hundred_megabytes_up_and_down_are_not_held_in_memory(pod, store, tmp_path):
    data = os.urandom(1 << 20) * 200
    digest = store.put([data])
    pod.files.outcome(0, 0).write_bytes(data)
    client = pod.client()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.fetch_file("outcome-0-0", tmp_path / "here")
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
    assert grown_mib < 50
    client.upload(store, [digest])
    assert pod.store.exists(digest)
    assert (tmp_path / "here").stat().st_size == len(data)


# -- who answers ---------------------------------------------------------------------------------------------------------


def ask_all(client, store, tmp_path):
    digest = store.put([b"x" * (2 << 20)])
    return [
        client.status, client.ack, lambda: client.cancel(1.0), lambda: client.log(0), lambda: client.events(0),
        lambda: client.upload(store, [digest]), lambda: client.fetch_file("checkpoint", tmp_path / "here"),
    ]  # fmt: skip


def test_a_wrong_key_is_said(pod, store, tmp_path):
    for ask in ask_all(pod.client(key=b"x" * 32), store, tmp_path):
        with pytest.raises(BackendError, match="it has another key"):
            ask()


def test_nobody_there_may_be_tried_again(store, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    client = PodClient(lambda: socket.create_connection(address), KEY)
    for ask in ask_all(client, store, tmp_path):
        with pytest.raises(BackendError, match="refused") as caught:
            ask()
        assert caught.value.retryable


def test_a_refusal_of_the_cluster_passes_through(store, tmp_path):
    def connect():
        raise BackendError("no port-forward for you")

    for ask in ask_all(PodClient(connect, KEY), store, tmp_path):
        with pytest.raises(BackendError, match="no port-forward for you"):
            ask()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 206 OK\r\nContent-Length: 2\r\nContent-Range: bytes 0-1/900\r\n\r\n{}",
    ],
)
def test_something_else_that_answers_is_said(answer, store, tmp_path):
    def serve(connection):
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    def connect():
        mine, theirs = socket.socketpair()
        mine.settimeout(60)
        threading.Thread(target=serve, args=(theirs,), daemon=True).start()
        return mine

    client = PodClient(connect, KEY)
    with pytest.raises(BackendError):
        client.status()
    digest = store.put([b"x" * (2 << 20)])
    with pytest.raises(BackendError):
        client.upload(store, [digest])
