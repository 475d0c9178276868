"""A training whose ranks make the model, in two containers or pods with a volume, and the same in this process."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader
from trainings import sums

import kale_dist as kd


def make(features=4):
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def train(on, ranks, epochs, *, model=make, lr=0.01, **options):
    """Two ranks have half of what one has of each batch."""
    return kd.distribute(
        model, DataLoader(sums(), batch_size=16 // ranks), nn.MSELoss(), functools.partial(torch.optim.Adam, lr=lr),
        seed=7, epochs=epochs, number_of_processes=ranks, on=on, **options,
    )  # fmt: skip


def continue_in_parts(on, save_to):
    """Train in parts, continue from the job with another number of ranks; returns both jobs, which have succeeded."""
    job = train(on, 2, 2, strategy="fsdp", save_to=save_to)
    assert job.wait(240).state == "succeeded", job.status.reason
    more = train(on, 1, 3, strategy="fsdp", save_to=save_to, resume_from=job)
    assert more.wait(240).state == "succeeded", more.status.reason
    return job, more


def assert_learned_as_one_process(model):
    expected = train("local", 1, 3, strategy="ddp").model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-4)
