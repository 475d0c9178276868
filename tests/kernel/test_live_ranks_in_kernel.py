"""Live ranks in a real kernel: `%distribute start`, cells, errors, the stop button, `breakpoint()`, a restart of the kernel."""

import re
import time

import pytest
from own_files import own_files


@pytest.fixture(scope="module", autouse=True)
def loaded(kernel):
    kernel.good("%load_ext kale_dist\nimport kale_dist as kd, torch")
    reply = kernel("%distribute start -n 4 --set threads=1 --job live")
    assert not reply.error, reply.traceback
    assert re.search(r"local://live-\w{5} is ready: %%distribute runs a cell in its 4 ranks", reply.out)
    yield
    kernel.good("%distribute stop\nlive.delete()")


def cell(kernel, text, options=""):
    reply = kernel(f"%%distribute{options}\n{text}")
    if reply.out.startswith("[kale-dist] From the notebook"):
        sent, _, reply.out = reply.out.partition("\n")
        reply.err += sent
    return reply


def test_variables_stay_and_equal_values_are_folded(kernel):
    printed = cell(kernel, "k = 5\nprint('from', rank)").out.splitlines()
    assert sorted(printed) == [f"[{rank}] from {rank}" for rank in range(4)]
    assert cell(kernel, "k + 1").out == "ranks 0-3: 6\n"
    assert cell(kernel, "k + rank // 2").out == "ranks 0-1: 5\nranks 2-3: 6\n"
    assert cell(kernel, "k = 'mine'; k", " --ranks 0,2").out == "ranks 0, 2: 'mine'\n"
    assert cell(kernel, "k").out == "ranks 0, 2: 'mine'\nranks 1, 3: 5\n"
    assert cell(kernel, "await __import__('asyncio').sleep(0, rank > 9)").out == "ranks 0-3: False\n"
    assert cell(kernel, "k;\nNone").out == ""


@pytest.mark.nightly
def test_output_comes_while_the_cell_runs(kernel):
    message = kernel.send("%%distribute\nimport time\nprint('first')\ntime.sleep(3)\nprint('last')")
    began = time.monotonic()
    while not (found := kernel.client.get_iopub_msg(timeout=30))["content"].get("text", "").count("first"):
        assert "last" not in found["content"].get("text", "")
    assert time.monotonic() - began < 3
    kernel.finish(message)


