"""What pods run in tests of training and of data on claims: they have no pytest."""

import io
import pathlib

import fsspec
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import kale_dist as kd


class WithTable(torch.nn.Linear):
    """A layer with 30 MB beside it, to which each batch adds 1."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("table", torch.arange(7_500_000, dtype=torch.float32))

    def forward(self, x):
        self.table += 1
        return super().forward(x)


class Files(Dataset):
    """A sample in each file of a folder, whose names are read when it is made."""

    def __init__(self, folder):
        self.files = sorted(pathlib.Path(folder).iterdir())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index], weights_only=True)


class Shards(IterableDataset):
    """Samples from files behind a URL; each process, and each worker of its loader, reads its own files."""

    def __init__(self, url):
        self.url = url

    def __iter__(self):
        place, worker = kd.context(), get_worker_info()
        workers = worker.num_workers if worker else 1
        number = place.rank * workers + (worker.id if worker else 0)
        fs, path = fsspec.core.url_to_fs(self.url)
        for file in sorted(fs.glob(path))[number :: place.world_size * workers]:
            print("read", pathlib.PurePath(file).name, flush=True)
            with fs.open(file, "rb") as shard:
                yield from torch.load(io.BytesIO(shard.read()), weights_only=True)


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
