"""Each kind of object against the same object by `kubectl apply`: from submission to the first step and to its success.

Run it with `python benchmarks/kinds.py [rounds [kind ...]]`, such as `5 job train`, where a cluster is configured (kubeconfig, `KALE_DIST_NAMESPACE`,
`KALE_DIST_IMAGE`; see docs/configuration.md). Kinds that the cluster does not serve are left out. Both contestants run the same
training on two pods of the same image; rounds are interleaved and take turns at being first. The table gives medians and the
ratio of the same run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import uuid
from typing import Any

import kale_dist as kd
from kale_dist import config
from kale_dist.places.kubernetes import client, objects
from kale_dist.places.manifests import KINDS, Kind

RESOURCES = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}

TRAINING = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(64):
    optimizer.zero_grad()
    model(torch.randn(32, 32)).square().mean().backward()
    optimizer.step()
    if step == 0:
        print("first step", time.time(), flush=True)
"""

SCRIPT = f"""
import os, torch.distributed as dist
for name, own in (("RANK", "PET_NODE_RANK"), ("WORLD_SIZE", "PET_NNODES"), ("MASTER_ADDR", "PET_MASTER_ADDR"),
                  ("MASTER_PORT", "PET_MASTER_PORT"), ("RANK", "JOB_COMPLETION_INDEX")):
    if own in os.environ:
        os.environ.setdefault(name, os.environ[own])
dist.init_process_group("gloo")
{TRAINING}
dist.destroy_process_group()
"""


def train() -> None:
    """What `SCRIPT` does, in a process group that is there already."""
    exec(TRAINING, {"__name__": "training"})


def plain(kind: Kind, name: str) -> list[dict[str, Any]]:
    """The object as its users write it."""
    image = config.load().image
    container: dict[str, Any] = {
        "name": kind.container,
        "image": image,
        "command": ["python3", "-c", SCRIPT],
        "resources": RESOURCES,
    }
    head = {"apiVersion": "/".join(kind.api), "kind": kind.name, "metadata": {"name": name}}
    if kind.word == "pytorch":
        replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
        return [{**head, "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}}]
    if kind.word == "train":
        trainer = {"numNodes": 2, "image": image, "command": container["command"], "resourcesPerNode": RESOURCES}
        return [{**head, "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}}]
    variables = {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    container["env"] = [{"name": key, "value": value} for key, value in variables.items()]
    pod = {"restartPolicy": "Never", "subdomain": name, "containers": [container]}
    template = {"metadata": {"labels": {"bench": name}}, "spec": pod}
    job = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0, "template": template}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"bench": name}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {**head, "spec": job},
    ]


def kubectl(*arguments: str, text: str | None = None) -> str:
    """Run kubectl in the namespace of the benchmark."""
    command = ["kubectl", "--namespace", client.connect().namespace, *arguments]
    return subprocess.run(command, input=text, text=True, check=True, capture_output=True).stdout


def await_success(kind: Kind, name: str) -> None:
    """Wait until the object says that it has succeeded."""
    cluster = client.connect()
    while True:
        job: Any = cluster.custom.get_namespaced_custom_object(*kind.api, cluster.namespace, kind.plural, name)
        state = kind.state(job)
        if state.finished == "failed":
            raise RuntimeError(f"the job {name} has failed: {state.message}")
        if state.finished:
            return
        time.sleep(0.05)


def first_step(lines: str) -> float:
    """When the first rank has taken its first step."""
    return min(float(line.split()[-1]) for line in lines.splitlines() if "first step" in line)


def by_kale_dist(kind: Kind, name: str) -> tuple[float, float]:
    """Seconds to the first step and to success."""
    start = time.time()
    on = kd.Kubernetes(kind=kind.word, resources={"cpu": 0.1, "memory": "1Gi"})
    job = kd.launch(train, name=name, number_of_processes=2, on=on)
    await_success(kind, name)
    succeeded = time.time() - start
    job.wait()
    first = first_step("\n".join(line.text for line in job.logs())) - start
    job.delete()
    return first, succeeded


def by_kubectl(kind: Kind, name: str) -> tuple[float, float]:
    """The same for the plain object."""
    start = time.time()
    made = plain(kind, name)
    kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": made}))
    await_success(kind, name)
    succeeded = time.time() - start
    pods = [pod for pod in kubectl("get", "pods", "-o", "name").split() if pod.startswith(f"pod/{name}")]
    first = first_step("\n".join(kubectl("logs", pod) for pod in pods)) - start
    kubectl("delete", *(f"{one['kind'].lower()}/{name}" for one in made))
    return first, succeeded


def main() -> int:
    """Measure every kind that there is."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    words = sys.argv[2:] or list(KINDS)
    contestants = {"kale_dist": by_kale_dist, "kubectl apply": by_kubectl}
    for kind in (kind for kind in map(KINDS.__getitem__, words) if objects.is_served(client.connect(), kind)):
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
        for number in range(rounds):
            for name in list(contestants)[:: 1 if number % 2 else -1]:
                taken[name].append(contestants[name](kind, f"bench-{uuid.uuid4().hex[:6]}"))
        print(kind.name)
        for index, what in enumerate(("first step", "success")):
            ours, theirs = (statistics.median(pair[index] for pair in taken[name]) for name in contestants)
            print(f"  {what:<11} {ours:6.2f} s  kubectl apply {theirs:6.2f} s  ratio {ours / theirs:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
