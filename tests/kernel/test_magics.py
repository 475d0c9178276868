"""`%load_ext kale_dist` in a real kernel: cells on ranks, and the words for jobs."""

import re

import pytest


@pytest.fixture(scope="module", autouse=True)
def loaded(kernel):
    kernel.good("%load_ext kale_dist")


def value(reply):
    """The plain text of a cell's own value, which comes after what it displays."""
    assert not reply.error, reply.traceback
    return reply.shown[-1]["text/plain"] if reply.shown else ""


@pytest.mark.newest
def test_a_cell_runs_on_every_rank_and_its_last_expression_comes_back(kernel):
    kernel.good("x = 10\ndef scaled(a):\n    return a * x")
    reply = kernel(
        "%%distribute -n 2 --job job\n"
        "import torch.distributed as dist\n"
        "x = x + rank\n"
        "total = torch.ones(1) * rank\n"
        "dist.all_reduce(total)\n"
        "def again(n):\n"
        "    return n if n == 0 else again(n - 1) + x\n"
        "(rank, world_size, device, scaled(2), total.item(), again(2))"
    )
    assert value(reply) == "[(0, 2, 'cpu', 20, 1.0, 20), (1, 2, 'cpu', 22, 1.0, 22)]"
    assert "Job cell-" in reply.shown[0]["text/html"]
    assert kernel.good("print(x, job.status.state.value)") == "10 succeeded"


def test_what_a_cell_imports_travels_with_it(kernel, tmp_path):
    (tmp_path / "beside.py").write_text("from pathlib import Path\nsaid = 'from a file'\n")
    kernel.good(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    reply = kernel("%%distribute -n 1\nimport beside\nfrom os import *\nfrom beside import said as word\nword, sep")
    assert value(reply) == "[('from a file', '/')]"


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("await __import__('asyncio').sleep(0, 'slept')", "['slept', 'slept']"),
        ("import asyncio\nfor i in range(2):\n    await asyncio.sleep(0)\ni + rank", "[1, 2]"),
        ("%matplotlib inline\nrank", "[0, 1]"),
        ("import math\n%matplotlib inline\nif rank >= 0:\n    %matplotlib widget\n    x = rank\nx", "[0, 1]"),
        ("text = '''\n%time is no magic here\n'''\nlen(text)", "[24, 24]"),
        ("5 % rank if rank else '%'", "['%', 0]"),
        ("rank if rank else None", "[None, 1]"),
        ("y = rank", ""),
        ("", ""),
        ("# only words", ""),
        ("rank;", "[0, 1]"),
    ],
)
def test_cells_of_all_kinds(kernel, cell, shown):
    reply = kernel(f"%%distribute -n 2\n{cell}")
    assert not reply.error, reply.traceback
    values = [data["text/plain"] for data in reply.shown[1:]]
    assert (values or [""])[-1] == shown


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%distribute\nx = (\n1", "line 2: '(' was never closed"),
        ("%%distribute\nx = 1\n%time x", "line 3, '%time x': magics and shell commands run in the notebook"),
        ("%%distribute\nfiles = !ls", "line 2, 'files = !ls': magics"),
        ("%%distribute\nx?", "line 2, 'x?': magics"),
        ("%%distribute\nx = (5\n % 3)\ny = = x", "line 4: invalid syntax: y = = x"),
        ("%%distribute\nfor i in range(2):\n    %time i", "line 3, '%time i': magics"),
        ("%%distribute\n%matplotlib inline\n!ls 'it", 'line 3, "!ls \'it": magics'),
        ("%%distribute\nx = 1\n%matplotlib inline\nawait", "line 4: invalid syntax: await"),
        ("%%distribute\nreturn 3", "'return' outside function"),
        ("%%distribute -n none\n1", "invalid int value"),
        ("%%distribute -n 0\n1", "number_of_processes: 0 is neither a whole number of 1 or more"),
        ("%%distribute --on mars\n1", "there is no place 'mars'"),
        ("%%distribute --set epoch=1\n1", "launch has no argument 'epoch'"),
        ("%%distribute --set timeouts=1\n1", "Did you mean 'timeout_s'"),
        ("%%distribute --job 1x\n1", "'1x' cannot be a name"),
        ("%attach spoken --job 1x", "'1x' cannot be a name"),
        ("%%distribute --set timeout_s\n1", "sets nothing"),
        ("%attach nothing", "There is no job 'nothing'"),
        ("%logs nothing", "There is no job 'nothing'"),
        ("%jobs --on mars", "invalid choice: 'mars'"),
    ],
)
def test_mistakes_are_said_in_one_line_and_start_nothing(kernel, cell, said):
    before = kernel.good("print(len(kd.jobs()))")
    reply = kernel(cell)
    assert said in reply.err
    assert "Traceback" not in reply.err
    assert kernel.good("print(len(kd.jobs()))") == before


