"""What the tests of this suite run, in ranks and in this process."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

CUDA = os.environ.get("KALE_DIST_GPU_SUITE") == "cuda"
DEVICE = "cuda" if CUDA else "cpu"


def launch(fn, *args, number_of_processes=1, **options):
    """What each rank returns."""
    job = kd.launch(fn, *args, number_of_processes=number_of_processes, cuda=CUDA, on="local", timeout_s=100, **options)
    try:
        return job.results()
    finally:
        job.delete()


def train(*args, number_of_processes=1, **options):
    """A training; returns the result of rank 0."""
    job = kd.distribute(
        *args,
        number_of_processes=number_of_processes,
        cuda=CUDA,
        on="local",
        timeout_s=100,
        stall_timeout_s=60,
        **options,
    )
    try:
        return job.result()
    finally:
        job.delete()


def data(samples=64, features=16, classes=4):
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.randint(0, classes, (samples,), generator=torch.Generator().manual_seed(2)))


def net(features=16, hidden=32, classes=4, dropout=0.0):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, classes))


def plain_loop(model, loader, optimizer, epochs, device=DEVICE):
    """The same training without the library."""
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()


def largest_difference(one, other):
    """Of the floating-point tensors of two states."""
    pairs = ((one[name], other[name]) for name in one)
    return max(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs if a.is_floating_point())


def loader(samples=64, batch=8, **options):
    return DataLoader(data(samples), batch, **options)
