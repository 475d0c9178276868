"""What it costs to measure all the time where a rank's time goes, as a share of a step of 5 ms.

    python benchmarks/measuring.py [rounds]

Two ranks train with steps of exactly 5 ms, one epoch as the library is, the next without its clock and without what it adds to
progress events, in turn and in the same processes. The share of medians is printed. Also printed: the bytes of a day's history
of 64 ranks in the job's folder.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from typing import Any
from unittest import mock

STEP_S, STEPS = 0.005, 200
DAY_S = 86_400


def nothing(*_: Any) -> dict[str, Any]:
    """Measure nothing."""
    return {}


def step(model: Any, data_loader: Any, criterion: Any, optimizer: Any, _: Any, args: Any) -> dict[str, float]:
    """One epoch, measured in every second one; returns the median of its steps in milliseconds."""
    from kale_dist.worker.training import clock
    from kale_dist.worker.training.data import batches

    args["epochs"] += 1
    is_measured = args["epochs"] % 2 == 0
    off = contextlib.ExitStack()
    if not is_measured:
        off.enter_context(mock.patch.object(batches, "time_spent", nothing))
        off.enter_context(mock.patch.object(clock.Clock, "_turn", nothing))
    times = []
    with off:
        last = time.perf_counter()
        for x, y in data_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            begun = time.perf_counter()
            while time.perf_counter() - begun < STEP_S:
                pass
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return {"measured_ms" if is_measured else "plain_ms": 1000 * statistics.median(times)}


def bytes_of_a_day(ranks: int) -> int:
    """The size of all history events of that many ranks, whose numbers have as many digits as they may."""
    from kale_dist.wire import encode_json
    from kale_dist.wire.events import Counters, Event, RankProgress, Usage
    from kale_dist.worker.agent.history import SHARE, History
    from kale_dist.worker.agent.usage import EACH_S

    history, now, size = History(), 0.0, 0
    history.begin_attempt(ranks)
    while now < DAY_S:
        for rank in range(ranks):
            usage = Usage(memory_bytes=123_456_789_012, gpu_percent=97, gpu_memory_bytes=71_234_567_890)
            history.take_usage(rank, usage)
            counters = Counters(
                batches=round(7.1 * now), trained=round(1817.6 * now), data_s=0.123 * now, exchange_s=0.234 * now, checkpoint_s=0.0,
                num_workers=4, meets=True,
            )  # fmt: skip
            history.take_progress(rank, RankProgress(time=now, counters=counters))
        moment = history.moment(now)
        if moment is not None:
            size += len(encode_json(Event(moment, 1_795_734_571.8612816).record()))
        now += max(EACH_S, now / SHARE / 4)
    return size


def main(rounds: int) -> None:
    """Run and print."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import kale_dist as kd

    data = TensorDataset(torch.randn(2 * 8 * STEPS, 16), torch.randint(3, (2 * 8 * STEPS,)))
    model = nn.Linear(16, 3)
    given = model, DataLoader(data, batch_size=8), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(*given, step, train_args={"epochs": 0}, epochs=2 * rounds, number_of_processes=2, threads=1)
    job.result()
    rows = [row for row in job.metrics if row["source"] == "train"][2:]
    found = {name: [row[name] for row in rows if name in row] for name in ("plain_ms", "measured_ms")}
    job.delete()
    plain, measured = (statistics.median(found[name]) for name in ("plain_ms", "measured_ms"))
    print(
        f"a step of {plain:.3f} ms without, {measured:.3f} ms with: {(measured - plain) / plain:+.2%} ({rounds - 1} epochs each)"
    )
    print(f"the history of 64 ranks and a day: {bytes_of_a_day(64) / 1e6:.2f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
