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
    stages = Mesh(pipeline=2).layout(3, 6)
    assert (stages.peers, stages.replicas, stages.part) == ((2, 3), (1, 3, 5), "shard 1 of 3, stage 1 of 2")


def test_two_pipelines_equal_one_process_and_send_what_the_formula_says():
    numbers = compare(Mesh(data=2, pipeline=2, micro_batches=3), 4, names=("MomentumAccumulatedClipped",))
    samples, passes, number = 10 * (2 * (4 * 4 + 3) + 1), 10 * 2, 8
    # 10 outputs of the first layer cross the cut and come back as gradients; the output of width 4 goes to stage 0.
    stages = samples * (2 * 10 + 4) * number
    # Each of two ranks writes the gradients of its stage into the memory that they share, once a window.
    gradients = passes * 2 * (6 * 10 + 10 + 10 * 8 + 8 + 8 * 4 + 4) * number
    assert numbers["MomentumAccumulatedClipped"]["bytes_sent"] == stages + gradients


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [4, 6])
def test_pipelines_of_a_language_model_equal_one_process(ranks):
    tied = Mesh(pipeline=2, cut=["norm"], micro_batches=2, activation_checkpointing=True)
    compare(tied, ranks, names=("TiedAdamClippedInStep",))
    compare(Mesh(pipeline=2, micro_batches=2), ranks, names=("LossOfTheModel",))


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


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_compiled_mesh_equals_one_process():
    compare(Mesh(data=2, tensor=2, plan=PLAN, compile=True), 4, names=("Attentive",), cases=ATTENTION)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_compiled_pipelines_equal_one_process():
    compare(Mesh(data=2, pipeline=2, micro_batches=2, compile=True), 4, names=("MomentumAccumulatedClipped",))


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
        (
            lambda: call(Mesh(tensor=4), 4),
            r"body.0 has 10 outputs.*kd.strategies.Mesh\(tensor=4, plan=\{'body.0': 'whole'\}\)",
        ),
        (lambda: call("mesh", 4), r"neither tensor= nor pipeline= is given.*Mesh\(data=2, tensor=2\)"),
        (lambda: call(Mesh(pipeline=2), 3), "pipeline=2 does not divide number_of_processes=3.*number_of_processes=4"),
        (lambda: call(Mesh(data=3, pipeline=2), 4), "data=3 times pipeline=2 is 6"),
        (lambda: call(Mesh(pipeline=2, cut=["head"]), 4), "no module 'head'"),
        (lambda: call(Mesh(pipeline=4), 4), "3 parts that can be told apart, too few for 4 stages"),
        (lambda: Mesh(tensor=2, pipeline=2), "both tensor= and pipeline= are given"),
        (lambda: Mesh(fsdp=2, pipeline=2), "Use data= with pipeline="),
        (lambda: Mesh(tensor=2, micro_batches=2), "micro_batches= is a setting of pipeline="),
        (lambda: Mesh(pipeline=2, plan={"head": "whole"}), "plan= is a setting of tensor="),
        (lambda: Mesh(pipeline=2, cut=["a", "b"]), "cut= makes 3 stages, and pipeline=2"),
        (lambda: Mesh(pipeline=2, micro_batches=0), "micro_batches=0"),
        (lambda: Mesh(data=2, fsdp=2, tensor=2), "both data= and fsdp= are given"),
        (lambda: Mesh(data=2, tensor=1), "tensor=1 is not a whole number of 2 or more"),
        (lambda: Mesh(data=2, tensors=2), "Did you mean 'tensor'"),
    ],
)
def test_sides_that_do_not_fit_are_refused_at_the_call(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
