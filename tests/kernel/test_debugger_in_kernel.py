"""`breakpoint()` in a rank, debugged in a notebook's cell: the prompt comes by Jupyter's stdin."""

import pathlib
import re

import pytest
from own_files import own_files

import kale_dist as kd

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "debugging.md"
CELL = (
    "def step(k):\n"
    "    import torch, torch.distributed as dist\n"
    "    x = torch.arange(4.0) * k\n"
    "    if dist.get_rank() == {rank}:\n"
    "        breakpoint()\n"
    "        x = x + 1\n"
    "    dist.all_reduce(x)\n"
    "    return x.sum().item()\n"
)
START = "job = kd.launch(step, 2, number_of_processes=2)"


class Typist:
    """Answers a cell's prompts."""

    def __init__(self, kernel, code):
        self.kernel = kernel
        self.message = kernel.send(code)
        self.asked = []

    def wait_for_prompt(self, timeout=60):
        self.asked.append(self.kernel.client.get_stdin_msg(timeout=timeout)["content"]["prompt"])
        return self.asked[-1]

    def type(self, *lines):
        for line in lines:
            self.wait_for_prompt()
            self.kernel.client.input(line)
        return self

    def end(self):
        return self.kernel.finish(self.message)


@pytest.fixture
def step(kernel):
    kernel.good(CELL.format(rank=1))
    kernel.good("from kale_dist.job import interrupts; interrupts._last_interrupt = float('-inf')")
    yield
    kernel.good("[job.delete() for job in kd.jobs()]; None")


@pytest.mark.parametrize(
    "wait",
    [
        "print(job.result())",
        pytest.param("job.wait(); print(job.result())", marks=pytest.mark.nightly),
        pytest.param("job.stream_logs(); print(job.result())", marks=pytest.mark.nightly),
    ],
)
def test_the_prompt_opens_in_the_cell_that_waits_and_shows_the_cells_lines(kernel, step, wait):
    reply = Typist(kernel, f"{START}\n{wait}").type("p x", "!x.mul_(100)", "l", "c").end()
    assert not reply.error, reply.traceback
    assert "Cell In[" in reply.out
    assert "-> x = x + 1" in reply.out
    assert "tensor([0., 2., 4., 6.])" in reply.out
    assert "    dist.all_reduce(x)" in reply.out
    assert reply.out.splitlines()[-1] == str(12 + 1200 + 4.0)
    assert "Debugger of rank 1" in reply.err


@pytest.mark.nightly
def test_the_pages_first_session_shows_what_the_page_shows(kernel):
    page = PAGE.read_text()
    cell, shown = (re.search(f"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("py", "text"))
    kernel.good(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "inputs = torch.ones(8, 3)\ninputs[7, 1] = float('inf')\n"
        "model, criterion = torch.nn.Linear(3, 1), torch.nn.MSELoss()\n"
        "loader = DataLoader(TensorDataset(inputs, torch.ones(8, 1)), batch_size=2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"
    )
    typist = Typist(kernel, cell)
    typist.type(*re.findall(r"^\(rank 1\) (.*)$", shown, re.MULTILINE))
    reply = typist.end()
    assert not reply.error, reply.traceback
    header, *rest = re.sub(r"In\[\d+\]", "In[3]", shown).splitlines()
    seen = re.sub(r"In\[\d+\]", "In[3]", reply.err + reply.out).splitlines()
    assert header in seen
    assert [line for line in rest if not line.startswith("(rank")] == [line for line in seen if line in rest]
    assert kernel.good("print(job.status.state.value, model.weight.isfinite().all().item())") == "succeeded True"


@pytest.mark.nightly
def test_a_distributed_cell_asks_in_itself(kernel, step):
    cell = "%%distribute -n 2\nz = rank\nif rank == 1:\n    breakpoint()\n    z += 1\nz"
    kernel.good("%load_ext kale_dist")
    reply = Typist(kernel, cell).type("p rank", "z = 10", "c").end()
    assert not reply.error, reply.traceback
    assert reply.shown[-1]["text/plain"] == "[0, 11]"


def test_two_ranks_are_debugged_one_after_the_other_each_by_its_name(kernel, step):
    kernel.good("def both():\n    import time\n    breakpoint()\n    return 1")
    kernel.good(
        "job = kd.launch(both, number_of_processes=2)\nwhile len(job.status.at_breakpoints) < 2: time.sleep(0.05)"
    )
    typist = Typist(kernel, "print(job.results())").type("n", "c", "n", "c")
    assert typist.end().out.splitlines()[-1] == "[1, 1]"
    assert typist.asked == ["(rank 0) ", "(rank 0) ", "(rank 1) ", "(rank 1) "]


def test_the_stop_button_leaves_the_prompt_and_debug_opens_it_again(kernel, step):
    typist = Typist(kernel, f"{START}\njob.result()")
    typist.wait_for_prompt()
    kernel.interrupt()
    reply = typist.end()
    assert reply.error.startswith("KeyboardInterrupt")
    assert own_files(reply.traceback) == []
    assert "job.debug(rank=1)" in reply.err
    assert "keeps running" in reply.err
    assert "job.debug(rank=1)" in kernel.good("print(job._repr_mimebundle_()['text/plain'])")
    left = Typist(kernel, "job.debug(rank=1)")
    left.wait_for_prompt()
    kernel.interrupt()
    assert not left.end().error
    assert not Typist(kernel, "job.debug(rank=1)").type("p x", "c").end().error
    assert kernel.good("print(job.result())").splitlines()[-1] == "28.0"


@pytest.mark.nightly
def test_the_cell_goes_on_when_the_job_ends_at_the_prompt(kernel, step):
    kernel.good(START)
    ref = kernel.good("print(job.ref)")
    typist = Typist(kernel, "print(job.wait().state.value)")
    typist.wait_for_prompt()
    kd.attach(ref).cancel()
    reply = typist.end()
    assert not reply.error, reply.traceback
    assert reply.out.split()[-1] == "cancelled"


@pytest.mark.nightly
def test_of_two_debuggers_of_a_rank_the_first_line_counts(kernel, step, new_kernel):
    kernel.good(START)
    ref = kernel.good("print(job.ref)")
    late = Typist(kernel, "print(job.result())")
    late.wait_for_prompt()
    other = new_kernel()
    first = Typist(other, f"import kale_dist as kd; kd.attach({ref!r}).debug(1)")
    first.type("!x.mul_(10)")
    assert late.wait_for_prompt() == "(rank 1) "
    late.kernel.client.input("c")
    reply = late.end()
    assert "Another debugger of rank 1 was first" in reply.err
    assert "x.mul_(10)" in reply.err
    assert reply.out.splitlines()[-1] == str(12 + 120 + 4.0)
    assert not first.end().error


@pytest.mark.nightly
def test_without_a_person_at_the_front_end_breakpoints_are_passed_over(kernel, step):
    reply = kernel(f"{START}\nprint(job.result())", allow_stdin=False)
    assert reply.out.splitlines()[-1] == "28.0"
    assert reply.err.count("was passed over") == 1
    assert "passed over" in kernel.good("print(job.logs())")


def test_debug_says_what_stands_in_its_way(kernel, step):
    kernel.good("job = kd.launch(lambda: 1, number_of_processes=1); job.wait(); None")
    assert "does not wait in breakpoint()" in kernel("job.debug(rank=0)").error
    assert "No rank" in kernel("job.debug()").error
    assert "no rank 9" in kernel("job.debug(rank=9)").error
    assert "nothing can be typed here" in kernel("job.debug(rank=0)", allow_stdin=False).error
