import dataclasses
import json
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from kale_dist.errors import JobExistsError, JobNotFoundError, StoreError
from kale_dist.job import records
from kale_dist.job.records import Record
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.wire.blobs import FolderStore

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "kale-dist"


def a_record(name="job-1", created=1.0, blobs=(), ref=""):
    spec = JobSpec(
        name=name.rpartition(".")[2],
        label="f",
        kind="call",
        snapshot="0" * 64,
        blobs=blobs,
        topology=Topology(number_of_processes=2),
    )
    return Record(
        ref=ref or f"local://{name}", name=name, created=created, spec=spec, agent_pid=1, agent_start=2, agent_socket="/s",
        kernel_pid=3, detach=False,
    )  # fmt: skip


def submitted(name="job-1", **changes):
    records.create(name, KEY)
    records.write(a_record(name, **changes))


def put(*texts):
    store = FolderStore(records.blobs_dir())
    return tuple(store.put((text.encode(),)) for text in texts)


def kept():
    return set(FolderStore(records.blobs_dir()).list())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_private_and_read_again(own_state):
    old = os.umask(0)
    try:
        submitted()
    finally:
        os.umask(old)
    assert records.read("job-1") == a_record()
    assert records.read_key("job-1") == KEY
    files = records.files("job-1")
    assert files.folder == own_state / "jobs" / "job-1"
    assert [mode(path) for path in (own_state, files.folder, files.key)] == [0o700, 0o700, 0o600]
    assert KEY.hex() not in files.record.read_text()


def test_a_relative_state_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert records.state_dir() == tmp_path / ".local/state/kale-dist"


def test_a_name_is_taken_once_even_in_a_race():
    barrier = threading.Barrier(8)
    taken, refused = [], []

    def take():
        barrier.wait()
        try:
            taken.append(records.create("job-1", KEY))
        except JobExistsError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    assert "'job-1'" in refused[0]
    assert "delete" in refused[0]


@pytest.mark.parametrize("name", ["missing", "", ".", "..", "../jobs", "a/b", "/etc", "\0", "a" * 5000, ".deleted-x-1"])
def test_what_is_not_there_is_not_found(name):
    with pytest.raises(JobNotFoundError):
        records.read(name)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ref": 1}', json.dumps({**a_record().to_json(), "spec": {}})])
def test_a_damaged_record_says_where_it_lies_and_hides_no_other_job(text):
    submitted("good")
    records.create("bad", KEY)
    records.files("bad").record.write_text(text)
    with pytest.raises(JobNotFoundError, match=rf"cannot be read.*{records.files('bad').folder}"):
        records.read("bad")
    assert [record.name for record in records.all_records()] == ["good"]


def test_a_later_versions_fields_are_passed_over():
    records.create("job-1", KEY)
    records.files("job-1").record.write_text(json.dumps({**a_record().to_json(), "new": 1}))
    assert records.read("job-1") == a_record()


def test_a_name_that_is_taken_says_how_the_job_is_removed():
    submitted("job-1")
    submitted("kubernetes.team.job-1", ref="kubernetes://team/job-1")
    with pytest.raises(JobExistsError, match=r"attach\('job-1'\)"):
        records.create("job-1", KEY)
    with pytest.raises(JobExistsError, match=r"`kale-dist delete kubernetes://team/job-1`"):
        records.create("kubernetes.team.job-1", KEY)


def test_names_are_oldest_first():
    for name, created in (("b", 2.0), ("a", 3.0), ("c", 1.0)):
        submitted(name, created=created)
    assert [record.name for record in records.all_records()] == ["c", "b", "a"]


def test_deletion_keeps_the_blobs_that_others_need():
    ours, shared, _ = put("ours", "shared", "of a call that never became a job")
    submitted("one", blobs=(ours, shared))
    submitted("two", blobs=(shared,))
    assert records.blobs_size() == sum(map(len, ("ours", "shared", "of a call that never became a job")))
    records.delete("one")
    assert kept() == {shared}
    assert not records.exists("one")
    records.delete("one")
    records.delete("two")
    assert not kept()
    assert not list(records.jobs_dir().iterdir())


def test_deletion_waits_for_a_call_that_is_between_snapshot_and_record():
    done = threading.Event()

    def delete():
        records.delete("nothing")
        done.set()

    with records.keeping_blobs():
        (blob,) = put("just written")
        thread = threading.Thread(target=delete)
        thread.start()
        assert not done.wait(0.2)
        submitted("new", blobs=(blob,))
    thread.join()
    assert kept() == {blob}


def test_two_calls_do_not_wait_for_each_other():
    start = time.monotonic()
    with records.keeping_blobs(), records.keeping_blobs():
        assert time.monotonic() - start < 5


def test_a_folder_that_cannot_be_made_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="XDG_STATE_HOME"):
        records.create("job-1", KEY)


def test_a_submission_that_was_cut_off_says_how_to_free_its_name():
    records.create("half", KEY)
    with pytest.raises(JobNotFoundError, match=f"Remove {records.files('half').folder}"):
        records.read("half")


def test_a_user_without_a_home_is_told_what_to_set():
    code = "import os, pwd; from kale_dist.job import records; os.setuid(54321); records.state_dir()"
    bare = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_STATE_HOME")}
    if os.getuid() != 0:
        pytest.skip("only root can become a user who is in no list")
    asked = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=False)
    assert "StoreError" in asked.stderr.splitlines()[-1]
    assert "Set HOME, or XDG_STATE_HOME" in asked.stderr


def test_a_lock_that_cannot_be_opened_is_a_store_error(own_state):
    (own_state / "lock").mkdir(parents=True)
    with pytest.raises(StoreError, match="lock could not be written"), records.keeping_blobs():
        pass


def test_a_record_is_replaced_as_a_whole():
    submitted()
    records.write(dataclasses.replace(a_record(), agent_pid=99))
    assert records.read("job-1").agent_pid == 99
    assert {path.name for path in records.files("job-1").folder.iterdir()} == {"key", "record.json"}


def test_a_key_that_is_gone_is_none():
    assert records.read_key("job-1") is None


@pytest.mark.parametrize(
    ("name", "ref"),
    [("docker.a-1", "docker://a-1"), ("kubernetes.team.a-1", "kubernetes://team/a-1")],
)
def test_a_job_elsewhere_is_named_by_its_reference(name, ref):
    with pytest.raises(JobNotFoundError, match=f"There is no job '{ref}'.*lists those"):
        records.read(name)
    records.create(name, KEY)
    with pytest.raises(JobNotFoundError, match=f"There is no job 'a-1' on this machine. Did you mean '{ref}'"):
        records.read("a-1")
