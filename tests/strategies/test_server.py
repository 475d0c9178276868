"""Parameter servers: equal to one process, or asynchronous within a bound."""

import functools

import pytest
import torch
from one_process import compare, compare_in_notebook
from strategy_jobs import assert_close_to_ddp, assert_fails, assert_resumes, digits, leave_early, momentum
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError
from kale_dist.strategies import ParameterServer
from kale_dist.worker.parallel.parameter_server import divide

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")
MODEL_BYTES = 8 * (6 * 10 + 10 + 10 * 8 + 8 + 8 * 4 + 4)


@pytest.mark.nightly
def test_two_workers_with_a_server_equal_one_process():
    numbers = compare(ParameterServer(), 3, names=("PlainSgd", "MomentumAccumulatedClipped", "TiedAdamClippedInStep"))
    # 2 workers send the model's gradients and receive its weights.
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 2 * 2 * MODEL_BYTES


@pytest.mark.nightly
def test_the_notebooks_own_objects_come_back_equal():
    compare_in_notebook(ParameterServer(), 3)


@pytest.mark.nightly
def test_three_workers_with_two_servers_equal_one_process():
    numbers = compare(ParameterServer(servers=2), 5)
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 3 * 2 * MODEL_BYTES


@pytest.mark.nightly
def test_a_lost_worker_resumes_from_the_servers_state():
    assert_resumes(ParameterServer(), 3, lost=1)


@pytest.mark.parametrize(("servers", "processes", "least"), [(1, 2, 3), (2, 4, 5)])
def test_backups_need_processes_of_their_own(servers, processes, least):
    model = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=f"as many backups all {processes} would be servers.* at least {least} processes"
    ):
        kd.distribute(
            model, DataLoader(TensorDataset(torch.randn(4, 2))), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1),
            number_of_processes=processes, strategy=ParameterServer(servers=servers, backup=True),
        )  # fmt: skip


def test_who_is_dispensable_is_known_beforehand():
    assert ParameterServer().dispensable(4) == ()
    assert ParameterServer(backup=True).dispensable(4) == ((2, 3),)
    assert ParameterServer(servers=2, backup=True).dispensable(6) == ((2, 4), (3, 5))
    assert ParameterServer(mode="async", servers=2).dispensable(5) == ((0, 1, 2),)
    layout = ParameterServer(servers=2, backup=True).layout(4, 6)
    assert (layout.shards, layout.shard, layout.part) == (2, None, "backup of server 0 of 2")


def slow_rank(model, loader, criterion, optimizer, device, args):
    """Rank 0 is slow, so that others run ahead as far as they may."""
    import time

    import torch.distributed as dist

    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        if not dist.get_rank():
            time.sleep(0.02)
        optimizer.step()


@pytest.mark.nightly
def test_no_worker_is_further_ahead_than_the_bound():
    settings = {bound: ParameterServer(mode="async", staleness=bound) for bound in (0, 2)}
    for bound, (_, numbers) in digits(settings, 3, epochs=1, step=slow_rank).items():
        assert numbers["steps_ahead"] == bound
        assert sum(count for name, count in numbers.items() if name.startswith("staleness_")) == 2 * 44


@pytest.mark.nightly
def test_digits_reach_the_accuracy_of_ddp():
    # 2 workers make twice as many steps with half of the samples, so with half of the learning rate.
    found = assert_close_to_ddp(
        {"async": ParameterServer(mode="async")},
        3,
        ddp_processes=2,
        optimizer=functools.partial(momentum, lr=0.05),
        of_ddp=momentum,
    )
    assert found["async"][1]["steps_ahead"] <= 4


def clamp(model, loader, criterion, optimizer, device, args):
    """A step that changes weights by itself, past torch's count of changes."""
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        model.weight.data.clamp_(-0.01, 0.01)


def clamp_once(model, loader, criterion, optimizer, device, args):
    """A step that changes weights late in its epoch."""
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        if number == 6:
            with torch.no_grad():
                model.weight.clamp_(-0.01, 0.01)
        optimizer.step()


def descend(model, loader, criterion, optimizer, device, args):
    """A step that makes no step of the optimizer."""
    for x, y in loader:
        model.zero_grad()
        criterion(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


@pytest.mark.nightly
def test_a_worker_that_leaves_early_is_told():
    assert_fails(ParameterServer(), 3, leave_early, "The workers do not take the same steps")


@pytest.mark.nightly
@pytest.mark.parametrize("step", [clamp, clamp_once, descend])
def test_weights_that_the_step_changes_are_not_lost_in_silence(step):
    assert_fails(ParameterServer(), 3, step, "train_step changed weights by itself")


def test_parameters_are_divided_evenly_and_each_once():
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 100), nn.Linear(100, 10))
    parameters = list(model.parameters())
    shards = divide(parameters, 2)
    assert sorted(index for shard in shards for index in shard.indices) == list(range(6))
    sizes = [sum(parameter.numel() for parameter in shard.parameters) for shard in shards]
    assert max(sizes) - min(sizes) <= 1100
    assert [shard.indices for shard in divide(parameters[:1], 3)] == [[0], [], []]
