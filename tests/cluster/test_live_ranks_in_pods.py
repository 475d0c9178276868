"""Live ranks in two pods of a PyTorchJob, through the API server."""

import statistics
import subprocess
import sys
import time

import pytest
import torch
from on_cluster import IMAGE

import kale_dist as kd
from kale_dist.errors import CellError

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]

SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
OTHER = f"""
import sys, kale_dist as kd, __main__
__main__.mine = "of this process"
live = kd.attach(sys.argv[1])
print(live.run({SUM!r}))
print(live.run("theirs = 7\\nworld_size, mine == 'of this process'"))
"""


def test_cells_errors_names_and_a_restart(namespace, monkeypatch):
    place = kd.Kubernetes(
        image=IMAGE, namespace=namespace, processes_per_pod=2, resources={"cpu": 0.2, "memory": "700Mi"}
    )
    monkeypatch.setattr("__main__.table", torch.arange(1 << 20, dtype=torch.float32), raising=False)
    with kd.live(4, on=place, threads=1, idle="5 min") as live:
        assert repr(live.run(SUM)) == "ranks 0-3: 4.0"
        took = []
        for _ in range(10):
            began = time.perf_counter()
            assert repr(live.run("1 + 1")) == "ranks 0-3: 2"
            took.append(time.perf_counter() - began)
        print(f"a cell 1 + 1 on 4 ranks: {1000 * statistics.median(took):.0f} ms")
        assert repr(live.run("len(table)")) == "ranks 0-3: 1048576"
        assert [one[0].item() for one in live.pull("table[:1] + rank")] == [0.0, 1.0, 2.0, 3.0]
        began = time.monotonic()
        with pytest.raises(CellError, match="Rank 3: ZeroDivisionError"):
            live.run("if rank == 3: 1 / 0\ndist.barrier()")
        print(f"an error, all have answered: {time.monotonic() - began:.1f} s")
        assert repr(live.run(SUM)) == "ranks 0-3: 4.0"
        live.run("before = 1")
        began = time.monotonic()
        live.restart()
        assert repr(live.run("'before' in globals()")) == "ranks 0-3: False"
        print(f"a restart and its first cell: {time.monotonic() - began:.1f} s")
        assert repr(live.run(SUM)) == "ranks 0-3: 4.0"
        # Another process of the user, such as a restarted kernel: names, numbers and a broken group are read in the job's events.
        with pytest.raises(CellError):
            live.run("mine = rank\nif rank == 3: 1 / 0\ndist.barrier()")
        ended = subprocess.run(
            [sys.executable, "-c", OTHER, live.ref], capture_output=True, text=True, timeout=100, check=True
        )
        assert ended.stdout.splitlines() == ["ranks 0-3: 4.0", "ranks 0-3: (4, False)"]
        assert repr(live.run("theirs")) == "ranks 0-3: 7"
    assert live.status.state == "succeeded"
    live.delete()
