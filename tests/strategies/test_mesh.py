"""Two kinds of parallelism at once: equal to one process; sides that do not fit are refused."""

import pytest
import torch
from one_process import WithLoss, compare
from test_tensor import ATTENTION, PLAN, PLANNED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError
from kale_dist.strategies import Mesh

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


def test_ranks_form_a_table():
    mesh = Mesh(data=2, tensor=3)
    assert [mesh.layout(rank, 6).peers for rank in (0, 2, 3)] == [(0, 1, 2), (0, 1, 2), (3, 4, 5)]
    assert [mesh.layout(rank, 6).shard for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert mesh.layout(4, 6).replicas == (1, 4)
    assert Mesh(fsdp=2, tensor=3).layout(4, 6).replicas == (4,)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        Mesh(data=2, tensor=2),
        Mesh(data=2, tensor=2, plan=PLAN, activation_checkpointing=True),
        Mesh(fsdp=2, tensor=2),
        Mesh(fsdp=2, tensor=2, plan=PLAN),
    ],
    ids=repr,
)
def test_four_ranks_equal_one_process(strategy):
    compare(strategy, number_of_processes=4, names=PLANNED, cases=ATTENTION)


def call(strategy, processes):
    """A call that is refused before anything starts."""
    model = WithLoss()
    data = TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return kd.distribute(
        model,
        DataLoader(data, 4),
        nn.CrossEntropyLoss(),
        optimizer,
        strategy=strategy,
        number_of_processes=processes,
        on="local",
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: call(Mesh(tensor=2), 3), "tensor=2 does not divide number_of_processes=3.*number_of_processes=4"),
        (lambda: call(Mesh(data=2, tensor=2), 6), "data=2 times tensor=2 is 4.*number_of_processes=4, or data=3"),
        (lambda: call(Mesh(fsdp=3, tensor=2), 4), "fsdp=3 times tensor=2 is 6"),
        (lambda: call(Mesh(tensor=4), 4), "body.0 has 10 outputs"),
        (lambda: call("mesh", 4), r"tensor= is not given.*Mesh\(data=2, tensor=2\)"),
        (lambda: Mesh(data=2, fsdp=2, tensor=2), "both data= and fsdp= are given"),
        (lambda: Mesh(data=2, tensor=1), "tensor=1 is not a whole number of 2 or more"),
        (lambda: Mesh(data=2, tensors=2), "Did you mean 'tensor'"),
    ],
)
def test_sides_that_do_not_fit_are_refused_at_the_call(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
