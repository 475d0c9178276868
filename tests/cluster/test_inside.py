"""A notebook that runs in a pod, with the rights of docs/rbac.md and no more, trains on two other pods."""

import json
import pathlib
import re

import kubernetes
import nbformat
import pytest
from on_cluster import IMAGE, grant, run_kubectl
from waiting import until

# tests/cluster/test_jobs.py trains in two pods, test_rights.py has the role.
pytestmark = pytest.mark.nightly

REPOSITORY = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(kubernetes.__file__).parents[1]
HOME = "/home/me"

TRAINING = """
import torch
import kale_dist as kd

torch.manual_seed(0)
x = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pods = {"on": kd.Kubernetes(resources={"cpu": 0.1, "memory_gib": 1}), "number_of_processes": 2}
job = kd.distribute(model, loader, torch.nn.MSELoss(), optimizer, epochs=8, seed=1, **pods)
status = job.wait(200)
print("training", status.state, [round(value, 1) for value in job.model.weight.flatten().tolist()])
print("ranks:", [f"{replica.rank} {replica.state}" for replica in status.replicas])
"""

LARGE = """
import os, pathlib

def add_one(weights):
    print("host", os.uname().nodename)
    print("read", pathlib.Path("HOME/data/note.txt").read_text())
    return weights + 1

# The pods see the notebook's home, which nothing in the call says.
pathlib.Path("HOME/data").mkdir()
pathlib.Path("HOME/data/note.txt").write_text("of the notebook")

weights = torch.arange(1_000_000, dtype=torch.float32)
large = kd.launch(add_one, weights, **pods)
print("large", [torch.equal(value, weights + 1) for value in large.results(200)])
print("sent through the API server:", any("snapshot was sent" in line.text for line in large.logs()))
print("hosts:", sorted(line.text for line in large.logs() if line.text.startswith("host ")))
print("read:", [line.text for line in large.logs() if line.text.startswith("read ")])
print("names:", job.name, large.name)
""".replace("HOME", HOME)

BESIDE = """
import pathlib
import kale_dist as kd

pathlib.Path("HOME/note.txt").write_text("of the notebook")
read = lambda: pathlib.Path("HOME/note.txt").exists() and pathlib.Path("HOME/note.txt").read_text()
for volumes in ({}, {"HOME": "home"}):
    pods = kd.Kubernetes(resources={"cpu": 0.1, "memory_gib": 1}, volumes=volumes)
    print(kd.launch(read, number_of_processes=2, on=pods).results(200))
""".replace("HOME", HOME)

RUN = f"""
import json, pathlib, shutil, sys
import nbclient.cli
notebook = pathlib.Path("{HOME}/train.ipynb")
shutil.copy("/notebook/train.ipynb", notebook)
sys.argv = ["jupyter-execute", "--inplace", "--allow-errors", "--timeout=300", str(notebook)]
try:
    nbclient.cli.main()
finally:
    print()
    print("executed", json.dumps(json.loads(notebook.read_text())), flush=True)
"""


def notebook_pod(account, run=RUN):
    mounts = [
        ("home", HOME, False),
        ("notebook", "/notebook", True),
        ("packages", "/packages", True),
        ("repository", "/repository", True),
    ]
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook"},
        "spec": {
            "serviceAccountName": account, "restartPolicy": "Never",
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": "notebook", "image": IMAGE, "command": ["python3", "-c", run],
                    "env": [
                        {"name": "PYTHONPATH", "value": "/repository:/packages"}, {"name": "HOME", "value": HOME},
                        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
                    ],
                    "volumeMounts": [
                        {"name": name, "mountPath": path, "readOnly": read_only} for name, path, read_only in mounts
                    ],
                },
            ],
            "volumes": [
                {"name": "home", "persistentVolumeClaim": {"claimName": "home"}},
                {"name": "notebook", "configMap": {"name": "notebook"}},
                {"name": "packages", "hostPath": {"path": str(PACKAGES)}},
                {"name": "repository", "hostPath": {"path": str(REPOSITORY)}},
            ],
        },
    }  # fmt: skip


