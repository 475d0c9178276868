"""What a dataset brings along, and what is said of it before a job starts elsewhere."""

import pathlib
import warnings

import pytest
import torch
from fake_backend import FakeBackend
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import kale_dist as kd
from kale_dist import places
from kale_dist.calls import starting
from kale_dist.errors import KaleDistWarning
from kale_dist.snapshot import datasets


class Images(Dataset):
    """Reads a file for each sample."""

    def __init__(self, root):
        self.root = str(root)
        self.samples = [(str(path), 0) for path in sorted(pathlib.Path(root).iterdir())]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.zeros(2), self.samples[index][1]


class Loaded(Dataset):
    """Has read its files already, and remembers where they are."""

    def __init__(self, root):
        self.root = str(root)
        self.data = torch.zeros(3, 2)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.data[index], 0


@pytest.fixture
def folder(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.png").touch()
    return tmp_path


def test_paths_are_found_and_those_on_volumes_are_fine(folder):
    found = datasets.examine(Subset(Images(folder), [0, 1]))
    assert found.paths[0] == str(folder)
    assert str(folder / "b.png") in found.paths
    assert datasets.uncovered(found.paths, [str(folder)]) == []
    assert datasets.uncovered(found.paths, ["/data"]) == list(found.paths)


def test_a_dataset_in_memory_reads_nothing(folder):
    assert datasets.examine(Loaded(folder)) == datasets.DatasetContent(memory_bytes=24)
    assert datasets.examine(TensorDataset(torch.zeros(10, 4), torch.zeros(10))).memory_bytes == 200


def test_odd_datasets_are_looked_through():
    class Odd(Dataset):
        def __init__(self):
            self.itself = self
            self.text = "a/b" * 5000
            self.nothing = None
            self.name = "\0/"

        def __len__(self):
            raise RuntimeError("unknown")

    assert datasets.examine(Odd()) == datasets.DatasetContent()


def call(loader, **place):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    return kd.distribute(
        model, loader, torch.nn.CrossEntropyLoss(), optimizer, number_of_processes=2, on=kd.Kubernetes(**place)
    )


def test_both_are_said_before_a_job_starts_elsewhere(folder, monkeypatch, tmp_path):
    class Cluster(FakeBackend):
        name = "kubernetes"

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(places, "get", lambda name: Cluster())
    with pytest.warns(KaleDistWarning, match=r"a\.png.*kd\.Kubernetes\(volumes=") as caught:
        call(DataLoader(Images(folder)))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(DataLoader(Images(folder)), volumes={str(folder): "images"})
    monkeypatch.setattr(starting, "_LARGE_BYTES", 1000)
    with pytest.warns(KaleDistWarning, match="0 MB in memory, which are sent to each of 2 pods"):
        call(DataLoader(TensorDataset(torch.zeros(200, 2), torch.zeros(200))))
