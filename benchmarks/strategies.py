"""Steps a second of two CPU ranks by each way of data parallelism, against ranks that only meet at a barrier each step.

    python benchmarks/strategies.py [rounds [model ...]]

Models are `small` (that of throughput.py), `digits` (a CNN) and `gpt` (10.8 M parameters). All ways run in turn, in the same two
processes with one thread each. Two ratios to the limit are printed: of the 10 % quantile of step times, which a busy machine
disturbs little, and of whole runs. DDP is torch's, as torchrun would start it.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

RANKS = 2
STEPS = {"small": 128, "digits": 96, "gpt": 6}


def made(name: str) -> tuple[Any, Any, int]:
    """A model, its data of both ranks, and the batch size."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    batch = 4 if name == "gpt" else 32
    samples = batch * RANKS * STEPS[name]
    if name == "gpt":
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
        model: Any = nn.Sequential(nn.Embedding(96, 384), nn.TransformerEncoder(layer, 6), nn.Linear(384, 96))
        x = torch.randint(96, (samples, 64), generator=generator)
        return model, (x, x.roll(1, 1)), batch
    y = torch.randint(10, (samples,), generator=generator)
    if name == "digits":
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        return model, (torch.randn(samples, 1, 8, 8, generator=generator), y), batch
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, (torch.randn(samples, 64, generator=generator), y), batch


def epoch(
    times: list[float], meet: Callable[[], None], model: Any, loader: Any, _: Any, optimizer: Any, *__: Any
) -> None:
    """One epoch, for all; each step's time is noted."""
    from torch.nn.functional import cross_entropy

    last = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        scores = model(x)
        cross_entropy(scores.flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]
        meet()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now


def nothing() -> None:
    """What a step does between backward and step where gradients are exchanged elsewhere."""


def ways(name: str) -> Iterator[tuple[str, list[float]]]:
    """Each way once: its name and the times of its steps."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from kale_dist.strategies import DDP
    from kale_dist.worker.parallel.shared_memory import SharedMemory
    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.rank_group import Group
    from kale_dist.worker.training.settings import Training

    shared = SharedMemory(Group(torch.device("cpu")), 1, 1)
    for way in ("limit", "DDP of torch"):
        times: list[float] = []
        model, arrays, batch = made(name)
        if way != "limit":
            model = torch.nn.parallel.DistributedDataParallel(model)
        data = TensorDataset(*arrays)
        loader = DataLoader(data, batch, sampler=DistributedSampler(data))
        optimizer = torch.optim.AdamW(model.parameters())
        epoch(times, shared.barrier if way == "limit" else nothing, model, loader, None, optimizer)
        yield way, times
    shared.close()
    for strategy in (DDP(), DDP(exchange="torch"), DDP(compress="bf16"), DDP(exchange="ring")):
        times = []
        model, arrays, batch = made(name)

        def step(*args: Any, times: list[float] = times) -> None:
            epoch(times, nothing, *args)

        with contextlib.redirect_stdout(io.StringIO()):
            train(
                Training(
                    model=model,
                    train_data_loader=DataLoader(TensorDataset(*arrays), batch),
                    criterion=None,
                    optimizer=torch.optim.AdamW(model.parameters()),
                    train_step=step,
                    strategy=strategy,
                )
            )
        yield f"kd {strategy.compress or strategy.exchange or 'shared memory'}", times


def run_rank(rank: int, store: str, rounds: int, models: list[str]) -> None:
    """All ways in turn; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)  # type: ignore[attr-defined] # torch does not list it
    for name in models:
        found: dict[str, list[list[float]]] = {}
        for _ in range(rounds):
            for way, times in ways(name):
                found.setdefault(way, []).append(times[len(times) // 8 :])
        if rank == 0:
            print(
                f"{name}: {rounds} rounds of {STEPS[name]} steps\n{'':20}{'p10 of a step':>16}{'ratio':>8}{'whole run':>14}{'ratio':>8}"
            )
            quick = {way: sorted(t for run in runs for t in run) for way, runs in found.items()}
            p10 = {way: times[len(times) // 10] for way, times in quick.items()}
            best = {way: min(sum(run) / len(run) for run in runs) for way, runs in found.items()}
            for way in found:
                row = f"{p10[way] * 1e3:13.2f} ms{p10['limit'] / p10[way]:8.2f}{best[way] * 1e3:11.2f} ms"
                print(f"{way:20}{row}{best['limit'] / best[way]:8.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    models = sys.argv[2:] or list(STEPS)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{folder}/store", rounds, models
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
