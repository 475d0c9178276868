"""What a user sees in a terminal while a job waits on the real cluster, and how long it waits for what only a person can mend."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from on_cluster import IMAGE, pods_in, run_kubectl, wait_for
from rank_work import rank_and

import kale_dist as kd
from kale_dist.wire import StateName

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]

ABSENT = f"{IMAGE.rpartition('/')[0]}/misspelt:1"


def test_a_misspelt_image_is_named_in_the_terminal_and_ends_the_job(namespace, tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    small = json.dumps({"cpu": 0.1, "memory": "256Mi"})
    words = ("image", ABSENT), ("namespace", namespace), ("resources", small), ("pending_timeout_s", "20")
    settings = [word for pair in words for word in ("--set", *pair)]
    command = [sys.executable, "-m", "kale_dist.cli", "launch", "train.py", "-n", "2", "--on", "kubernetes", *settings]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )
    assert ended.returncode != 0
    assert "never" not in ended.stdout
    said = [
        line
        for line in ended.stderr.splitlines()
        if re.match(r"\[kale-dist\] kubernetes://\S+: Pod \S+ waits: the image ", line)
    ]
    assert len(said) == 1, ended.stderr
    assert f"the image {ABSENT} was not found in its registry" in said[0]
    assert "pending_timeout_s of 20 s" in ended.stderr


def test_two_sigterms_end_a_command_and_its_pods(namespace, tmp_path):
    (tmp_path / "train.py").write_text("print('never')")
    words = ("image", ABSENT), ("namespace", namespace), ("resources", json.dumps({"cpu": 0.1, "memory": "256Mi"}))
    settings = [word for pair in words for word in ("--set", *pair)]
    command = [sys.executable, "-m", "kale_dist.cli", "launch", "train.py", "-n", "2", "--on", "kubernetes", *settings]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as run:
        while "waits: " not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=90)
    assert run.returncode == 143
    assert "is cancelled" in said
    run_kubectl("-n", namespace, "wait", "--for=delete", "pods", "--all", "--timeout=90s")


def test_a_job_of_which_one_pod_fits_names_the_other_one_and_what_it_lacks(namespace, capsys):
    [node] = json.loads(run_kubectl("get", "nodes", "-o", "json"))["items"]
    most = float(node["status"]["allocatable"]["cpu"]) * 0.55
    on = pods_in(namespace, resources={"cpu": most, "memory": "256Mi"}, master=True)
    job = kd.launch(rank_and, 0, number_of_processes=2, on=on)
    wait_for(job, lambda status: "no node has that much free" in status.reason)
    pods = json.loads(run_kubectl("-n", namespace, "get", "pods", "-o", "json"))["items"]
    mine = [pod for pod in pods if pod["metadata"]["name"].startswith(job.name)]
    [lacking] = [pod["metadata"]["name"] for pod in mine if not pod["spec"].get("nodeName")]
    threading.Timer(3, job.cancel).start()
    assert job.wait(120).state is StateName.CANCELLED
    [said] = [line for line in capsys.readouterr().err.splitlines() if "no node has that much free" in line]
    assert f"Pod {lacking} waits" in said
    assert "Insufficient cpu" in said
    assert "master=False" not in said
    job.delete()
