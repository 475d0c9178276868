"""What the real cluster refuses, before the job is submitted: one sentence and what to do, and nothing is left."""

import json
import warnings

import pytest
from on_cluster import pods_in, run_kubectl
from rank_work import summed

import kale_dist as kd
from kale_dist.errors import BackendError, ConfigError, JobExistsError, KaleDistWarning
from kale_dist.places.kubernetes import client, objects
from kale_dist.places.manifests import KINDS


def apply(namespace, kind, name, **rest):
    text = json.dumps({"apiVersion": rest.pop("api", "v1"), "kind": kind, "metadata": {"name": name}, **rest})
    run_kubectl("-n", namespace, "apply", "-f", "-", text=text)


def refusal_of(on, processes=1):
    with pytest.raises(BackendError) as caught:
        kd.launch(summed, 1, name="refused", number_of_processes=processes, on=on)
    left = run_kubectl("get", "pytorchjobs,secrets", "-A", "-o", "name")
    assert "refused" not in left
    return str(caught.value)


def test_more_than_any_node_has_is_refused_unless_nodes_are_added(namespace):
    said = refusal_of(pods_in(namespace, resources={"cpu": 500}))
    assert "a pod needs 500 cores, and the largest node has" in said.lower()
    assert "wait_for_nodes=True" in said
    assert "nvidia.com/gpu" in refusal_of(pods_in(namespace, resources={"gpus": 64}))
    waits = pods_in(namespace, resources={"cpu": 500}, wait_for_nodes=True)
    job = kd.launch(summed, 1, number_of_processes=1, on=waits)
    job.delete()


def test_quotas_of_all_pods_together(make_namespace):
    namespace = make_namespace()
    apply(namespace, "ResourceQuota", "small", spec={"hard": {"requests.cpu": "1", "pods": "4"}})
    said = refusal_of(pods_in(namespace, resources={"cpu": 0.4}), 3)
    assert "allows requests.cpu=1 in all, and requests.cpu=1.2 is asked for" in said
    apply(namespace, "ResourceQuota", "small", spec={"hard": {"limits.cpu": "4"}})
    job = kd.launch(summed, 1, number_of_processes=1, on=pods_in(namespace))
    pod = json.loads(run_kubectl("-n", namespace, "get", "pytorchjob", job.name, "-o", "json"))
    template = pod["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    # The quota demands a limit of cores, and the namespace gives none by itself.
    assert template["containers"][0]["resources"]["limits"]["cpu"] == "100m"
    job.delete()


def test_what_only_a_dry_run_of_a_pod_can_tell(make_namespace):
    namespace = make_namespace(enforce="baseline")
    bounds = {"limits": [{"type": "Container", "max": {"memory": "2Gi"}}]}
    apply(namespace, "LimitRange", "bounds", spec=bounds)
    said = refusal_of(pods_in(namespace, resources={"cpu": 0.1, "memory": "3Gi"}))
    assert "A LimitRange of the namespace" in said
    assert "maximum memory usage per Container is 2Gi" in said
    said = refusal_of(pods_in(namespace, volumes={"/node": "hostpath:///mnt"}))
    assert 'enforces Pod Security "baseline' in said
    assert "use a claim" in said
    assert "There is no service account nope" in refusal_of(pods_in(namespace, service_account="nope"))
    assert "There is no priority class nope" in refusal_of(pods_in(namespace, priority_class="nope"))


def test_objects_that_the_job_names_and_that_do_not_exist(namespace):
    assert "There is no persistentvolumeclaim nope" in refusal_of(pods_in(namespace, volumes={"/data": "nope"}))
    assert "There is no secret nope" in refusal_of(pods_in(namespace, secret_environment={"TOKEN": "nope/key"}))
    assert "There is no configmap nope" in refusal_of(pods_in(namespace, volumes={"/c": "configmap://nope"}))
    with pytest.warns(KaleDistWarning, match="There is no Secret nope"):
        job = kd.launch(summed, 1, number_of_processes=1, on=pods_in(namespace, image_pull_secrets=["nope"]))
    job.delete()


def test_a_claim_for_one_pod_or_node(namespace):
    for name, mode in (("one", "ReadWriteOncePod"), ("node", "ReadWriteOnce")):
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}, "storageClassName": "none"}
        apply(namespace, "PersistentVolumeClaim", name, spec=spec)
    assert "is for a single pod" in refusal_of(pods_in(namespace, volumes={"/data": "one"}), 2)
    with pytest.warns(KaleDistWarning, match="all 2 pods have to fit on one node"):
        job = kd.launch(summed, 1, number_of_processes=2, on=pods_in(namespace, volumes={"/data": "node"}))
    job.delete()


def test_a_namespace_that_is_not_there(kubeconfig):
    assert "there is no namespace no-such-namespace" in refusal_of(pods_in("no-such-namespace")).lower()


def test_a_policy_that_refuses_pods_is_a_warning(make_namespace):
    """It sees this user and a pod without an owner: of the operator's pods it may think otherwise."""
    namespace = make_namespace()
    name = f"{namespace}-label"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    api = "admissionregistration.k8s.io/v1"
    policy = {
        "failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule], **here},
        "validations": [{"expression": "'team' in object.metadata.labels", "message": "every pod needs a label team"}],
    }  # fmt: skip
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    apply(namespace, "ValidatingAdmissionPolicy", name, api=api, spec=policy)
    apply(namespace, "ValidatingAdmissionPolicyBinding", name, api=api, spec=binding)
    try:
        on = pods_in(namespace, patch={"spec": {"runPolicy": {"suspend": True}}})
        for _ in range(20):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                job = kd.launch(summed, 1, number_of_processes=1, on=on)
            job.delete()
            # The API server learns of a policy a little later.
            if any("every pod needs a label team" in str(warning.message) for warning in caught):
                return
        pytest.fail("the policy was never told")
    finally:
        run_kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name, "--wait=false")


def test_a_name_that_another_machine_has_taken(namespace, monkeypatch, tmp_path):
    on = pods_in(namespace, patch={"spec": {"runPolicy": {"suspend": True}}})
    job = kd.launch(summed, 1, number_of_processes=1, name="there", on=on)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path))
        with pytest.raises(JobExistsError, match=r"pytorchjobs/there exists already. Give another name="):
            kd.launch(summed, 1, number_of_processes=1, name="there", on=on)
    job.delete()
    assert objects.find(client.connect(namespace), KINDS["pytorch"], namespace, "there") is None


def test_without_an_image_the_call_says_where_to_name_one(namespace, kubeconfig, monkeypatch, tmp_path):
    monkeypatch.setenv("KALE_DIST_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="KALE_DIST_IMAGE"):
        kd.launch(summed, 2, number_of_processes=1, on=kd.Kubernetes(namespace=namespace))
