"""Trainings with a bottleneck, on real ranks: each is named right, and a healthy one is told nothing.

A minute is four seconds here, but for one training that is followed to its sentence in log, card and notes.
"""

import json
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import kale_dist as kd
from kale_dist.job import view
from kale_dist.job.handle import inside
from kale_dist.wire import context
from kale_dist.wire.events import Event
from kale_dist.worker.agent import bottlenecks
from kale_dist.worker.agent.bottlenecks import Bottlenecks, Spent

pytestmark = pytest.mark.nightly


class Slow(Dataset):
    """Reads a sample in a millisecond."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((16,), float(index % 3)), index % 3


def rows(count):
    return TensorDataset(torch.randn(count, 16), torch.randint(3, (count,)))


def at_work(model, data_loader, criterion, optimizer, device, args):
    """Compute for 10 ms a batch, in the last rank for as much longer as `args` says."""
    for x, y in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        time.sleep(0.01 + args * (context.context().rank == context.context().world_size - 1))
        loss.backward()
        optimizer.step()
    return {"loss": 0.0}


def training(data, batch_size, width=16, train_step=None, **options):
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    loader = DataLoader(data, batch_size=batch_size)
    given = model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01), train_step
    return kd.distribute(*given, number_of_processes=2, threads=1, epochs=100_000, **options)


def sent(job):
    """The last progress of each rank."""
    found = json.loads(inside(job).files.progress.read_text())
    return {int(rank): one for rank, one in found.items() if rank.isdigit()}


def named(job, monkeypatch):
    """The first sentence on a training within four of its minutes; empty if there is none."""
    monkeypatch.setattr(bottlenecks, "HALF_S", 2.0)
    found, said = Bottlenecks(), ""
    try:
        while not (job.status.fraction and len(sent(job)) == 2):
            time.sleep(0.1)
        end = time.monotonic() + 16
        while time.monotonic() < end and not said:
            for rank, record in sent(job).items():
                if (spent := Spent.of(Event.read(record).what)) is not None:
                    found.take(rank, spent)
            said = found.sentence()
            time.sleep(0.3)
        return said
    finally:
        job.cancel()
        job.wait()
        job.delete()


EXCHANGED = kd.strategies.DDP(exchange="torch")
STAGED = {
    "slow loader": (lambda: training(Slow(), 16), "Ranks wait "),
    "uneven ranks": (lambda: training(rows(4000), 8, train_step=at_work, train_args=0.02), "Rank 1 is the slowest"),
    "tiny batch": (lambda: training(rows(20_000), 1, strategy=EXCHANGED), "Try larger batches"),
    "exchange": (lambda: training(rows(4000), 4, width=3000, strategy=EXCHANGED), "Try accumulate="),
    "checkpoint": (lambda: training(rows(64), 32, width=1500, checkpoint_every=1), "Checkpoints take"),
    "healthy": (lambda: training(rows(4000), 8, train_step=at_work, train_args=0.0), ""),
}


@pytest.mark.parametrize("stage", STAGED)
def test_a_bottleneck_is_named_right(stage, monkeypatch):
    start, sentence = STAGED[stage]
    if stage in ("tiny batch", "exchange"):
        # How much of a batch's time these take, and how long, differs from machine to machine, and with their load.
        monkeypatch.setattr(bottlenecks, "EXCHANGE", 0.2)
        monkeypatch.setattr(bottlenecks, "_LATENCY_S", 0.025)
    said = named(start(), monkeypatch)
    assert sentence in said
    assert bool(sentence) == bool(said), said


def test_the_sentence_is_in_log_card_and_notes_after_a_minute():
    job = training(Slow(), 16)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and not any("for data" in note for note in job.status.notes):
            time.sleep(0.5)
        took_s = time.time() - job.status.started
        (note,) = [note for note in job.status.notes if "for data" in note]
        assert "num_workers=0" in note
        assert took_s > 2 * bottlenecks.HALF_S
        assert note in view.html(job.status)
    finally:
        job.cancel()
        job.wait()
    assert any(note in line.text for line in job.logs())
    # The last moment before the end may know nothing of it.
    assert [row["data_percent"] for row in job.usage if "data_percent" in row][-1] > 30
    job.delete()
