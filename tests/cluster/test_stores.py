"""Where snapshots and results lie between notebook and pods: claims and URLs, also when one side is gone."""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import pytest
from on_cluster import make_claim, pods_in, run_kubectl
from rank_work import backwards, last_of, size_and_more
from waiting import until

import kale_dist as kd
from kale_dist.errors import StoreError
from kale_dist.wire import StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

FLOATS = 2_000_000
"""8 MB."""


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


def on_another_machine(code, state):
    """Run a script with a state folder of its own; gives what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(state), "PYTHONWARNINGS": "default"},
        check=False,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_results_on_a_claim_are_read_when_the_pods_are_gone_and_by_another_machine(namespace, tmp_path, plain_image):
    make_claim(namespace, "results")
    on = pods_in(namespace, image=plain_image, store="pvc://results/team")
    data = bytes(range(250)) * 32_000
    job = kd.launch(backwards, data, number_of_processes=1, on=on)
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    assert job.result() == data[::-1]
    # Before the operator has seen them end, it would take their absence for a failure.
    run_kubectl("-n", namespace, "wait", "--for=condition=Succeeded", f"pytorchjob/{job.name}", "--timeout=60s")
    selector = f"training.kubeflow.org/job-name={job.name}"
    run_kubectl("-n", namespace, "delete", "pods", "-l", selector, "--grace-period=0", "--force", "--wait=true")
    said = on_another_machine(
        f"""
        import sys
        import kale_dist as kd
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        job = kd.attach("{job.ref}", trust=True)
        status = job.wait(60)
        print(status.state, job.result() == bytes(range(249, -1, -1)) * 32_000)
        """,
        tmp_path,
    )
    assert said.split("\n")[-2] == "succeeded True"
    left = json.loads(run_kubectl("-n", namespace, "get", "pytorchjobs", "-o", "json"))["items"]
    assert [item["metadata"]["name"] for item in left] == [job.name]
    # What the claim has is not sent again.
    again = kd.launch(last_of, data, number_of_processes=1, on=on)
    assert again.result(120) == 249
    job.delete()
    again.delete()


@pytest.mark.nightly
def test_a_url_carries_snapshot_and_results_and_a_re_run_sends_what_changed(namespace, share):
    import torch

    on = pods_in(namespace, store=share.url)
    weights = torch.arange(FLOATS, dtype=torch.float32)
    job = kd.launch(size_and_more, weights, number_of_processes=2, on=on)
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    assert torch.equal(job.result(), weights + 1)
    # The first pod may still be storing the results that the notebook has fetched from it.
    kept = [share.folder / "team" / "jobs" / job.name / f"outcome-0-{rank}" for rank in range(2)]
    until(lambda: all(path.exists() and path.stat().st_size > weights.nbytes for path in kept), 60, share.sizes)
    before = share.sizes()

    again = kd.launch(last_of, weights, number_of_processes=1, on=on)
    assert again.result(120) == FLOATS - 1
    assert sum(size for name, size in share.sizes().items() if name not in before) < 100_000
    job.delete()
    again.delete()


def test_a_protocol_whose_package_is_not_installed_is_refused_before_anything_is_sent(namespace):
    with pytest.raises(StoreError, match="gcsfs"):
        kd.launch(
            last_of, [1.0], name="unsent", number_of_processes=1, on=pods_in(namespace, store="gs://bucket/folder")
        )
    left = run_kubectl("-n", namespace, "get", "pytorchjobs,secrets", "-o", "name")
    assert "unsent" not in left
