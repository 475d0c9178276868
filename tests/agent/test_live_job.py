"""`kd.live` on this machine: what its handle knows of the ranks, and what it says when something goes wrong."""

import queue
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from agent_jobs import descriptors
from waiting import until

import kale_dist as kd
from kale_dist.errors import CellError, ConfigError, JobFailedError
from kale_dist.job import debugging, interrupts, live_job
from kale_dist.wire.messages import Cell, Repair

SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
FAILS = "if rank == 1: raise KeyError('gone')\ndist.barrier()"


of_gloo = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's group is not repaired: ranks are started again")


@pytest.fixture
def live():
    with kd.live(2, threads=1) as live:
        yield live
    live.delete()


@pytest.fixture(scope="module")
def one():
    """Ranks that are asked for nothing."""
    with kd.live(1) as live:
        yield live
    live.delete()


@pytest.fixture
def main(monkeypatch):
    return lambda **names: [
        monkeypatch.setattr(f"__main__.{name}", value, raising=False) for name, value in names.items()
    ]


def test_values_of_ranks_are_folded_and_brought(live):
    assert repr(live.run("rank // 2")) == "ranks 0-1: 0"
    assert live.run("rank")[1] == "1"
    assert live.run("x = 1") is None
    assert repr(live.run("import os\nos.fork() > 0")) == "ranks 0-1: True"
    assert repr(live.run("'a\\nb\\n'.join('xy')", ranks=1)) == "rank 1: 'xa\\nb\\ny'"
    live.push(table=torch.arange(3))
    assert live.pull("table.sum().item() + rank") == [3, 4]
    assert live.pull("rank", ranks=1) == 1
    assert live.pull("rank", ranks=[1]) == [1]


