"""Experiments of Katib without Katib: a trial's Job runs on the cluster, and Katib's own models know every field."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from monitored import train
from on_cluster import IMAGE, run_kubectl
from test_inside import PACKAGES, REPOSITORY, log_of_ended

import kale_dist as kd
from kale_dist import katib

optuna = pytest.importorskip("optuna", reason="needs Optuna")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

GOLDEN = REPOSITORY / "tests" / "golden" / "katib" / "experiment.yaml"

CHECK = """
import json, pathlib, sys, typing
import kubeflow_katib_api.models as models

def check(model, value, path):
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inner in value.items():
        assert key in fields, f"{path}.{key} is not in {sorted(fields)}"
        kinds = [fields[key], *typing.get_args(fields[key])]
        kinds += [inside for kind in kinds for inside in typing.get_args(kind)]
        known = [kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "model_fields")]
        for one in inner if isinstance(inner, list) else [inner]:
            if known and isinstance(one, dict) and key not in ("metadata", "trialSpec"):
                check(known[0], one, f"{path}.{key}")

experiment = json.loads(sys.stdin.read())
models.V1beta1Experiment.from_dict(experiment)
check(models.V1beta1Experiment, experiment, "experiment")
print("known")
"""


def call(trial):
    return train(kd.Local(), trial.suggest_float("lr", 1e-3, 1.0, log=True), epochs=3)


def test_katibs_own_models_know_all_that_the_golden_file_has(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "kubeflow-katib-api>=0.19"], check=True, timeout=200)
    experiment = list(yaml.safe_load_all(GOLDEN.read_text()))[1]
    ended = subprocess.run(
        [python, "-c", CHECK], input=json.dumps(experiment), capture_output=True, text=True, check=False
    )
    assert ended.stdout == "known\n", ended.stderr


def test_a_trial_trains_in_its_pod_and_prints_what_katib_reads(namespace):
    study = optuna.create_study(study_name="digits", direction="maximize")
    text = katib.export(
        call, study, {"lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)}, metric="eval/accuracy",
        trials=4, parallel=2, failures=3, image=IMAGE, namespace=namespace, service_account=None, resources={"cpu": 0.1},
    )  # fmt: skip
    secret, experiment = yaml.safe_load_all(text)
    run_kubectl("create", "-f", "-", text=json.dumps(secret))
    job = json.loads(
        json.dumps(experiment["spec"]["trialTemplate"]["trialSpec"]).replace("${trialParameters.lr}", "0.5")
    )
    job["metadata"] = {"name": "trial", "namespace": namespace}
    # The tests' image has torch and nothing else.
    pod = job["spec"]["template"]["spec"]
    folders = {"repository": REPOSITORY, "packages": PACKAGES}
    pod["volumes"] += [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()]
    pod["containers"][0]["volumeMounts"] += [{"name": name, "mountPath": f"/{name}"} for name in folders]
    pod["containers"][0]["env"] += [{"name": "PYTHONPATH", "value": "/repository:/packages"}]
    run_kubectl("create", "-f", "-", text=json.dumps(job))
    run_kubectl("-n", namespace, "wait", "--for=create", "pod", "-l", "job-name=trial", "--timeout=60s")
    name = run_kubectl(
        "-n", namespace, "get", "pods", "-l", "job-name=trial", "-o", "jsonpath={.items[0].metadata.name}"
    )
    log = log_of_ended(namespace, name, timeout_s=300)
    values = [
        float(match[2])
        for match in re.finditer(r"([\w|-]+)\s*=\s*((-?\d+)(\.\d+)?)", log)
        if match[1] == "kale-eval-accuracy"
    ]
    assert len(values) == 3, log
    assert values[-1] > 0.8
    run_kubectl("-n", namespace, "wait", "--for=condition=complete", "job/trial", "--timeout=60s")
