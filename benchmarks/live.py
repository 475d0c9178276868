"""Live ranks: how long cells take, and whether random interrupts ever hurt a later one.

python benchmarks/live.py                    # on this machine, 4 ranks
python benchmarks/live.py --cells 1000       # with more random interrupts, one cell in twelve in a collective
python benchmarks/live.py --on kubernetes    # on the configured cluster
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time

import kale_dist as kd
from kale_dist.job import live_job

SUM = "import torch, time, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
FEW = ("time.sleep(0.02)", "for i in range(20000): pass", "1 + 1")


def median_ms(live: live_job.LiveJob, source: str, times: int = 15) -> float:
    """The median time of a cell."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        live.run(source)
        took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


def stress(live: live_job.LiveJob, cells: int, ranks: int) -> str:
    """Interrupt cells at random moments; after every tenth check that a sum over all ranks is right."""
    right = wrong = restarts = ended = 0
    for number in range(cells):
        source = "dist.all_reduce(torch.ones(1))" if number % 12 == 0 else random.choice(FEW)
        backend, ref = live._backend, live._ref
        told = {"live": {"interrupt": live._number + 1}}
        timer = threading.Timer(random.random() * 0.03, backend.tell, (ref, -1, told))
        timer.start()
        try:
            live.run(source)
        except KeyboardInterrupt:
            ended += 1
        except kd.KaleDistError as error:
            if "has been repaired" not in str(error):
                raise
            restarts += 1
            live.restart()
            live.run(SUM)
        timer.join()
        if number % 10 == 9:
            try:
                is_right = repr(live.run(SUM)).endswith(f": {ranks:.1f}")
            except kd.KaleDistError as error:
                if "has been repaired" not in str(error):
                    raise
                restarts += 1
                live.restart()
                is_right = repr(live.run(SUM)).endswith(f": {ranks:.1f}")
            right, wrong = right + is_right, wrong + (not is_right)
    return f"{cells} cells, {ended} ended by an interrupt, {right} checks right, {wrong} wrong, {restarts} restarts after 100 repairs"


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--on", default="local")
    given.add_argument("--ranks", type=int, default=4)
    given.add_argument("--cells", type=int, default=120)
    options = given.parse_args()
    random.seed(1)
    began = time.perf_counter()
    with kd.live(options.ranks, on=options.on, threads=1) as live:
        live.run(SUM)
        print(f"start and first collective: {time.perf_counter() - began:.1f} s")
        print(f"1 + 1: {median_ms(live, '1 + 1'):.0f} ms")
        print(f"all_reduce and its value: {median_ms(live, SUM):.0f} ms")
        began = time.perf_counter()
        try:
            live.run("if rank == 0: raise ValueError\ndist.barrier()")
        except kd.KaleDistError:
            print(f"an error of one rank, all have answered: {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        live.run(SUM)
        print(f"the next cell, with the repair: {1000 * (time.perf_counter() - began):.0f} ms")
        began = time.perf_counter()
        live.restart()
        live.run(SUM)
        print(f"restart and first collective: {time.perf_counter() - began:.2f} s")
        print(stress(live, options.cells, options.ranks))
    live.delete()


if __name__ == "__main__":
    main()
