"""Jobs with GPUs on a cluster, whose pods have simulated ones (tests/simcuda): the node has four `nvidia.com/gpu` by name."""

import os
import shutil

import pytest
import simulated_gpus
import torch
from on_cluster import IMAGE, pods_in, run_kubectl, wait_for
from simulated_work import device, training

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.wire import StateName

PROBLEM = simulated_gpus.why_not()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(PROBLEM) and "KALE_DIST_REQUIRE_SIMCUDA" not in os.environ, reason=PROBLEM),
]


@pytest.fixture(scope="module")
def image(kubeconfig, tmp_path_factory):
    """The tests' image with a GPU in it."""
    docker = pytest.importorskip("docker")
    assert not PROBLEM, PROBLEM
    folder = tmp_path_factory.mktemp("simulated")
    shutil.copytree(simulated_gpus.build(), folder / "simulation")
    (folder / "Dockerfile").write_text(
        f"FROM {IMAGE}\nCOPY simulation /opt/simulation\n"
        "RUN cp -r /opt/simulation/* $(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')\n"
        "ENV SIMCUDA_DEVICES=1\n"
    )
    name = "localhost:5000/kale-dist-tests/simulated-gpus:1"
    engine = docker.from_env()
    engine.images.build(path=str(folder), tag=name, rm=True)
    for line in engine.images.push(name, stream=True, decode=True):
        assert "error" not in line, line
    engine.close()
    return name


def test_two_pods_with_a_gpu_each_train_by_nccls_rules_and_survive_the_loss_of_one(namespace, image, jobs):
    on = pods_in(namespace, image=image, resources={"cpu": 0.1, "memory": "1Gi", "gpus": 1}, processes_per_pod=1)
    arguments, expected = training()
    job = kd.distribute(
        *arguments, train_args=0.3, epochs=6, number_of_processes=2, cuda=True, max_restarts=1, threads=1, on=on
    )
    jobs.append(job)
    wait_for(job, lambda status: (status.checkpoint_epoch or 0) >= 2)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false", "--grace-period=0", "--force")
    assert job.wait(200).state is StateName.SUCCEEDED, (job.status, [str(line) for line in job.logs()])
    result = job.result()
    assert job.status.attempt == 1
    assert (result.metrics["gpu"], result.metrics["nccl"]) == (0.0, 1.0)
    for name, value in expected.items():
        torch.testing.assert_close(result.model_state[name], value)


@pytest.mark.parametrize(
    ("environment", "processes_per_pod", "sentence"),
    [
        ({"SIMCUDA_DEVICES": "0"}, 1, "built without CUDA"),
        ({}, 2, "2 processes need 2 GPUs here, and torch sees 1"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 1, "torch sees no GPU here: No CUDA GPUs are available"),
    ],
)
def test_a_pod_with_too_few_gpus_says_how_many_it_sees(
    namespace, image, environment, processes_per_pod, sentence, jobs
):
    resources = {"cpu": 0.1, "memory": "1Gi", "gpus": 1}
    on = pods_in(namespace, image=image, resources=resources, processes_per_pod=processes_per_pod)
    job = kd.launch(device, number_of_processes=processes_per_pod, cuda=True, environment=environment, on=on)
    jobs.append(job)
    with pytest.raises(JobFailedError, match=sentence):
        job.results()
