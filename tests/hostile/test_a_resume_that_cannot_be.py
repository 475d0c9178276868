"""A training that was to continue, and cannot: it fails before its first epoch, and never begins over what is there."""

import functools
import os
import shutil
import signal
import time

import made_models
import pytest
import torch
from trainings import classifying

import kale_dist as kd
from kale_dist.errors import ConfigError, JobFailedError
from kale_dist.job import records
from kale_dist.job.status import JobStatus, reduce_events
from kale_dist.worker.training import supervised

in_parts = functools.partial(made_models.train, "local", 1, strategy="fsdp", threads=1)
train = functools.partial(kd.distribute, number_of_processes=1, threads=1)


def trained(job):
    return [row["epoch"] for row in job.metrics if row["source"] == "train"]


def test_parts_that_are_gone_fail_a_resume_that_was_asked_for(tmp_path):
    job = in_parts(2, save_to=tmp_path / "net")
    job.result()
    (tmp_path / "net.checkpoints").rename(tmp_path / "moved")
    more = in_parts(3, save_to=tmp_path / "net", resume_from=job)
    with pytest.raises(JobFailedError, match=r"cannot resume: .*its parts are not at .*net.checkpoints"):
        more.result()
    assert trained(more) == []


class Lost:
    """A step that spoils the job's checkpoints in its third epoch, and kills its rank."""

    def __init__(self, spoil):
        self.spoil, self.epochs = spoil, 0

    def __call__(self, model, loader, criterion, optimizer, device, args):
        self.epochs += 1
        place = kd.context()
        if not place.attempt and self.epochs == 3:
            _wait_for_two(place.folder)
            self.spoil(place.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return supervised.train_epoch(model, loader, criterion, optimizer, device, args)


def _wait_for_two(folder):
    """A thread writes them: the second one comes while the third epoch begins."""
    last, older = folder / "checkpoint", folder / "checkpoint.1"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (older.exists() and not older.samefile(last)):
        time.sleep(0.01)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])


def last(folder):
    cut_short(folder / "checkpoint")


def both(folder):
    cut_short(folder / "checkpoint")
    cut_short(folder / "checkpoint.1")


def gone(folder):
    for path in folder.glob("checkpoint*"):
        path.unlink()


@pytest.mark.parametrize(("spoil", "behind"), [(last, 1), pytest.param(gone, 0, marks=pytest.mark.nightly)])
def test_a_restart_takes_the_newest_checkpoint_that_is_whole(spoil, behind):
    job = train(*classifying(), Lost(spoil), epochs=4, max_restarts=1, checkpoint_every=1)
    job.result()
    assert trained(job) == [1, 2, 3, 4]
    said = "\n".join(line.text for line in job.logs())
    assert ("The last checkpoint is left out" in said) is (spoil is last)
    assert ("resumes after epoch 1" if behind else "starts from the beginning") in said


def test_a_restart_never_begins_over_checkpoints_that_it_cannot_read():
    job = train(*classifying(), Lost(both), epochs=4, max_restarts=1, checkpoint_every=1)
    with pytest.raises(
        JobFailedError, match=r"cannot resume: .*checkpoint cannot be read.*checkpoint.1 cannot be read"
    ):
        job.result()
    assert job.status.attempt == 1
    assert trained(job) == [1, 2]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(capsys):
    job = train(*classifying(), epochs=3, checkpoint_every=1)
    job.result()
    folder = records.files(job.ref.removeprefix("local://")).folder
    cut_short(folder / "checkpoint")
    more = train(*classifying(), epochs=3, resume_from=job)
    assert "is damaged. The checkpoint before it is used" in capsys.readouterr().err
    more.result()
    assert trained(more) == [3]
    cut_short(folder / "checkpoint.1")
    with pytest.raises(ConfigError, match="is damaged"):
        train(*classifying(), epochs=4, resume_from=job)


def test_a_disk_that_is_almost_full_keeps_one_checkpoint(monkeypatch, tmp_path, capsys):
    from kale_dist.worker.training import checkpoint
    from kale_dist.worker.training.checkpoint import Checkpoint

    usage = shutil.disk_usage(tmp_path)
    path, older = tmp_path / "checkpoint", tmp_path / "checkpoint.1"
    write = lambda epoch: checkpoint.save(path, checkpoint.collect(Checkpoint(epoch=epoch, model={})))  # noqa: E731
    write(1)
    write(2)
    assert (checkpoint.read(older).epoch, checkpoint.read(path).epoch) == (1, 2)
    size = path.stat().st_size
    seen = []
    monkeypatch.setattr(torch, "save", lambda whole, file: (seen.append(older.exists()), file.write_bytes(b"x" * size)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(1.3 * size)))
    write(3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(1.1 * size)))
    write(4)
    write(5)
    assert seen == [True, False, False]
    assert capsys.readouterr().out.count("almost full") == 1


def test_a_job_that_resumed_in_its_first_epoch_and_then_failed_has_a_checkpoint():
    status = reduce_events(JobStatus(ref="r"), [{"event": "resumed", "epoch": 0, "batches": 7}])
    assert status.checkpoint_epoch == 0
    fresh = reduce_events(JobStatus(ref="r"), [{"event": "resumed", "epoch": 0, "batches": 0}])
    assert fresh.checkpoint_epoch is None
