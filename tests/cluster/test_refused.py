"""What a real API server refuses, in the words that a user reads."""

import time
import uuid

import pytest
from on_cluster import grant, run_kubectl

from kale_dist.backends.kubernetes import client, refusals, roles
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.config import Config
from kale_dist.errors import BackendError, BackendUnavailableError, JobExistsError

JOBS = ("kubeflow.org", "v1")


def job(name="train"):
    pod = {"containers": [{"name": "pytorch", "image": "x", "command": ["true"]}], "nodeSelector": {"no": "where"}}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": replica}},
    }  # fmt: skip


def submit(cluster, namespace, body=None, group="kubeflow.org"):
    body = job() if body is None else body
    doing = Doing(verb="create", resource="pytorchjobs", namespace=namespace, name=body["metadata"]["name"])
    try:
        return cluster.custom.create_namespaced_custom_object(group, "v1", namespace, "pytorchjobs", body)
    except Exception as error:
        raise refusals.explain(error, doing=doing) from error


def make_secret(cluster, namespace, size):
    secret = {"metadata": {"name": "big"}, "stringData": {"x": "a" * size}}
    try:
        cluster.core.create_namespaced_secret(namespace, secret)
    except Exception as error:
        doing = Doing(verb="create", resource="secrets", namespace=namespace, name="big")
        raise refusals.explain(error, doing=doing) from error


def test_a_namespace_that_is_not_there(cluster):
    with pytest.raises(BackendError, match=r"there is no namespace 'no-such'. Correct it, or make it: kubectl create"):
        submit(cluster, "no-such")


def test_a_cluster_without_the_operator(cluster, namespace):
    with pytest.raises(BackendUnavailableError, match=r"Training Operator is not installed(.|\n)*kubectl apply"):
        submit(cluster, namespace, group="no-such-group.example.com")


def test_a_name_that_is_taken(cluster, namespace):
    submit(cluster, namespace, job("taken"))
    with pytest.raises(JobExistsError, match=rf"attach\('kubernetes://{namespace}/taken'\)"):
        submit(cluster, namespace, job("taken"))


def test_a_field_that_is_wrong(cluster, namespace):
    body = job("wrong")
    body["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = "three"
    with pytest.raises(BackendError, match=r"invalid: .*Master.replicas.*must be of type integer"):
        submit(cluster, namespace, body)


@pytest.mark.parametrize("size", [1_200_000, 4_000_000])
def test_an_object_that_is_too_large(cluster, namespace, size):
    with pytest.raises(BackendError, match=r"larger than the cluster takes: .*store="):
        make_secret(cluster, namespace, size)


def test_a_quota_on_what_is_made_at_once(cluster, make_namespace):
    namespace = make_namespace()
    run_kubectl("-n", namespace, "create", "quota", "few", "--hard=count/pytorchjobs.kubeflow.org=0,count/secrets=0")
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.hard}", "quota/few", "--timeout=20s")
    with pytest.raises(BackendError, match=r"the quota 'few' allows count/pytorchjobs.kubeflow.org=0") as caught:
        submit(cluster, namespace)
    assert caught.value.retryable
    with pytest.raises(BackendError, match=r"the quota 'few' allows count/secrets=0"):
        make_secret(cluster, namespace, 10)


def test_pod_security(cluster, make_namespace):
    namespace = make_namespace(enforce="restricted")
    pod = {
        "metadata": {"name": "p"},
        "spec": {
            "containers": [{"name": "c", "image": "x"}], "volumes": [{"name": "v", "hostPath": {"path": "/"}}],
        },
    }  # fmt: skip
    with pytest.raises(Exception, match=r"403") as caught:
        cluster.core.create_namespaced_pod(namespace, pod)
    said = str(
        refusals.explain(caught.value, doing=Doing(verb="create", resource="pods", namespace=namespace, name="p"))
    )
    assert 'enforces Pod Security "restricted' in said
    assert "use a claim instead" in said


def refused_in_the_end(resource, namespace, create):
    """What is said once the API server has learnt of a policy, which takes it a moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        name = f"n-{uuid.uuid4().hex[:8]}"
        try:
            create(namespace, {"metadata": {"name": name}})
        except Exception as error:
            doing = Doing(verb="create", resource=resource, namespace=namespace, name=name)
            return refusals.explain(error, doing=doing)
        time.sleep(0.1)
    pytest.fail("it is never refused")


def test_a_policy_of_the_cluster(cluster, namespace):
    policy = f"""
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {namespace}}}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
    resourceRules: [{{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [secrets]}}]
  validations: [{{expression: "has(object.metadata.labels)", message: "say whose it is"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {namespace}}}
spec: {{policyName: {namespace}, validationActions: [Deny]}}
"""
    run_kubectl("apply", "-f", "-", text=policy)
    try:
        said = str(refused_in_the_end("secrets", namespace, cluster.core.create_namespaced_secret))
        assert f"policy {namespace!r} refuses it: say whose it is" in said
    finally:
        run_kubectl("delete", "-f", "-", "--wait=false", text=policy)


def test_a_webhook_that_does_not_answer(cluster, namespace):
    webhook = f"""
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {{name: {namespace}}}
webhooks:
- name: silent.example.com
  clientConfig: {{service: {{name: nobody, namespace: {namespace}}}}}
  rules: [{{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}}]
  namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
  sideEffects: None
  admissionReviewVersions: [v1]
"""
    run_kubectl("apply", "-f", "-", text=webhook)
    try:
        found = refused_in_the_end("configmaps", namespace, cluster.core.create_namespaced_config_map)
        assert "the cluster's webhook 'silent.example.com'" in str(found)
        assert found.retryable
    finally:
        run_kubectl("delete", "-f", "-", "--wait=false", text=webhook)


def test_a_missing_right_comes_with_the_role_that_grants_it(cluster, namespace, make_user):
    path = make_user(namespace, name="nobody")
    user = client.connect(namespace=namespace, config=Config(kubeconfig=str(path)))
    assert user.identity == f"system:serviceaccount:{namespace}:nobody"
    with pytest.raises(BackendError, match=r"may not create pytorchjobs") as caught:
        submit(user, namespace, job("mine"))
    granted = str(caught.value).partition("of:\n\n")[2]
    assert granted == roles.role_yaml(namespace, user.identity)
    grant(namespace, user.identity, granted)
    submit(user, namespace, job("mine"))


def test_a_namespace_that_is_being_deleted(cluster, make_namespace):
    namespace = make_namespace()
    keep = '{"metadata": {"finalizers": ["example.com/keep"]}}'
    run_kubectl("-n", namespace, "create", "configmap", "kept")
    run_kubectl("-n", namespace, "patch", "configmap", "kept", "--type=merge", "-p", keep)
    run_kubectl("delete", "namespace", namespace, "--wait=false")
    try:
        with pytest.raises(BackendError, match=r"the namespace is being deleted"):
            submit(cluster, namespace)
    finally:
        run_kubectl(
            "-n", namespace, "patch", "configmap", "kept", "--type=merge", "-p", '{"metadata": {"finalizers": []}}'
        )
