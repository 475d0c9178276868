"""A step of a Kubeflow pipeline: kfp compiles it, and a pod runs what it has compiled, as the pipeline's launcher would."""

import json
import pathlib
import subprocess
import sys
import textwrap

import pytest
import yaml
from on_cluster import IMAGE, grant, run_kubectl
from test_inside import PACKAGES, REPOSITORY, least_role, log_of_ended
from waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PIPELINE = """
from kfp import compiler, dsl
from kale_dist import kfp

@kfp.component(base_image="IMAGE", install_kfp_package=False)
def train(epochs: int, lr: float = 0.1):
    import torch
    import kale_dist as kd
    from torch.utils.data import DataLoader, TensorDataset

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x)

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = Net()
    return kd.distribute(
        model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8), torch.nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=lr), epochs=epochs, number_of_processes=2,
        on=kd.Kubernetes(resources={"cpu": 0.1, "memory": "1Gi"}),
    )

@dsl.pipeline
def pipeline():
    train(epochs=8)

compiler.Compiler().compile(pipeline, "pipeline.yaml")
"""

LOOK = """
import json, torch
print("weights", [round(value, 1) for value in torch.load("/minio/run/model")["layer.weight"].flatten().tolist()])
print("told", json.dumps(json.load(open("/minio/run/told.json"))))
"""


FORWARD = """
import os, signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda number, _: os.killpg(child.pid, number))
try:
    while True:
        os.wait()
except ChildProcessError:
    sys.exit(143)
"""
"""An init that passes SIGTERM on to a step's process group, and waits for all of it.

Argo's executor need not: its container ends with the launcher and the shell, which SIGTERM ends at once, and whatever else runs
in it is killed. So this shows what a step does that gets the signal and the time, and not that it gets the time.
"""


@pytest.fixture(scope="module")
def kfp_packages(tmp_path_factory):
    """An environment of its own: kfp wants an older kubernetes than kale-dist[kubernetes]."""
    folder = tmp_path_factory.mktemp("kfp")
    # Pods run as another user.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "-q", "kfp>=2.13"], check=True, timeout=280)
    return next(folder.glob("venv/lib/*/site-packages"))


def compiled(kfp_packages, folder):
    """The container that kfp makes of the step."""
    folder.joinpath("pipeline.py").write_text(PIPELINE.replace("IMAGE", IMAGE))
    python = kfp_packages.parents[2] / "bin" / "python"
    subprocess.run([python, "pipeline.py"], cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, check=True, timeout=120)
    found = next(yaml.safe_load_all(folder.joinpath("pipeline.yaml").read_text()))
    return found["deploymentSpec"]["executors"]["exec-train"]["container"]


def told(epochs):
    """What the pipeline's launcher tells a step: its inputs, and where its outputs go."""

    def artifact(name, title):
        described = {"name": name, "type": {"schemaTitle": f"system.{title}"}, "uri": f"minio://run/{name}"}
        return {"artifacts": [described | {"metadata": {}}]}

    outputs = {"model": artifact("model", "Model"), "metrics": artifact("metrics", "Metrics")}
    return {
        "inputs": {"parameterValues": {"epochs": epochs, "lr": 0.1}},
        "outputs": {"artifacts": outputs, "outputFile": "/minio/run/told.json"},
    }


def step_pod(container, account, kfp_packages, epochs=8):
    arguments = [json.dumps(told(epochs)) if word == "{{$}}" else word for word in container["args"]]
    script = textwrap.dedent('"$@" && python3 -c "$LOOK"')
    # By the name of its folder kfp is an installed package, and no module of the user's own.
    mounts = {"packages": "/packages", "repository": "/repository", "kfp": "/kfp/site-packages"}
    folders = {"packages": str(PACKAGES), "repository": str(REPOSITORY), "kfp": str(kfp_packages)}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "step"},
        "spec": {
            "serviceAccountName": account, "restartPolicy": "Never",
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": "main", "image": container["image"],
                    "command": ["sh", "-c", script, "sh", *container["command"], *arguments],
                    "env": [
                        {"name": "PYTHONPATH", "value": ":".join(mounts[name] for name in ("repository", "packages", "kfp"))}, {"name": "HOME", "value": "/home/me"},
                        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}, {"name": "LOOK", "value": LOOK},
                    ],
                    "volumeMounts": [
                        {"name": "home", "mountPath": "/home/me"}, {"name": "minio", "mountPath": "/minio"},
                        *({"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()),
                    ],
                },
            ],
            "volumes": [
                {"name": "home", "emptyDir": {}}, {"name": "minio", "emptyDir": {}},
                *({"name": name, "hostPath": {"path": path}} for name, path in folders.items()),
            ],
        },
    }  # fmt: skip


def test_a_step_that_is_terminated_leaves_nothing(namespace, kfp_packages, tmp_path):
    run_kubectl("-n", namespace, "create", "serviceaccount", "ended")
    identity = f"system:serviceaccount:{namespace}:ended"
    grant(namespace, identity, least_role(namespace, "ended").replace("name: kale-dist", "name: ended"))
    pod = step_pod(compiled(kfp_packages, tmp_path), "ended", kfp_packages, epochs=1_000_000)
    pod["spec"]["containers"][0]["command"][:0] = ["python3", "-c", FORWARD]
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod))
    run_kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/step", "--timeout=120s")
    ours = ("-n", namespace, "get", "pytorchjobs,secrets,pods", "-l", "app.kubernetes.io/name=kale-dist", "-o", "name")
    until(lambda: "epoch 2" in run_kubectl("-n", namespace, "logs", "step"), 300)
    assert run_kubectl(*ours)
    run_kubectl("-n", namespace, "delete", "pod", "step", "--grace-period=30")
    until(lambda: not run_kubectl(*ours), 90, lambda: run_kubectl(*ours))


def test_a_compiled_step_trains_and_gives_its_model_and_metrics_to_the_pipeline(namespace, kfp_packages, tmp_path):
    assert pathlib.Path(kfp_packages, "kfp").is_dir()
    run_kubectl("-n", namespace, "create", "serviceaccount", "pipeline-runner")
    identity = f"system:serviceaccount:{namespace}:pipeline-runner"
    grant(namespace, identity, least_role(namespace, "pipeline-runner"))
    pod = step_pod(compiled(kfp_packages, tmp_path), "pipeline-runner", kfp_packages)
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(pod))
    log = log_of_ended(namespace, "step", timeout_s=600)
    assert "weights [1.0, 1.0, 1.0, 1.0]" in log, log
    output = json.loads(log.partition("told ")[2].splitlines()[0])
    artifacts = output["artifacts"]
    assert artifacts["metrics"]["artifacts"][0]["metadata"]["loss"] < 0.1
    assert artifacts["model"]["artifacts"][0]["metadata"]["job"].startswith("kubernetes://")
    # The job's log is the step's.
    assert "train: 64 samples, 2 ranks x 32" in log
