"""Datasets that the notebook cannot build, because only the ranks see their files."""

import pickle
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError, JobFailedError, KaleDistWarning


def only_in_ranks(samples=40):
    if not kd.context().in_job:
        raise FileNotFoundError("/data/train")
    torch.manual_seed(0)
    x = torch.randn(samples, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    data.classes = ["a", "b"]
    return data


def train_step(model, data_loader, criterion, optimizer, device, args):
    assert data_loader.dataset.classes == ["a", "b"]
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return {"samples": len(data_loader.dataset)}


def train(data, **options):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    return kd.distribute(model, loader, torch.nn.MSELoss(), optimizer, train_step, number_of_processes=2, **options)


def test_a_shuffled_loader_of_files_that_the_notebook_does_not_see_trains():
    with pytest.warns(KaleDistWarning, match="cannot be built here .FileNotFoundError: /data/train."):
        job = train(kd.dataset(only_in_ranks), epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.result(120)
    # Of its 40 samples two whole global batches: the dataset that was built decides.
    assert any("train: 32 samples, 2 ranks x 16" in line.text for line in job.logs())
    assert [row["samples"] for row in job.metrics if "samples" in row][:1] == [20]


def test_a_length_that_was_given_is_that_of_the_notebook_and_is_checked_in_the_ranks():
    data = kd.dataset(only_in_ranks, length=41)
    assert (len(data), len(DataLoader(data, batch_size=8))) == (41, 6)
    with pytest.raises(JobFailedError, match="length: it is 41, and the dataset that was built has 40 samples"):
        train(data).result(120)


def test_where_the_files_are_it_is_the_dataset():
    built = []

    def build():
        built.append(1)
        return TensorDataset(torch.arange(4.0))

    data = kd.dataset(build)
    assert (len(data), data[2][0].item(), data.tensors[0].shape) == (4, 2.0, (4,))
    assert len(built) == 1
    copy = pickle.loads(pickle.dumps(kd.dataset(only_in_ranks, length=3)))
    assert len(copy) == 3


def test_what_is_no_dataset_is_refused():
    with pytest.raises(ConfigError, match="Pass a function that makes it"):
        kd.dataset(TensorDataset(torch.zeros(2)))
    with pytest.raises(ConfigError, match="it made a generator"):
        len(kd.dataset(lambda: (one for one in range(3))))
    with pytest.raises(ConfigError, match="length: 0 is not"):
        kd.dataset(only_in_ranks, length=0)
