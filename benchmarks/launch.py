"""Time from the call to the first training step, in a warm process: kale_dist against torchrun and plain spawn.

Run it with `python benchmarks/launch.py [rounds]`. All contestants train the same model on the same data with two
ranks; rounds are interleaved and start at another contestant each time. The table gives medians, and each
contestant's ratio to torchrun of the same run.
"""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import kale_dist as kd

RANKS = 2

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            with open(path, "x") as file:
                file.write(repr(time.time()))
        break
    dist.barrier()

if __name__ == "__main__":
    main(sys.argv[1])
"""


def train_step(model: Any, data_loader: Any, criterion: Any, optimizer: Any, _device: Any, args: Any) -> None:
    """One step, and the time of its end into the file named by `args`."""
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if kd.context().rank == 0:
            with open(args["path"], "x") as file:  # noqa: PTH123 - as in the script of the other contestants
                file.write(repr(time.time()))
        break


def by_kale_dist(path: pathlib.Path) -> None:
    """The product, in this warm process."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model = torch.nn.Linear(32, 10)
    job = kd.distribute(
        model,
        loader,
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        train_step,
        train_args={"path": str(path)},
        number_of_processes=RANKS,
    )
    job.result()
    job.delete()


def by_command(*command: str) -> Callable[[pathlib.Path], None]:
    """A contestant that runs the script with a launcher's command line."""

    def run(path: pathlib.Path) -> None:
        script = path.with_suffix(".py")
        script.write_text(SCRIPT)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, str(script), str(path)], check=True, env=environment, capture_output=True)

    return run


CONTESTANTS: dict[str, Callable[[pathlib.Path], None]] = {
    "kale_dist": by_kale_dist,
    "torchrun": by_command(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
}


def main(rounds: int) -> None:
    """Measure and print."""
    first: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    done: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        by_kale_dist(pathlib.Path(folder) / "warm-up")
        names = list(CONTESTANTS)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(1.0)
                path = pathlib.Path(folder) / f"{name}-{number}"
                start = time.time()
                CONTESTANTS[name](path)
                done[name].append(time.time() - start)
                first[name].append(float(path.read_text()) - start)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, {RANKS} ranks")
    print(f"{'':12} {'first step s':>14} {'x torchrun':>11} {'return s':>10} {'x torchrun':>11}")
    base_first, base_done = statistics.median(first["torchrun"]), statistics.median(done["torchrun"])
    for name in CONTESTANTS:
        median_first, median_done = statistics.median(first[name]), statistics.median(done[name])
        print(
            f"{name:12} {median_first:14.3f} {base_first / median_first:11.1f} "
            f"{median_done:10.3f} {base_done / median_done:11.1f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
