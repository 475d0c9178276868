"""A checkpoint that is being written beside the training when its ranks raise."""

import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.job import records
from kale_dist.worker.training import checkpoint


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
        assert checkpoint.read(records.files(job.name).checkpoint).resume.steps == 4
    finally:
        job.delete()
