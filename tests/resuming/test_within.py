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
from tests.resuming.steps import CASES, FALLS_BACK, STEERS

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


def train(
    step, fatal, *, calls=12, workers=0, make=net, every="3 steps", ranks=2, loader=None, schedule=None, **options
):
    """Train, and lose the rank `fatal` after `calls` and some batches; returns what has to be equal, and what the log says about the restart."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader if loader is not None else DataLoader(Noisy(96), batch_size=4, shuffle=True, num_workers=workers)
    if schedule is not None:
        options["scheduler"] = schedule(optimizer)
        options["train_args"] = {"scheduler": options["scheduler"]}
    criterion = options.pop("kind", Fatal)(fatal, calls + 9)
    job = kd.distribute(
        model, loader, criterion, optimizer, step, epochs=3, seed=3, number_of_processes=ranks, threads=1,
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


def is_equal(expected, found):
    """Whether weights and optimizer are equal to the last bit."""
    (weights, optimizer), (others, another) = expected, found
    return optimizer == another and all(torch.equal(others[name], value) for name, value in weights.items())


def check(expected, found):
    assert found[0] == expected[0]
    assert is_equal(expected[1:], found[1:])


DEFAULT = {"running_loss"}
"""Cases of the gate; `make nightly` runs all."""


def each(names):
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("name", each(CASES))
def test_a_rank_is_killed_within_an_epoch(name):
    step, outcome, options = CASES[name]
    options = dict(options)
    says = options.pop("says", outcome == FALLS_BACK)
    expected, _, _ = train(step, -1, **options)
    found, attempt, log = train(step, 1, **options)
    assert attempt == 1
    (resumed,) = [line for line in log if "the training resumes" in line]
    said = [line for line in log if "no checkpoint can be written" in line]
    assert ("in epoch 2, after" in resumed, bool(said)) == (outcome != FALLS_BACK, says), log
    if outcome == FALLS_BACK:
        check(expected, found)
        return
    # The row of the epoch says from which batch on its numbers are; all others are of whole epochs.
    marked = [row for row in found[0] if row.get("from_batch")]
    assert [(row["epoch"], row["source"]) for row in marked] == [(2, "train")]
    begins_again = f"batches from {marked[0]['from_batch']} on, and its own variables begin again"
    assert [line for line in log if begins_again in line], log
    assert is_equal(expected[1:], found[1:]) == (outcome != STEERS)


class Centred(Fatal):
    """Takes a moving average of each rank's own outputs from them."""

    def __init__(self, rank, call):
        super().__init__(rank, call)
        self.register_buffer("center", torch.zeros(2))

    def forward(self, outputs, targets):
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return super().forward(outputs - self.center, targets)


def test_a_buffer_of_the_criterion_that_is_each_ranks_own_resumes():
    step, _, _ = CASES["running_loss"]
    expected, _, _ = train(step, -1, kind=Centred)
    found, attempt, log = train(step, 1, kind=Centred)
    assert attempt == 1
    assert [line for line in log if "the training resumes in epoch 2, after" in line], log
    assert is_equal(expected[1:], found[1:])


