"""A training with everything that is monitored, for tests in containers and in pods."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd


def train(on, lr=0.1, **options):
    """Train a small model with two processes, and evaluate it."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return kd.distribute(
        model, loader, nn.CrossEntropyLoss(), optimizer, eval_data_loader=loader, number_of_processes=2, seed=1, on=on,
        **options,
    )  # fmt: skip


def series(folder):
    """How many values each series has that TensorBoard finds in a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
