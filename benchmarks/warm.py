"""From a call to its first step, in pods that are there (`keep_warm`) and in new ones.

Run it with `python benchmarks/warm.py [calls]` where a cluster is configured (kubeconfig, `KALE_DIST_NAMESPACE`, `KALE_DIST_IMAGE`;
see docs/configuration.md). Two ranks in two pods sum one number; the clock is this machine's, so that the cluster has to be on it, or its
clock has to be right. With "12 MB" the weights of a model of that size have changed since the last call. Live ranks are four in two pods:
until the first cell has its value, and how long a cell takes then. The table gives medians, in seconds.
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
SMALL = {"cpu": 0.1, "memory": "1Gi"}
PLACE = kd.Kubernetes(resources=SMALL)
WARM_PLACE = kd.Kubernetes(resources=SMALL, keep_warm="5 min")
LIVE_PLACE = kd.Kubernetes(resources=SMALL, keep_warm="5 min", processes_per_pod=2)


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


def measure_live(count: int) -> tuple[list[float], list[float]]:
    """Start live ranks again and again; gives the times to the first value, and of the cells after it."""
    starts, cells = [], []
    for number in range(count + 1):
        began = time.perf_counter()
        with kd.live(4, on=LIVE_PLACE, threads=1) as live:
            live.run("1 + 1")
            took = time.perf_counter() - began
            for _ in range(10 if number else 0):
                began = time.perf_counter()
                live.run("1 + 1")
                cells.append(time.perf_counter() - began)
        # The first has made the pods.
        starts += [took] if number else []
        live.delete()
    return starts, cells


def main() -> None:
    """Measure and print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"# {platform.node()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    model = torch.nn.Linear(3000, 1000)
    measure(WARM_PLACE, 1)
    warm, sending = measure(WARM_PLACE, count), measure(WARM_PLACE, count, model)
    starts, cells = measure_live(count)
    rows = {"warm": warm, "warm, 12 MB": sending, "live ranks start": starts, "live ranks, a cell": cells}
    rows["cold"] = measure(PLACE, min(count, COLD_CALLS))
    print("                    number  median s  slowest s")
    for name, seconds in rows.items():
        print(f"{name:18}  {len(seconds):6}  {statistics.median(seconds):8.2f}  {max(seconds):9.2f}")
    print(f"load {os.getloadavg()[0]:.1f}")
    for record in records.all_records():
        if record.spec.kind == WARM:
            kd.attach(record.ref).delete()


if __name__ == "__main__":
    main()
