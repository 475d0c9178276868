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
from kale_dist.places.following import life
from kale_dist.wire import FailureCause, StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

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
        line for line in ended.stderr.splitlines() if re.match(r"\[kale-dist\] kubernetes://\S+: Pod \S+ waits: ", line)
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


def test_the_next_status_of_a_job_that_waits_too_long_ends_it(namespace, tmp_path):
    on = f"kd.Kubernetes(namespace={namespace!r}, image={ABSENT!r}, resources={{'cpu': 0.1}}, pending_timeout_s=3)"
    code = f"import os, kale_dist as kd; kd.launch(print, number_of_processes=2, name='left', on={on}); os._exit(0)"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=60, check=True)
    time.sleep(4)
    command = [sys.executable, "-m", "kale_dist.cli", "status", f"kubernetes://{namespace}/left"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True).stdout
    assert shown.splitlines()[0].endswith("failed")
    assert "pending_timeout_s of 3 s" in shown
    run_kubectl("-n", namespace, "wait", "--for=delete", "pods", "--all", "--timeout=90s")


@pytest.mark.nightly
def test_a_notebook_that_waits_for_a_misspelt_image_says_so_once(namespace, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    cell = nbformat.v4.new_code_cell(
        "import kale_dist as kd\n"
        f"on = kd.Kubernetes(image={ABSENT!r}, namespace={namespace!r}, pending_timeout_s=20)\n"
        "kd.launch(print, 1, number_of_processes=1, on=on).exception()"
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "kale_dist.cli", "run", "n.ipynb"]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )
    waits = [
        line
        for line in ended.stderr.splitlines()
        if "was not found in its registry" in line and "pending_timeout_s" not in line
    ]
    assert len(waits) == 1, (ended.stdout, ended.stderr)


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


def test_what_only_a_person_can_mend_ends_a_job_without_a_limit_of_its_own(namespace, monkeypatch):
    monkeypatch.setattr(life, "ACT_WITHIN_S", 12.0)
    job = kd.launch(rank_and, 0, number_of_processes=1, on=pods_in(namespace, image=ABSENT))
    status = job.wait(90)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED)
    assert "was not found in its registry" in status.reason
    job.delete()
