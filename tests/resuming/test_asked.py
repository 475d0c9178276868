"""Checkpoints at the times that were asked for, and the last one before ranks are ended."""

import signal
import threading
import time

import pytest
import torch
from recorded import events_in
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.cli import launch_command
from kale_dist.job import records, view
from kale_dist.worker.training import checkpoint

LONG_S = 600


def unhurried(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        time.sleep(args["nap_s"])
    return {"loss": 0.0}


def start(nap_s=0.02, samples=80_000, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(samples, 4), torch.randint(2, (samples,))), 8)
    return kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), unhurried,
        train_args={"nap_s": nap_s}, number_of_processes=2, threads=1, seed=1, **options,
    )  # fmt: skip


def events(job, kind):
    return [one for one in events_in(records.files(job.name).events.read_bytes()) if one["event"] == kind]


def wait_for_step(job, step):
    for status in iter(lambda: job.status, None):
        progress = status.replicas[0].progress if status.replicas else None
        if progress is not None and progress.step >= step:
            return
        assert not status.is_final, status
        time.sleep(0.05)


@pytest.fixture
def started():
    jobs = []

    def begin(**options):
        jobs.append(start(**options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.delete()


def test_a_cancelled_training_writes_one_more_checkpoint(started):
    job = started(checkpoint_every="10 min")
    wait_for_step(job, 20)
    job.cancel()
    assert isinstance(job.exception(60), kd.KaleDistError)
    (written,) = events(job, "checkpoint")
    assert written["asked"]
    assert written["batches"] >= 20
    found = checkpoint.read(records.files(job.name).checkpoint)
    assert (found.epoch, found.resume.position.batches, found.resume.steps) == (
        0,
        written["batches"],
        written["step"],
    )


def test_a_command_that_is_interrupted_cancels_once_and_says_how_to_resume(started, capsys):
    job = started(checkpoint_every="10 min")
    main_thread = threading.get_ident()

    def interrupt():
        wait_for_step(job, 20)
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert launch_command.follow(job, [], as_json=False, has_value=False) != 0
    said = capsys.readouterr().err
    assert said.count("cancelled") == 1
    assert f"kale-dist retry --resume {job.ref}" in said
    assert [one["asked"] for one in events(job, "checkpoint")] == [True]


def test_wherever_the_end_of_a_cancelled_training_is_shown_it_says_how_to_resume(started):
    job = started(checkpoint_every="10 min")
    wait_for_step(job, 20)
    job.cancel()
    how = "job.retry(resume=True)"
    assert how in str(job.exception(60))
    assert how in view.text(job.status)
    assert how in view.html(job.status)


def test_so_does_one_that_reaches_its_time_limit(started):
    job = started(checkpoint_every="10 min", timeout_s=4)
    assert "timeout_s" in str(job.exception(60))
    assert [one["asked"] for one in events(job, "checkpoint")] == [True]


def test_a_hang_gets_no_time_for_a_save_that_it_cannot_make(started):
    job = started(nap_s=LONG_S, checkpoint_every="10 min", timeout_s=10, stall_warn_s=2.0, grace_s=60)
    error = str(job.exception(40))
    assert "in unhurried" in error
    assert "more time" not in error


def test_a_slow_training_keeps_its_time_for_a_save(started):
    job = started(nap_s=1.5, checkpoint_every="10 min", timeout_s=6)
    assert "more time" in str(job.exception(60))
    assert [one["asked"] for one in events(job, "checkpoint")] == [True]


@pytest.mark.parametrize(
    ("every", "save"), [("10 min", False), (1, True), (None, True)], ids=["not wanted", "epochs", "none"]
)
def test_others_are_ended_at_once(started, every, save):
    job = started(checkpoint_every=every)
    wait_for_step(job, 5)
    job.cancel(save=save)
    job.exception(60)
    assert not events(job, "checkpoint")
    assert not records.files(job.name).checkpoint.exists()


def test_a_second_cancel_does_not_wait_for_the_checkpoint(started):
    job = started(checkpoint_every="10 min", nap_s=30.0)
    wait_for_step(job, 1)
    job.cancel()
    job.cancel()
    began = time.monotonic()
    job.exception(60)
    assert time.monotonic() - began < 15
    assert not events(job, "checkpoint")


def test_every_so_many_steps(started):
    job = started(checkpoint_every="3 steps", nap_s=0.0, samples=160)
    job.result()
    assert [one["step"] for one in events(job, "checkpoint")] == [3, 6, 9, 10]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
@pytest.mark.parametrize("where", ["before forward", "before backward", "after the step"])
def test_ranks_that_leave_the_loop_alone_are_named(where, strategy):
    with pytest.raises(kd.KaleDistError, match=r"left the loop"):
        broken(where, strategy).result()


def leaving(model, loader, criterion, optimizer, device, args):
    for i, (x, y) in enumerate(loader):
        leaves = i == 5 and kd.context().rank
        if leaves and args == "before forward":
            break
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if leaves and args == "before backward":
            break
        loss.backward()
        optimizer.step()
        if leaves:
            break
    return {"loss": 0.0}


def broken(where, strategy):
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(160, 4), torch.randint(2, (160,))), 8)
    return kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), leaving, train_args=where,
        number_of_processes=2, strategy=strategy, checkpoint_every="1 steps", stall_timeout_s=20.0,
    )  # fmt: skip


def failing_later(model, loader, criterion, optimizer, device, args):
    if not optimizer.state:
        return unhurried(model, loader, criterion, optimizer, device, args)
    raise ValueError("failed")


def test_an_error_waits_for_the_checkpoint_that_is_being_written():
    model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 4000), nn.Linear(4000, 2))
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(2, (8,))), 8)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), failing_later, epochs=2,
        train_args={"nap_s": 0.0}, number_of_processes=1, threads=1, checkpoint_every=1,
    )  # fmt: skip
    assert "failed" in str(job.exception(60))
    assert checkpoint.read(records.files(job.name).checkpoint).epoch == 1
    job.delete()
