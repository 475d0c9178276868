"""What a call refuses before anything starts, because of its strategy."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.strategies import Gossip, LocalSGD, ParameterServer


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


def test_servers_do_not_leave_out_steps(refusal):
    refusal(lambda: call("parameter-server", 2, precision="fp16"))


def test_servers_take_no_sparse_gradients(refusal):
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 2))
    refusal(lambda: call("parameter-server", 2, model=model))
