"""Live ranks: how long cells take, and whether random interrupts ever hurt a later one.

python benchmarks/live.py                    # on this machine, 4 ranks
python benchmarks/live.py --cells 1000       # with more random interrupts, one cell in twelve in a collective
python benchmarks/live.py --on kubernetes    # on the configured cluster
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import threading
import time

import kale_dist as kd
from kale_dist.errors import CellError
from kale_dist.job import live_job
from kale_dist.wire.messages import Interrupt

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


def restarted(live: live_job.LiveJob, source: str) -> tuple[object, bool]:
    """Run a cell; gives its value, and whether the ranks had to be started again before it."""
    try:
        return live.run(source), False
    except CellError as error:
        if "has been repaired" not in str(error):
            raise
        live.restart()
        live.run(SUM)
        return live.run(source), True


def stress(live: live_job.LiveJob, cells: int, ranks: int) -> str:
    """Interrupt cells at random moments; after every tenth check that a sum over all ranks is right."""
    drawn, right, wrong, restarts, ended = random.Random(1), 0, 0, 0, 0
    for number in range(1, cells + 1):
        source = FEW[drawn.randrange(len(FEW))] if number % 12 else "dist.all_reduce(torch.ones(1))"
        # The stop button sends this, at a moment of its own.
        told = Interrupt(number=live._number + 1)  # noqa: SLF001 - as the handle itself
        timer = threading.Timer(drawn.random() * 0.03, live._backend.send, (live._ref, -1, told))  # noqa: SLF001 - likewise
        timer.start()
        try:
            restarts += restarted(live, source)[1]
        except KeyboardInterrupt:
            ended += 1
        timer.join()
        if number % 10 == 0:
            value, is_new = restarted(live, SUM)
            restarts += is_new
            is_right = repr(value).endswith(f": {ranks:.1f}")
            right, wrong = right + is_right, wrong + (not is_right)
    return f"{cells} cells, {ended} ended by an interrupt, {right} checks right, {wrong} wrong, {restarts} restarts after 100 repairs"


def main() -> None:
    """Measure and print."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--on", default="local")
    given.add_argument("--ranks", type=int, default=4)
    given.add_argument("--cells", type=int, default=120)
    options = given.parse_args()
    began = time.perf_counter()
    with kd.live(options.ranks, on=options.on, threads=1) as live:
        live.run(SUM)
        print(f"start and first collective: {time.perf_counter() - began:.1f} s")
        print(f"1 + 1: {median_ms(live, '1 + 1'):.0f} ms")
        print(f"all_reduce and its value: {median_ms(live, SUM):.0f} ms")
        began = time.perf_counter()
        try:
            live.run("if rank == 0: raise ValueError\ndist.barrier()")
        except CellError:
            print(f"an error of one rank, all have answered: {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        live.run(SUM)
        print(f"the next cell, with the repair: {1000 * (time.perf_counter() - began):.0f} ms")
        began = time.perf_counter()
        live.restart()
        live.run(SUM)
        print(f"restart and first collective: {time.perf_counter() - began:.2f} s")
        with contextlib.redirect_stderr(io.StringIO()):
            found = stress(live, options.cells, options.ranks)
        print(found)
    live.delete()


if __name__ == "__main__":
    main()
