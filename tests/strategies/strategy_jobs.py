"""Jobs for tests of strategies that do not equal one process: resumed ones, failing ones, and digits."""

import os
import signal

import pytest
import torch
from one_process import WithLoss
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import fit, labelled

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.strategies import DDP
from kale_dist.worker.training import supervised


class _LossOfRank:
    """A step that kills its rank in the middle of the third epoch of the first attempt."""

    def __init__(self, rank):
        self.rank = rank
        self.epochs = 0

    def __call__(self, model, loader, criterion, optimizer, device, args):
        self.epochs += 1
        if kd.context().attempt == 0 and kd.context().rank == self.rank and self.epochs == 3:
            next(iter(loader))
            os.kill(os.getpid(), signal.SIGKILL)
        return supervised.train_epoch(model, loader, criterion, optimizer, device, args)


def trained(strategy, number_of_processes, *, lost=None):
    """Weights, the optimizer's state and the learning rate after four epochs, in the notebook; `lost` is killed in the third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = torch.randn(96, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    job = kd.distribute(
        model, DataLoader(data, 8, shuffle=True), nn.CrossEntropyLoss(), optimizer, _LossOfRank(lost),
        eval_data_loader=DataLoader(data, 8), scheduler=scheduler, epochs=4, seed=3, strategy=strategy,
        number_of_processes=number_of_processes, threads=1, max_restarts=1, on="local",
    )  # fmt: skip
    try:
        job.result()
        assert job.status.attempt == (lost is not None)
        return model.state_dict(), optimizer.state_dict()["state"], optimizer.param_groups[0]["lr"], job.metrics
    finally:
        job.delete()


def assert_resumes(strategy, number_of_processes, lost):
    """A training that lost a rank ends as one that lost none, bit for bit."""
    expected, found = trained(strategy, number_of_processes), trained(strategy, number_of_processes, lost=lost)
    for name, tensor in expected[0].items():
        assert torch.equal(tensor, found[0][name]), name
    for index, state in expected[1].items():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in state.items():
            assert torch.equal(value, found[1][index][name]), (index, name)
    assert expected[2] == found[2]


def _fail(strategy, step):
    fit(loader=DataLoader(labelled(64), 4), train_step=step, strategy=strategy)


def assert_fails(strategy, number_of_processes, step, match):
    """A job with this step fails with these words."""
    job = kd.launch(_fail, strategy, step, number_of_processes=number_of_processes, threads=1)
    try:
        with pytest.raises(JobFailedError) as caught:
            job.result()
        assert match in f"{caught.value} {caught.value.__cause__}"
    finally:
        job.delete()


def leave_early(model, loader, criterion, optimizer, device, args):
    """Rank 0 leaves the loop before the others."""
    for number, (x, y) in enumerate(loader):
        if number == 3 and not kd.context().rank:
            break
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def call(strategy, ranks=2, *, model=None, optimizer=torch.optim.SGD, features=6, **options):
    """A call that is refused before anything starts; `optimizer` gets the model's parameters."""
    model = model or WithLoss()
    loader = DataLoader(TensorDataset(torch.zeros(8, features), torch.zeros(8).long()), 4)
    given = (model, loader, nn.CrossEntropyLoss(), optimizer(model.parameters()))
    return kd.render(*given, strategy=strategy, number_of_processes=ranks, **{"on": "local", **options})


def _digits(strategies, epochs, step, optimizer):
    """Runs in each rank: accuracy and the strategy's numbers of each, by name."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    found = {}
    for name, strategy in strategies.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        own = optimizer(model.parameters())
        loader = DataLoader(
            TensorDataset(x[:1400], y[:1400]), 16, shuffle=True, generator=torch.Generator().manual_seed(2)
        )
        options = {"eval_data_loader": DataLoader(TensorDataset(x[1400:], y[1400:]), 64), "train_step": step}
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, epochs)
        result = fit(model, loader, own, scheduler=scheduler, epochs=epochs, strategy=strategy, **options)
        found[name] = result.metrics.get("eval_accuracy", result.metrics.get("accuracy")), result.strategy
    return found


def momentum(parameters, lr=0.1):
    """SGD as for one batch of 16."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def digits(strategies, number_of_processes, *, epochs=12, step=None, optimizer=momentum):
    """Accuracy on digits, and the strategy's numbers, by name; the same ranks train with each strategy in turn."""
    job = kd.launch(_digits, strategies, epochs, step, optimizer, number_of_processes=number_of_processes, threads=1)
    try:
        return job.results()[0]
    finally:
        job.delete()


def assert_close_to_ddp(strategies, number_of_processes, *, ddp_processes=None, optimizer=momentum, of_ddp=None):
    """Each strategy is at most one point of accuracy below ddp, after as many epochs."""
    ranks = ddp_processes or number_of_processes
    best = digits({"ddp": DDP()}, ranks, optimizer=of_ddp or optimizer)["ddp"][0]
    found = digits(strategies, number_of_processes, optimizer=optimizer)
    print({"ddp": best, **{name: accuracy for name, (accuracy, _) in found.items()}})
    for name, (accuracy, _) in found.items():
        assert accuracy >= best - 0.01, f"{name}: {accuracy:.3f}, ddp: {best:.3f}"
    return found
