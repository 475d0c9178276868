"""Another pod of the cluster connects to your job's pods, where torch's store and gloo let in everybody: a NetworkPolicy of the
job's own stands before them, and no moment is without it."""

import json

import pytest

pytest.importorskip("kubernetes")

import yaml
from fake_api import FakeApi, status
from on_cluster import grant, pods_in, run_kubectl, write_kubeconfig
from work_without_pytest import waits_and_says

import kale_dist as kd
from kale_dist import places
from kale_dist.errors import BackendError, ConfigError
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places import manifests
from kale_dist.places.kubernetes import client, doctor, roles, submit

JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"
SECRETS = "/api/v1/namespaces/team/secrets"


def a_spec(**cluster):
    options = ClusterOptions(**{"namespace": "team", "kind": "pytorch", **cluster})
    topology = Topology(number_of_processes=2)
    return JobSpec(
        name="mine", label="f", kind="call", snapshot="ab" * 32, topology=topology, image="x:1", cluster=options
    )


@pytest.fixture
def api(monkeypatch, tmp_path):
    with FakeApi().running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        made = manifests.kind_of(a_spec()).make(a_spec())
        api.answer("POST", JOBS, 201, {**made, "metadata": {**made["metadata"], "uid": "u1"}})
        api.answer("POST", SECRETS, 201, {"kind": "Secret"})
        api.answer("DELETE", f"{JOBS}/mine", 200, {"kind": "Status"})
        yield api
        client.disconnect()


def made_by(api, **cluster):
    """What a submission has created and deleted, in its order."""
    try:
        submit.create(client.connect(), a_spec(**cluster), b"k" * 32)
    finally:
        asked = [(method, path, body) for method, path, body in api.asked if path.startswith((JOBS, POLICIES, SECRETS))]
    return [(method, path) for method, path, _ in asked], {path: json.loads(body) for _, path, body in asked if body}


@pytest.mark.parametrize(("port", "more"), [(None, []), (9090, [{"ports": [{"port": 9090, "protocol": "TCP"}]}])])
def test_only_the_job_s_own_pods_and_prometheus_get_in_before_its_pods_run(api, port, more):
    api.answer("POST", POLICIES, 201, {})
    order, bodies = made_by(api, metrics_port=port)
    # The pods wait for the Secret.
    assert order == [("POST", JOBS), ("POST", POLICIES), ("POST", SECRETS)]
    policy = bodies[POLICIES]
    own = {"podSelector": {"matchLabels": {"kale-dist.dev/object": "mine"}}}
    assert policy["spec"] == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}, *more]}
    assert [(one["kind"], one["uid"]) for one in policy["metadata"]["ownerReferences"]] == [("PyTorchJob", "u1")]
    groups = manifests.kind_of(a_spec()).pod_groups(bodies[JOBS])
    labels = [group.template["metadata"]["labels"] for group in groups]
    assert all(own["podSelector"]["matchLabels"].items() <= each.items() for each in labels)


def test_who_may_not_make_it_runs_without_it_and_is_told(api, capsys):
    api.answer("POST", POLICIES, 403, status(403, "somebody cannot create networkpolicies", "Forbidden"))
    order, _ = made_by(api)
    assert order == [("POST", JOBS), ("POST", POLICIES), ("POST", SECRETS)]
    assert "All pods of the cluster can connect" in capsys.readouterr().err


def test_who_asks_for_it_and_may_not_make_it_gets_no_job(api):
    api.answer("POST", POLICIES, 403, status(403, "somebody cannot create networkpolicies", "Forbidden"))
    with pytest.raises(BackendError, match="networkpolicies"):
        made_by(api, network_policy=True)
    assert ("DELETE", f"{JOBS}/mine") in [(method, path) for method, path, _ in api.asked]
    assert SECRETS not in [path for _, path, _ in api.asked]


def test_false_leaves_the_ports_of_your_own_code_open(api):
    assert made_by(api, network_policy=False)[0] == [("POST", JOBS), ("POST", SECRETS)]


def test_the_plan_shows_it_or_says_what_lacks():
    assert [one["kind"] for one in yaml.safe_load_all(submit.render(a_spec()))] == [
        "PyTorchJob",
        "NetworkPolicy",
        "Secret",
    ]
    text = submit.render(a_spec(network_policy=False))
    assert "It gets no NetworkPolicy. All pods of the cluster can connect" in text
    assert "kind: NetworkPolicy" not in text


# -- on the real cluster -----------------------------------------------------------------------------------------------


def policies_in(namespace, *whose):
    return json.loads(run_kubectl(*whose, "-n", namespace, "get", "networkpolicies", "-o", "json"))["items"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["pytorch", "job"])
def test_a_real_job_has_it_while_it_runs_and_leaves_none(kubeconfig, make_namespace, plain_pod_image, kind):
    namespace = make_namespace()
    job = kd.launch(waits_and_says, 0, number_of_processes=2, on=pods_in(namespace, image=plain_pod_image, kind=kind))
    # Its head is reached by port-forward, which comes from its own node into its own network.
    assert job.results(150) == [7, 7], list(job.logs())
    [policy] = policies_in(namespace)
    assert policy["metadata"]["ownerReferences"][0]["name"] == job.name
    job.delete()
    assert policies_in(namespace) == []


@pytest.mark.nightly
def test_a_user_without_the_right_has_it_in_the_plan_and_is_refused_who_wants_it(
    kubeconfig, make_namespace, plain_pod_image, tmp_path, monkeypatch
):
    namespace, rights = make_namespace(), roles.rights(manifests.KINDS["pytorch"])
    run_kubectl("-n", namespace, "create", "serviceaccount", "ann")
    identity = f"system:serviceaccount:{namespace}:ann"
    kept = [right for right in rights if right.resource != "networkpolicies"]
    grant(namespace, identity, roles.role_yaml(namespace, identity, kept))
    token = run_kubectl("-n", namespace, "create", "token", "ann", "--duration=1h").strip()
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "ann", kubeconfig, token=token)))
    on = {"namespace": namespace, "image": plain_pod_image, "kind": "pytorch"}
    assert "# It gets no NetworkPolicy" in str(kd.render(waits_and_says, 0, on=pods_in(**on)))
    assert [one.verdict for one in doctor.examine(namespace) if "networkpolicies" in one.sentence] == ["warning"]
    with pytest.raises(ConfigError) as caught:
        kd.launch(waits_and_says, 0, on=pods_in(**on, network_policy=True))
    assert caught.value.argument == "network_policy"
    job = kd.launch(waits_and_says, 0, number_of_processes=1, on=pods_in(**on))
    assert job.result(150) == 7
    assert policies_in(namespace, "--kubeconfig", str(kubeconfig)) == []
    job.delete()
    places.get("kubernetes").close()
