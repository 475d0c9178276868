"""Blobs and containers: content names, maps that keep what they mapped, a full disk said aloud."""

import errno
import hashlib
import io
import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import zipfile

import pytest

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.wire import blobs


def names_in(folder):
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def store(tmp_path):
    return blobs.FolderStore(tmp_path / "blobs")


@pytest.mark.parametrize("pieces", [[], [b""], [b"a"], [b"ab", bytearray(b"c"), memoryview(b"de")], [b"x" * 3_000_000]])
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_blob_comes_back_under_the_digest_of_its_bytes(store, pieces, kind):
    store = store if kind == "folder" else blobs.MemoryStore()
    whole = b"".join(pieces)
    digest = store.put(pieces)
    assert digest == hashlib.sha256(whole).hexdigest() == blobs.digest_of(pieces)
    assert store.exists(digest)
    assert store.open(digest) == whole
    assert list(store.list()) == [digest]


def test_equal_blobs_are_one_file_which_is_read_only_and_not_written_again(store):
    digest = store.put([b"ab", b"c"])
    before = store.path(digest).stat()
    assert store.put([b"a", b"bc"]) == digest
    after = store.path(digest).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert stat.S_IMODE(after.st_mode) == 0o444
    assert names_in(store.root) == [digest]
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


def test_writing_into_a_map_changes_neither_the_file_nor_another_map(store):
    digest = store.put([b"abc" * 5000])
    one, other = store.open(digest), store.open(digest)
    one[0] = 0
    assert other[0] == ord("a")
    assert store.path(digest).read_bytes().startswith(b"abc")


def test_a_map_outlives_its_file_and_holds_no_descriptor(store):
    digests = [store.put([bytes([number]) * 100_000]) for number in range(20)]
    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    views = [store.open(digest) for digest in digests]
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == before
    for digest in digests:
        store.delete(digest)
        store.delete(digest)
    assert [view[99_999] for view in views] == list(range(20))
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, "g" * 64])
def test_a_name_that_is_no_digest_is_refused(store, name):
    for method in (store.open, store.exists, store.delete, store.path):
        with pytest.raises(StoreError, match="not the name of a blob"):
            method(name)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_missing_blob_is_named(store, kind):
    store = store if kind == "folder" else blobs.MemoryStore()
    with pytest.raises(StoreError, match="0" * 64):
        store.open("0" * 64)
    assert not store.exists("0" * 64)
    assert list(store.list()) == []


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not be written"):
        blobs.FolderStore(tmp_path / "file" / "blobs").put([b"x"])


