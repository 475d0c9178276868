"""Strategies in containers and in pods: equal to one process there, too."""

import pytest
from on_cluster import pods_in
from one_process import MomentumAccumulated, MomentumAccumulatedClipped, compare_in_notebook

import kale_dist as kd
from kale_dist.strategies import FSDP, LocalSGD, Pipeline

pytestmark = pytest.mark.nightly


def test_fsdp_in_containers_equals_one_process(image):
    compare_in_notebook(FSDP(), on=kd.Docker(image=image))


@pytest.mark.parametrize(
    ("strategy", "case_class"),
    [
        (LocalSGD(sync_every=1), MomentumAccumulated),
        (Pipeline(cut=["2"], micro_batches=2), MomentumAccumulatedClipped),
    ],
    ids=["local-sgd", "pipeline"],
)
def test_pods_equal_one_process(make_namespace, strategy, case_class):
    compare_in_notebook(strategy, case_class=case_class, on=pods_in(make_namespace()))
