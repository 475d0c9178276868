"""Milliseconds of a training step on GPUs: control numbers on the device beside control numbers on the CPU.

    python benchmarks/control_numbers.py [ranks] [rounds]

Ranks share GPUs where there are fewer than ranks. NCCL refuses that, so gloo carries CUDA tensors then, and both figures
are higher than those of one GPU a rank. Without a GPU it runs on the CPU, where the difference is one small all_reduce.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

STEPS, BATCH, WIDTH = 200, 64, 1024


def on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """Give the control numbers a tensor on the CPU, which gloo sums in every step."""
    import torch

    from kale_dist.worker.parallel import buckets, data_parallel

    original = buckets.fill_buckets

    def fill(*args: Any) -> Any:
        buckets, control = original(*args)
        return buckets, torch.empty(len(control), dtype=torch.float32)

    return mock.patch.object(data_parallel, "fill_buckets", fill)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the loop says."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def step_ms(device: Any) -> float:
    """Train for two epochs; the time of a step in the second."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.settings import Training

    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    world = torch.distributed.get_world_size()
    data = TensorDataset(torch.randn(STEPS * BATCH * world, WIDTH), torch.randint(10, (STEPS * BATCH * world,)))
    marks: list[float] = []

    def step(model: Any, loader: Any, criterion: Any, optimizer: Any, _device: Any, _args: Any) -> None:
        started = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append((time.perf_counter() - started) / STEPS * 1000)

    with quiet():
        train(
            Training(
                model=model,
                train_data_loader=DataLoader(data, BATCH),
                criterion=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                train_step=step,
                epochs=2,
            ),
            cuda=device.type == "cuda",
        )
    return marks[-1]


def run_rank(rank: int, world: int, store: str, rounds: int) -> None:
    """Both ways in turn; rank 0 prints."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    backend = f"cpu:gloo,cuda:{'nccl' if gpus >= world else 'gloo'}" if gpus else "gloo"
    if gpus:
        torch.cuda.set_device(rank % gpus)
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined] # torch does not list it
    device = torch.device("cuda" if gpus else "cpu")
    times: dict[str, list[float]] = {"on the device": [], "on the CPU": []}
    for _ in range(rounds):
        times["on the device"].append(step_ms(device))
        with on_the_cpu():
            times["on the CPU"].append(step_ms(device))
    if rank == 0:
        print(f"{world} ranks, {gpus} GPUs, {backend}, {rounds} rounds of {STEPS} steps; ms a step")
        for way, found in times.items():
            print(f"  {way:14} median {statistics.median(found):7.3f}   best {min(found):7.3f}")


def main() -> None:
    """Start the ranks."""
    world, rounds = (int(given) for given in (*sys.argv[1:], *("2", "5")[len(sys.argv) - 1 :]))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, world, f"{folder}/store", rounds)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
