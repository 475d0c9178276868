"""Local SGD: what equals one process, what is sent, and what comes back."""

import pytest
import torch
from one_process import MomentumAccumulated, PlainSgd, compare
from strategy_jobs import assert_close_to_ddp, assert_fails, assert_resumes, leave_early

from kale_dist.strategies import LocalSGD

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")
MODEL_BYTES = 8 * (6 * 10 + 10 + 10 * 8 + 8 + 8 * 4 + 4)


CASES = {"PlainSgd": PlainSgd, "MomentumAccumulated": MomentumAccumulated}


@pytest.mark.nightly
def test_an_average_after_every_step_equals_one_process():
    numbers = compare(LocalSGD(sync_every=1), names=tuple(CASES), cases=CASES)
    # Each of 2 ranks sends 2 (n - 1)/n times the model for an average.
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 2 * MODEL_BYTES
    assert numbers["MomentumAccumulated"]["bytes_sent"] == 20 * 2 * MODEL_BYTES


@pytest.mark.nightly
def test_four_ranks_equal_one_process():
    numbers = compare(LocalSGD(sync_every=1), 4, names=tuple(CASES), cases=CASES)
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 4 * 1.5 * MODEL_BYTES


@pytest.mark.nightly
def test_a_lost_rank_resumes_with_its_own_optimizer_and_the_outer_momentum():
    assert_resumes(LocalSGD(sync_every=4, outer="diloco"), 2, lost=1)


@pytest.mark.nightly
def test_ranks_that_take_different_steps_are_told():
    assert_fails(LocalSGD(sync_every=2), 2, leave_early, "have not made the same number of optimizer steps")


@pytest.mark.nightly
def test_digits_reach_the_accuracy_of_ddp():
    found = assert_close_to_ddp({"eight": LocalSGD(), "epoch": LocalSGD(sync_every="epoch")}, 2)
    # 44 steps an epoch: 5 averages and one at the end, or the one alone.
    assert found["eight"][1]["bytes_sent"] == 6 * found["epoch"][1]["bytes_sent"]


@pytest.mark.nightly
def test_digits_reach_the_accuracy_of_ddp_with_diloco():
    assert_close_to_ddp(
        {"diloco": LocalSGD(sync_every="epoch", outer="diloco")}, 2, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)
    )
