"""From a call to its first step, in pods that are there (`keep_warm`) and in new ones.

Run it with `python benchmarks/warm.py [calls]` where a cluster is configured (kubeconfig, `KALE_DIST_NAMESPACE`, `KALE_DIST_IMAGE`;
see docs/configuration.md). Two ranks in two pods sum one number; the clock is this machine's, so that the cluster has to be on it, or its
clock has to be right. With "12 MB" the weights of a model of that size have changed since the last call. The table gives medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from typing import Any

import torch

import kale_dist as kd
from kale_dist.job import records
from kale_dist.job.spec.job_spec import WARM

COLD_CALLS = 3
PLACE = kd.Kubernetes(resources={"cpu": 0.1, "memory": "1Gi"})
WARM_PLACE = kd.Kubernetes(resources={"cpu": 0.1, "memory": "1Gi"}, keep_warm="5 min")


def step(called_at: float, model: Any = None) -> float:
    """The first step: seconds since the call, when all ranks have summed a number."""
    import torch.distributed as dist

    del model
    dist.all_reduce(torch.ones(1))
    return time.time() - called_at


def measure(on: kd.Kubernetes, count: int, model: torch.nn.Module | None = None) -> list[float]:
    """Call the step; gives the times of the slower rank."""
    found = []
    for _ in range(count):
        if model is not None:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        given = () if model is None else (model,)
        job = kd.launch(step, time.time(), *given, number_of_processes=2, on=on)
        found.append(max(job.results()))
        job.delete()
    return found


def main() -> None:
    """Measure and print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"# {platform.node()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print("calls           number  median s  slowest s")
    model = torch.nn.Linear(3000, 1000)
    measure(WARM_PLACE, 1)
    rows = [
        ("warm", measure(WARM_PLACE, count)),
        ("warm, 12 MB", measure(WARM_PLACE, count, model)),
        ("cold", measure(PLACE, min(count, COLD_CALLS))),
    ]
    for name, seconds in rows:
        print(f"{name:14}  {len(seconds):6}  {statistics.median(seconds):8.2f}  {max(seconds):9.2f}")
    for record in records.all_records():
        if record.spec.kind == WARM:
            kd.attach(record.ref).delete()


if __name__ == "__main__":
    main()
