"""Faults of the cluster itself, seen from a notebook. Its parts have to be processes of this machine; each is well in the end."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
from fault_work import counts, waits
from in_containers import check_counts
from in_pods import has_counted, in_pods, process_of
from on_cluster import run_kubectl, write_kubeconfig


def part(name):
    """The process id of a part of the cluster."""
    file = pathlib.Path(os.environ["KUBECONFIG"]).parent / "state" / f"{name}.pid"
    if not file.exists():
        pytest.skip("the cluster's parts are not processes of this machine")
    return int(file.read_text())


def node_is(ready):
    told = run_kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")
    return told.split()[:1] == [ready]


def is_well(scene):
    """The API server, the node, the operator and the kubelet do their work: a job succeeds."""
    scene.until(
        lambda: not subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, check=False).returncode
    )
    scene.until(lambda: node_is("True"))
    scene.succeeds(scene.launch(counts, 3, on=in_pods(scene)), 3, 3)


def etcd_is_stopped(scene):
    job = scene.launch(counts, 500, 0.1, on=in_pods(scene))
    has_counted(scene, job)
    scene.stop(part("etcd"), 20).wait()
    assert not job.done()
    scene.succeeds(job, 500, 500)
    check_counts(job, 500)
    is_well(scene)


def kubelet_is_stopped(scene):
    job = scene.launch(counts, 900, 0.1, on=in_pods(scene))
    has_counted(scene, job)
    stopped = scene.stop(part("kubelet"), 60)
    scene.until(lambda: node_is("Unknown"))
    assert stopped.poll() is None
    stopped.wait()
    assert not job.done()
    scene.succeeds(job, 900, 900)
    check_counts(job, 900)
    is_well(scene)


def api_server_is_restarted(scene):
    """A second API server of the same cluster, which this process may end: all else stays as it is."""
    words = pathlib.Path(f"/proc/{part('kube-apiserver')}/cmdline").read_bytes().decode().split("\0")[:-1]
    words[words.index("--secure-port") + 1] = "6444"
    words.append("--endpoint-reconciler-type=none")
    path = write_kubeconfig(
        scene.folder / "kubeconfig", os.environ["KUBECONFIG"], server="https://127.0.0.1:6444",
        token=run_kubectl("config", "view", "--raw", "-o", "jsonpath={.users[0].user.token}"),
    )  # fmt: skip

    def start():
        with (scene.folder / "server.log").open("ab") as log:
            server = subprocess.Popen(words, stdout=log, stderr=log)
        scene.undone.callback(server.wait)
        scene.undone.callback(server.kill)
        ready = ["kubectl", f"--kubeconfig={path}", "get", "--raw", "/readyz"]
        scene.until(lambda: not subprocess.run(ready, capture_output=True, check=False).returncode)
        return server

    server = start()
    on = in_pods(scene)
    scene.patch.setenv("KALE_DIST_KUBECONFIG", str(path))
    job = scene.launch(counts, 500, 0.1, on=on)
    has_counted(scene, job)
    server.kill()
    server.wait()
    time.sleep(5)
    assert not job.done()
    start()
    scene.succeeds(job, 500, 500)
    check_counts(job, 500)
    scene.check()


def shim_is_killed(scene):
    job = scene.launch(waits, ready=2, on=in_pods(scene))
    worker = f"{job.name}-worker-0"
    inside = process_of(scene.namespace, worker)
    shim = int(pathlib.Path(f"/proc/{inside}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"containerd-shim" in pathlib.Path(f"/proc/{shim}/cmdline").read_bytes()
    os.kill(shim, signal.SIGKILL)
    scene.fails(job, "lost", worker)
    scene.until(lambda: not pathlib.Path(f"/proc/{inside}").exists())
    is_well(scene)
