"""What ranks change of the objects of a call is in the notebook's own objects, in restarts, and in other processes."""

import functools
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import KaleDistWarning


class Center(nn.Module):
    """A loss as DINO's, and one that counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.scale, self.calls = nn.Parameter(torch.ones(1)), 0

    def forward(self, outputs, targets):
        self.calls += 1
        with torch.no_grad():
            self.center.mul_(0.9).add_(outputs.mean(0), alpha=0.1)
        return nn.functional.cross_entropy((outputs - self.center) * self.scale, targets)


class Net(nn.Module):
    """Two stages of a pipeline; the second has state that is in no state_dict."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(3, 4), Layer(4, 2))

    def forward(self, x):
        return self.layers(x)


class Layer(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.linear, self.count, self.seen = nn.Linear(*sizes), 0, torch.zeros(())
        self.mean = torch.zeros(sizes[1])
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            self.seen.add_(1)
            self.steps += 1
        return y


class Lookahead(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.calls, self.slow = 0, [torch.zeros(1)]

    def step(self, closure=None):
        self.calls += 1
        self.slow[0] += 1
        return super().step(closure)


class Training:
    """A call whose step is sent by value, with the names that it uses."""

    def __init__(self, *, kill=False):
        torch.manual_seed(0)
        self.model, self.criterion = Net(), Center()
        self.loader = DataLoader(TensorDataset(torch.randn(32, 3), torch.arange(32) % 2), 4)
        self.optimizer = Lookahead(self.model.parameters(), lr=0.1)
        self.args = {"alpha": torch.zeros(3)}
        self.history = history = []
        self.table = table = {"best": None, "counts": torch.zeros(2)}

        def step(model, loader, criterion, optimizer, device, args):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                args["alpha"].add_(1)
                table["counts"] += 1
            history.append(len(loader))
            table["best"] = 0.5
            if kill and len(history) == 2 and kd.context().attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss.item()

        self.step = step

    def run(self, **options):
        given = self.model, self.loader, self.criterion, self.optimizer, self.step
        job = kd.distribute(*given, **{"train_args": self.args, "number_of_processes": 2, **options})
        assert job.wait().state == "succeeded", job.logs()
        return job


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", kd.strategies.Pipeline(micro_batches=1)], ids=lambda one: str(one)[:8]
)
def test_what_a_step_changes_is_in_the_notebooks_own_objects(strategy):
    call = Training()
    model, alpha, counts, slow = call.model, call.args["alpha"], call.table["counts"], call.optimizer.slow[0]
    seen = model.layers[1].seen
    job = call.run(strategy=strategy)
    batches = 4 if isinstance(strategy, str) else 8
    assert [layer.count for layer in model.layers] == [layer.steps.item() for layer in model.layers] == [batches] * 2
    assert all(layer.mean.abs().sum() > 0 for layer in model.layers)
    assert (model.layers[1].seen, call.args["alpha"], call.table["counts"]) == (seen, alpha, counts)
    assert (seen.item(), *alpha.tolist(), *counts.tolist(), slow.item()) == (batches,) * 7
    assert (call.optimizer.calls, call.criterion.calls, call.history) == (batches, batches, [batches])
    assert call.table["best"] == 0.5
    assert call.criterion.center.abs().sum() > 0
    if strategy == "ddp":
        script = f"""
            import kale_dist as kd
            model = kd.attach({job.ref!r}).model
            print([layer.count for layer in model.layers], model.layers[1].seen.item())
        """
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
        )
        assert run.stdout.split("\n")[-2] == "[4, 4] 4.0", run.stderr
    job.delete()


def test_a_training_that_was_interrupted_goes_on_with_what_it_had_changed():
    call = Training(kill=True)
    job = call.run(epochs=3, max_restarts=1, checkpoint_every=1)
    assert (call.history, call.args["alpha"].tolist(), call.table["counts"].tolist()) == ([4] * 3, [12] * 3, [12] * 2)
    assert ([layer.count for layer in call.model.layers], call.criterion.calls, call.optimizer.calls) == (
        [12] * 2,
        12,
        12,
    )
    # A later call gives its own arguments and names, and the model goes on.
    later = Training()
    later.history.append(99)
    second = later.run(epochs=4, number_of_processes=1, resume_from=job)
    assert (later.history, later.args["alpha"].tolist(), later.model.layers[0].count) == ([99, 8], [8] * 3, 20)
    job.delete()
    second.delete()


class Wrapper:
    def __init__(self):
        self.net, self.rounds = nn.Linear(2, 2), 0

    def train(self):
        self.net.weight.data.add_(1)
        self.rounds += 1
        return self.rounds


def growing(wrapper):
    def grow(model, log, *, table):
        log.append(model.linear.weight.sum().item())
        table["n"] += 1
        model.count += 1
        wrapper.train()

    return grow


def test_what_a_function_changes_is_in_the_notebooks_own_objects():
    wrapper, model, log, table = Wrapper(), Layer(2, 2), [], {"n": 0}
    before = wrapper.net.weight.detach().clone()
    job = kd.launch(growing(wrapper), model, log, table=table, number_of_processes=2)
    job.wait()
    assert (len(log), table, model.count, wrapper.rounds) == (1, {"n": 1}, 1, 1)
    assert torch.equal(wrapper.net.weight, before + 1)
    method = kd.launch(wrapper.train, number_of_processes=2)
    assert method.result() == 2
    assert torch.equal(wrapper.net.weight, before + 1 + 1)
    job.delete()
    method.delete()


def test_what_the_notebook_has_changed_meanwhile_is_named_when_it_is_written_over():
    log, table = [1], {"n": 0}
    job = kd.launch(growing(Wrapper()), Layer(2, 2), log, table=table, number_of_processes=1)
    log.append(2)
    with pytest.warns(KaleDistWarning, match=r"was written over what changed here after it had started: log"):
        job.wait()
    assert len(log) == 2
    job.delete()


class Counted(TensorDataset):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


seen_here = []


def test_a_step_that_is_a_part_of_a_method_has_its_objects():
    call, log = Training(), []

    class Loop:
        epochs = 0

        def step(self, log, *given):
            self.epochs += 1
            return log.append(step(*given))

    step, loop = call.step, Loop()
    call.step = functools.partial(loop.step, log)
    call.run()
    assert (loop.epochs, len(log), len(call.history)) == (1, 1, 1)


def test_what_does_not_come_back_is_named():
    call, history = Training(), []

    def step(model, loader, criterion, optimizer, device, args):
        nonlocal history
        history = [*history, 1]
        args.append(nn.Linear(1, 1))
        note()
        return sum(len(x) for x, _ in loader)

    call.loader = DataLoader(Counted(*call.loader.dataset.tensors), 2)
    call.loader.dataset.reads, call.args, call.step = 0, [], step
    job = call.run(number_of_processes=1)
    names = "history, train_args, test_way_back.seen_here, train_data_loader.dataset.reads."
    assert f"left behind in the ranks: {names}" in str(job.logs())
    assert (history, seen_here, call.args) == ([], [], [])
    job.delete()


def note():
    seen_here.append(1)


def test_a_function_that_changes_nothing_returns_what_it_returns():
    assert kd.launch(len, "abc", number_of_processes=1).result() == 3
