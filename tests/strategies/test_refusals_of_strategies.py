"""What a call refuses before anything starts, because of its strategy."""

import math

import pytest
import torch
from strategy_jobs import call
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError, JobFailedError
from kale_dist.strategies import DDP, Gossip, LocalSGD, ParameterServer
from kale_dist.worker.training import supervised


def own_step(model, data_loader, criterion, optimizer, device, args):
    """Never runs: the ready-made one takes no LBFGS."""


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
    refusal(lambda: call(strategy, 2, optimizer=torch.optim.LBFGS, train_step=own_step))


class TwoSteps(torch.optim.SGD):
    """As the usual package has SAM."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    first_step = second_step = torch.optim.SGD.step


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_a_norm_of_all_gradients_needs_all_of_them(strategy, refusal):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    refusal(lambda: call(strategy, 2, optimizer=TwoSteps, model=model))
    call("fsdp", 2, optimizer=TwoSteps, model=nn.Linear(3, 2))


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
    refusal(lambda: call(strategy, 2, optimizer=make, model=model))
    call(strategy, 2, optimizer=lambda p: ClippingSgd(p, max_grad_norm=0), model=model)
    call("ddp", 2, optimizer=make, model=nn.Linear(3, 2))


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DDP(exchange="rnig"), "Did you mean 'ring'?"),
        (lambda: DDP(compress="fp32"), "Use one of: None, 'fp16', 'bf16', 'powersgd'"),
        (lambda: DDP(compress="fp16", exchange="ring"), "Leave out one of them"),
        (lambda: DDP(bucket_mb=3), "Did you mean 'bucket_mib'?"),
        (lambda: DDP(bucket_mib=0), "Give a number of MiB such as 25.0"),
        (lambda: DDP(bucket_mib=math.nan), "Give a number of MiB such as 25.0"),
        (lambda: DDP("ring"), "without names"),
        (lambda: LocalSGD(sync_every=0), "sync_every=0 is neither"),
        (lambda: LocalSGD(sync_every=True), "sync_every=True is neither"),
        (lambda: LocalSGD(sync_every=2.5), "sync_every=2.5 is neither"),
        (lambda: LocalSGD(sync_every="epochs"), "sync_every='epochs' is neither"),
        (lambda: LocalSGD(sync_every=float("nan")), "sync_every=nan is neither"),
        (lambda: LocalSGD(outer="dilco"), "Did you mean 'diloco'"),
        (lambda: LocalSGD(outer=True), "there is no outer=True"),
        (lambda: LocalSGD(every=3), "has no setting 'every'"),
        (lambda: LocalSGD(sync_evry=3), "Did you mean 'sync_every'"),
        (lambda: Gossip(graph="rings"), "Did you mean 'ring'"),
        (lambda: Gossip(graph=3), "there is no graph=3"),
        (lambda: Gossip(mode="asynchronous"), "there is no mode='asynchronous'"),
        (lambda: Gossip(send="change"), "Did you mean 'changed'"),
        (lambda: Gossip(send="changed", mode="async"), "needs neighbours that meet after every step"),
        (lambda: Gossip(sync_every=3), "has no setting 'sync_every'"),
        (lambda: ParameterServer(servers=0), "servers=0"),
        (lambda: ParameterServer(servers=1.5), "servers=1.5"),
        (lambda: ParameterServer(mode="asynch"), "Did you mean 'async'"),
        (lambda: ParameterServer(staleness=4), "staleness=4 is given, and with mode='sync'"),
        (lambda: ParameterServer(staleness=0, mode="sync"), "staleness=0 is given"),
        (lambda: ParameterServer(staleness=-1, mode="async"), "staleness=-1"),
        (lambda: ParameterServer(staleness=True, mode="async"), "staleness=True"),
        (lambda: ParameterServer(backup=True, mode="async"), "backup=True is given, and with mode='async'"),
        (lambda: ParameterServer(backup=1), "backup=1 is neither"),
        (lambda: ParameterServer(backups=True), "Did you mean 'backup'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_when_they_are_made(make, said):
    with pytest.raises(ConfigError, match="strategy") as caught:
        make()
    assert said in str(caught.value)
