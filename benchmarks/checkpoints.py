"""What `checkpoint_every="auto"` costs: a model of 200 MB side by side with no checkpoints, and steps between meetings.

Run it with `python benchmarks/checkpoints.py [runs]` (5 if left out). Each run trains both ways in turn, for as many steps as take
about half a minute, and the medians are compared; a run's checkpoints are counted. Meetings are measured with a tiny model.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.job import records

STEPS = {"200 MB": 150, "tiny": 20_000}


def timed(model: Any, loader: Any, criterion: Any, optimizer: Any, _device: Any, _args: Any) -> dict[str, float]:
    """A step that measures its own time, without the first ten batches."""
    import time

    began, taken = 0.0, []
    for number, (x, y) in enumerate(loader):
        if number == 10:  # noqa: PLR2004 - until then files and memory are new
            began = time.perf_counter()
        before = time.perf_counter()
        # In place: new memory for gradients costs a step 10 to 20 %, or nothing, as the allocator keeps it or not.
        optimizer.zero_grad(set_to_none=False)
        criterion(model(x), y).backward()
        optimizer.step()
        taken.append(time.perf_counter() - before)
    return {"seconds": time.perf_counter() - began, "longest": max(taken[10:])}


def run(size: str, every: str | None) -> tuple[float, float, int]:
    """Train once; returns the seconds, the longest step's, and the number of checkpoints."""
    width, batch = (2880, 64) if size == "200 MB" else (8, 4)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6 if size == "200 MB" else 1)))
    data = TensorDataset(torch.randn(batch, width), torch.randn(batch, width))
    loader = DataLoader(data, batch, sampler=[i % batch for i in range(batch * STEPS[size])])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    job = kd.distribute(
        model, loader, nn.MSELoss(), optimizer, timed, number_of_processes=1, threads=1, checkpoint_every=every,
    )  # fmt: skip
    try:
        found = job.result().metrics
        written = records.files(job.name).events.read_bytes().count(b'"event":"checkpoint"')
        return found["seconds"], found["longest"], written
    finally:
        job.delete()


def main() -> None:
    """Measure, and print the medians."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for size in STEPS:
        found: dict[str | None, list[float]] = {"auto": [], None: []}
        for _ in range(runs):
            for every, seconds in found.items():
                one = run(size, every)
                seconds.append(one[0])
                print(
                    f"{size}, {every}: {one[0]:.2f} s, longest step {one[1] * 1e3:.0f} ms, {one[2]} checkpoints",
                    flush=True,
                )
        with_them, without = (statistics.median(seconds) for seconds in found.values())
        print(f"{size}: {with_them:.2f} s with auto, {without:.2f} s without: {100 * (with_them / without - 1):+.1f} %")


if __name__ == "__main__":
    main()
