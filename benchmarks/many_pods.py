"""What a PyTorchJob of 1,000 pods costs the notebook: processor, memory and requests, from the submission to its deletion.

Run it with `python benchmarks/many_pods.py [workers]` against a test cluster with nodes that exist only in its API
(`cluster with kwok 249`: 996 workers of 4 cores find room, 3 stay pending). The first pod is a real head that waits for the others;
theirs are said to run, and nothing runs in them. So it is the following that is measured, not results. Five workers are evicted by the
eviction API. One gets the status of a pod whose image is missing, because no kubelet tries to pull an image there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

HOME = tempfile.TemporaryDirectory()
os.environ["XDG_STATE_HOME"] = os.environ.get("BENCH_STATE", HOME.name)

import kale_dist as kd  # noqa: E402 - its records are this benchmark's own
from kale_dist.job import view  # noqa: E402
from kale_dist.places.kubernetes import client  # noqa: E402

IMAGE = f"{os.environ.get('REGISTRY', 'localhost:5000')}/kale-dist/torch-cpu:2.13.0"
LOOK_S = 30.0
FAKE = {
    "nodeSelector": {"type": "fake"},
    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}],
    "containers": [
        {
            "name": "pytorch",
            "resources": {"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "1Gi"}},
        }
    ],
}
REAL = {"nodeSelector": {"kubernetes.io/hostname": "kd-node"}}

requests: Counter[str] = Counter()


def count_requests() -> None:
    """Count what this process asks of the API server."""
    rest: Any = client._TimedRest  # noqa: SLF001 - there is no public place to count
    plain = rest._send  # noqa: SLF001

    def send(self: Any, method: str, url: str, options: dict[str, Any]) -> Any:
        path = url.partition("?")[0].rpartition("/namespaces/")[2].partition("/")[2]
        watch = (
            " (watch)" if "watch=true" in url.lower() or dict(options.get("query_params") or ()).get("watch") else ""
        )
        requests[f"{method} {path.partition('/')[0]}{watch}"] += 1
        return plain(self, method, url, options)

    rest._send = send  # noqa: SLF001


def memory_mib() -> float:
    """What this process has in memory now."""
    return int(pathlib.Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Print what a step takes of clock, processor, memory and requests."""
    began, used, before = time.monotonic(), time.process_time(), requests.copy()
    yield
    took, used = time.monotonic() - began, time.process_time() - used
    asked = ", ".join(f"{count} {name}" for name, count in (requests - before).items())
    print(
        f"{what}: {took:.1f} s, {used:.2f} s of processor ({100 * used / took:.0f} %), {memory_mib():.0f} MiB; {asked or 'no requests'}",
        flush=True,
    )


def until(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    """Wait for something."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(2)


def measure(namespace: str, workers: int) -> None:
    """One job, from its submission to its deletion."""
    print(f"--- 1 + {workers}", flush=True)
    patch = {
        "spec": {
            "pytorchReplicaSpecs": {"Master": {"template": {"spec": REAL}}, "Worker": {"template": {"spec": FAKE}}}
        }
    }
    place = kd.Kubernetes(
        namespace=namespace, image=IMAGE, resources={"cpu": 0.1, "memory_gib": 0.5}, patch=patch, wait_for_nodes=True
    )
    before = memory_mib()
    with told("submit"):
        job = kd.launch(time.sleep, 1, number_of_processes=workers + 1, on=place)
    follow(job, namespace, min(workers, 996), before)


def follow(job: kd.Job[Any], namespace: str, fits: int, before: float) -> None:
    """Follow a job until its pods run, then for a while, then end it."""

    def runs() -> int:
        found = subprocess.run(
            ["kubectl", "-n", namespace, "get", "pods", "--field-selector=status.phase=Running", "--no-headers"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return len(found.stdout.splitlines())

    with told("until its pods run"):
        until(lambda: runs() >= fits + 1)
    time.sleep(10)
    with told("followed"):
        time.sleep(LOOK_S)
    print(
        f"memory: {memory_mib() - before:.0f} MiB more than before the submission, {threading.active_count()} threads"
    )
    times = []
    for _ in range(5):
        began = time.thread_time()
        status = job.status
        middle = time.thread_time()
        html = "".join(view.parts(status, time.time()).values())
        times.append((middle - began, time.thread_time() - middle))
    print(
        "status and its picture: "
        + ", ".join(f"{1000 * statistics.median(column):.0f} ms" for column in zip(*times, strict=True)),
        f"{len(html) / 1e3:.0f} kB",
    )
    print(view.text(status))
    if fits > 20:  # noqa: PLR2004 - the large job
        break_pods(job, namespace)
    else:
        with told("cancel"):
            job.cancel()
    with told("until it has ended"), contextlib.suppress(kd.KaleDistError):
        job.wait(timeout=120)
    with told("delete"):
        job.delete()


def break_pods(job: kd.Job[Any], namespace: str) -> None:
    """Evict some pods, and let one lack its image."""
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "team/missing:1"'}
    container = {"name": "pytorch", "image": "team/missing:1", "imageID": "", "ready": False, "restartCount": 0}
    lacks = {"status": {"phase": "Pending", "containerStatuses": [{**container, "state": {"waiting": waiting}}]}}
    with told("a pod lacks its image"):
        subprocess.run(
            ["kubectl", "-n", namespace, "patch", "pod", f"{job.name}-worker-5", "--subresource=status", "--type=merge", "-p", json.dumps(lacks)],
            check=True,
        )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            until(lambda: "team/missing" in job.status.reason, 30)
    print(job.status.state, job.status.reason)
    evicted = [f"{job.name}-worker-{number}" for number in range(10, 15)]
    with told("5 pods evicted, until the job has failed"):
        for name in evicted:
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
            }
            path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
            subprocess.run(["kubectl", "create", "--raw", path, "-f", "-"], input=json.dumps(body), text=True, check=True, capture_output=True)  # fmt: skip
        until(job.done)
    print(job.status.state, job.status.reason)


def main() -> None:
    """Measure a small and a large job."""
    count_requests()
    if len(sys.argv) > 2:  # noqa: PLR2004 - an earlier run's job, which this one follows
        ref = sys.argv[2]
        with told("attach"):
            job = kd.attach(ref)
        follow(job, ref.split("/")[2], 996, memory_mib())
        return
    namespace = f"test-scale-{uuid.uuid4().hex[:6]}"
    subprocess.run(["kubectl", "create", "namespace", namespace], check=True)
    subprocess.run(
        ["kubectl", "-n", namespace, "wait", "--for=create", "serviceaccount/default", "--timeout=20s"], check=True
    )
    try:
        for workers in (1, int(sys.argv[1]) if len(sys.argv) > 1 else 999):
            measure(namespace, workers)
    finally:
        subprocess.run(["kubectl", "delete", "namespace", namespace, "--wait=false"], check=True)


if __name__ == "__main__":
    main()
