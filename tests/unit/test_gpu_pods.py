"""What pods with GPUs ask a cluster for, and which GPUs a container gets."""

import types

import golden_jobs
import pytest

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.resources import Resources
from kale_dist.places.docker import engines
from kale_dist.places.kubernetes import preflight
from kale_dist.places.manifests import KINDS
from kale_dist.worker.agent.usage import Gpu


def pod(**changes):
    made = KINDS["pytorch"].make(golden_jobs.a_spec(**changes), golden_jobs.SETTINGS)
    return made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_a_process_with_a_gpu_has_memory_cores_and_shared_memory_for_cuda():
    (container,) = pod(cuda=True)["containers"]
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    shm = next(volume for volume in pod(cuda=True)["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == "8Gi"
    (plain,) = pod()["containers"]
    assert plain["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}


def test_pods_with_gpus_tolerate_the_taint_of_their_nodes_once():
    assert pod(cuda=True)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    own = [{"key": "nvidia.com/gpu", "operator": "Equal", "value": "yes"}]
    assert pod(cuda=True, cluster=ClusterOptions(tolerations=own))["tolerations"] == own
    assert "tolerations" not in pod()
    amd = pod(cuda=True, resources=Resources(gpus=1, gpu_resource="amd.com/gpu"))
    assert amd["tolerations"][0]["key"] == "amd.com/gpu"


@pytest.mark.parametrize(
    ("extended", "added"), [({"rdma/hca": 1}, ["IPC_LOCK"]), ({"vpc.amazonaws.com/efa": 1}, ["IPC_LOCK"]), ({"a.b/c": 1}, None)]
)  # fmt: skip
def test_rdma_may_pin_memory(extended, added):
    (container,) = pod(cuda=True, resources=Resources(extended=extended))["containers"]
    assert container["securityContext"]["capabilities"].get("add") == added


def test_a_runtime_class_is_set_and_a_trainjob_leaves_it_to_its_runtime():
    cluster = ClusterOptions(runtime_class="nvidia")
    assert pod(cluster=cluster)["runtimeClassName"] == "nvidia"
    with pytest.raises(ConfigError, match="runtime_class"):
        KINDS["train"].make(golden_jobs.a_spec(cluster=ClusterOptions(kind="train", runtime_class="nvidia")))


def fitted(nodes, quotas=(), per_pod=1, world=2, **given):
    resources = Resources(**given)
    found = [types.SimpleNamespace(status=types.SimpleNamespace(hard=hard, used={})) for hard in quotas]
    topology = Topology(number_of_processes=world, processes_per_pod=per_pod)
    return preflight.fitted(resources, topology, nodes, found)


BIG = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
SMALL = {"cpu": "4", "memory": "15Gi", "nvidia.com/gpu": "1"}


def test_ranks_ask_for_less_where_the_largest_node_or_the_quota_has_less():
    assert (fitted([BIG])[0].cpu, fitted([BIG])[0].memory_gib) == (4.0, 16.0)
    assert (fitted([])[0].cpu, fitted([])[0].memory_gib) == (4.0, 16.0)
    small, note = fitted([SMALL])
    assert (small.cpu, small.memory_gib) == (3.5, 13.5)
    assert "3.5 cores and 13.5 GiB" in note
    assert fitted([BIG, SMALL])[0].memory_gib == 16.0
    assert fitted([BIG], quotas=[{"requests.memory": "20Gi"}])[0].memory_gib == 10.0
    assert fitted([{**BIG, "memory": "64Gi"}], per_pod=8, world=8)[0].memory_gib == 7.0


def test_what_the_call_gives_stays():
    given, note = fitted([SMALL], memory="2Gi", cpu=1)
    assert (given.memory_gib, given.cpu, note) == (2.0, 1.0, "")


def test_nodes_with_several_gpus_are_named_to_processes_in_pods_of_their_own():
    assert "processes_per_pod=8" in fitted([BIG], world=16)[1]
    assert "processes_per_pod" not in fitted([BIG], per_pod=8, world=16)[1]
    assert "processes_per_pod" not in fitted([SMALL], world=16)[1]


def test_containers_get_the_emptiest_gpus_that_the_notebook_may_see(monkeypatch):
    used = [Gpu(percent=0, used_bytes=size, total_bytes=100) for size in (70, 0, 5)]
    monkeypatch.setattr(engines, "Driver", lambda: types.SimpleNamespace(read=lambda: tuple(used)))
    here, elsewhere = types.SimpleNamespace(is_local=True), types.SimpleNamespace(is_local=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engines.gpus_of(here) == [1, 2, 0]
    assert engines.gpus_of(elsewhere) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert engines.gpus_of(here) == [2, 0]
