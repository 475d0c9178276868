"""How much memory a rank takes that holds a part of a model that no process has whole."""

import pathlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")]

LAYERS, WIDTH = 64, 1024
STATES_BYTES = 4 * 4 * LAYERS * WIDTH**2
"""Weights, gradients and Adam's two states."""


def memory(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.real("memory of a process")
def test_a_rank_of_four_takes_at_most_40_percent_of_the_states():
    before = {}

    def make():
        before["bytes"] = memory("VmRSS")
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        # Of the first epoch's checkpoint, too.
        return {f"rank {kd.context().rank}": memory("VmHWM") - before["bytes"]}

    loader = DataLoader(TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH)), batch_size=1)
    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731
    job = kd.distribute(
        make, loader, nn.MSELoss(), adam, step, epochs=2, strategy="fsdp", number_of_processes=4, threads=1
    )
    largest = job.result().metrics
    assert len(largest) == 4
    assert max(largest.values()) <= 0.4 * STATES_BYTES, largest
