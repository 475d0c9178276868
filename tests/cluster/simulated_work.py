"""What ranks with simulated GPUs do; pods import it, and have no pytest."""

import time

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd


def slow_step(model, data_loader, criterion, optimizer, device, args):
    for inputs, targets in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        time.sleep(args)
    return {"loss": loss.item(), "gpu": float(device.index), "nccl": float("nccl" in dist.get_backend_config())}


def training():
    """A training, and the weights that one process without a GPU would give it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(6):
        for inputs, targets in DataLoader(data, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(inputs), targets).backward()
            optimizer.step()
    arguments = model, DataLoader(data, 4), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    return (*arguments, slow_step), alone.state_dict()


def device():
    return str(kd.context().device)
