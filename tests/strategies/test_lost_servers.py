"""Parameter servers that lose a rank: a server with a backup costs nothing, a worker of asynchronous ones its share."""

import contextlib
import os
import pathlib
import signal
import socket
import time

import pytest
import torch
from one_process import MomentumAccumulatedClipped, PlainSgd, compare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.strategies import ParameterServer
from kale_dist.wire import RankStateName, StateName

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")
PRIMARY, BACKUP = 2, 3
"""Of two workers."""


def die(rank, attempt=0, unseen_s=0.0):
    """Kill this process as the kernel does when memory ran out, if it is this rank; its connections end `unseen_s` before."""
    place = kd.context()
    if place.in_job and place.rank == rank and place.attempt <= attempt:
        if unseen_s:
            cut_connections()
            time.sleep(unseen_s)
        os.kill(os.getpid(), signal.SIGKILL)


def cut_connections():
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as one:
            if one.family == socket.AF_INET and one.getpeername():  # gloo aborts if its listener ends
                one.shutdown(socket.SHUT_RDWR)


class DyingSGD(torch.optim.SGD):
    """Kills the given ranks in the middle of one of their steps: between the gradients and the answer."""

    def __init__(self, parameters, deaths, **options):
        super().__init__(parameters, **options)
        self.deaths = deaths
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for rank, step in self.deaths:
            if self.steps == step:
                die(rank)
        return super().step(closure)


class _Dying(MomentumAccumulatedClipped):
    """20 steps of the optimizer, two an epoch."""

    deaths = ()

    def optimizer(self, model):
        return DyingSGD(model.parameters(), self.deaths, lr=0.1, momentum=0.9, weight_decay=1e-3)


class PrimaryDies(_Dying):
    deaths = ((PRIMARY, 8),)


class BackupDies(_Dying):
    deaths = ((BACKUP, 7),)


class EachDies(_Dying):
    """Of two servers: the primary of one, and the backup of the other, later."""

    deaths = ((2, 3), (5, 12))


@pytest.mark.parametrize("case", [PrimaryDies, pytest.param(BackupDies, marks=pytest.mark.nightly)])
def test_a_lost_server_costs_nothing(case):
    compare(ParameterServer(backup=True), 4, names=("Dying",), cases={"Dying": case})


@pytest.mark.nightly
def test_with_backups_twice_as_many_bytes_are_sent():
    strategy, cases = ParameterServer(backup=True), {"PlainSgd": PlainSgd}
    once = compare(ParameterServer(), 3, names=("PlainSgd",), cases=cases)["PlainSgd"]["bytes_sent"]
    assert compare(strategy, 4, names=("PlainSgd",), cases=cases)["PlainSgd"]["bytes_sent"] == 2 * once


@pytest.mark.nightly
def test_of_each_server_one_is_enough():
    compare(ParameterServer(servers=2, backup=True), 6, names=("Dying",), cases={"Dying": EachDies})


class Step:
    """One epoch; in the second one of the first attempt a worker dies."""

    def __init__(self, lost=None, unseen_s=0.0):
        self.lost, self.unseen_s = lost, unseen_s
        self.epochs = 0

    def __call__(self, model, loader, criterion, optimizer, device, args):
        self.epochs += 1
        if self.epochs == 2 and self.unseen_s:
            die(self.lost, unseen_s=self.unseen_s)
        total = 0.0
        for number, (x, y) in enumerate(loader):
            if self.epochs == 2 and number == 1 and self.lost is not None:
                die(self.lost)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        return {"loss": total / len(loader.dataset), "samples": len(loader.dataset)}


class Scaled(nn.Linear):
    """A layer with a constant table, which no average may change."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("table", torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return super().forward(x) * self.table


def train(strategy, processes, deaths=(), lost=None, unseen_s=0.0):
    """A job that has ended: 4 epochs of 48 samples in batches of 4 a worker, evaluated on 12."""
    torch.manual_seed(0)
    model = Scaled()
    x = torch.randn(60, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    first, last = torch.utils.data.Subset(data, range(48)), torch.utils.data.Subset(data, range(48, 60))
    job = kd.distribute(
        model, DataLoader(first, 4, shuffle=True), nn.CrossEntropyLoss(),
        DyingSGD(model.parameters(), deaths, lr=0.1, momentum=0.9), Step(lost, unseen_s), eval_data_loader=DataLoader(last, 4),
        epochs=4, seed=3, strategy=strategy, number_of_processes=processes, threads=1, max_restarts=1, on="local",
        checkpoint_every=1,
    )  # fmt: skip
    job.wait()
    return job


def states(job):
    return [replica.state for replica in job.status.replicas]


def lines(job):
    return "\n".join(line.text for line in job.logs())


@pytest.mark.nightly
def test_a_worker_of_asynchronous_servers_may_be_lost():
    job = train(ParameterServer(mode="async"), 4, lost=1)
    try:
        log = lines(job)
        assert (job.status.state, job.status.attempt) == (StateName.SUCCEEDED, 0), log
        done = RankStateName.SUCCEEDED
        assert states(job) == [done, RankStateName.LOST, done, done]
        assert "Rank 1 was killed by SIGKILL" in log
        assert "The other ranks carry on without it" in log
        assert "What was left of its share of this epoch's data is not used" in log
        # Two thirds of the data, or all of it on two ranks, are half of it on each.
        assert "train: 48 samples, 3 ranks x 16" in log
        assert "train: 48 samples, 2 ranks x 24" in log
        result = job.result()
        assert result.metrics["samples"] == 24
        assert result.metrics["loss"] < 0.5
        assert job.state_dict()["table"].tolist() == [1.0, 2.0]
        assert [type(one).__name__ for one in job.results()] == ["TrainingResult", "NoneType", *["TrainingResult"] * 2]
        assert all(torch.equal(value, job.state_dict()[name]) for name, value in job.model.state_dict().items())
    finally:
        job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("unseen_s", [0.0, 0.1])
def test_rank_0_ends_the_attempt_and_the_job_resumes(unseen_s):
    """Also where the others' errors, that they miss it, are told before its end."""
    job = train(ParameterServer(mode="async"), 3, lost=0, unseen_s=unseen_s)
    try:
        assert (job.status.state, job.status.attempt) == (StateName.SUCCEEDED, 1), lines(job)
        assert "resumes after epoch 1" in lines(job)
    finally:
        job.delete()


@pytest.mark.nightly
def test_a_server_and_its_backup_lost_resumes_from_the_checkpoint():
    expected = train(ParameterServer(backup=True), 4)
    job = train(ParameterServer(backup=True), 4, deaths=((PRIMARY, 9), (BACKUP, 15)))
    try:
        log = lines(job)
        assert (job.status.state, job.status.attempt) == (StateName.SUCCEEDED, 1), log
        assert "Rank 2, a server, was lost. Rank 3 has the same weights" in log
        assert "Rank 3 was killed by SIGKILL" in log
        assert "Lost before: rank 2" in log
        assert "resumes after epoch 2" in log
        assert states(job) == [RankStateName.SUCCEEDED] * 4
        found = job.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    finally:
        expected.delete()
        job.delete()
