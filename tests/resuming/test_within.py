"""A training of which a rank is killed within an epoch ends as one that nothing has happened to: bit for bit."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kale_dist as kd
from kale_dist.worker.training import checkpoint
from tests.resuming.steps import CASES, EXACT

CALLS = [0]


class Noisy(Dataset):
    """Samples with noise from every generator that code may share."""

    def __init__(self, size):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002 - the shared one is meant
        return self.x[index] + 0.01 * noise, int(self.x[index].sum() > 0)


class Fatal(nn.CrossEntropyLoss):
    """A criterion that kills its rank in a call, once there is a checkpoint."""

    def __init__(self, rank, call):
        super().__init__()
        self.fatal = (rank, call)

    def forward(self, outputs, targets):
        CALLS[0] += 1
        place = kd.context()
        if place.attempt == 0 and (place.rank, CALLS[0]) == self.fatal:
            # The files are written beside the training; the other rank waits for this one.
            for _ in range(100):
                time.sleep(0.02)
                if place.files.checkpoint.exists() and checkpoint.read(place.files.checkpoint).epoch:
                    break
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(outputs, targets)


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def train(step, fatal, *, calls=12, workers=0, make=net, every="3 steps", ranks=2, loader=None, **options):
    """Train, and lose the rank `fatal` after `calls` and some batches; returns what has to be equal, and what the log says about the restart."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader or DataLoader(Noisy(96), batch_size=4, shuffle=True, num_workers=workers)
    job = kd.distribute(
        model, loader, Fatal(fatal, calls + 9), optimizer, step, epochs=3, seed=3, number_of_processes=ranks, threads=1,
        max_restarts=1, checkpoint_every=every, **options,
    )  # fmt: skip
    try:
        job.result()
        measured = ("time", "collective_s", "samples_per_s", "bytes_sent")
        rows = [{name: value for name, value in row.items() if name not in measured} for row in job.metrics]
        log = [line.text for line in job.logs()]
        return (rows, job.state_dict(), str(optimizer.state_dict())), job.status.attempt, log
    finally:
        job.delete()


def check(expected, found):
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_killed_within_an_epoch(name):
    step, outcome, options = CASES[name]
    options = dict(options)
    says = options.pop("says", outcome != EXACT)
    expected, _, _ = train(step, -1, **options)
    found, attempt, log = train(step, 1, **options)
    assert attempt == 1
    (resumed,) = [line for line in log if "the training resumes" in line]
    said = [line for line in log if "no checkpoint can be written" in line]
    assert ("in epoch 2, after" in resumed, bool(said)) == (outcome == EXACT, says), log
    assert not [line for line in log if "another order" in line or "could not be set" in line]
    check(expected, found)
