"""Functions that tests on the real cluster share."""

import json
import pathlib
import subprocess
import time

IMAGE = "localhost:5000/kale-dist/torch-cpu:2.13.0"


def run_kubectl(*arguments, text=None):
    ended = subprocess.run(
        ["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def call_in(namespace, *, cpu=0.1, processes=2):
    """Arguments that send a call to small pods of a namespace."""
    return {
        "on": "kubernetes", "image": IMAGE, "resources": {"cpu": cpu, "memory_gib": 1},
        "cluster": {"namespace": namespace}, "number_of_processes": processes,
    }  # fmt: skip


def make_claim(namespace, name):
    """Make a claim that pods of several nodes may write into, and wait for its volume: a call that comes before warns."""
    spec = {
        "storageClassName": "shared", "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    }  # fmt: skip
    made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{name}", "--timeout=90s")


def grant(namespace, identity, role):
    """Apply a Role with its binding, and wait until the API server knows of it."""
    import yaml

    run_kubectl("apply", "-f", "-", text=role)
    resource = next(yaml.safe_load_all(role))["rules"][-1]["resources"][0]
    deadline = time.monotonic() + 30
    while not any(
        line.split()[0].partition(".")[0] == resource
        for line in run_kubectl("-n", namespace, "--as", identity, "auth", "can-i", "--list").splitlines()
        if line.strip()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_kubeconfig(path, original, *, token=None, user=None, namespace="", **cluster_settings):
    """A copy of a kubeconfig with other credentials or another server."""
    import yaml

    data = yaml.safe_load(pathlib.Path(original).read_text())
    data["clusters"][0]["cluster"].update(cluster_settings)
    data["clusters"][0]["cluster"] = {k: v for k, v in data["clusters"][0]["cluster"].items() if v is not None}
    data["users"][0]["user"] = {"token": token} if user is None else user
    data["contexts"][0]["context"]["namespace"] = namespace
    path.write_text(json.dumps(data))
    return path
