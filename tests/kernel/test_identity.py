"""What a notebook may count on: its own classes, functions and globals stay its own."""


def test_the_call_returns_before_anything_runs_and_later_cells_change_nothing(kernel):
    kernel.good("factor = 2\ndef scaled(x):\n    return factor * x, helper(x)\ndef helper(x):\n    return x + 1")
    said = kernel.good("job = kd.launch(scaled, 10, number_of_processes=2); print(job.status.state.value)")
    assert said in ("pending", "starting")
    kernel.good("factor = 1000\ndef helper(x):\n    return None")
    assert kernel.good("print(job.results())") == "[(20, 11), (20, 11)]"


def test_classes_and_functions_come_back_as_the_notebooks_own(kernel):
    kernel.good(
        "scale = 3\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.weight = torch.nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x):\n"
        "        return x * self.weight * scale\n"
        "forward = Net.forward\n"
        "def make(net):\n"
        "    with torch.no_grad(): net.weight += 1\n"
        "    return net, Net, forward\n"
        "net = Net()\n"
        "back, cls, function = kd.launch(make, net, number_of_processes=1).result()\n"
    )
    said = kernel.good(
        "print(type(back) is Net, cls is Net, function is forward, Net.forward is forward, back is not net)\n"
        "scale = 5\n"
        "print(back(torch.ones(2)).tolist(), net.weight.tolist())"
    )
    assert said == "True True True True True\n[10.0, 10.0] [1.0, 1.0]"


def test_a_remote_exception_shows_the_cells_lines_and_is_the_notebooks_own_class(kernel):
    kernel.good("class Odd(Exception):\n    pass\ndef inner(x):\n    raise Odd(f'at {x}')  # the guilty line\n")
    reply = kernel("def outer():\n    inner(kd.context().rank)\nkd.launch(outer, number_of_processes=1).result()")
    assert reply.error.startswith("JobFailedError")
    assert "the guilty line" in reply.traceback
    assert "inner(kd.context().rank)" in reply.traceback
    assert "Odd: at 0" in reply.traceback
    said = kernel.good(
        "job = kd.launch(outer, number_of_processes=1)\n"
        "error = job.exception()\nprint(type(error.__cause__) is Odd, error.__cause__)"
    )
    assert said == "True at 0"


def test_two_cells_with_two_jobs_at_once(kernel):
    kernel.good(
        "def sleepy(word):\n    print('say', word)\n    time.sleep(0.5)\n    return word * 2\n"
        "one = kd.launch(sleepy, 'a', number_of_processes=2)"
    )
    kernel.good("two = kd.launch(sleepy, 'b', number_of_processes=2)")
    assert kernel.good("print(one.results(), two.results())") == "['aa', 'aa'] ['bb', 'bb']"
    said = kernel.good("print([[line.text for line in job.logs(ranks=[0])] for job in (one, two)])")
    assert said == "[['say a'], ['say b']]"


def test_a_notebook_process_is_never_forked_moved_or_given_threads_that_pile_up(kernel):
    before = kernel.good("print(os.getcwd(), len(os.listdir('/proc/self/fd')))")
    for _ in range(3):
        kernel.good("kd.launch(sleepy, 'c', number_of_processes=1).result(); time.sleep(0.1)")
    after = kernel.good("print(os.getcwd(), len(os.listdir('/proc/self/fd')))")
    assert after.split()[0] == before.split()[0]
    assert int(after.split()[1]) <= int(before.split()[1]) + 3


def test_a_job_shows_itself_below_its_cell(kernel):
    reply = kernel("job = kd.launch(sleepy, 'd', number_of_processes=1); job.wait(); job")
    assert not reply.error, reply.traceback
    assert any("text/html" in shown and "succeeded" in shown["text/html"].lower() for shown in reply.shown)
