"""The local backend's own promises: one agent for all jobs, replaced when it must be; files tell everything."""

import concurrent.futures
import json
import os
import pathlib
import stat
import subprocess
import sys
import time
import uuid

import pytest

import kale_dist as kd
from kale_dist.errors import BackendUnavailableError, JobNotFoundError
from kale_dist.job import interrupts, records
from kale_dist.job.handle import inside
from kale_dist.places import local

pytestmark = pytest.mark.usefixtures("own_state")


def pid():
    return os.getpid(), os.getppid()


def sleep(seconds):
    print("ready", flush=True)
    time.sleep(seconds)


def add(one, other):
    return one + other


def record(job):
    return records.read(job.name)


def run(fn=pid, *args, **options):
    return kd.launch(fn, *args, **{"number_of_processes": 1, **options})


def test_jobs_of_one_process_share_one_agent():
    jobs = [run() for _ in range(3)]
    assert all(job.wait(60).state.value == "succeeded" for job in jobs)
    assert len({record(job).agent_pid for job in jobs}) == 1
    assert record(jobs[0]).kernel_pid == os.getpid()
    assert not any(job.status.notes for job in jobs)


@pytest.mark.parametrize("has_person", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_job_that_is_long_in_coming_tells_a_person_what_it_waits_for(monkeypatch, capfd, has_person):
    monkeypatch.setattr(local, "_LONG_S", 0.0)
    monkeypatch.setattr(interrupts, "has_person", lambda: has_person)
    local.shared().close()
    job = run()
    assert "import torch" in job.status.reason
    job.result(60)
    assert (f"[kale-dist] {job.ref}: Its processes import torch first" in capfd.readouterr().err) == has_person
    assert not job.status.reason


class Slow:
    """Takes long to load."""

    def __reduce__(self):
        return time.sleep, (1.0,)


def test_a_job_whose_input_takes_long_to_load_does_not_speak_of_imports(monkeypatch):
    run().result(60)
    monkeypatch.setattr(local, "_LONG_S", 0.5)
    job, reasons = run(str, Slow()), set()
    while not job.done():
        reasons.add(job.status.reason)
        time.sleep(0.02)
    assert reasons == {""}


def fail():
    raise ValueError("row 3 is bad")


@pytest.mark.parametrize(
    ("fn", "error", "last"),
    [
        (fail, "ValueError: row 3 is bad", "Rank 0 failed: its error is above"),
        (sys.exit, "SystemExit", "Rank 0 failed: SystemExit: 3"),
    ],
)
def test_an_error_stands_once_in_the_log(fn, error, last):
    job = run(fn, *([3] if fn is sys.exit else []))
    assert error in str(job.exception(60))
    assert str(job.logs()).count(error) == 1
    assert str(job.logs()).splitlines()[-1] == f"[kale-dist] {last}"


def fail_quietly():
    with pathlib.Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        fail()


def test_an_error_of_a_function_that_keeps_its_rank_quiet_stands_in_the_log():
    job = run(fail_quietly)
    assert job.exception(60) is not None
    assert "ValueError: row 3 is bad" in str(job.logs())


def test_a_jobs_folder_is_private_and_its_key_is_nowhere_else():
    token = uuid.uuid4().hex
    job = run(seen, "TOKEN", environment={"TOKEN": token})
    assert job.result() == job.retry().result() == token
    folder = inside(job).files.folder
    key = inside(job).files.key.read_bytes()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(inside(job).files.key.stat().st_mode) == 0o600
    assert len(key) == 32
    for path in folder.rglob("*"):
        if path.is_file() and path != inside(job).files.key:
            content = path.read_bytes()
            assert key not in content
            assert path.name.startswith("outcome") or token.encode() not in content
            assert key.hex().encode() not in content


def seen(name):
    return os.environ.get(name)


@pytest.mark.nightly
def test_a_changed_variable_that_is_read_at_load_gets_a_new_agent_and_the_job_says_why(monkeypatch):
    before = run()
    before.wait()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = run(seen, "OMP_NUM_THREADS")
    assert job.result() == "1"
    assert record(job).agent_pid != record(before).agent_pid
    assert "OMP_NUM_THREADS was set" in job.status.notes[0]
    assert [line.text for line in job.logs() if line.rank is None] == [job.status.notes[0]]
    again = run(seen, "OMP_NUM_THREADS")
    again.wait()
    assert not again.status.notes
    assert record(again).agent_pid == record(job).agent_pid


class RemovesTheInterpreter:
    """Whoever pickles it has no interpreter any more to start an agent with."""

    def __reduce__(self):
        sys.executable = "/nonexistent"
        return RemovesTheInterpreter, ()


def test_a_call_whose_job_cannot_be_handed_over_leaves_nothing_and_the_next_one_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", sys.executable)
        with pytest.raises(BackendUnavailableError, match="could not be started"):
            run(add, RemovesTheInterpreter(), 1, name="not-handed-over")
    assert not records.exists("not-handed-over")
    assert run(add, 1, 2, name="not-handed-over").result(60) == 3


def test_another_process_follows_and_the_log_starts_at_its_first_line():
    job = run(sleep, 1.5)
    next(job.logs(follow=True))
    code = f"import kale_dist as kd; kd.attach({job.name!r}).stream_logs()"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=pathlib.Path(kd.__file__).parents[1],
    )
    assert elsewhere.stdout == "[0] ready\n"
    job.wait()


