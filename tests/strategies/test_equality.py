"""Strategies that promise it train as one process does: 50 steps in float64, see one_process.py."""

import pytest
from one_process import compare, compare_in_notebook

from kale_dist.strategies import DDP

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")
EXACT = [
    DDP(),
    DDP(exchange="torch", bucket_mib=1e-5),
    DDP(exchange="ring", bucket_mib=1e-3),
    DDP(exchange="driver"),
]


RICHEST = ("MomentumAccumulatedClipped", "TiedAdamClippedInStep")


def test_two_ranks_equal_one_process():
    compare(DDP(), names=RICHEST)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", EXACT, ids=repr)
def test_two_ranks_equal_one_process_by_any_exchange(strategy):
    compare(strategy)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", EXACT, ids=repr)
def test_four_ranks_equal_one_process(strategy):
    compare(strategy, number_of_processes=4)


@pytest.mark.parametrize("strategy", [DDP()], ids=repr)
def test_the_notebooks_own_objects_come_back_equal(strategy):
    compare_in_notebook(strategy)
