"""Two kinds of parallelism at once: equal to one process; sides that do not fit are refused."""

import pytest
import torch
from one_process import compare
from strategy_jobs import call
from test_tensor import ATTENTION, PLAN, PLANNED

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


@pytest.mark.nightly
def test_two_pipelines_equal_one_process_and_send_what_the_formula_says():
    numbers = compare(Mesh(data=2, pipeline=2, micro_batches=3), 4, names=("MomentumAccumulatedClipped",))
    samples, passes, number = 10 * (2 * (4 * 4 + 3) + 1), 10 * 2, 8
    # 10 outputs of the first layer cross the cut and come back as gradients; the output of width 4 goes to stage 0.
    stages = samples * (2 * 10 + 4) * number
    # Each of two ranks writes the gradients of its stage into the memory that they share, once a window.
    gradients = passes * 2 * (6 * 10 + 10 + 10 * 8 + 8 + 8 * 4 + 4) * number
    if torch.cuda.is_available():
        # Ranks with GPUs share no memory, and send numbers of control beside the gradients.
        assert stages + gradients < numbers["MomentumAccumulatedClipped"]["bytes_sent"] < stages + 1.5 * gradients
    else:
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
@pytest.mark.real("Triton")
def test_a_compiled_mesh_equals_one_process():
    compare(Mesh(data=2, tensor=2, plan=PLAN, compile=True), 4, names=("Attentive",), cases=ATTENTION)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.real("Triton")
def test_compiled_pipelines_equal_one_process():
    compare(Mesh(data=2, pipeline=2, micro_batches=2, compile=True), 4, names=("MomentumAccumulatedClipped",))


@pytest.mark.parametrize(
    "make",
    [
        lambda: call(Mesh(tensor=2), 3),
        lambda: call(Mesh(data=2, tensor=2), 6),
        lambda: call(Mesh(fsdp=3, tensor=2), 4),
        lambda: call(Mesh(tensor=4, plan={"body.0": "columns"}), 4),
        lambda: call("mesh", 4),
        lambda: call(Mesh(pipeline=2), 3),
        lambda: call(Mesh(data=3, pipeline=2), 4),
        lambda: call(Mesh(pipeline=2, cut=["head"]), 4),
        lambda: call(Mesh(pipeline=4), 4),
        lambda: Mesh(tensor=2, pipeline=2),
        lambda: Mesh(fsdp=2, pipeline=2),
        lambda: Mesh(tensor=2, micro_batches=2),
        lambda: Mesh(pipeline=2, plan={"head": "whole"}),
        lambda: Mesh(pipeline=2, cut=["a", "b"]),
        lambda: Mesh(pipeline=2, micro_batches=0),
        lambda: Mesh(data=2, fsdp=2, tensor=2),
        lambda: Mesh(data=2, tensor=1),
        lambda: Mesh(data=2, tensors=2),
    ],
)
def test_sides_that_do_not_fit_are_refused_at_the_call(make, refusal):
    assert refusal(make).argument == "strategy"
