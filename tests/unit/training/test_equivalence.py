"""n ranks are one process with the global batch: in losses and in weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import fit


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def make(samples):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(samples, 6)
    return model, TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def train_step(model, data_loader, criterion, optimizer, device, args):
    total = 0.0
    for x, y in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(data_loader.sampler)


def run_ranks(samples, batch, epochs, accumulate):
    model, data = make(samples)
    loader = DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    losses = []

    def step(*args):
        losses.append(train_step(*args))
        return losses[-1]

    options = {"train_step": step, "epochs": epochs, "accumulate": accumulate}
    result = fit(model, loader, momentum(model.parameters()), **options)
    return result.metrics, [p.detach().clone() for p in model.parameters()]


def run_plain(samples, batch, epochs):
    """Plain PyTorch with the global batch; knows nothing of kale_dist."""
    model, data = make(samples)
    optimizer = momentum(model.parameters())
    loader = DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(3))
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
    return total / samples, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world", "samples", "batch", "accumulate"),
    [
        (2, 64, 8, 1),  # full batches
        (2, 61, 8, 1),  # a ragged end: 7 + 6
        (2, 65, 8, 1),  # one sample for two ranks
        (3, 61, 5, 1),  # one sample for three ranks
        (2, 61, 4, 2),  # accumulation with a ragged end
        (2, 68, 4, 3),  # a last window of three full steps
        (3, 50, 2, 3),
        (1, 61, 8, 1),
        (1, 61, 8, 3),
    ],
)
def test_ranks_equal_one_process(ranks, world, samples, batch, accumulate):
    results = ranks(world, run_ranks, samples, batch, 3, accumulate)
    loss, weights = run_plain(samples, batch * world * accumulate, 3)
    for metrics, own in results:
        for mine, theirs in zip(own, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        if accumulate == 1 and (samples % (batch * world)) % world == 0:
            assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[-1][1], strict=True))
