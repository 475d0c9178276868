"""Hundreds of trivial jobs in a row on one agent: how many hang, abort, or leave something behind.

Run it with `python benchmarks/trivial_jobs.py [jobs]` (1,000 if left out). Every second job destroys the process group
before its DistributedDataParallel model dies, the others after; under other launchers the first order hangs or aborts
up to a third of such jobs with torch 2.13 and gloo.
"""

from __future__ import annotations

import pathlib
import secrets
import shutil
import statistics
import sys
import tempfile
import time

from kale_dist import wire
from kale_dist.places.agent_client import AgentClient
from kale_dist.snapshot.capture import capture
from kale_dist.wire import EventKind, JobFiles, Order, StateName
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.rank.process_state import capture as capture_process

RANKS = 2
LIMIT_S = 30.0
"""A job without an end after this long counts as hung."""

FINAL = (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)


def trivial_job(*, destroy_first: bool) -> float:
    """One training step on a tiny model, ended in one of the two orders."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
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


def last_state(files: JobFiles) -> dict[str, str]:
    """The job's last state event."""
    if not files.events.exists():
        return {"state": "pending"}
    events = wire.decode_json_lines(files.events.read_bytes())
    states = [event for event in events if event["event"] == EventKind.STATE]
    return states[-1] if states else {"state": "pending"}


def run_one(client: AgentClient, root: pathlib.Path, number: int) -> str:
    """Run one job to its end; gives its state, or `hung`."""
    store = FolderStore(root / "blobs")
    folder = root / "jobs" / str(number)
    folder.mkdir(parents=True)
    call = {"destroy_first": number % 2 == 0}
    order = Order(
        job=f"trivial-{number}",
        number_of_processes=RANKS,
        processes_per_agent=RANKS,
        folder=str(folder),
        store=str(store.root),
        snapshot=capture(trivial_job, (), call, store=store, label="trivial").digest,
        key=secrets.token_hex(32),
        process=capture_process(cuda=False),
    )
    client.take(order)
    files = JobFiles(folder)
    deadline = time.monotonic() + LIMIT_S
    while (state := last_state(files))["state"] not in FINAL:
        if time.monotonic() > deadline:
            return "hung"
        time.sleep(0.005)
    if state["state"] != StateName.SUCCEEDED:
        print(f"job {number}: {state['state']}: {state['reason']}")
        print(files.log.read_text(errors="replace"))
    shutil.rmtree(folder)
    return state["state"]


def descendants(pid: int) -> int:
    """Number of processes below one, zombies included."""
    count = 0
    for file in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            count += 1 + descendants(int(child))
    return count


def held(pid: int) -> tuple[int, int]:
    """Processes below the agent, and its open descriptors."""
    return descendants(pid), len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


def shared_memory() -> set[str]:
    """Names of entries in /dev/shm. Other programs of the machine make some, too."""
    return {file.name for file in pathlib.Path("/dev/shm").iterdir()}


def main(jobs: int) -> int:
    """Run and print; gives 1 if anything went wrong."""
    outcomes: dict[str, int] = {}
    seconds = []
    root = pathlib.Path(tempfile.mkdtemp(prefix="trivial-jobs-"))
    client = AgentClient()
    client.start()
    try:
        run_one(client, root, 0)
        time.sleep(2)
        before, shared = held(client.pid), shared_memory()
        for number in range(1, jobs + 1):
            start = time.monotonic()
            state = run_one(client, root, number)
            seconds.append(time.monotonic() - start)
            outcomes[state] = outcomes.get(state, 0) + 1
        time.sleep(2)
        after, left = held(client.pid), shared_memory() - shared
    finally:
        client.close()
        shutil.rmtree(root, ignore_errors=True)
    print(
        f"{jobs} jobs of {RANKS} ranks: {outcomes}; median {statistics.median(seconds):.3f} s, max {max(seconds):.3f} s"
    )
    print(f"processes, descriptors: {before} before, {after} after; new entries in /dev/shm: {sorted(left) or 'none'}")
    return int(outcomes != {"succeeded": jobs} or before != after or bool(left))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
