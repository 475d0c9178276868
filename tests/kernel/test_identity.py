"""What a notebook may count on: its own classes, functions and globals stay its own."""

import pytest

pytestmark = pytest.mark.newest


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
    # What an argument of the function has learnt comes back into it.
    assert said == "True True True True True\n[10.0, 10.0] [2.0, 2.0]"


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


def test_a_trained_model_is_the_notebooks_own_object_of_its_own_class(kernel):
    kernel.good(
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 24\n"
        "    def __getitem__(self, i): return torch.tensor([float(i)]), torch.tensor([2.0 * i])\n"
        "scale = 1.0\n"
        "class Line(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(1, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x) * scale\n"
        "def train_step(model, data_loader, criterion, optimizer, device, args):\n"
        "    assert isinstance(model, Line)\n"
        "    for x, y in data_loader:\n"
        "        optimizer.zero_grad(); loss = criterion(model(x.to(device)), y); loss.backward(); optimizer.step()\n"
        "    print('epoch done')\n"
        "    return loss.item()\n"
        "model = Line(); forward = Line.forward; start = model.layer.weight.item()\n"
        "loader = DataLoader(Numbers(), batch_size=4, shuffle=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "job = kd.distribute(model, loader, torch.nn.MSELoss(), optimizer, train_step, epochs=2, number_of_processes=2)\n"
        "start == model.layer.weight.item()"
    )
    said = kernel.good(
        "job.wait()\n"
        "print(job.model is model, isinstance(job.model, Line), Line.forward is forward, model.layer.weight.item() != start)\n"
        "one = model(torch.ones(1, 1)).item(); scale = 2.0\n"
        "print(abs(model(torch.ones(1, 1)).item() - 2 * one) < 1e-6, sum(row['source'] == 'train' for row in job.metrics))"
    )
    assert said == "True True True True\nTrue 2"


def test_pictures_of_rank_0_appear_in_the_cell_that_waits(kernel):
    kernel.good(
        "import matplotlib.pyplot as plt\n"
        "from IPython.display import display\n"
        "def draw():\n"
        "    figure, axes = plt.subplots(figsize=(2, 2))\n"
        "    axes.plot([1, 2])\n"
        "    plt.show()\n"
        "    display(figure)\n"
    )
    shown = kernel("job = kd.launch(draw, number_of_processes=2)\njob.result()").shown
    assert sum("image/png" in data for data in shown) == 2
    assert not kernel("job.wait()").shown[0].keys() & {"image/png"}


def test_models_that_launch_is_given_come_back_trained(kernel):
    kernel.good(
        "first, second, untouched = (torch.nn.Linear(1, 1) for _ in range(3))\n"
        "def train(one, rest, other):\n"
        "    with torch.no_grad():\n"
        "        one.weight.fill_(3.0)\n"
        "        rest['b'].bias.fill_(4.0)\n"
        "    return 'done'\n"
        "before = untouched.weight.clone()\n"
        "job = kd.launch(train, first, {'b': second}, other=untouched, number_of_processes=2)"
    )
    assert kernel.good("print(job.results())") == "['done', 'done']"
    said = kernel.good("print(first.weight.item(), second.bias.item(), torch.equal(untouched.weight, before))")
    assert said == "3.0 4.0 True"


def test_a_model_that_the_function_divides_over_the_ranks_comes_back_whole(kernel):
    kernel.good(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = torch.nn.Linear(2, 3)\n"
        "def train(net):\n"
        "    fully_shard(net)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "    net(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    torch.distributed.destroy_process_group()\n"
        "before = net.weight.detach().clone()\n"
        "kd.launch(train, net, number_of_processes=2).wait()"
    )
    assert kernel.good("print(torch.allclose(net.weight, before - 1))") == "True"


def test_several_models_and_other_state_come_back_into_the_notebooks_own_objects(kernel):
    kernel.good(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "nets = {'one': torch.nn.Linear(2, 1), 'two': torch.nn.Linear(2, 1)}\n"
        "optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}\n"
        "history = []\n"
        "def step(models, loader, criterion, optimizers, device, args):\n"
        "    for (x,) in loader:\n"
        "        for name, model in models.items():\n"
        "            optimizers[name].zero_grad(); model(x).mean().backward(); optimizers[name].step()\n"
        "        history.append(len(x))\n"
        "    return 0.0\n"
        "one, before = nets['one'], nets['one'].weight.clone()\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), 2)\n"
        "job = kd.distribute(nets, loader, None, optimizers, step, state=[history], number_of_processes=2)\n"
        "job.wait()"
    )
    said = kernel.good("print(job.model['one'] is one, bool((one.weight < before).all()), history)")
    assert said == "True True [2, 2]"


def test_a_criterion_that_the_optimizer_trains_comes_back(kernel):
    kernel.good(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "class Centres(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.centre = torch.nn.Parameter(torch.zeros(2))\n"
        "    def forward(self, outputs, targets):\n"
        "        return (outputs - self.centre).pow(2).mean() + targets.mean()\n"
        "net, centres = torch.nn.Linear(3, 2), Centres()\n"
        "optimizer = torch.optim.SGD([*net.parameters(), *centres.parameters()], lr=0.5)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), 2)\n"
        "kd.distribute(net, loader, centres, optimizer, number_of_processes=2).wait()"
    )
    assert kernel.good("print(bool(centres.centre.abs().min() > 0))") == "True"
