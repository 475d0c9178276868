"""A disk that gets full while a checkpoint is written beside the training."""

import resource
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.job import records
from kale_dist.wire import EventKind, decode_json_lines
from kale_dist.worker.training import checkpoint


def filling(model, loader, criterion, optimizer, device, args):
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        file = kd.context().files.checkpoint
        if number == 5 and kd.context().rank == 0:
            while not file.exists():
                time.sleep(0.01)
            # What a full disk does, without privileges.
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size // 2, resource.RLIM_INFINITY))
    return {"loss": 0.0}


def test_the_error_names_the_file_and_the_checkpoint_before_is_whole():
    model = nn.Linear(512, 512)
    loader = DataLoader(TensorDataset(torch.randn(96, 512), torch.randint(512, (96,))), 4)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), filling,
        number_of_processes=2, threads=1, checkpoint_every="4 steps", max_restarts=3,
    )  # fmt: skip
    try:
        files = records.files(job.name)
        said = str(job.exception(120))
        assert str(files.checkpoint) in said
        assert "could not be written; its disk has" in said
        events = decode_json_lines(files.events.read_bytes())
        assert [one["step"] for one in events if one["event"] == EventKind.CHECKPOINT] == [4]
        assert checkpoint.read(files.checkpoint).resume["steps"] == 4
        assert job.state_dict(partial=True).keys() == model.state_dict().keys()
        assert [one.name for one in files.folder.iterdir() if "checkpoint" in one.name] == ["checkpoint"]
        # The disk would be as full for the next attempt.
        assert job.status.attempt == 0
    finally:
        job.delete()


def raising_on_all(model, loader, criterion, optimizer, device, args):
    save = torch.save

    def slow(*given, **options):
        if threading.current_thread().name == "checkpoint":
            time.sleep(4)
        save(*given, **options)

    torch.save = slow
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if number == 5:
            raise ValueError("bad sample")
    return {"loss": 0.0}


def test_a_checkpoint_that_is_being_written_when_all_ranks_raise_is_finished():
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(96, 4), torch.randint(2, (96,))), 4)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), raising_on_all,
        number_of_processes=2, threads=1, checkpoint_every="4 steps",
    )  # fmt: skip
    try:
        assert "bad sample" in str(job.exception(120))
        assert checkpoint.read(records.files(job.name).checkpoint).resume["steps"] == 4
    finally:
        job.delete()