def test_a_job_of_another_name_or_backend_is_not_found():
    backend = local.shared()
    for ref in (local.JobRef("local", "missing"), local.JobRef("fake", "x")):
        with pytest.raises(JobNotFoundError):
            backend.status(ref)


def test_a_name_used_again_is_another_job():
    old = run(name="again")
    old.wait()
    elsewhere = "import kale_dist as kd; kd.attach('again').delete()"
    subprocess.run([sys.executable, "-c", elsewhere], check=True, timeout=60, cwd=pathlib.Path(kd.__file__).parents[1])
    with pytest.raises(JobNotFoundError):
        _ = old.status
    new = run(name="again")
    assert kd.attach("again") is new
    assert new.wait().state.value == "succeeded"


def test_a_deleted_job_frees_its_blobs():
    job = run(sleep, 0)
    kept = run(sleep, 0)
    other = run(seen, "B" * 200_000)
    for each in (job, kept, other):
        each.wait()
    store = local.records.blobs_dir()
    big = set(other.spec.blobs) - set(job.spec.blobs)
    assert all((store / blob).exists() for blob in big)
    other.delete()
    job.delete()
    assert not any((store / blob).exists() for blob in big)
    assert all((store / blob).exists() for blob in kept.spec.blobs)


def test_jobs_from_several_threads_do_not_get_mixed_up():
    def one(number):
        return run(add, number, 1).result()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(12))) == list(range(1, 13))


# -- reading files piece by piece ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_job_of_another_version_is_listed_cancelled_and_deleted_but_neither_attached_nor_retried(seconds):
    job = kd.launch(time.sleep, seconds, number_of_processes=1)
    if not seconds:
        job.wait()
    record = records.files(job.name).record
    written = json.loads(record.read_text())
    # Records of version 2 have no such field.
    del written["spec"]["version"]
    record.write_text(json.dumps(written))
    code = f"""
import kale_dist as kd
from kale_dist.errors import ContractError
found, = [job for job in kd.jobs() if job.ref == {job.ref!r}]
found.cancel()
for refused in (lambda: kd.attach({job.ref!r}), *([] if {seconds} else [found.retry, found.results])):
    try:
        refused()
    except ContractError as error:
        print(error)
found.delete()
print([job for job in kd.jobs() if job.ref == {job.ref!r}])
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    sentence = f"{job.ref} was submitted by another version of kale_dist: install it to fetch the result"
    assert said.splitlines() == [sentence] * (1 if seconds else 3) + ["[]"]
