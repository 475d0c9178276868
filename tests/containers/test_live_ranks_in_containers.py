"""Live ranks in a container: what a notebook sends and gets by the agent's port."""

import uuid

import pytest
import torch

import kale_dist as kd
from kale_dist.errors import CellError
from kale_dist.job import interrupts

pytestmark = pytest.mark.nightly
SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


def test_cells_names_an_error_a_breakpoint_and_a_restart(image, monkeypatch):
    lines = ["p rank", "k = 7", "c"]
    monkeypatch.setattr(interrupts, "has_person", lambda: True)
    monkeypatch.setattr(interrupts, "can_answer", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    monkeypatch.setattr("__main__.table", torch.arange(1 << 20, dtype=torch.float32), raising=False)
    with kd.live(2, on=kd.Docker(image=image), name=f"test-{uuid.uuid4().hex[:8]}", idle="10 min") as live:
        assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
        live.run("moved = table + rank")
        assert [one[0].item() for one in live.pull("moved")] == [0.0, 1.0]
        with pytest.raises(CellError, match="Rank 1: ZeroDivisionError"):
            live.run("if rank: 1 / 0\ndist.barrier()")
        assert repr(live.run("k = 0\nif rank: breakpoint()\nk")) == "rank 0: 0\nrank 1: 7"
        assert live.restart() is live
        assert repr(live.run("'moved' in globals()")) == "ranks 0-1: False"
        assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
    assert live.status.state == "succeeded"
    live.delete()
