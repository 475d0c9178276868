"""Blobs that were damaged or planted, a power failure, another version's records, an open folder."""

import json
import os
import pathlib
import stat
import threading

import pytest
import torch
from trainings import classifying

import kale_dist as kd
from kale_dist.errors import StoreError
from kale_dist.job import records
from kale_dist.wire import blobs
from kale_dist.wire.blobs import FolderStore


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """A state of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "kale-dist"


def write(path, data):
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o444)


def total(values):
    return values.sum().item()


def test_the_same_call_after_its_tensor_was_damaged_gives_the_same_result(own_state):
    values = torch.arange(1_000_000, dtype=torch.float64)
    expected = kd.launch(total, values, number_of_processes=1).result()
    large = max((own_state / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    whole = large.read_bytes()
    write(large, whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert kd.launch(total, values, number_of_processes=1).result() == expected
    assert large.read_bytes() == whole


def test_a_retry_with_a_damaged_blob_is_refused(own_state):
    job = kd.launch(total, torch.arange(1_000_000.0), number_of_processes=1)
    job.result()
    large = max((own_state / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    write(large, bytes(large.stat().st_size))
    with pytest.raises(kd.errors.BackendError, match="Make the call again"):
        job.retry()


def test_what_was_planted_in_a_shared_folder_is_no_blob_and_is_written_again(tmp_path):
    planted, shared = b"weights" * 100, tmp_path / "claim"
    shared.mkdir()
    digest = blobs.digest_of([planted])
    (shared / digest).write_bytes(b"another" * 100)
    store = FolderStore(shared)
    assert not store.exists(digest)
    assert store.put([planted]) == digest
    assert store.exists(digest)
    assert store.open(digest) == planted
    # What is remembered lies in no folder that others can write to.
    assert [path.name for path in shared.iterdir()] == [digest]


def test_a_blob_is_read_once_and_again_when_it_has_changed(tmp_path, own_state, monkeypatch):
    data = b"x" * 5000
    store = FolderStore(records.blobs_dir())
    (store.root / blobs.digest_of([data])).write_bytes(data)
    read = []
    mapped = blobs.map_file
    monkeypatch.setattr(blobs, "map_file", lambda path: read.append(path) or mapped(path))
    digest = blobs.digest_of([data])
    assert all(store.exists(digest) for _ in range(3))
    assert len(read) == 1
    # So does a later process.
    monkeypatch.setattr(blobs, "checked", type(blobs.checked)())
    assert FolderStore(records.blobs_dir()).exists(digest)
    assert len(read) == 1
    assert stat.S_IMODE(own_state.stat().st_mode) == 0o700
    write(store.path(digest), b"y" * 5000)
    assert not store.exists(digest)


def test_a_damaged_blob_in_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    digest = blobs.digest_of([b"a"])
    (tmp_path / digest).write_bytes(b"b")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="could not be written"):
        FolderStore(tmp_path).put([b"a"])


def test_what_a_job_has_reached_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Records, keys, outcomes and checkpoints are synced, file and folder; blobs can be made again."""
    done, fsync = [], os.fsync

    def noting(descriptor):
        done.append(str(pathlib.Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    from kale_dist.worker.training import checkpoint
    from kale_dist.worker.training.checkpoint import Checkpoint

    checkpoint.save(tmp_path / "checkpoint", checkpoint.collect(Checkpoint(epoch=1, model={})))
    blobs.write_bundle(tmp_path / "outcome-0-0", {}, [b"x"])
    for name in ("checkpoint", "outcome-0-0"):
        assert any(path.startswith(str(tmp_path / f".{name}.")) for path in done), name
    assert done.count(str(tmp_path)) == 2
    job = kd.launch(total, torch.ones(3), number_of_processes=1)
    files = records.files(job.ref.removeprefix("local://"))
    assert {str(files.key), str(files.record), str(files.folder)} <= set(done)
    job.result()
    done.clear()
    FolderStore(tmp_path / "blobs").put([b"x"])
    assert done == []


def put(*texts):
    store = FolderStore(records.blobs_dir())
    return [store.put((text.encode(),)) for text in texts]


def test_deleting_keeps_what_another_versions_record_names(own_state):
    job = kd.launch(total, torch.ones(3), number_of_processes=1)
    job.result()
    theirs = set(FolderStore(records.blobs_dir()).list())
    (unused,) = put("of no record")
    path = records.files(job.ref.removeprefix("local://")).record
    record = json.loads(path.read_text())
    record["spec"] = {"of_a_later_version": record["spec"]}
    path.write_text(json.dumps(record))
    assert job.ref not in [one.ref for one in records.all_records()]
    records.delete("another")
    assert set(FolderStore(records.blobs_dir()).list()) == theirs
    assert unused not in theirs
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match="no snapshot were deleted"):
        records.delete("another")
    assert theirs <= set(FolderStore(records.blobs_dir()).list())


def test_an_open_state_folder_is_closed_to_others(own_state):
    for folder in (own_state, own_state / "jobs", own_state / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    kd.distribute(*classifying(), number_of_processes=1).result()
    for folder in (own_state, own_state / "jobs", own_state / "blobs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose folder it is")
def test_a_folder_of_roots_that_all_may_write_is_no_state_folder(tmp_path, monkeypatch):
    (tmp_path / "kale-dist").mkdir()
    (tmp_path / "kale-dist").chmod(0o777)
    monkeypatch.delenv("KALE_DIST_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(StoreError, match=r"All users may write into .*Set XDG_STATE_HOME to a folder of your own"):
        records.state_dir()


def test_many_threads_remember_at_once(own_state):
    store = FolderStore(records.blobs_dir())
    threads = [
        threading.Thread(target=lambda n=n: [store.put([b"%d %d" % (n, i)]) for i in range(50)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (own_state / "checked").read_text().splitlines()
    assert len(lines) == 200
    assert all(line.count(" ") == 3 for line in lines)
