"""Live ranks in two containers: one rank beside the head, one behind a relay."""

import threading
import time
import uuid

import pytest
import torch

import kale_dist as kd
from kale_dist.errors import CellError
from kale_dist.job import interrupts

SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def live(engine, image):
    place = kd.Docker(image=image, processes_per_pod=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts, "has_person", lambda: True)
        live = kd.live(2, on=place, name=f"test-{uuid.uuid4().hex[:8]}", idle="10 min")
    with live:
        yield live
    assert live.status.state == "succeeded"
    live.delete()


@pytest.fixture
def main(monkeypatch):
    """Names of the notebook."""
    return lambda **names: [
        monkeypatch.setattr(f"__main__.{name}", value, raising=False) for name, value in names.items()
    ]


def test_cells_keep_variables_and_the_group(live, capsys):
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
    live.run("k = rank * 10\nprint('hello')")
    assert repr(live.run("k + 1")) == "rank 0: 1\nrank 1: 11"
    # A slow machine says for which pods it waits.
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Waiting")]
    assert sorted(said) == ["[0] hello", "[1] hello"]


def test_names_of_the_notebook_reach_a_rank_behind_a_relay_and_values_come_back(live, main):
    main(lr=0.5, table=torch.arange(1 << 20, dtype=torch.float32))
    assert (
        repr(live.run("lr, table.sum().item()"))
        == f"ranks 0-1: (0.5, {torch.arange(1 << 20, dtype=torch.float32).sum().item()})"
    )
    pulled = live.pull("table + rank")
    assert [one[0].item() for one in pulled] == [0.0, 1.0]
    assert live.pull("rank", ranks=1) == 1


def test_an_error_frees_the_other_rank_and_the_group_is_repaired(live):
    live.run(SUM)
    began = time.monotonic()
    with pytest.raises(CellError, match="Rank 1: ZeroDivisionError"):
        live.run("if rank: 1 / 0\ndist.barrier()")
    assert time.monotonic() - began < 15
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"


def test_an_interrupt_ends_the_cell_in_both_containers(live):
    timer = threading.Timer(1.0, lambda: __import__("_thread").interrupt_main())
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        live.run("import time\ntime.sleep(60) if rank else dist.barrier()")
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"


def test_a_breakpoint_is_answered(live, monkeypatch):
    lines = ["p rank", "k = 7", "c"]
    monkeypatch.setattr(interrupts, "can_answer", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    assert repr(live.run("k = 0\nif rank: breakpoint()\nk")) == "rank 0: 0\nrank 1: 7"


def test_a_restart_gives_new_processes_in_the_same_containers(live):
    live.run("before = 1")
    assert live.restart() is live
    assert repr(live.run("'before' in globals()")) == "ranks 0-1: False"
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
