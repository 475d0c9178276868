"""Jobs whose notebook has gone, that the cluster holds up or takes away, and what is left of a job in the end."""

import contextlib
import datetime as dt
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse

import flat
import pytest
from on_cluster import IMAGE, call_in, run_kubectl
from rank_work import bytes_of, size_and_more, summed

import kale_dist as kd
from kale_dist import backends
from kale_dist.backends.kubernetes import client, roles
from kale_dist.contract import StateName
from kale_dist.errors import BackendError, ResultUnavailableError

pytestmark = pytest.mark.usefixtures("jobs_end")

SMALL = {"cpu": 0.2, "memory_gib": 1}
KINDS = "pytorchjobs,pods,secrets,services,configmaps,persistentvolumeclaims,podgroups"


@pytest.fixture
def on(namespace):
    """Arguments that send a call to the cluster."""
    return call_in(namespace, cpu=0.2)


def left_in(namespace, name):
    there = {kind for kind in KINDS.split(",") if "pod" not in kind or kind == "pods"}
    listed = json.loads(run_kubectl("-n", namespace, "get", ",".join(sorted(there)), "-o", "json"))["items"]
    return [f"{item['kind']}/{item['metadata']['name']}" for item in listed if name in item["metadata"]["name"]]


def wait_for(seen, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return found


def submit_and_die(code, state):
    """Run a notebook that ends with SIGKILL; gives the reference that it printed."""
    script = f"import os, signal, sys\nsys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n" + textwrap.dedent(
        code
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(state), "PYTHONWARNINGS": "default"},
        check=False,
        timeout=120,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.strip()


def test_a_notebook_that_dies_while_it_sends_is_named_in_the_job_s_end(namespace, tmp_path):
    ref = submit_and_die(
        f"""
        import torch
        import kale_dist as kd
        from rank_work import size_and_more
        job = kd.launch(size_and_more, torch.rand(100_000_000), number_of_processes=2, on=kd.Kubernetes(
            image="{IMAGE}", resources={{"cpu": 0.2, "memory_gib": 2}}, namespace="{namespace}", input_wait_s=4))
        print(job.ref, flush=True)
        while "Sending the snapshot" not in job.status.reason:
            assert not job.done(), job.status
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    job = kd.attach(ref)
    status = job.wait(90)
    assert status.state is StateName.FAILED
    assert "The notebook was gone before its bytes had arrived" in status.reason
    assert "input_wait_s" in status.reason
    job.delete()


def test_results_that_nobody_fetches_are_lost_and_the_job_says_so(namespace, tmp_path):
    ref = submit_and_die(
        f"""
        import kale_dist as kd
        from rank_work import bytes_after
        job = kd.launch(bytes_after, 2, 5_000_000, number_of_processes=2, on=kd.Kubernetes(
            image="{IMAGE}", resources={{"cpu": 0.2, "memory_gib": 1}}, namespace="{namespace}", collect_wait_s=2))
        print(job.ref, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    name = ref.rpartition("/")[2]
    run_kubectl("-n", namespace, "wait", "--for=condition=Succeeded", f"pytorchjob/{name}", "--timeout=90s")
    job = kd.attach(ref)
    assert job.wait(60).state is StateName.SUCCEEDED
    assert any("not fetched within 2 s and are lost; give a store" in line.text for line in job.logs())
    with pytest.raises(ResultUnavailableError, match="collect_wait_s"):
        job.result()
    job.delete()


class CuttingProxy:
    """A way to the API server that breaks once, in the middle of a long request."""

    def __init__(self, server, cut_after):
        parts = urllib.parse.urlsplit(server)
        self._target = (parts.hostname, parts.port)
        self._cut_after = cut_after
        self.cuts = 0
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, target, is_up in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._carry, args=(source, target, is_up))
                self._threads.append(thread)
                thread.start()

    def _carry(self, source, target, is_up):
        carried = 0
        try:
            while block := source.recv(1 << 16):
                target.sendall(block)
                carried += len(block)
                self.sent += len(block) if is_up else 0
                if is_up and carried > self._cut_after and not self.cuts:
                    self.cuts += 1
                    break
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        # Threads that wait for one are woken by this, and not by close.
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()


def test_a_cut_upload_goes_on_where_it_broke(on, namespace, kubeconfig, make_user, monkeypatch):
    import torch
    import yaml

    server = yaml.safe_load(pathlib.Path(kubeconfig).read_text())["clusters"][0]["cluster"]["server"]
    proxy = CuttingProxy(server, 40_000_000)
    weights = torch.rand(20_000_000)
    user = make_user(namespace, lambda identity: roles.role_yaml(namespace, identity), server=proxy.url)
    with monkeypatch.context() as patched:
        patched.setenv("KALE_DIST_KUBECONFIG", str(user))
        with pytest.warns(kd.errors.KaleDistWarning, match="MiB"):
            job = flat.launch(size_and_more, weights, **on)
        assert torch.equal(job.result(120), weights + 1)
        assert proxy.cuts == 1
        assert weights.nbytes < proxy.sent < 1.5 * weights.nbytes
        job.delete()
        backends.get("kubernetes").close()
    client.disconnect()
    proxy.close()


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_quota_on_secrets_leaves_nothing_behind(on, make_namespace, make_user, monkeypatch, looks_first):
    namespace = make_namespace()
    run_kubectl("-n", namespace, "create", "quota", "few", "--hard=count/secrets=0")
    rights = [right for right in roles.RIGHTS if looks_first or right.resource != "resourcequotas"]
    user = make_user(namespace, lambda identity: roles.role_yaml(namespace, identity, rights))
    monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(user))
    wait_for(lambda: "0" in run_kubectl("-n", namespace, "get", "quota", "few", "-o", "jsonpath={.status.used}"))
    arguments = {**on, "cluster": {"namespace": namespace}, "name": "refused"}
    if looks_first:
        with pytest.raises(BackendError, match="few"):
            flat.launch(summed, 1, **arguments)
    else:
        with pytest.warns(kd.errors.KaleDistWarning, match="quota"), pytest.raises(BackendError, match="few"):
            flat.launch(summed, 1, **arguments)
    assert wait_for(lambda: left_in(namespace, "refused") == [])
    assert not any("refused" in str(job.ref) for job in kd.jobs())


def test_after_its_ttl_the_cluster_has_nothing_and_this_machine_has_the_results(on, namespace):
    job = flat.launch(bytes_of, 1_000_000, **{**on, "cluster": {"namespace": namespace, "ttl_s": 2}})
    assert job.wait(90).state is StateName.SUCCEEDED
    assert wait_for(lambda: left_in(namespace, job.name) == [])
    again = kd.attach(job.ref)
    assert again.status.state is StateName.SUCCEEDED
    assert again.results() == [bytes(1_000_000)] * 2
    assert any(line.text == "rank 1 is here" for line in again.logs())
    again.delete()
    assert str(job.ref) not in [str(found.ref) for found in kd.jobs()]


def test_a_job_that_its_ttl_has_taken_away_unseen_says_so(namespace, tmp_path):
    ref = submit_and_die(
        f"""
        import kale_dist as kd
        from rank_work import summed
        job = kd.launch(summed, 1, number_of_processes=1, on=kd.Kubernetes(
            image="{IMAGE}", resources={{"cpu": 0.2, "memory_gib": 1}}, namespace="{namespace}", ttl_s=0))
        print(job.ref, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert wait_for(lambda: left_in(namespace, ref.rpartition("/")[2]) == [])
    seen = subprocess.run(
        [sys.executable, "-c", f"import kale_dist as kd; status = kd.attach({ref!r}).wait(60); print(status.state, status.reason)"],
        capture_output=True, text=True, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, check=False, timeout=120,
    )  # fmt: skip
    assert " cancelled: " in seen.stdout, (seen.stdout, seen.stderr)
    assert "is no longer in the namespace" in seen.stdout
    assert "0 s after its end (ttl_s)" in seen.stdout


def test_a_process_that_ends_while_it_follows_a_job_ends_well(namespace, tmp_path):
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    script = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import kale_dist as kd
from rank_work import waits
kd.launch(waits, number_of_processes=1, name="followed",
          on=kd.Kubernetes(image="{IMAGE}", resources={SMALL}, namespace="{namespace}"))
"""
    ref = f"kubernetes://{namespace}/followed"
    calls = [
        ["-c", script],
        *[["-m", "kale_dist.cli", "status", ref]] * 3,
        ["-m", "kale_dist.cli", "delete", ref],
    ]
    for arguments in calls:
        ended = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=120
        )
        assert ended.returncode == 0, (arguments, ended.returncode, ended.stderr)


def test_deleting_a_finished_job_leaves_nothing(on, namespace):
    job = flat.launch(summed, 1, **on)
    assert job.result(90) == 3.0
    kinds = {item.partition("/")[0] for item in left_in(namespace, job.name)}
    assert kinds == {"PyTorchJob", "Pod", "Secret", "Service"}
    job.delete()
    assert wait_for(lambda: left_in(namespace, job.name) == [])


SUSPENDED = {"spec": {"runPolicy": {"suspend": True}}}


def test_a_suspended_job_says_so_and_runs_when_it_is_resumed(on, namespace):
    job = flat.launch(summed, 1, **{**on, "cluster": {"namespace": namespace, "patch": SUSPENDED}})
    status = wait_for(lambda: "suspended" in job.status.reason and job.status)
    assert status.state is StateName.PENDING
    assert '"suspend":false' in status.reason
    resumed = '{"spec":{"runPolicy":{"suspend":false}}}'
    run_kubectl("-n", namespace, "patch", "pytorchjob", job.name, "--type=merge", "-p", resumed)
    assert job.results(120) == [3.0, 3.0]
    job.delete()


def test_a_job_that_kueue_holds_back_says_why(on, namespace):
    options = {"namespace": namespace, "patch": SUSPENDED, "queue": "team-queue"}
    with pytest.warns(kd.errors.KaleDistWarning, match="no Kueue queue 'team-queue'"):
        job = flat.launch(summed, 1, **{**on, "cluster": options})
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = (
        "couldn't assign flavors to pod set master: insufficient unused quota for cpu in flavor default, 2 more needed"
    )
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{job.name}.1", "namespace": namespace},
        "involvedObject": {
            "apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "namespace": namespace,
            "name": f"pytorchjob-{job.name}-1a2b3",
        },
        "reason": "Pending", "message": said, "type": "Warning", "source": {"component": "kueue-admission"},
        "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    }  # fmt: skip
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(event))
    status = wait_for(lambda: "insufficient unused quota" in job.status.reason and job.status)
    assert status.state is StateName.PENDING
    assert "Kueue's queue team-queue" in status.reason
    job.delete()