@pytest.mark.nightly
def test_a_prompt_opens_where_the_thread_that_watches_the_job_is_slow(monkeypatch):
    class Slow(queue.SimpleQueue):
        def put(self, item):
            super().put(item)
            time.sleep(0.2)

    lines = ["k = 7", "c"]
    monkeypatch.setattr(debugging, "queue", types.SimpleNamespace(SimpleQueue=Slow))
    monkeypatch.setattr(interrupts, "has_person", lambda: True)
    monkeypatch.setattr(interrupts, "can_answer", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    with kd.live(1, threads=1) as live:
        assert repr(live.run("k = 0\nbreakpoint()\nk")) == "rank 0: 7"
    live.delete()


def test_a_function_uses_the_ranks_own_names_and_its_large_ones_do_not_travel(live, main, capfd):
    live.run("weights = 'of the ranks'")
    source = "def used():\n    return weights if isinstance(weights, str) else len(weights)\n"
    namespace = sys.modules["__main__"].__dict__
    main(weights=torch.zeros(1 << 20), used=None)
    exec(compile(source, "<cell>", "exec"), namespace)
    assert repr(live.run("used()")) == "ranks 0-1: 'of the ranks'"
    assert "From the notebook: used\n" in capfd.readouterr().out


@of_gloo
@pytest.mark.parametrize(
    "most", [2, pytest.param(live_job.MOST_REPAIRS, marks=[pytest.mark.nightly, pytest.mark.timeout(120)])]
)
def test_the_repair_that_is_one_too_many_asks_for_a_restart_after_which_all_is_right(live, monkeypatch, most):
    monkeypatch.setattr(live_job, "MOST_REPAIRS", most)
    live.run(SUM)
    pids = [replica.pid for replica in live.status.replicas]
    before = sum(map(descriptors, pids))
    for _ in range(most):
        with pytest.raises(CellError, match="Rank 1: KeyError"):
            live.run(FAILS)
        assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
    assert sum(map(descriptors, pids)) <= before + 12 * most
    with pytest.raises(CellError, match="Rank 1: KeyError"):
        live.run(FAILS)
    with pytest.raises(CellError, match="%distribute restart"):
        live.run(SUM)
    assert live.restart() is live
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"


@pytest.mark.nightly
@of_gloo
def test_where_the_group_cannot_be_repaired_the_ranks_are_started_again_and_that_is_said(live):
    # In one rank: the others wait for its connections.
    live.run(f"{SUM}\nimport kale_dist.worker.rank.repair as private\nif rank == 1: private.TIMEOUT = None")
    with pytest.raises(CellError, match="Rank 1: KeyError"):
        live.run(FAILS)
    with pytest.raises(CellError, match="started again, because this torch's process group cannot be repaired"):
        live.run("1")
    assert repr(live.run(SUM)) == "ranks 0-1: 2.0"


@of_gloo
def test_a_stop_while_the_group_is_repaired_or_the_cell_is_sent_is_not_lost(live, monkeypatch, capfd):
    live.run(f"{SUM}\nimport time")
    with pytest.raises(CellError):
        live.run(FAILS)
    send = live._backend.send

    def stopped_at(part):
        def told(ref, rank, message, blobs=()):
            send(ref, rank, message, blobs)
            if isinstance(message, part):
                monkeypatch.setattr(live._backend, "send", send)
                raise KeyboardInterrupt

        monkeypatch.setattr(live._backend, "send", told)

    for part in (Repair, Cell):
        stopped_at(part)
        with pytest.raises(KeyboardInterrupt):
            live.run("time.sleep(60)")
        assert repr(live.run(SUM)) == "ranks 0-1: 2.0"
    assert "The cell was interrupted before it ran" in capfd.readouterr().err


def test_a_restart_ends_a_cell_whose_c_code_never_returns_and_it_says_so(live):
    live.run("import ctypes")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(live.run, "print('begins')\nctypes.PyDLL(None).sleep(300)")
        while not [line for line in live.logs() if line.text == "begins"]:
            time.sleep(0.1)
        live.restart()
        with pytest.raises(CellError, match="were started again meanwhile"):
            running.result()
    assert repr(live.run("rank // 2")) == "ranks 0-1: 0"


def test_an_error_of_all_ranks_leaves_the_group_alone(live):
    live.run(SUM)
    with pytest.raises(CellError, match="Ranks 0-1: NameError"):
        live.run("undefined")
    assert not live._is_broken
    with pytest.raises(CellError) as raised:
        live.run("raise ValueError(rank)")
    said = {str(raised.value).splitlines()[0], str(raised.value).splitlines()[-1]}
    assert said == {"Rank 0: ValueError: 0", "Rank 1: ValueError: 1"}


OTHER = """
import sys, kale_dist as kd
live = kd.attach(sys.argv[1])
import __main__
__main__.sent, __main__.mine = "of this process", "of this process"
print(live.run("mine, sent, len(str(sent))"))
print(live.run("import torch.distributed as dist\\ndist.barrier()\\nmine = 5"))
"""


@pytest.mark.nightly
@of_gloo
def test_another_process_attaches_and_goes_on(live, main):
    main(sent="of the notebook")
    live.run(f"mine = sent + ' in the ranks'\n{SUM}")
    with pytest.raises(CellError):
        live.run(FAILS)
    ended = subprocess.run(
        [sys.executable, "-c", OTHER, live.ref], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines()[0] == "ranks 0-1: ('of the notebook in the ranks', 'of the notebook', 15)"
    assert repr(live.run("mine")) == "ranks 0-1: 5"


def test_a_cell_that_waits_gets_its_answers_when_another_one_follows_it(live):
    assert repr(live.run("import time; rank // 2")) == "ranks 0-1: 0"
    with ThreadPoolExecutor(1) as pool:
        # Rank 0 answers both before rank 1 answers the first.
        running = pool.submit(live.run, "print('begins', flush=True); time.sleep(1 + rank); rank // 2")
        while not [line for line in live.logs() if line.text == "begins"]:
            time.sleep(0.1)
        assert repr(live.run("1 + rank // 2")) == "ranks 0-1: 1"
        assert repr(running.result(10)) == "ranks 0-1: 0"


def test_idle_ranks_end_and_the_next_cell_says_when_and_why():
    live = kd.live(1, idle="1 s")
    live.run("import time; time.sleep(2)")
    until(live.done, 20)
    with pytest.raises(JobFailedError, match=r"have ended at \d\d:\d\d: The live ranks have run no cell for 1 s"):
        live.run("1")
    other = live.restart()
    assert repr(other.run("1")) == "rank 0: 1"
    other.stop()
    other.delete()
    live.delete()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda live: kd.live(2, idle="ten"), "idle"),
        (lambda live: kd.live(2, idle=0), "idle"),
        (lambda live: kd.live((2, 4)), "number_of_processes"),
        (lambda live: kd.live(nprocs=2), "nprocs"),
        (lambda live: live.run("1 +"), "source"),
        (lambda live: live.run("return 1"), "source"),
        (lambda live: live.run("1", ranks=9), "ranks"),
        (lambda live: live.run("1", ranks=[0, "1"]), "ranks"),
    ],
)
def test_wrong_arguments_are_refused(one, call, argument):
    with pytest.raises(ConfigError) as refused:
        call(one)
    assert refused.value.argument == argument