def test_a_failure_shows_the_line_of_the_cell(kernel):
    reply = kernel("%%distribute -n 1\ny = 3\nraise ValueError(f'{y} on purpose')")
    assert reply.error.startswith("JobFailedError")
    assert "line 3" in reply.traceback
    assert "raise ValueError(f'{y} on purpose')" in reply.traceback


@pytest.fixture(scope="module")
def spoken(kernel, loaded):
    """A job that has ended, of this name."""
    reply = kernel("%%distribute -n 2 --name spoken --job spoken --set timeout_s=50 --no-wait\nprint('rank', rank)")
    assert "local://spoken" in value(reply)
    kernel.good("spoken.wait()")


def test_jobs_are_listed_found_again_and_their_logs_read(kernel, spoken):
    listed = kernel.good("%jobs")
    assert re.search(r"^spoken +succeeded +2 ", listed, re.MULTILINE), listed
    # Which of its two sentences it is depends on the jobs of other tests.
    assert re.search(r"lsewhere.*: kale-dist jobs --on (docker|kubernetes)", listed), listed
    assert "lsewhere" not in kernel.good("%jobs --on local")
    assert kernel.good("%logs spoken --ranks 1") == "[1] rank 1"
    assert kernel.good("%logs local://spoken --tail 1 --ranks 0") == "[0] rank 0"
    kernel.good("again = None")
    kernel.good("%attach local://spoken --job again")
    assert kernel.good("print(again is spoken)") == "True"
    assert kernel.good("%status again").startswith("local://spoken  succeeded")
    assert kernel.good("%cancel spoken").startswith("local://spoken: Succeeded")


@pytest.mark.newest
@pytest.mark.parametrize(("line", "offered"), [("%attach lo", "local://spoken"), ("%attach local://sp", "//spoken")])
def test_completion(kernel, spoken, line, offered):
    reply = kernel.client.complete(line, reply=True, timeout=30)
    assert offered in reply["content"]["matches"]


def test_a_warning_stands_without_a_line_of_ipythons_own(kernel, loaded):
    kernel.good("import os; cores = os.sched_getaffinity(0); os.sched_setaffinity(0, {min(cores)})")
    reply = kernel("%%distribute -n 2\npass")
    kernel.good("os.sched_setaffinity(0, cores)")
    assert not reply.error, reply.traceback
    assert "[kale-dist] number_of_processes: 2 processes share 1 cores" in reply.err
    assert "interactiveshell" not in reply.err


def test_a_jobs_name_is_completed_without_a_variable_of_that_name(kernel, loaded):
    kernel.good("import kale_dist as kd\nkd.launch(print, 'x', number_of_processes=1, name='unbound').wait()")
    assert "unbound" in kernel.client.complete("%logs unb", reply=True, timeout=30)["content"]["matches"]


def test_the_package_offers_its_public_names_alone(kernel):
    kernel.good("import kale_dist as kd")
    offered = kernel.client.complete("kd.", reply=True, timeout=30)["content"]["matches"]
    assert {"distribute", "launch", "attach"} <= set(offered)
    assert not {"calls", "importlib", "records"} & set(offered)


def test_help(kernel):
    reply = kernel.client.inspect("%%distribute", reply=True, timeout=30)
    text = reply["content"]["data"]["text/plain"]
    assert "Run the cell on every rank" in text
    assert "--number-of-processes" in text