@pytest.fixture
def small_disk():
    """A process that cannot write files over 1 MiB: what a full disk does, without privileges."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_disk")
def test_what_does_not_fit_is_said_with_sizes_and_a_remedy_and_leaves_nothing(store, tmp_path):
    with pytest.raises(StoreError, match=r"needs 3,000,000 bytes, 1,048,576 were written, [\d,]+ are free") as caught:
        store.put([b"x" * 3_000_000])
    assert "kale-dist delete" in str(caught.value)
    assert names_in(store.root) == []
    with pytest.raises(StoreError, match="needs"):
        blobs.write_bundle(tmp_path / "c", {}, [b"x" * 3_000_000])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota")])
def test_a_full_disk_says_so(tmp_path, code, said):
    class FullDisk(list):
        def __iter__(self):
            yield b"some"
            if sys._getframe(1).f_code.co_name == "_write_file":
                raise OSError(code, os.strerror(code))

    with pytest.raises(StoreError, match=said):
        blobs.FolderStore(tmp_path).put(FullDisk())
    assert names_in(tmp_path) == []


def test_many_processes_put_the_same_blob_at_once(store):
    script = "import sys; from kale_dist import blobs\nprint(blobs.FolderStore(sys.argv[1]).put([b'z' * 5_000_000]))"
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(store.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = {process.communicate()[0].strip() for process in started}
    assert printed == {blobs.digest_of([b"z" * 5_000_000])}
    assert set(names_in(store.root)) == printed


@pytest.mark.parametrize("buffers", [[], [b""], [b"abc", b"", bytearray(b"d" * 200), memoryview(b"e" * 64)]])
def test_a_container_keeps_header_and_buffers(tmp_path, buffers):
    path = tmp_path / "bundle"
    blobs.write_bundle(path, {"a": [1, None], "ü": "ü"}, buffers)
    header, views = blobs.open_bundle(path)
    assert header == {"a": [1, None], "ü": "ü"}
    assert [bytes(view) for view in views] == [bytes(buffer) for buffer in buffers]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names_in(tmp_path) == ["bundle"]


def test_a_containers_buffers_are_aligned_writable_and_private(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "bundle"
    blobs.write_bundle(path, {}, [b"abc", b"d" * 100])
    _, views = blobs.open_bundle(path)
    assert [numpy.frombuffer(view, "u1").ctypes.data % blobs.ALIGNMENT for view in views] == [0, 0]
    views[0][0] = 0
    assert bytes(blobs.open_bundle(path)[1][0]) == b"abc"


def test_a_replaced_container_leaves_the_mapped_one_alone(tmp_path):
    path = tmp_path / "bundle"
    blobs.write_bundle(path, {}, [b"old" * 1000])
    _, (old,) = blobs.open_bundle(path)
    blobs.write_bundle(path, {}, [b"new"])
    assert bytes(old[:3]) == b"old"
    assert bytes(blobs.open_bundle(path)[1][0]) == b"new"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"something else entirely",
        lambda data: data[:20],
        lambda data: data[:-70],
        lambda data: data.replace(b'"sizes": [3, 100]', b'"sizes": [3, -10]'),
        lambda data: data.replace(b'"sizes": [3, 100]', b'"sizes": [3, "a"]'),
        lambda data: data.replace(b'"sizes"', b'"seizs"'),
        lambda data: data[:8] + b"\xff" * 8 + data[16:],
        lambda data: data[:16] + b"\xff" * 8 + data[24:],
    ],
)
def test_a_damaged_container_is_refused(tmp_path, damage):
    path = tmp_path / "bundle"
    blobs.write_bundle(path, {"some": "header"}, [b"abc", b"d" * 100])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SnapshotDamagedError, match="is damaged"):
        blobs.open_bundle(path)


def test_a_missing_container_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match="nothing"):
        blobs.open_bundle(tmp_path / "nothing")


# -- packed blobs ----------------------------------------------------------------------------------------------------


def test_blobs_are_packed_the_same_each_time_and_come_out(tmp_path):
    store = blobs.MemoryStore()
    contents = [b"", b"a" * 100_000, bytes(range(256))]
    digests = [store.put([content]) for content in contents]
    packed = blobs.pack_blobs(store, digests)
    assert packed == blobs.pack_blobs(store, [*reversed(digests), digests[0]])
    blobs.unpack_blobs(packed, tmp_path / "a")
    (tmp_path / "packed").write_bytes(packed)
    blobs.unpack_blobs(tmp_path / "packed", tmp_path / "b")
    for place in "ab":
        unpacked = blobs.FolderStore(tmp_path / place)
        assert [bytes(unpacked.open(digest)) for digest in digests] == contents


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zip",
        zipped("../../evil", b"x"),
        zipped("/etc/evil", b"x"),
        zipped(blobs.digest_of([b"y"]), b"x"),
        zipped(blobs.digest_of([b"x"]), b"x" * 1000)[:-40],
        zipped(blobs.digest_of([b"x" * 99]), b"x" * 99).replace(b"x" * 99, b"z" * 99),
    ],
)
def test_a_damaged_pack_is_refused_and_nothing_odd_is_written(packed, tmp_path):
    with pytest.raises(SnapshotDamagedError, match="packed snapshot is damaged"):
        blobs.unpack_blobs(packed, tmp_path / "folder" / "blobs")
    assert not (tmp_path / "evil").exists()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
