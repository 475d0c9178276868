"""Where snapshots and results lie between notebook and pods: claims and URLs, also when one side is gone."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import flat
import pytest
from on_cluster import call_in, make_claim, run_kubectl
from rank_work import last_of, size_and_more

import kale_dist as kd
from kale_dist.contract import StateName
from kale_dist.errors import StoreError

pytestmark = pytest.mark.usefixtures("jobs_end")

FLOATS = 7_500_000
"""30 MB."""


@pytest.fixture(scope="module")
def claim(namespace):
    make_claim(namespace, "results")
    return "results"


@pytest.fixture
def on(namespace):
    """Arguments that send a call to the cluster."""
    return call_in(namespace, cpu=0.2)


class FileShare:
    """An FTP server that this machine and the pods reach."""

    def __init__(self, folder):
        self.folder = folder
        node = json.loads(run_kubectl("get", "nodes", "-o", "json"))["items"][0]
        host = next(item["address"] for item in node["status"]["addresses"] if item["type"] == "InternalIP")
        # It stands on asyncore, whose deprecation is a warning.
        words = ["-W", "ignore", "-m", "pyftpdlib", "-i", host, "-p", "0", "-w"]
        self._process = subprocess.Popen(
            [sys.executable, *words, "-d", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        found = None
        while found is None:
            line = self._process.stderr.readline()
            assert line, "the server has ended"
            found = re.search(r"starting FTP server on .*?:(\d+)", line)
        self._reader = threading.Thread(target=self._process.stderr.read)
        self._reader.start()
        self.url = f"ftp://{host}:{found[1]}/team"

    def sizes(self):
        return {
            str(path.relative_to(self.folder)): path.stat().st_size for path in self.folder.rglob("*") if path.is_file()
        }

    def close(self):
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self._process.stderr.close()


@pytest.fixture
def share(kubeconfig, tmp_path):
    (tmp_path / "share").mkdir()
    made = FileShare(tmp_path / "share")
    yield made
    made.close()


def delete_pods(namespace, job):
    # Before the operator has seen them end, it would take their absence for a failure.
    run_kubectl("-n", namespace, "wait", "--for=condition=Succeeded", f"pytorchjob/{job.name}", "--timeout=60s")
    selector = f"training.kubeflow.org/job-name={job.name}"
    run_kubectl("-n", namespace, "delete", "pods", "-l", selector, "--grace-period=0", "--force", "--wait=true")


def readers(namespace):
    return run_kubectl("-n", namespace, "get", "pods", "-l", "app.kubernetes.io/component=reader", "-o", "name").split()


def own_lines(job):
    return " ".join(line.text for line in job.logs() if line.rank is None)


def on_another_machine(code, state, **environment):
    """Run a script with a state folder of its own; gives what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(state), "PYTHONWARNINGS": "default", **environment},
        check=False,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_results_on_a_claim_are_read_when_the_pods_are_gone_and_by_another_machine(on, namespace, claim, tmp_path):
    import torch

    weights = torch.arange(FLOATS, dtype=torch.float32)
    with pytest.warns(kd.errors.KaleDistWarning, match="MiB"):
        job = flat.launch(size_and_more, weights, store=f"pvc://{claim}/team", **on)
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    assert torch.equal(job.result(), weights + 1)
    delete_pods(namespace, job)
    said = on_another_machine(
        f"""
        import sys
        import kale_dist as kd
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import torch
        job = kd.attach("{job.ref}", trust=True)
        status = job.wait(60)
        values = job.results()
        print(status.state, [torch.equal(value, torch.arange({FLOATS}, dtype=torch.float32) + 1) for value in values])
        """,
        tmp_path,
    )
    assert said.split("\n")[-2] == "succeeded [True, True]"
    assert readers(namespace) == []
    with pytest.warns(kd.errors.KaleDistWarning, match="MiB"):
        again = flat.launch(size_and_more, weights, store=f"pvc://{claim}/team", **on)
    assert torch.equal(again.result(120), weights + 1)
    assert "nothing had to be sent" in own_lines(again)
    job.delete()
    again.delete()


def test_a_url_carries_snapshot_and_results_and_a_re_run_sends_what_changed(on, namespace, share):
    import torch

    weights = torch.arange(FLOATS, dtype=torch.float32)
    job = flat.launch(size_and_more, weights, store=share.url, **on)
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    assert torch.equal(job.result(), weights + 1)
    before = share.sizes()
    assert sum(before.values()) > 3 * weights.nbytes
    outcomes = sorted(path.name for path in (share.folder / "team" / "jobs" / job.name).iterdir())
    assert outcomes == ["outcome-0-0", "outcome-0-1"]

    again = flat.launch(last_of, weights, store=share.url, **on)
    assert again.result(120) == FLOATS - 1
    assert sum(size for name, size in share.sizes().items() if name not in before) < 100_000
    job.delete()
    again.delete()


def test_a_protocol_whose_package_is_not_installed_is_refused_before_anything_is_sent(on, namespace):
    with pytest.raises(StoreError, match="s3fs"):
        flat.launch(last_of, [1.0], store="s3://bucket/folder", name="unsent", **on)
    left = run_kubectl("-n", namespace, "get", "pytorchjobs,secrets", "-o", "name")
    assert "unsent" not in left


READER = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: most, namespace: {namespace}}}
rules:
- {{apiGroups: ["kubeflow.org"], resources: ["pytorchjobs"], verbs: ["*"]}}
- {{apiGroups: [""], resources: [secrets, pods/log, pods/portforward, pods/exec, events], verbs: ["*"]}}
- {{apiGroups: [""], resources: [pods], verbs: [{verbs}]}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: most, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: most}}
subjects: [{{kind: ServiceAccount, name: "{account}", namespace: {namespace}}}]
"""


def test_without_the_right_to_make_a_pod_the_error_says_where_the_results_lie(
    on, namespace, claim, make_user, tmp_path
):
    import torch

    job = flat.launch(torch.zeros, 500_000, store=f"pvc://{claim}/team", **on)
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    delete_pods(namespace, job)

    def role(identity):
        account = identity.rpartition(":")[2]
        return READER.format(namespace=namespace, account=account, verbs="get, list, watch")

    said = on_another_machine(
        f"""
        import kale_dist as kd
        job = kd.attach("{job.ref}", trust=True)
        job.wait(60)
        try:
            job.result()
        except kd.errors.BackendError as error:
            print(error)
        """,
        tmp_path,
        KUBECONFIG=str(make_user(namespace, role)),
    )
    assert f"lie in the claim '{claim}'" in said
    assert f"team/jobs/{job.name}" in said
    assert "create pods" in said
    job.delete()
