"""Kale's own names, on a cluster that is played."""

import pytest
from fake_backend import FakeBackend
from trainings import classifying

import kale_dist as kd
from kale_dist import places
from kale_dist.calls import verbs
from kale_dist.errors import ConfigError
from kale_dist.kale import DistributedConfig, PyTorchJob, distribute


class Cluster(FakeBackend):
    name = "kubernetes"

    def describe(self, ref):
        return {"kind": "PyTorchJob", "status": {"replicaStatuses": {"Master": {"active": 1}}}}


@pytest.fixture(autouse=True)
def cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    backend = Cluster()
    monkeypatch.setattr(places, "get", lambda name: backend)


def test_a_notebook_of_kale_runs_on_the_cluster():
    config = DistributedConfig(
        env=[{"name": "A", "value": "1"}, {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        env_from=[{"configMapRef": {"name": "settings"}}],
        requests={"cpu": "500m", "memory": "2Gi"},
        limits={"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": 1},
        labels={"team": "vision"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        run_policy={"activeDeadlineSeconds": 60, "backoffLimit": 2, "ttlSecondsAfterFinished": 9},
    )
    job = distribute(*classifying(), None, epochs=1, number_of_processes=2, cuda=True, train_args={}, config=config)
    spec = job.spec
    assert (spec.resources.cpu, spec.resources.cpu_limit, spec.resources.memory_gib) == (0.5, 2, 2)
    assert spec.resources.gpus == 1
    assert (spec.secrets, spec.cluster.secret_environment) == ((("A", ""),), (("T", "s", "k"),))
    assert (spec.policy.timeout_s, spec.policy.max_restarts, spec.cluster.ttl_s) == (60, 2, 9)
    assert spec.cluster.labels == (("team", "vision"),)
    assert '"envFrom":[{"configMapRef":{"name":"settings"}}]' in spec.cluster.patch


def test_a_run_policy_that_says_nothing_of_the_end_leaves_the_default():
    for policy, ttl_s in (({}, 604_800), ({"backoffLimit": 2}, 604_800), ({"ttlSecondsAfterFinished": None}, None)):
        assert DistributedConfig(run_policy=policy).arguments(2)["on"].ttl_s == ttl_s


def test_a_job_is_found_again_by_its_name(monkeypatch):
    monkeypatch.setattr(verbs, "attach", lambda ref: ref)
    assert PyTorchJob("train-net") == "kubernetes://train-net"
    monkeypatch.setenv("KALE_DIST_ON", "local")
    assert PyTorchJob("train-net") == "local://train-net"
    assert PyTorchJob("docker://train-net") == "docker://train-net"


def test_the_resource_is_the_clusters_own():
    job = distribute(*classifying(), None, number_of_processes=1)
    assert job.get()["status"]["replicaStatuses"]["Master"] == {"active": 1}


def test_a_variable_from_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="env: "):
        DistributedConfig(env=[{"name": "A", "valueFrom": {"fieldRef": {}}}]).arguments(1)


def test_elsewhere_a_resource_is_made_of_the_status(monkeypatch):
    monkeypatch.undo()
    job = kd.launch(print, number_of_processes=2, on=FakeBackend(lambda run: run.returns(0, None)))
    job.wait()
    status = job.get()["status"]
    assert status["replicaStatuses"]["Master"] == {"succeeded": 1}
    assert status["conditions"][-1]["type"] == job.get_job_status() == "Succeeded"
