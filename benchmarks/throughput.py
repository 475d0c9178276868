"""Samples a second of two ranks: `training.loop.train` beside plain DistributedDataParallel, interleaved in one run.

    python benchmarks/throughput.py [rounds]

Both run in the same two processes on the same group, so only the loop and the exchange of gradients differ.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from typing import Any

RANKS, SAMPLES, BATCH = 2, 4096, 32


def digits_model() -> Any:
    """A small model on 64 numbers, as for scikit-learn's digits."""
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def step(model: Any, loader: Any, criterion: Any, optimizer: Any, _device: Any = None, _args: Any = None) -> None:
    """One epoch, for both."""
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def run_rank(rank: int, store: str, rounds: int) -> None:
    """Both ways in turn; rank 0 prints."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.settings import Training

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)  # type: ignore[attr-defined] # torch does not list it
    data = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))
    criterion = torch.nn.CrossEntropyLoss()
    speeds: dict[str, list[float]] = {"DistributedDataParallel": [], "kale_dist": []}
    for _ in range(rounds):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(digits_model())
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step(model, loader, criterion, optimizer)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            step(model, loader, criterion, optimizer)
        speeds["DistributedDataParallel"].append(3 * SAMPLES / (time.perf_counter() - start))

        marks: list[float] = []

        def timed(*args: Any, marks: list[float] = marks) -> None:
            marks.append(time.perf_counter())
            step(*args)
            marks.append(time.perf_counter())

        torch.manual_seed(0)
        own = digits_model()
        with contextlib.redirect_stdout(io.StringIO()):
            train(
                Training(
                    model=own,
                    train_data_loader=DataLoader(data, BATCH, shuffle=True),
                    criterion=criterion,
                    optimizer=torch.optim.SGD(own.parameters(), lr=0.01),
                    train_step=timed,
                    epochs=4,
                )
            )
        speeds["kale_dist"].append(3 * SAMPLES / (marks[-1] - marks[2]))
    if rank == 0:
        for name, values in speeds.items():
            print(f"{name:25} {statistics.median(values):10,.0f} samples/s (median of {rounds})")
    # Both must be done with the group before one of them takes it away.
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, f"{folder}/store", rounds)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
