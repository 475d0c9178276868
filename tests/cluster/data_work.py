"""What pods run in tests of data on claims: they have no pytest."""

import pathlib

import torch
from torch.utils.data import Dataset


class Files(Dataset):
    """A sample in each file of a folder, whose names are read when it is made."""

    def __init__(self, folder):
        self.files = sorted(pathlib.Path(folder).iterdir())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index], weights_only=True)


def write(folder, count):
    pathlib.Path(folder).mkdir()
    for number in range(count):
        x = torch.randn(3)
        torch.save((x, x.sum(0, keepdim=True)), pathlib.Path(folder, f"{number:03}.pt"))


def train_step(model, data_loader, criterion, optimizer, device, args):
    try:
        pathlib.Path("/data/new").touch()
    except OSError as error:
        assert "Read-only" in str(error)  # noqa: PT017 - pods have no pytest
    else:
        raise AssertionError("the volume is not read-only")
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
