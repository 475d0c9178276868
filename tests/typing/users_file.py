"""What users write, for a type checker: `make lint` checks this file as strictly as the library itself."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.worker.training.result import TrainingResult


def add(one: int, other: int) -> int:
    """A function that every rank runs."""
    kd.report(sum=one + other)
    return one + other + kd.context().rank


def train() -> nn.Module:
    """The call of the README, on a cluster."""
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4)
    job = kd.distribute(
        model,
        loader,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=2,
        number_of_processes=2,
        on=kd.Kubernetes(
            image="registry.example.com/train:1", volumes={"/data": "datasets"}, resources={"memory": "4Gi"}
        ),
    )
    assert_type(job, kd.Job[TrainingResult])
    job.wait(timeout=60.0)
    return job.model


def launch() -> int:
    """The function's own types come through `launch`."""
    job = kd.launch(add, 1, other=2)
    assert_type(job.results(), list[int])
    return job.result()
