"""A soak: trivial jobs in a row from one notebook process; how many hang, abort, or leave something behind.

Run it with `python benchmarks/trivial_jobs.py [jobs] [local | docker | kubernetes | warm]` (1,000 and local if left out; elsewhere
`KALE_DIST_IMAGE` and `KALE_DIST_NAMESPACE` say where; `warm` is one set of warm pods on a cluster, whose head is counted, too). Every second job destroys the process group before its
DistributedDataParallel model dies, the others after; under other launchers the first order hangs or aborts up to a third of such
jobs with torch 2.13 and gloo. What is held is counted in this process, its agent and all below, after each tenth of the jobs.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

HOME = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
os.environ["XDG_STATE_HOME"] = os.environ["TMPDIR"] = str(HOME)

import kale_dist as kd  # noqa: E402 - its folders and temporary files are to be counted
from kale_dist.errors import WaitTimeoutError  # noqa: E402
from kale_dist.job import records  # noqa: E402
from kale_dist.job.spec.job_spec import WARM  # noqa: E402

RANKS = 2
LIMIT_S = 120.0
"""A job without an end after this long counts as hung."""

PLACES: dict[str, Callable[[], kd.Local | kd.Docker | kd.Kubernetes]] = {
    "local": kd.Local,
    "docker": lambda: kd.Docker(resources={"memory": "1Gi"}),
    "kubernetes": lambda: kd.Kubernetes(resources={"cpu": 0.1, "memory": "1Gi"}),
    "warm": lambda: kd.Kubernetes(resources={"cpu": 0.1, "memory": "1Gi"}, keep_warm="10 min"),
}
KUBECTL = f"kubectl -n {os.environ.get('KALE_DIST_NAMESPACE', 'default')}"
HEAD = f"{KUBECTL} exec $({KUBECTL} get pods -o name | grep warm-.*master-0) --"
COUNTS = {
    "docker": {"containers": "docker ps -aq --filter label=kale-dist.dev/job", "volumes": "docker volume ls -q"},
    "kubernetes": {name: f"{KUBECTL} get {name} -o name" for name in ("pytorchjobs", "pods", "secrets", "configmaps")},
}
COUNTS["warm"] = COUNTS["kubernetes"] | {
    "head's descriptors": f"{HEAD} ls /proc/1/fd",
    "head's threads": f"{HEAD} ls /proc/1/task",
    "head's MiB": f"{HEAD} awk '/VmRSS/ {{ for (i = 1; i < $2 / 1024; i++) print i }}' /proc/1/status",
    "in /dev/shm of the head": f"{HEAD} ls /dev/shm",
}
"""What jobs of a place could leave behind, each with a command that prints a line for one."""

GROWN = {"head's MiB": 4}
"""By how much a count may grow: the head's memory comes in pieces of a megabyte."""

GROWTH_MIB = 16.0
"""By how much memory may differ: an interpreter's own ups and downs."""


def trivial_job(*, destroy_first: bool) -> float:
    """One training step on a tiny model, ended in one of the two orders."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    optimizer.step()
    value = loss.item()
    if destroy_first:
        dist.destroy_process_group()
        del model, optimizer, loss
    else:
        del model, optimizer, loss
        dist.destroy_process_group()
    return float(value)


def run_one(place: kd.Local | kd.Docker | kd.Kubernetes, number: int) -> str:
    """Run one job to its end and delete it; gives its state, or `hung`."""
    job = kd.launch(trivial_job, destroy_first=number % 2 == 0, number_of_processes=RANKS, on=place)
    try:
        job.results(timeout=LIMIT_S)
    except WaitTimeoutError:
        return "hung"
    except kd.KaleDistError as error:
        print(f"job {number}: {error}", *job.logs(), sep="\n")
    state = str(job.status.state)
    job.delete()
    return state


def tree(pid: int) -> list[int]:
    """A process and all below it, zombies included."""
    files = list(pathlib.Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(found for file in files for child in file.read_text().split() for found in tree(int(child)))]


def held(where: str) -> tuple[dict[str, int], float]:
    """What is there now, and the memory of all processes in MiB: each page that several share is counted once."""
    pids = [pathlib.Path(f"/proc/{pid}") for pid in tree(os.getpid())]
    proportional = [(pid / "smaps_rollup").read_text().partition("\nPss:")[2].split() for pid in pids]
    counts = {
        "processes": len(pids),
        "threads": sum(len(list((pid / "task").iterdir())) for pid in pids),
        "descriptors": sum(len(list((pid / "fd").iterdir())) for pid in pids),
        "files and folders": sum(1 for _ in HOME.rglob("*")),
        "job folders": sum(1 for _ in HOME.glob("kale-dist/jobs/*")),
    }
    if where == "local":
        # Other programs of the machine make some, too.
        counts["in /dev/shm"] = len(list(pathlib.Path("/dev/shm").iterdir()))
    for name, command in COUNTS.get(where, {}).items():
        counts[name] = len(subprocess.check_output(["sh", "-c", command], text=True).split())
    return counts, sum(int(words[0]) for words in proportional if words) / 1024


def main(jobs: int, where: str) -> int:
    """Run and print; gives 1 if anything went wrong."""
    place = PLACES[where]()
    outcomes: Counter[str] = Counter()
    seconds, found = [], []
    for number in range(1, jobs + 1):
        start = time.monotonic()
        outcomes[run_one(place, number)] += 1
        seconds.append(time.monotonic() - start)
        if number % max(1, jobs // 10) == 0:
            time.sleep(5)
            found.append(held(where))
            print(f"after {number}: {found[-1][0]}, {found[-1][1]:.0f} MiB", flush=True)
    print(
        f"{jobs} jobs of {RANKS} ranks, {where}: {dict(outcomes)}; median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s"
    )
    for record in records.all_records():
        if record.spec.kind == WARM:
            kd.attach(record.ref).delete()
    (first, first_mib), (last, last_mib) = found[0], found[-1]
    is_flat = last_mib <= first_mib + GROWTH_MIB and all(
        count <= first[name] + GROWN.get(name, 0) for name, count in last.items()
    )
    return int(outcomes != {"succeeded": jobs} or not is_flat)


if __name__ == "__main__":
    try:
        code = main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, sys.argv[2] if sys.argv[2:] else "local")
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
    sys.exit(code)
