"""`kale-dist run --in-cluster`: a notebook that runs in a pod comes back from there, however it ends."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import uuid

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from on_cluster import IMAGE, grant, run_kubectl

import kale_dist as kd

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.nightly
SMALL = ("--pod", "resources", "{'cpu': 0.1, 'memory_gib': 1.5}")

TRAINING = """
import os, torch
import kale_dist as kd
print("in", os.uname().nodename, "times", times)
print("variables of a rank:", [name for name in ("RANK", "MASTER_ADDR", "KALE_DIST_INPUT") if name in os.environ])

def work(times):
    here = kd.context()
    for _ in range(times):
        print("on", os.uname().nodename)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return total.item()

job = kd.launch(work, times, on=kd.Kubernetes(resources={"cpu": 0.1, "memory_gib": 1}), number_of_processes=2)
print("results", job.results(150))
job.delete()
"""


@pytest.fixture(scope="module")
def place(namespace, tmp_path_factory):
    """A namespace with a service account that has the least Role; environment and folder of the command."""
    run_kubectl("-n", namespace, "create", "serviceaccount", "jo")
    page = (ROOT / "docs" / "rbac.md").read_text()
    role = re.search(r"^```yaml\n(apiVersion: rbac.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    role = role.replace("team-a", namespace).replace('name: "notebook"', 'name: "jo"')
    grant(namespace, f"system:serviceaccount:{namespace}:jo", role)
    settings = {
        "PYTHONPATH": str(ROOT), "KALE_DIST_IMAGE": IMAGE, "KALE_DIST_NAMESPACE": namespace,
        "KALE_DIST_REGISTRY": f"{IMAGE.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}",
    }  # fmt: skip
    return namespace, os.environ | settings, tmp_path_factory.mktemp("notebooks")


def start(place, cells, *words):
    """Start the command on a notebook of these cells, the first of which has its parameters."""
    _, environment, folder = place
    first, *others = cells
    made = [new_code_cell(first, metadata={"tags": ["parameters"]}), *map(new_code_cell, others)]
    nbformat.write(new_notebook(cells=made), folder / "n.ipynb")
    command = [sys.executable, "-m", "kale_dist.cli", "run", "n.ipynb", "--in-cluster", *SMALL, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment,
        start_new_session=True,
    )  # fmt: skip


def executed(place, name="n.executed.ipynb"):
    return nbformat.read(place[2] / name, as_version=4).cells


def left_behind(namespace):
    kinds = "pods,secrets,pytorchjobs"
    return run_kubectl("-n", namespace, "get", kinds, "-o", "name").split()


def test_a_notebook_with_a_parameter_trains_on_other_pods_with_the_least_rights(place):
    running = start(
        place, ["times = 1", TRAINING], "-p", "times", "3", "-o", "out.ipynb", "--json", "run.json",
        "--packages", "auto", "--pod", "service_account", "jo",
    )  # fmt: skip
    out, err = running.communicate(timeout=280)
    assert running.returncode == 0, out + err
    lines = out.splitlines()
    pod = re.search(r"^The notebook runs as kubernetes://\S+/(\S+)$", out, re.MULTILINE)[1]
    assert f"in {pod}-master-0 times 3" in lines
    assert "variables of a rank: []" in lines
    name = re.search(r"^\[0\] on (\S+)-master-0$", out, re.MULTILINE)[1]
    assert name != pod
    assert [lines.count(f"[{rank}] on {name}-{role}-0") for rank, role in enumerate(("master", "worker"))] == [3, 3]
    assert "results [2.0, 2.0]" in lines
    cells = executed(place, "out.ipynb")
    assert cells[1].source == "times = 3"
    assert "results [2.0, 2.0]" in "".join(output.get("text", "") for output in cells[2].outputs)
    said = json.loads((place[2] / "run.json").read_text())
    assert said["result"] == "succeeded"
    assert [cell["state"] for cell in said["cells"]] == ["succeeded"] * 3
    assert said["output"] == "out.ipynb"
    assert left_behind(place[0]) == []


def test_a_failing_cell_is_told_with_its_traceback_and_the_notebook_is_kept(place):
    cells = ["x = 1", "def inner():\n    raise ValueError('on purpose')\nprint('before')\ninner()", "print('never')"]
    running = start(place, cells, "--packages", "auto", "--json", "run.json")
    out, err = running.communicate(timeout=200)
    assert running.returncode == 1, out + err
    assert "before" in out.splitlines()
    assert "never" not in out
    assert "n.ipynb, cell 2 of 3 failed:" in err
    assert "raise ValueError('on purpose')" in err
    assert err.splitlines()[-1] == "Executed notebook: n.executed.ipynb"
    assert executed(place)[1].outputs[-1]["ename"] == "ValueError"
    said = json.loads((place[2] / "run.json").read_text())
    assert [cell["state"] for cell in said["cells"]] == ["succeeded", "failed", "not run"]
    assert left_behind(place[0]) == []


@pytest.mark.parametrize(("send", "number", "code"), [
    pytest.param(os.killpg, signal.SIGINT, 130, id="ctrl-c"), pytest.param(os.kill, signal.SIGTERM, 143, id="sigterm"),
])  # fmt: skip
def test_ctrl_c_and_sigterm_end_the_pod_s_cell_and_its_job_and_bring_the_notebook(place, send, number, code):
    job = "import kale_dist as kd, time\ndef wait():\n    print('waiting', flush=True)\n    time.sleep(300)\n"
    call = "job = kd.launch(wait, number_of_processes=1)\njob.wait()"
    running = start(place, ["x = 1", "print('first')", job + call, "print('never')"], "--packages", "auto")
    for line in running.stdout:
        if line == "[0] waiting\n":
            break
    send(running.pid, number)
    out, err = running.communicate(timeout=90)
    assert running.returncode == code, out + err
    assert re.search(r"^local://\S+: Cancelled", out, re.MULTILINE)
    assert "never" not in out
    cells = executed(place)
    assert cells[1].outputs[0]["text"] == "first\n"
    assert cells[2].outputs[-1]["ename"] == "KeyboardInterrupt"
    assert left_behind(place[0]) == []


def test_an_image_without_what_executes_notebooks_is_named_with_the_remedy(place):
    running = start(place, ["x = 1"])
    out, err = running.communicate(timeout=120)
    assert running.returncode == 1, out + err
    assert "The pod's image lacks what executes notebooks: ipykernel" in err
    assert "--packages auto" in err
    assert "Traceback" not in out + err
    assert executed(place)[0].source == "x = 1"
    assert left_behind(place[0]) == []


def test_a_pod_that_is_kept_can_be_looked_at_and_deleted(place):
    namespace, environment, folder = place
    running = start(place, ["x = 1", "print('from the pod')"], "--packages", "auto", "--keep")
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, out + err
    ref = re.search(r"^(kubernetes://\S+) is kept", out, re.MULTILINE)[1]
    for words, said in ((["logs"], "[0] from the pod"), (["delete", "--yes"], f"{ref} deleted")):
        found = subprocess.run(
            [sys.executable, "-m", "kale_dist.cli", *words, ref],
            capture_output=True, text=True, check=True, env=environment, cwd=folder, timeout=60,
        )  # fmt: skip
        assert said in found.stdout
    assert left_behind(namespace) == []


def test_ctrl_c_also_cancels_a_job_on_the_cluster_that_no_cell_waits_for(place, tmp_path):
    namespace, environment, _ = place
    source = (
        "import kale_dist as kd, time\ndef wait():\n    print('waiting', flush=True)\n    time.sleep(300)\n"
        "job = kd.launch(wait, on=kd.Kubernetes(resources={'cpu': 0.1, 'memory_gib': 1}), number_of_processes=1)\n"
        "time.sleep(300)"
    )
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), tmp_path / "here.ipynb")
    running = subprocess.Popen(
        [sys.executable, "-m", "kale_dist.cli", "run", "here.ipynb"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, start_new_session=True,
    )  # fmt: skip
    for line in running.stdout:
        if line == "[0] waiting\n":
            break
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, out + err
    ref = re.search(r"^(kubernetes://\S+): Cancelled", out, re.MULTILINE)[1]
    kd.attach(ref).delete()
    assert left_behind(namespace) == []
