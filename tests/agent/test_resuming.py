"""A training that goes on in another attempt ends as one that nothing has happened to: bit for bit."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import kale_dist as kd
from kale_dist.worker.training import supervised

EPOCHS = 5


class Noisy(Dataset):
    """Samples with noise from every generator that code may share."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002 - the shared one is meant
        return self.x[index] + 0.01 * noise, int(self.x[index].sum() > 0)


class Scaled(nn.Module):
    """A criterion that learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.scale, targets) + (self.scale - 2).pow(2)


def plain(model):
    return lr_scheduler.MultiStepLR(torch.optim.AdamW(model.parameters(), lr=0.01), [1, 2, 3], 0.5)


def of_plateau(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def in_sequence(model):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    first = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], [2])


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.3), nn.Tanh(), nn.LazyLinear(2))


class LossOfRank:
    """A step that kills its rank in the middle of the fourth epoch of the first attempt."""

    def __init__(self, rank):
        self.rank = rank
        self.epochs = 0

    def __call__(self, model, loader, criterion, optimizer, device, args):
        self.epochs += 1
        if kd.context().attempt == 0 and kd.context().rank == self.rank and self.epochs == 4:
            next(iter(loader))
            os.kill(os.getpid(), signal.SIGKILL)
        return supervised.train_epoch(model, loader, criterion, optimizer, device, args)


def train(
    lost, net=dense, scheduling=plain, criterion=nn.CrossEntropyLoss, checkpoint_every=1, generator=False, workers=0
):
    torch.manual_seed(0)
    model, loss = net(), criterion()
    scheduler = scheduling(model)
    optimizer = scheduler.optimizer
    if any(True for _ in loss.parameters()):
        optimizer.add_param_group({"params": list(loss.parameters()), "lr": 0.1})
        scheduler = None
    own = torch.Generator().manual_seed(7) if generator else None
    loader = DataLoader(Noisy(96), batch_size=8, shuffle=True, generator=own, num_workers=workers)
    job = kd.distribute(
        model, loader, loss, optimizer, LossOfRank(lost), eval_data_loader=DataLoader(Noisy(20), batch_size=4),
        scheduler=scheduler, epochs=EPOCHS, seed=3, number_of_processes=2, threads=1, max_restarts=1,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    try:
        result = job.result()
        measured = ("time", "collective_s", "samples_per_s")
        rows = [{name: value for name, value in row.items() if name not in measured} for row in job.metrics]
        return job.status.attempt, result.metrics, rows, job.state_dict(), str(optimizer.state_dict())
    finally:
        job.delete()


@pytest.mark.filterwarnings("ignore:.*Lazy modules are a new feature.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*got its shape:UserWarning")
@pytest.mark.parametrize(
    ("case", "behind"),
    [
        pytest.param({"generator": True}, 3, marks=pytest.mark.nightly),
        ({"checkpoint_every": 2, "scheduling": of_plateau}, 2),
        pytest.param({"scheduling": in_sequence, "workers": 1}, 3, marks=pytest.mark.nightly),
        pytest.param({"criterion": Scaled}, 3, marks=pytest.mark.nightly),
        pytest.param({"checkpoint_every": None}, 0, marks=pytest.mark.nightly),
        pytest.param({"net": lazy}, 3, marks=pytest.mark.nightly),
    ],
)
def test_the_end_is_that_of_an_undisturbed_training(case, behind):
    expected = train(None, **case)
    found = train(1 - behind % 2, **case)
    assert (expected[0], found[0]) == (0, 1)
    assert found[1] == expected[1]
    assert found[2] == expected[2]
    assert [row["epoch"] for row in found[2] if row["source"] == "train"] == list(range(1, EPOCHS + 1))
    assert found[3].keys() == expected[3].keys()
    assert all(torch.equal(found[3][name], value) for name, value in expected[3].items())
    assert found[4] == expected[4]
