"""A process in a pod: by the pod's service account, what it finds out about the pod. The packages come from this machine."""

import json
import pathlib

import kubernetes
import pytest
from on_cluster import IMAGE, grant, run_kubectl

from kale_dist.places.kubernetes import roles
from kale_dist.places.manifests import KINDS

REPOSITORY = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(kubernetes.__file__).parents[1]

SCRIPT = """
import dataclasses, json
from kale_dist.places.kubernetes import client, self_pod
cluster = client.connect()
pod = dataclasses.asdict(self_pod.find(cluster))
print(json.dumps({"identity": cluster.identity, "namespace": cluster.namespace, "in": cluster.in_cluster, "pod": pod}))
"""


def notebook(name, account):
    claim = {"name": "home", "mountPath": "/home/me", "subPath": "me"}
    packages = {"name": "packages", "mountPath": "/packages", "readOnly": True}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "serviceAccountName": account, "restartPolicy": "Never",
            "securityContext": {"runAsUser": 1234, "runAsGroup": 99, "fsGroup": 4321},
            "containers": [
                {"name": "proxy", "image": "localhost:5000/kale-dist/torch-cpu:2.13.0", "command": ["true"]},
                {
                    "name": "notebook", "image": IMAGE, "command": ["python3", "-c", SCRIPT],
                    "env": [{"name": "PYTHONPATH", "value": "/repository:/packages"}, {"name": "HOSTNAME", "value": "x"}],
                    "volumeMounts": [claim, packages, {"name": "repository", "mountPath": "/repository", "readOnly": True}],
                },
            ],
            "volumes": [
                {"name": "home", "persistentVolumeClaim": {"claimName": "home"}},
                {"name": "packages", "hostPath": {"path": str(PACKAGES)}},
                {"name": "repository", "hostPath": {"path": str(REPOSITORY)}},
            ],
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def home(namespace):
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Mi"}},
        "storageClassName": "standard",
    }
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "home"}, "spec": spec}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(claim))


def look(namespace, name, rights):
    run_kubectl("-n", namespace, "create", "serviceaccount", name)
    identity = f"system:serviceaccount:{namespace}:{name}"
    grant(namespace, identity, roles.role_yaml(namespace, identity, rights).replace("name: kale-dist", f"name: {name}"))
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(notebook(name, name)))
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=90s")
    return json.loads(run_kubectl("-n", namespace, "logs", name, "-c", "notebook").splitlines()[-1])


@pytest.mark.nightly
def test_a_notebook_with_the_least_role(namespace, home):
    found = look(namespace, "jo", roles.rights(KINDS["pytorch"]))
    assert (found["identity"], found["namespace"]) == (f"system:serviceaccount:{namespace}:jo", namespace)
    assert found["in"]
    pod = found["pod"]
    assert (pod["name"], pod["container"], pod["run_as_user"]) == ("jo", "notebook", 1234)
    assert pod["image"].startswith("localhost:5000/kale-dist/torch-cpu")
    assert "@sha256:" in pod["image"] or "pull a newer one" in pod["image_warning"]
    (claim,) = pod["claims"]
    assert claim == {
        "path": "/home/me", "claim": "home", "sub_path": "me", "read_only": False, "access_modes": ["ReadWriteMany"]
    }  # fmt: skip


@pytest.mark.nightly
def test_a_notebook_that_may_not_read_its_own_pod(namespace, home):
    found = look(namespace, "blind", [right for right in roles.rights(KINDS["pytorch"]) if right.resource != "pods"])
    pod = found["pod"]
    assert (pod["name"], pod["run_as_user"]) == ("blind", 1234)
    assert (pod["image"], pod["claims"]) == ("", [])