def least_role(namespace, account):
    """The Role and binding of the documentation, for another namespace and account."""
    page = (REPOSITORY / "docs" / "rbac.md").read_text()
    text = re.search(r"^```yaml\n(apiVersion: rbac.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    return text.replace("team-a", namespace).replace('name: "notebook"', f'name: "{account}"')


def log_of_ended(namespace, pod, timeout_s=240):
    phase = ("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.status.phase}")
    described = ("-n", namespace, "describe", "pod", pod)
    until(lambda: run_kubectl(*phase) in ("Succeeded", "Failed"), timeout_s, lambda: run_kubectl(*described))
    return run_kubectl("-n", namespace, "logs", pod)


def claim(mode, storage_class):
    spec = {"accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": {"storage": "100Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "home"}, "spec": spec}


@pytest.fixture(scope="module")
def executed(namespace):
    """The notebook's output, by cell."""
    cells = [nbformat.v4.new_code_cell(source) for source in (TRAINING, LARGE)]
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    objects = [
        claim("ReadWriteMany", "shared"),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notebook"}, "data": {"train.ipynb": text}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "jo"}},
    ]
    for made in objects:
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    grant(namespace, f"system:serviceaccount:{namespace}:jo", least_role(namespace, "jo"))
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(notebook_pod("jo")))
    log = log_of_ended(namespace, "notebook")
    found = re.search(r"^executed (.*)$", log, re.MULTILINE)
    assert found, log
    notebook = nbformat.reads(found[1], as_version=4)
    errors = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "error"]
    assert errors == [], "\n".join(errors[0].traceback)
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


def test_a_model_is_trained_by_two_other_pods(executed):
    assert "training succeeded [1.0, 1.0, 1.0, 1.0]" in executed[0]
    assert "ranks: ['0 succeeded', '1 succeeded']" in executed[0]


def test_what_is_large_travels_by_the_notebook_s_own_volume(executed):
    assert "large [True, True]" in executed[1]
    assert "sent through the API server: False" in executed[1]
    assert "/.kale-dist, a volume of this notebook's pod" in executed[0]


def test_the_notebook_s_own_volume_is_mounted_at_the_same_path(executed):
    assert "[kale-dist] The pods mount pvc://home at /home/me, as this notebook's own pod does" in executed[0]
    assert "read: ['read of the notebook', 'read of the notebook']" in executed[1]


def test_the_pods_ran_the_notebook_s_image_without_a_token(executed, namespace):
    small, large = re.search(r"^names: (\S+) (\S+)$", executed[1], re.MULTILINE).groups()
    assert f"hosts: ['host {large}-master-0', 'host {large}-worker-0']" in executed[1]
    pods = json.loads(
        run_kubectl("-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=kale-dist", "-o", "json")
    )
    assert sorted(pod["metadata"]["name"] for pod in pods["items"]) == sorted(
        f"{name}-{role}-0" for name in (small, large) for role in ("master", "worker")
    )
    for pod in pods["items"]:
        assert "kale-dist/torch-cpu" in pod["spec"]["containers"][0]["image"]
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_claim_of_one_node_is_mounted_if_it_is_named_by_pods_on_that_node(make_namespace):
    namespace = make_namespace()
    for made in (
        claim("ReadWriteOnce", "standard"),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notebook"}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "jo"}},
    ):
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    grant(namespace, f"system:serviceaccount:{namespace}:jo", least_role(namespace, "jo"))
    pod = notebook_pod("jo", BESIDE)
    # A volume that is a folder of the node belongs to root.
    opens = {
        "name": "open", "image": IMAGE, "command": ["chmod", "777", HOME], "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "home", "mountPath": HOME}],
    }  # fmt: skip
    pod["spec"]["initContainers"] = [opens]
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod))
    log = log_of_ended(namespace, "notebook")
    node = run_kubectl("get", "nodes", "-o", "name").removeprefix("node/").strip()
    assert "The claim home of this notebook is ReadWriteOnce and not mounted. volumes={'/home/me': 'home'}" in log
    assert "[False, False]" in log
    assert f"All pods run on this notebook's node {node}, as the claim home is ReadWriteOnce" in log
    assert "['of the notebook', 'of the notebook']" in log
    assert "all 2 pods have to fit on one node" not in log
    run_kubectl("delete", "namespace", namespace, "--wait=false")