@pytest.mark.nightly
def test_figures_and_tables_are_shown_and_bars_are_lines(kernel):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    reply = cell(kernel, "import pandas\npandas.DataFrame({'a': [1, 2]})")
    assert "<table" in reply.shown[-1]["text/html"]
    assert reply.out == "ranks 0-3:\n"
    reply = cell(kernel, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nNone", " --ranks 1")
    assert [data.keys() & {"image/png"} for data in reply.shown] == [{"image/png"}]
    reply = cell(kernel, "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass", " --ranks 0")
    assert "3/3" in reply.out


def test_names_of_the_notebook_come_once_and_those_of_the_ranks_win(kernel):
    kernel.good(
        "lr = 0.5\ntable = torch.ones(1 << 19)\nmodel = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=lr)\ndef scaled(x):\n    return x * lr\n"
        "class Point:\n    def __init__(self, x):\n        self.x = x\npoint = Point(3)"
    )
    reply = cell(kernel, "scaled(4), len(table), model.in_features, point.x")
    assert reply.out == "ranks 0-3: (2.0, 524288, 2, 3)\n"
    assert "From the notebook: model, point, scaled, table (2 MiB)" in reply.err
    assert "From the notebook" not in cell(kernel, "scaled(4), len(table)").err
    # In place, in the ranks alone: that stays, and an optimizer that comes later is over the same parameters.
    cell(kernel, "with torch.no_grad(): model.weight.fill_(7)")
    reply = cell(kernel, "optimizer.param_groups[0]['params'][0] is model.weight, model.weight[0, 0].item()")
    assert reply.out == "ranks 0-3: (True, 7.0)\n"
    # What has changed in the notebook is sent again.
    kernel.good("lr = 2")
    assert cell(kernel, "scaled(4)").out == "ranks 0-3: 8\n"
    reply = cell(kernel, "lr = 10 + rank * 0\nscaled(4)")
    assert reply.out == "ranks 0-3: 40\n"
    assert cell(kernel, "scaled(4), lr").err.count("`lr` is the ranks' own") == 1
    assert "ranks' own" not in cell(kernel, "lr").err
    assert kernel.good("live.push(lr=3)\nprint(lr)") == "2"
    assert cell(kernel, "scaled(4)").out == "ranks 0-3: 12\n"
    assert kernel.good("print(live.pull('lr * 2', ranks=1), live.pull('rank'))") == "6 [0, 1, 2, 3]"
    assert kernel.good("print(isinstance(live.pull('point', ranks=0), Point))") == "True"
    assert kernel.good("print(live.pull('model', ranks=2).weight[0, 0].item())") == "7.0"


def test_a_value_that_cannot_be_sent_or_brought_is_named(kernel):
    kernel.good("import threading\nheld = {'lock': threading.Lock()}")
    assert "held -> ['lock']" in cell(kernel, "held").error + kernel("live.push(held=held)").traceback
    reply = kernel("live.pull('__import__(\"threading\").Lock()', ranks=0)")
    assert "CellError" in reply.error


def test_an_error_shows_the_cells_lines_and_the_next_cell_works(kernel):
    setup = "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\nwrapped = DistributedDataParallel(torch.nn.Linear(2, 2))\nwrapped(torch.ones(1, 2)).sum().backward()"
    assert not cell(kernel, setup).error
    began = time.monotonic()
    reply = cell(kernel, "if rank == 1:\n    1 / 0\nwrapped(torch.ones(1, 2)).sum().backward()")
    assert time.monotonic() - began < 10
    assert reply.error.startswith("CellError: Rank 1: ZeroDivisionError: division by zero")
    assert "Rank 1: ZeroDivisionError: division by zero" in reply.traceback
    assert re.search(r"Cell In\[(\d+)\], line 1\n.*File \"Cell In\[\1\]\", line 3", reply.traceback, re.DOTALL)
    assert "1 / 0" in reply.traceback
    assert "Ranks 0, 2-3 waited in a collective" in reply.traceback
    assert own_files(reply.traceback) == []
    reply = cell(kernel, "wrapped(torch.ones(1, 2)).sum().backward()\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert reply.out == "ranks 0-3: 4.0\n"
    reply = cell(kernel, "undefined_name")
    assert "Ranks 0-3: NameError" in reply.traceback


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param("time.sleep(60)", marks=pytest.mark.nightly),
        pytest.param("while True: pass", marks=pytest.mark.nightly),
        "dist.all_reduce(x) if rank else time.sleep(60)",
    ],
)
def test_the_stop_button_interrupts_the_cell_and_not_the_ranks(kernel, wait):
    cell(kernel, "import time, torch.distributed as dist\nkept = 8\nx = torch.ones(1)")
    message = kernel.send(f"%%distribute\nprint('runs')\n{wait}")
    while "runs" not in kernel.client.get_iopub_msg(timeout=30)["content"].get("text", ""):
        pass
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    if "dist." in wait:
        # A double click: the cell takes half a second to end.
        time.sleep(0.1)
        kernel.manager.interrupt_kernel()
    reply = kernel.finish(message)
    # The second click may come when the cell has ended, and IPython itself prints the word.
    assert "KeyboardInterrupt" in reply.error + reply.err
    assert "interrupted in ranks 0-3" in reply.err
    assert cell(kernel, "y = torch.ones(1)\ndist.all_reduce(y)\nkept, y.item()").out == "ranks 0-3: (8, 4.0)\n"


def test_a_breakpoint_opens_its_prompt_in_the_cell(kernel):
    message = kernel.send("%%distribute\nz = 3\nif rank == 2: breakpoint()\nz + rank")
    for line in ("p z", "z = 10", "c"):
        asked = kernel.client.get_stdin_msg(timeout=30)
        assert asked["content"]["prompt"] == "(rank 2) "
        kernel.client.input(line)
    reply = kernel.finish(message)
    assert "ranks 0: 3" not in reply.out
    assert "rank 2: 12\n" in reply.out
    assert "Cell In[" in reply.out


