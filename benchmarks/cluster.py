"""A job on a cluster against the same PyTorchJob by `kubectl apply`: from submission to Succeeded, and what watching costs.

Run it with `python benchmarks/cluster.py [rounds]` where a cluster with the Training Operator is configured (kubeconfig,
`KALE_DIST_NAMESPACE`, `KALE_DIST_IMAGE`; see docs/configuration.md). Both contestants train the same model on the same
data with one master and one worker, in the same image; rounds are interleaved and take turns at being first. The table
gives medians and ratios of the same run. Both are timed by the same look at the PyTorchJob's conditions.

Watching is measured on a job whose two ranks write 50 lines a second each for 20 s: processor time of this process from
the submission to the end, against that of `kubectl apply` and one `kubectl logs --follow` for each pod.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import kale_dist as kd
from kale_dist import config
from kale_dist.places.kubernetes import client

PLACE = kd.Kubernetes(resources={"cpu": 0.1, "memory_gib": 1})
RESOURCES = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
LINES, LINES_A_SECOND = 1000, 50

TRAINING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""

TALKING = f"""
import time
for number in range({LINES}):
    print("line", number, flush=True)
    time.sleep(1 / {LINES_A_SECOND})
"""


def talk() -> None:
    """What `TALKING` does, as a function."""
    for number in range(LINES):
        print("line", number, flush=True)
        time.sleep(1 / LINES_A_SECOND)


def manifest(name: str, script: str) -> str:
    """A PyTorchJob as its users write it, with a script in it."""
    container = {
        "name": "pytorch",
        "image": config.load().image,
        "command": ["python3", "-c", script],
        "resources": RESOURCES,
    }
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    return json.dumps(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
        }
    )


def kubectl(*arguments: str, text: str | None = None) -> None:
    """Run kubectl in the namespace of the benchmark."""
    command = ["kubectl", "--namespace", client.connect().namespace, *arguments]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)


def await_success(name: str) -> None:
    """Wait until the PyTorchJob says that it has succeeded."""
    cluster = client.connect()
    while True:
        job: Any = cluster.custom.get_namespaced_custom_object(
            "kubeflow.org", "v1", cluster.namespace, "pytorchjobs", name
        )
        states = {item["type"]: item["status"] for item in job.get("status", {}).get("conditions") or ()}
        if states.get("Failed") == "True":
            raise RuntimeError(f"the job {name} has failed")
        if states.get("Succeeded") == "True":
            return
        time.sleep(0.05)


def train_by_kale_dist(name: str) -> float:
    """Submit the training from this process; seconds until its result is here."""
    start = time.perf_counter()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model = torch.nn.Linear(32, 10)
    job = kd.distribute(
        model,
        loader,
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        name=name,
        number_of_processes=2,
        on=PLACE,
    )
    await_success(name)
    succeeded = time.perf_counter() - start
    job.wait()
    job.delete()
    return succeeded


def train_by_kubectl(name: str) -> float:
    """Apply the manifest; seconds until the job has succeeded."""
    start = time.perf_counter()
    kubectl("apply", "-f", "-", text=manifest(name, TRAINING))
    await_success(name)
    succeeded = time.perf_counter() - start
    kubectl("delete", "pytorchjob", name)
    return succeeded


@contextmanager
def processor_time(who: int) -> Iterator[Callable[[], float]]:
    """Gives a function that tells the seconds of processor time used since, by this process or by ended children."""

    def used() -> float:
        usage = resource.getrusage(who)
        return usage.ru_utime + usage.ru_stime

    before = used()
    yield lambda: used() - before


def watch_by_kale_dist(name: str) -> float:
    """Processor time of this process for a job that talks."""
    with processor_time(resource.RUSAGE_SELF) as used:
        job = kd.launch(talk, name=name, number_of_processes=2, on=PLACE)
        job.wait()
        if sum(line.rank is not None for line in job.logs()) != 2 * LINES:
            raise RuntimeError("lines are missing")
        seconds = used()
    job.delete()
    return seconds


def watch_by_kubectl(name: str) -> float:
    """Processor time of kubectl for the same."""
    with processor_time(resource.RUSAGE_CHILDREN) as used:
        kubectl("apply", "-f", "-", text=manifest(name, TALKING))
        for pod in (f"{name}-master-0", f"{name}-worker-0"):
            kubectl("wait", "--for=create", f"pod/{pod}", "--timeout=60s")
            kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].started}=true", f"pod/{pod}", "--timeout=60s")
        namespace = client.connect().namespace
        readers = [
            subprocess.Popen(["kubectl", "--namespace", namespace, "logs", "--follow", pod], stdout=subprocess.DEVNULL)
            for pod in (f"{name}-master-0", f"{name}-worker-0")
        ]
        for reader in readers:
            reader.wait()
        kubectl("wait", "--for=condition=Succeeded", f"pytorchjob/{name}", "--timeout=60s")
        seconds = used()
    kubectl("delete", "pytorchjob", name)
    return seconds


def compare(title: str, unit: str, contestants: dict[str, Callable[[str], float]], rounds: int) -> None:
    """Let contestants take turns, and print medians with their ratio to the last one."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(1.0)
            taken[name].append(contestants[name](f"bench-{uuid.uuid4().hex[:6]}"))
    base = statistics.median(taken[names[-1]])
    print(f"\n{title}")
    print(f"{'':12} {unit:>22} {'x ' + names[-1]:>11}")
    for name in names:
        median = statistics.median(taken[name])
        print(f"{name:12} {median:22.2f} {median / base:11.2f}   {[round(value, 2) for value in taken[name]]}")


def main(rounds: int) -> None:
    """Measure and print."""
    train_by_kale_dist(f"bench-{uuid.uuid4().hex[:6]}")
    train_by_kubectl(f"bench-{uuid.uuid4().hex[:6]}")
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, 2 pods")
    compare(
        "From the call to Succeeded",
        "s",
        {"kale_dist": train_by_kale_dist, "kubectl": train_by_kubectl},
        rounds,
    )
    compare(
        f"Watching {2 * LINES_A_SECOND} lines a second for {LINES / LINES_A_SECOND:.0f} s",
        "s of processor time",
        {"kale_dist": watch_by_kale_dist, "kubectl": watch_by_kubectl},
        max(1, rounds // 2),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
