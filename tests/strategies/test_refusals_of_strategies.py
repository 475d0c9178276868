"""What a call refuses before anything starts, because of its strategy."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.strategies import Gossip, LocalSGD, ParameterServer
from kale_dist.worker.training import supervised


def own_step(model, data_loader, criterion, optimizer, device, args):
    """Never runs: the ready-made one takes no LBFGS."""


def call(strategy, number_of_processes, *, make=lambda p: torch.optim.SGD(p, lr=0.1), model=None, **options):
    model = model or nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8).long()), 4)
    return kd.render(
        model,
        loader,
        nn.CrossEntropyLoss(),
        make(model.parameters()),
        strategy=strategy,
        number_of_processes=number_of_processes,
        on="local",
        **options,
    )


@pytest.mark.parametrize(
    ("strategy", "processes", "argument"),
    [
        ("parameter-server", 1, "number_of_processes"),
        (ParameterServer(servers=3), 3, "number_of_processes"),
        ("gossip", 1, "number_of_processes"),
        (Gossip(mode="async"), 3, "number_of_processes"),
        ("gosip", 2, "strategy"),
        ("local_sgd", 2, "strategy"),
        ("parameter_server", 2, "strategy"),
    ],
)
def test_worlds_that_cannot_be_are_refused_with_a_remedy(strategy, processes, argument, refusal):
    assert refusal(lambda: call(strategy, processes)).argument == argument


@pytest.mark.parametrize("strategy", [LocalSGD(), Gossip(), ParameterServer()], ids=repr)
def test_a_line_search_needs_all_ranks(strategy, refusal):
    refusal(lambda: call(strategy, 2, make=torch.optim.LBFGS, train_step=own_step))


class TwoSteps(torch.optim.SGD):
    """As the usual package has SAM."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    first_step = second_step = torch.optim.SGD.step


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_a_norm_of_all_gradients_needs_all_of_them(strategy, refusal):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    refusal(lambda: call(strategy, 2, make=TwoSteps, model=model))
    call("fsdp", 2, make=TwoSteps, model=nn.Linear(3, 2))


class ClippingSgd(torch.optim.SGD):
    """As Adan and LAMB have it."""

    def __init__(self, parameters, max_grad_norm=1.0):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["max_grad_norm"] = max_grad_norm


class ProdigyOfOurs(torch.optim.SGD):
    """By its name a kind of Prodigy."""


class OwnDistance(torch.optim.SGD):
    """A learning rate of all gradients, which its name does not tell."""

    def step(self, closure=None):
        group = self.param_groups[0]
        norms = [p.grad.norm().item() for p in group["params"] if p.grad is not None]
        group["distance"] = group.get("distance", 0) + sum(norms)
        group["lr"] = 0.1 / group["distance"]
        return super().step(closure)


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
@pytest.mark.parametrize("make", [ClippingSgd, ProdigyOfOurs], ids=lambda make: make.__name__)
def test_optimizers_that_look_at_all_weights_are_refused(strategy, make, refusal):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    refusal(lambda: call(strategy, 2, make=make, model=model))
    call(strategy, 2, make=lambda p: ClippingSgd(p, max_grad_norm=0), model=model)
    call("ddp", 2, make=make, model=nn.Linear(3, 2))


def trained_by_distance(strategy, frozen=0):
    """Weights after a training by `OwnDistance`; alone without a strategy."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model[:frozen].requires_grad_(False)
    data = TensorDataset(torch.randn(32, 3).double(), torch.arange(32) % 2)
    optimizer, criterion = OwnDistance(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    optimizer.param_groups[0]["distance"] = 0.1
    if strategy is None:
        supervised.train_epoch(model, DataLoader(data, 4), criterion, optimizer, "cpu", None)
    else:
        batch = 4 if strategy in ("tensor", "pipeline") else 2
        job = kd.distribute(
            model, DataLoader(data, batch), criterion, optimizer, strategy=strategy, number_of_processes=2, on="local"
        )
        try:
            job.result()
        finally:
            job.delete()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "frozen"), [("tensor", 0), ("pipeline", 0), ("pipeline", 1)])
def test_an_unknown_optimizer_that_looks_at_all_weights_fails_in_its_first_steps(strategy, frozen):
    with pytest.raises(JobFailedError, match=r"OwnDistance computes 'distance' of all weights.*strategy='ddp'"):
        trained_by_distance(strategy, frozen)


def two_optimizers(model, loader, criterion, optimizers, device, args):
    for x, y in loader:
        for one in optimizers.values():
            one.zero_grad()
        criterion(model(x), y).backward()
        for one in optimizers.values():
            one.step()


def test_of_several_optimizers_the_one_is_named_that_does():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    loader = DataLoader(TensorDataset(torch.randn(32, 3), torch.arange(32) % 2), 4)
    optimizers = {"last": torch.optim.SGD(model[2].parameters(), 0.1), "first": OwnDistance(model[0].parameters(), 0.1)}
    job = kd.distribute(
        model,
        loader,
        nn.CrossEntropyLoss(),
        optimizers,
        two_optimizers,
        strategy="tensor",
        number_of_processes=2,
        on="local",
    )
    with pytest.raises(JobFailedError, match="OwnDistance computes 'distance' of all weights"):
        job.result()
    job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_trains_where_its_numbers_are_those_of_all_weights(strategy):
    for found, expected in zip(trained_by_distance(strategy), trained_by_distance(None), strict=True):
        torch.testing.assert_close(found, expected)


def test_servers_do_not_leave_out_steps(refusal):
    refusal(lambda: call("parameter-server", 2, precision="fp16"))


def test_servers_take_no_sparse_gradients(refusal):
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 2))
    refusal(lambda: call("parameter-server", 2, model=model))