class Stream(torch.utils.data.IterableDataset):
    """Items in an order and with noise from the generators that code may share."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        numbers = list(range(96))[info.id :: info.num_workers] if info else list(range(96))
        random.shuffle(numbers)
        for number in numbers:
            x = torch.full((4,), float(number)) / 96 + 0.1 * torch.rand(4)
            yield x, int(number > 40)


def several(size=96, batch=4, **options):
    return lambda: DataLoader(Noisy(size), batch_size=batch, shuffle=True, **options)


def of_batches():
    sampler = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(96)), 4, drop_last=False)
    return DataLoader(Noisy(96), batch_sampler=sampler)


class WithoutLength(torch.utils.data.Sampler):
    def __iter__(self):
        yield from torch.randperm(96).tolist()


READY_MADE = {
    "a sampler without a length": {"loader": lambda: DataLoader(Noisy(96), 4, sampler=WithoutLength())},
    "plain": {},
    "two workers": {"loader": several(num_workers=2)},
    "persistent workers": {"loader": several(num_workers=2, persistent_workers=True)},
    "the generator of the loader": {
        "loader": lambda: DataLoader(Noisy(96), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    },
    "accumulate": {"loader": several(size=94), "accumulate": 3, "every": "1 steps"},
    "accumulate with workers": {"loader": several(size=94, num_workers=1), "accumulate": 3, "every": "1 steps"},
    "bf16 and clipping": {"precision": "bf16", "clip_norm": 0.5},
    "averages and the best": {"callbacks": [kd.callbacks.EMA(0.9), kd.callbacks.ModelCheckpoint("train/loss")]},
    "batch sampler": {"loader": of_batches},
    "not sharded": {"shard": False, "calls": 24},
    "split batches": {"split_batches": True, "calls": 24},
    "a stream": {"loader": lambda: DataLoader(Stream(), batch_size=4)},
    "a stream with workers": {"loader": lambda: DataLoader(Stream(), batch_size=4, num_workers=2)},
    "a stream on one rank": {"loader": lambda: DataLoader(Stream(), batch_size=4), "ranks": 1, "calls": 24, "lost": 0},
    "rank 0 is lost": {"lost": 0},
    "fsdp": {"strategy": "fsdp"},
    "PowerSGD": {"strategy": kd.strategies.DDP(compress="powersgd")},
    "local SGD": {"strategy": kd.strategies.LocalSGD(sync_every=2)},
    "a sync parameter server": {"strategy": kd.strategies.ParameterServer(mode="sync"), "ranks": 3},
    "tensor": {"strategy": "tensor", "calls": 24},
}


@pytest.mark.filterwarnings("ignore:.*share 2 cores")
@pytest.mark.parametrize("name", each(READY_MADE))
def test_the_ready_made_step_goes_on_within_an_epoch(name):
    options = dict(READY_MADE[name])
    lost, make_loader = options.pop("lost", 1), options.pop("loader", several())
    expected, _, _ = train(None, -1, loader=make_loader(), **options)
    found, attempt, log = train(None, lost, loader=make_loader(), **options)
    assert attempt == 1
    assert [line for line in log if "resumes in epoch 2, after" in line], log
    assert not [line for line in log if "another order" in line or "could not be set" in line]
    check(expected, found)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=36)


def per_batch(model, loader, criterion, optimizer, device, args):
    total = rates = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        args["scheduler"].step()
        total += loss.item()
        rates += optimizer.param_groups[0]["lr"]
    return {"loss": total, "rates": rates}


@pytest.mark.nightly
def test_a_one_cycle_scheduler_of_batches_goes_on_within_an_epoch():
    expected, _, _ = train(per_batch, -1, schedule=one_cycle)
    found, attempt, log = train(per_batch, 1, schedule=one_cycle)
    assert attempt == 1
    assert [line for line in log if "resumes in epoch 2, after" in line], log
    assert is_equal(expected[1:], found[1:])


def counting(model, loader, criterion, optimizer, device, args):
    batches = samples = 0
    whole = len(loader), len(loader.dataset), len(loader.sampler)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        batches, samples = batches + 1, samples + len(x)
    return {"batches": batches, "samples": samples, **dict(zip(("length", "size", "drawn"), whole, strict=True))}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="two ranks"),
        pytest.param({"ranks": 1, "calls": 24, "lost": 0}, id="one rank"),
        pytest.param({"shard": False, "calls": 24}, id="not sharded"),
    ],
)
def test_lengths_are_those_of_what_is_left(options):
    """A mean that a step makes by `len(loader)` or `len(loader.dataset)` is that of the batches it got."""
    options = dict(options)
    (rows, _, _), _, _ = train(counting, options.pop("lost", 1), loader=several(size=94)(), **options)
    first, resumed, last = (row for row in rows if row["source"] == "train")
    assert resumed["from_batch"] > 1
    assert resumed["batches"] == first["batches"] - resumed["from_batch"] + 1
    for row in (first, resumed, last):
        assert row["length"] == row["batches"]
        if "shard" not in options:
            assert row["size"] == row["drawn"] == row["samples"]
    assert (last["batches"], last["samples"]) == (first["batches"], first["samples"])
