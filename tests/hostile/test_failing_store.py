"""A store fails for a while, as NFS and object storage do: nothing that was reached is lost, and no training begins over it."""

from __future__ import annotations

import pathlib

import pytest
from plain_jobs import wait_for_file

from kale_dist import wire
from kale_dist.wire import FailureCause

REACHED = b"epoch 99"


class Store:
    """A folder that can be made to fail: a link to itself cannot be entered, not even by root."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, folder / "jobs"
        folder.mkdir()

    def breaks(self):
        if self.jobs.exists():
            self.jobs.rename(self.folder / "kept")
        self.jobs.symlink_to(self.jobs)

    def works(self):
        self.jobs.unlink()
        if (self.folder / "kept").exists():
            (self.folder / "kept").rename(self.jobs)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def hurried(tmp_path):
    """Environment of a pod whose limits are a second."""
    folder = tmp_path / "hurried"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "from kale_dist.worker.pod import head, store_copy\n"
        "head.READ_LIMIT_S = head.RETRY_EACH_S = store_copy.STORE_WARN_S = store_copy.RETRY_EACH_S = 1.0\n"
    )
    return {"PYTHONPATH": str(folder)}


def begin(make_bare, store, tmp_path, **options):
    return make_bare(wait_for_file, str(tmp_path / "go"), ranks=1, store=str(store.folder), **options).put_input()


def reach(head, job):
    """Put a checkpoint where ranks do."""
    part = head.folder / "work" / "part"
    part.write_bytes(REACHED)
    part.rename(head.folder / "work" / "job" / "checkpoint")


def kept(job, store, name):
    path = pathlib.Path(store.jobs, job.order.job, name)
    return path.read_bytes() if path.exists() else None


def test_a_checkpoint_is_kept_once_the_store_works_again(make_bare, store, tmp_path, hurried):
    job = begin(make_bare, store, tmp_path)
    head = job.start(0, **hurried)
    job.until_running()
    store.breaks()
    reach(head, job)
    job.until(lambda: "It is tried again as long as the job lasts" in job.text())
    job.until(lambda: any(event.get("warns") for event in job.events("note")))
    store.works()
    job.until(lambda: kept(job, store, "checkpoint") == REACHED)
    (tmp_path / "go").touch()
    assert job.end() == [0], job.text()
    assert "can be written again" in job.text()
    assert kept(job, store, "outcome-0-0")


def test_a_result_is_kept_if_the_store_works_again_after_the_end(make_bare, store, tmp_path, hurried):
    job = begin(make_bare, store, tmp_path, outcomes_on_stdout=False)
    head = job.start(0, **hurried)
    job.until_running()
    store.breaks()
    (tmp_path / "go").touch()
    job.until(lambda: job.state()["state"] == "succeeded")
    store.works()
    job.until(lambda: kept(job, store, "outcome-0-0"))
    assert head.ask("POST", "/ack", b"")[0] == 200
    assert head.end() == 0


def come_back(make_bare, store, tmp_path, **options):
    """A job whose head was lost with a checkpoint in the store, which then cannot be read."""
    job = begin(make_bare, store, tmp_path, **options)
    head = job.start(0)
    job.until_running()
    reach(head, job)
    job.until(lambda: kept(job, store, "checkpoint") == REACHED)
    job.until(lambda: kept(job, store, "checkpoint.owner"))
    head.process.kill()
    head.end()
    store.breaks()
    return job


@pytest.mark.parametrize("returns", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_head_that_comes_back_waits_for_the_store_and_resumes(make_bare, store, tmp_path, returns):
    job = come_back(make_bare, store, tmp_path, returns_head=returns, max_restarts=2)
    head = job.start(0)
    job.until(lambda: "It is tried again for 10 minutes" in job.text())
    assert len(job.events("attempt")) == 1
    store.works()
    job.until(lambda: len(job.events("attempt")) == 2)
    assert (head.folder / "work" / "job" / "checkpoint").read_bytes() == REACHED
    (tmp_path / "go").touch()
    assert head.end() == 0, job.text()
    assert kept(job, store, "checkpoint") == REACHED


@pytest.mark.nightly
@pytest.mark.parametrize("returns", [True, False])
def test_a_head_that_cannot_read_the_store_for_long_begins_nothing_over_the_checkpoint(
    make_bare, store, tmp_path, hurried, returns
):
    job = come_back(make_bare, store, tmp_path, returns_head=returns, max_restarts=2)
    head = job.start(0, **hurried)
    # A controller makes the pod again whose exit code is that of SIGTERM.
    assert head.end() == (wire.EXIT_TERMINATED if returns else 1), job.text()
    assert len(job.events("attempt")) == 1
    assert head.last_words["cause"] == (FailureCause.SUSPENDED if returns else FailureCause.NOT_STARTED)
    assert f"{store.folder}/jobs/{job.order.job}/checkpoint" in head.last_words["reason"]
    store.works()
    assert kept(job, store, "checkpoint") == REACHED
