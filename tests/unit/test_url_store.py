"""A store behind a URL: the same for a folder, memory and a web server, and whatever is wrong is said in words."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
import uuid

import pytest

from kale_dist.errors import StoreError
from kale_dist.wire.blobs import FolderStore, digest_of
from kale_dist.wire.url_store import UrlStore

pytestmark = pytest.mark.newest

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["file", "memory", "path"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/folder"
    return f"file://{tmp_path}/store" if request.param == "file" else f"{tmp_path}/store/"


@pytest.mark.parametrize(
    "pieces", [[], [b""], [b"one"], [b"one", bytearray(b"two"), memoryview(b"three")], [b"x" * (9 << 20)]]
)
def test_a_blob_comes_back_as_it_went(url, pieces):
    store = UrlStore(url)
    digest = store.put(pieces)
    assert digest == digest_of(pieces)
    assert store.put(pieces) == digest
    assert store.list() == [digest]
    found = UrlStore(url).open(digest)
    assert bytes(found) == b"".join(pieces)
    found[:1] = b"!"[: len(found)]
    assert bytes(store.open(digest)) == b"".join(pieces)


def test_what_is_not_there(url):
    store = UrlStore(url)
    assert store.list() == ()
    assert not store.exists("0" * 64)
    with pytest.raises(StoreError, match=r"Could not read 0{64} in the store .*: it is not there"):
        store.open("0" * 64)
    with pytest.raises(StoreError, match="is not the name of a blob"):
        store.open("../key")


def test_what_another_process_puts_is_seen(tmp_path):
    store = UrlStore(f"file://{tmp_path}/store")
    assert store.list() == ()
    digest = FolderStore(tmp_path / "store").put([b"late"])
    assert store.exists(digest)
    assert store.list() == [digest]


def test_files_go_both_ways_and_are_replaced(url, tmp_path):
    store, name = UrlStore(url), "jobs/digits/outcome-0-0"
    source, target = tmp_path / "source", tmp_path / "target"
    for data in (os.urandom(3 << 20), b"later"):
        source.write_bytes(data)
        store.put_file(name, source)
        assert store.exists(name)
        store.get_file(name, target)
        assert target.read_bytes() == data
    assert store.list() == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == ["source", "target"]


@pytest.mark.parametrize("name", ["", "../key", "a/../../b", "/etc/passwd", "a//b", "."])
def test_names_that_lead_elsewhere_are_refused(url, tmp_path, name):
    store = UrlStore(url)
    for ask in (
        lambda: store.exists(name),
        lambda: store.get_file(name, tmp_path / "x"),
        lambda: store.put_file(name, tmp_path),
    ):
        with pytest.raises(StoreError, match="is not a name in a store"):
            ask()


def test_a_damaged_blob_is_refused(tmp_path):
    store = UrlStore(f"file://{tmp_path}/store")
    digest = store.put([b"one"])
    (tmp_path / "store" / digest).write_bytes(b"two")
    with pytest.raises(StoreError, match=rf"The blob {digest} .*is damaged"):
        store.open(digest)


class Torn:
    """Buffers that cannot be read a second time to their end, as after a crash in the middle."""

    def __init__(self):
        self.reads = 0

    def __iter__(self):
        self.reads += 1
        yield b"half"
        if self.reads > 1:
            raise OSError("broken")
        yield b"rest"


def test_a_blob_that_was_not_written_whole_is_not_there(url):
    store = UrlStore(url)
    with pytest.raises(StoreError, match="OSError: broken"):
        store.put(Torn())
    assert not store.exists(digest_of([b"half", b"rest"]))
    assert not store.list()


def test_a_store_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "taken").write_bytes(b"a file")
    with pytest.raises(StoreError, match=r"Could not write .* on the notebook's side: .*may read and write there"):
        UrlStore(f"file://{tmp_path}/taken/below").put([b"one"])


def test_a_web_server_gives_blobs_and_takes_none(tmp_path):
    pytest.importorskip("aiohttp")
    digest = FolderStore(tmp_path).put([b"one" * 100_000])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = UrlStore(f"http://127.0.0.1:{server.server_port}")
        assert bytes(store.open(digest)) == b"one" * 100_000
        with pytest.raises(StoreError, match="Could not write"):
            store.put([b"two"])
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "abfs://user:hunter2@bucket/x",
            r"abfs://bucket/x needs a package that is not installed on the notebook's side: .*adlfs",
        ),
        ("nonsense://user:hunter2@x", r"nonsense://x cannot be opened on the notebook's side"),
        ("https://user:hunter2@x/y?sig=hunter2", r"https://x/y has a query"),
        ("http://[x/y?sig=hunter2", "has a query"),
    ],
)
def test_what_is_no_store_is_said_without_secrets(url, words):
    with pytest.raises(StoreError, match=words) as caught:
        UrlStore(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "not installed on the notebook's side. Install fsspec"),
        ({"KALE_DIST_WORK": "/w"}, "not installed in the pod. Use an image"),
    ],
)
def test_fsspec_may_be_missing(environment, words):
    script = (
        "import sys; sys.modules['fsspec'] = None\nfrom kale_dist.wire.url_store import UrlStore\n"
        "try: UrlStore('memory://x')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.startswith("StoreError")
    assert words in found.stdout
