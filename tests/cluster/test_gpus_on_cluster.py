"""Jobs with GPUs on a cluster whose nodes promise some that are not there."""

import json

import pytest
import torch
from gpu_work import arguments
from on_cluster import pods_in, run_kubectl

import kale_dist as kd
from kale_dist.calls import training_checks
from kale_dist.errors import JobFailedError

GPU = "kale-dist.test/gpu"


@pytest.fixture(scope="module")
def promised(kubeconfig):
    """A resource that a node says it has, as after the driver of a GPU was lost."""
    node = json.loads(run_kubectl("get", "nodes", "-o", "json"))["items"][0]["metadata"]["name"]

    def patch(op, **value):
        path = f"/{GPU.replace('/', '~1')}"
        operations = [{"op": op, "path": f"/status/{field}{path}", **value} for field in ("capacity", "allocatable")]
        run_kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(operations))

    patch("add", value="2")
    yield
    patch("remove")


@pytest.mark.usefixtures("promised")
def test_gpus_that_are_not_there_end_the_job_with_a_sentence(namespace):
    resources = {"cpu": 0.1, "memory": "1Gi", "gpus": 1, "gpu_resource": GPU}
    job = kd.distribute(
        *arguments(), number_of_processes=1, cuda=True, on=pods_in(namespace, resources=resources, processes_per_pod=1)
    )
    with pytest.raises(JobFailedError, match="built without CUDA"):
        job.result()
    job.delete()


def test_a_model_of_a_gpu_trains_on_the_cpu_where_none_is_asked_for(namespace, monkeypatch, capsys):
    monkeypatch.setattr(training_checks, "gpu_of", lambda _: "cuda:0")
    job = kd.distribute(*arguments(), train_args=torch.device("cuda:0"), number_of_processes=1, on=pods_in(namespace))
    assert job.result().metrics["cpu"] == 1.0
    assert "The model is on cuda:0, and the processes train on the CPU" in capsys.readouterr().err
    job.delete()
