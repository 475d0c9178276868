"""Small trainings that many tests use: their data, a net, a step, and the first four arguments of `distribute`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def labelled(samples=20, features=3):
    """Random numbers, and whether each row's sum is above 0. Equal in each call, in all processes."""
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def sums(samples=64, features=4):
    """Random numbers, and each row's sum, which a Linear learns within a few epochs."""
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def net(features=3, hidden=0):
    """A classifier of two classes, with equal weights in each call."""
    torch.manual_seed(2)
    if hidden:
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    return nn.Linear(features, 2)


def classifying(samples=20, features=3, *, hidden=0, batch_size=5, lr=0.1):
    """Model, loader, criterion and optimizer that learn `labelled`."""
    model = net(features, hidden)
    loader = DataLoader(labelled(samples, features), batch_size)
    return model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=lr)


def summing(samples=64, features=4, *, model=None, batch_size=8, lr=0.1):
    """Model, loader, criterion and optimizer that learn `sums`."""
    torch.manual_seed(2)
    model = nn.Linear(features, 1) if model is None else model
    loader = DataLoader(sums(samples, features), batch_size)
    return model, loader, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=lr)


def train_step(model, data_loader, criterion, optimizer, device, args):
    """The step of every tutorial."""
    total = 0.0
    for inputs, targets in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return {"loss": total / len(data_loader)}


def fit(model=None, loader=None, optimizer=None, **options):
    """Train in this rank, without a job."""
    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.settings import Training

    model = model or net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("criterion", nn.CrossEntropyLoss())
    loader = DataLoader(labelled(21), 4) if loader is None else loader
    return train(Training(model=model, train_data_loader=loader, optimizer=optimizer, **options))
