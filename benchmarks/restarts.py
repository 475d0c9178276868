"""How long a training stands still when a rank is killed: from kill -9 of one of two local ranks to the next step.

Run it with `python benchmarks/restarts.py [runs]` (5 if left out). The model is small: a large one takes longer to read again.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd


def stamped(model: Any, loader: Any, criterion: Any, optimizer: Any, _device: Any, _args: Any) -> None:
    """A step that says when each batch is through, and in which process."""
    import os
    import time

    here = kd.context()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        print("step", here.attempt, here.rank, os.getpid(), time.time(), flush=True)
        time.sleep(0.005)


def steps_of(job: Any) -> list[tuple[int, int, int, float]]:
    """Attempt, rank, process and time of each batch so far."""
    found = [line.text.split() for line in job.logs() if line.text.startswith("step ")]
    return [(int(attempt), int(rank), int(pid), float(at)) for _, attempt, rank, pid, at in found]


def main() -> None:
    """Measure, and print the median."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    model = nn.Linear(8, 8)
    loader = DataLoader(TensorDataset(torch.randn(40_000, 8), torch.randn(40_000, 8)), 4)
    job = kd.distribute(
        model, loader, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-3), stamped,
        number_of_processes=2, threads=1, max_restarts=runs,
    )  # fmt: skip
    try:
        taken = []
        for attempt in range(runs):
            while not (seen := [step for step in steps_of(job) if step[:2] == (attempt, 1)]):
                time.sleep(0.2)
            # Two checkpoints are written by then.
            time.sleep(5)
            killed_at = time.time()
            os.kill(seen[0][2], signal.SIGKILL)
            while not (again := [at for number, _, _, at in steps_of(job) if number == attempt + 1]):
                time.sleep(0.2)
            taken.append(min(again) - killed_at)
            print(f"kill {attempt + 1}: {taken[-1]:.2f} s to the next step", flush=True)
        print(
            f"median of {runs}: {statistics.median(taken):.2f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
    finally:
        job.delete()


if __name__ == "__main__":
    main()
