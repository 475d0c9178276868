"""A cluster that a Secret names, pods with the random user that OpenShift gives them, and what pods need of a network."""

import base64
import json
import pathlib

import pytest
from on_cluster import pods_in, run_kubectl, write_kubeconfig
from rank_work import connections_of_the_pods, rank_and, summed

import kale_dist as kd
from kale_dist.errors import ConfigError
from kale_dist.places.kubernetes import client

pytestmark = pytest.mark.usefixtures("jobs_end")


def put(namespace, name, text, key="kubeconfig"):
    data = {key: base64.b64encode(text.encode()).decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(secret))


@pytest.fixture
def mine(kubeconfig, namespace, monkeypatch, tmp_path):
    """One's own cluster, as a kubeconfig has it whose namespace is that of the Secrets."""
    import yaml

    user = yaml.safe_load(pathlib.Path(kubeconfig).read_text())["users"][0]["user"]
    path = write_kubeconfig(tmp_path / "mine", kubeconfig, user=user, namespace=namespace)
    monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(path))
    return path


def test_a_job_runs_on_the_cluster_of_a_kubeconfig_in_a_secret(
    mine, kubeconfig, namespace, make_namespace, plain_image
):
    there = make_namespace()
    put(namespace, "elsewhere", pathlib.Path(kubeconfig).read_text())
    on = pods_in(there, image=plain_image, cluster_secret="elsewhere")
    job = kd.launch(rank_and, 2, number_of_processes=1, on=on)
    assert job.result(150) == 2
    assert job.ref == f"kubernetes://{there}/{job.name}"
    job.delete()


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("clusters: []\nusers: []\n", "kubeconfig", "no current context"),
        ("[1, 2", "kubeconfig", "is not a kubeconfig"),
        ("just text", "config", "is not a kubeconfig"),
        ("clusters: []\nusers: [{name: x, user: {exec: {command: sh}}}]", "kubeconfig", "a program or a file"),
    ],
)
def test_a_secret_without_a_usable_kubeconfig_is_refused(mine, namespace, text, key, said):
    put(namespace, "wrong", text, key)
    with pytest.raises(ConfigError, match=said):
        client.connect(secret="wrong")
    run_kubectl("-n", namespace, "delete", "secret", "wrong")


def test_a_secret_that_does_not_exist_is_named(mine, namespace):
    with pytest.raises(ConfigError, match="no-such") as caught:
        client.connect(secret="no-such")
    assert namespace in caught.value.problem
    assert f"kubectl -n {namespace} create secret" in caught.value.remedy


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pytorch", "job"])
def test_a_pod_with_a_random_user_works(namespace, kind):
    """OpenShift gives each namespace users from 1000000000 on, of the group 0, without a name and a home."""
    pod = {"spec": {"securityContext": {"runAsUser": 1000660000, "runAsGroup": 0, "fsGroup": 1000660000}}}
    template = {"spec": {"pytorchReplicaSpecs": {role: {"template": pod} for role in ("Master", "Worker")}}}
    patch = template if kind == "pytorch" else {"spec": {"template": pod}}
    on = pods_in(namespace, kind=kind, run_as_user=-1, patch=patch)
    job = kd.launch(summed, 2, number_of_processes=2, on=on)
    assert job.results(150) == [6.0, 6.0], (job.status, [str(line) for line in job.logs()])
    job.delete()


def test_pods_are_connected_to_each_other_and_to_nothing_else(namespace):
    job = kd.launch(connections_of_the_pods, number_of_processes=2, on=pods_in(namespace))
    pods = dict(job.result(180))
    own, connected = set(pods), {end for ends in pods.values() for end in ends}
    assert own <= connected
    # 127.0.0.1 is how the notebook comes in; what listens has no other end.
    assert connected <= own | {"127.0.0.1", "0.0.0.0"}
    job.delete()
