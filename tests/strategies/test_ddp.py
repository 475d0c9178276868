"""Data parallelism: what is sent, what compression costs, a rank that is lost, and what is refused."""

import os
import pathlib

import pytest
import torch
from one_process import compare
from strategy_jobs import call
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import fit

import kale_dist as kd
from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import DDP

ACCURACY = 0.01
"""What compression may cost on the digits."""


def parameters_of(case="PlainSgd"):
    return [*nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).parameters()]


@pytest.mark.nightly
def test_bytes_sent_are_those_of_the_formulas():
    model = sum(p.numel() for p in parameters_of()) * 8
    controls = (10 + len(parameters_of())) * 8
    expected = {
        # Both ranks write their gradients once.
        DDP(exchange="shared-memory"): 2 * model,
        # 2 (n-1)/n of the buffer, on each of n = 2 ranks.
        DDP(exchange="ring"): 2 * (model + controls),
        DDP(exchange="torch"): 2 * (model + controls),
        DDP(exchange="driver"): 2 * (model + controls),
    }
    if torch.cuda.is_available():
        del expected[DDP(exchange="shared-memory")]  # of CPUs alone
    for strategy, bytes_of_a_step in expected.items():
        numbers = compare(strategy, names=["PlainSgd"])["PlainSgd"]
        assert numbers["bytes_sent"] == pytest.approx(50 * bytes_of_a_step), strategy


def digits_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def accuracies(strategies, x, y):
    """Runs in each rank: accuracy on held-out digits and bytes sent, for each strategy."""
    found = []
    for strategy in strategies:
        model = digits_net()
        loader = DataLoader(
            TensorDataset(x[:1500], y[:1500]), 16, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        result = fit(model, loader, optimizer, epochs=12, strategy=strategy)
        accuracy = (model.cpu()(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
        found.append((accuracy, result.strategy.get("bytes_sent", 0.0)))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [pytest.param(("powersgd",), id="powersgd"), pytest.param(("fp16", "bf16"), id="half")],
)
def test_compressed_gradients_learn_the_digits_as_well(words):
    strategies = [DDP(exchange="torch"), *(DDP(compress=word) for word in words)]
    job = kd.launch(accuracies, strategies, *digits(), number_of_processes=2, threads=1)
    job.wait()
    (plain, whole), *compressed = job.result()
    job.delete()
    assert plain > 0.85
    for strategy, (accuracy, sent) in zip(strategies[1:], compressed, strict=True):
        assert accuracy >= plain - ACCURACY, strategy
        assert sent < 0.55 * whole, strategy


def losing_a_rank(marker, strategy, max_restarts):
    """Train where rank 1 dies once in the third epoch; gives the weights."""
    torch.manual_seed(1)
    model = digits_net()
    x, y = digits()

    def train_step(model, loader, criterion, optimizer, device, args):
        for number, (a, b) in enumerate(loader):
            if number == 3 and args["epochs"] == 2 and max_restarts and kd.context().rank == 1:
                with marker.open("a+") as file:
                    if not file.tell():
                        file.write("once")
                        file.flush()
                        os._exit(9)
            optimizer.zero_grad()
            criterion(model(a), b).backward()
            optimizer.step()
        args["epochs"] += 1

    counts = {"epochs": 0}
    job = kd.distribute(
        model,
        DataLoader(TensorDataset(x[:320], y[:320]), 8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters()),
        train_step,
        epochs=4,
        train_args=counts,
        state=[counts],
        strategy=strategy,
        seed=3,
        number_of_processes=2,
        threads=1,
        max_restarts=max_restarts,
        on="local",
    )
    job.wait()
    job.delete()
    return model.state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        DDP(exchange="torch" if torch.cuda.is_available() else "shared-memory"),
        DDP(compress="powersgd"),
    ],
    ids=repr,
)
def test_a_lost_rank_changes_nothing(tmp_path, strategy):
    marker = pathlib.Path(tmp_path / "lost")
    expected = losing_a_rank(marker, strategy, 0)
    found = losing_a_rank(marker, strategy, 1)
    assert marker.exists()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def weights_where_memory_is(hidden, **settings):
    """Train on two ranks; gives the weights. Where memory is hidden, no rank can open another's."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    x = torch.randn(16, 2)

    def train_step(model, loader, criterion, optimizer, device, args):
        from kale_dist.worker.parallel import shared_memory

        if args:
            shared_memory._opened = lambda *_: None
        for a, b in loader:
            optimizer.zero_grad()
            criterion(model(a), b).backward()
            optimizer.step()

    job = kd.distribute(
        model,
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2),
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        train_step,
        train_args=hidden,
        strategy=DDP(**settings),
        number_of_processes=2,
        on="local",
    )
    try:
        return job.result().model_state["weight"]
    finally:
        job.delete()


@pytest.mark.nightly
@pytest.mark.real("shared memory is for CPUs")
def test_ranks_that_cannot_share_memory_exchange_by_torch_unless_memory_was_asked_for():
    torch.testing.assert_close(weights_where_memory_is(True), weights_where_memory_is(False))
    with pytest.raises(KaleDistError, match="exchange='shared-memory' does not work here"):
        weights_where_memory_is(True, exchange="shared-memory")


def test_what_a_call_cannot_do_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"strategy=kd.strategies.DDP\(exchange=...\)"):
        call("ddp", exchange="ring")
    with pytest.raises(ConfigError, match="several pods"):
        call(DDP(exchange="shared-memory"), on=kd.Kubernetes(image="registry.example.com/torch:1"))