@pytest.mark.nightly
def test_the_stop_button_at_a_breakpoint_ends_the_cell(kernel):
    message = kernel.send("%%distribute\nif rank == 2: breakpoint()\ntorch.distributed.barrier()")
    assert kernel.client.get_stdin_msg(timeout=30)["content"]["prompt"] == "(rank 2) "
    kernel.manager.interrupt_kernel()
    assert kernel.finish(message).error.startswith("KeyboardInterrupt")
    assert cell(kernel, "1").out == "ranks 0-3: 1\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%distribute start -n 2", "runs already, and a notebook has one set of live ranks"),
        ("%distribute begin", "'begin': %distribute has the words start, restart and stop"),
        ("%distribute restart -n 2", "takes no options"),
        ("%%distribute --ranks 9\n1", "the job has no rank 9. Its ranks are 0 to 3"),
        ("%%distribute --ranks all\n1", "'all' names no ranks"),
        ("%%distribute --ranks 0 -n 2\n1", "--ranks: it chooses among live ranks"),
        ("%%distribute\nx = 1\n%time x", "line 3, '%time x': magics and shell commands run in the notebook"),
        ("%%distribute --idle 5min\n1", "--idle: it belongs to"),
    ],
)
def test_mistakes_are_refused_in_one_line(kernel, code, said):
    reply = kernel(code)
    assert said in reply.err
    assert reply.err.startswith("UsageError: ")
    assert len(reply.err.strip().splitlines()) == 1


@pytest.mark.nightly
def test_a_cell_with_options_is_a_job_of_its_own_and_a_line_says_so(kernel):
    reply = cell(kernel, "rank", " -n 2")
    assert "runs as a job of its own, not in local://live-" in reply.out
    assert reply.shown[-1]["text/plain"] == "[0, 1]"


def test_ranks_that_have_died_say_so_and_restart_as_another_job(kernel):
    reply = cell(kernel, "import os\nif rank == 1: os._exit(3)\nimport time; time.sleep(60)")
    assert reply.error.startswith("JobFailedError")
    assert "Rank 1" in reply.traceback
    reply = cell(kernel, "1")
    assert "%distribute restart" in reply.traceback
    assert not kernel("%distribute restart").error
    assert cell(kernel, "1").out == "ranks 0-3: 1\n"


@pytest.mark.nightly
def test_c_code_that_never_returns_is_named_and_a_second_stop_ends_the_ranks(kernel):
    message = kernel.send("%%distribute\nimport ctypes\nprint('runs')\nctypes.PyDLL(None).sleep(300)")
    for said in ("runs", "C code cannot be interrupted"):
        while said not in kernel.client.get_iopub_msg(timeout=30)["content"].get("text", ""):
            pass
        # An interrupt between the line and the call in C would end the cell.
        time.sleep(1)
        kernel.manager.interrupt_kernel()
    assert kernel.finish(message).error.startswith("KeyboardInterrupt")
    assert not kernel("%distribute restart").error
    assert cell(kernel, "1").out == "ranks 0-3: 1\n"


@pytest.mark.nightly
def test_before_an_idle_end_a_line_comes_into_the_last_cell_and_short_cells_keep_the_ranks(kernel):
    kernel.good("%distribute stop")
    assert not kernel("%distribute start -n 1 --idle 5s --set threads=1").error
    for _ in range(8):
        assert cell(kernel, "1").out == "rank 0: 1\n"
        time.sleep(1)
    last = kernel.send("%%distribute\n2")
    kernel.finish(last)
    kernel.good("1")
    while "They end in" not in (told := kernel.client.get_iopub_msg(timeout=30))["content"].get("text", ""):
        pass
    assert told["parent_header"]["msg_id"] == last
    kernel.good("import time; time.sleep(6)")
    assert "have run no cell for 5 s" in cell(kernel, "1").traceback
    assert not kernel("%distribute start -n 4 --set threads=1 --job live").error
