"""Group C: two ranks that share the GPU, over NCCL's sockets. Says nothing of NVLink, RDMA or speed."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gpu_jobs import CUDA, DEVICE, data, largest_difference, launch, loader, net, train
from torch import nn
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.errors import JobFailedError, KaleDistError
from kale_dist.wire import FailureCause

pytestmark = pytest.mark.usefixtures("two_ranks")


def sums():
    value = torch.ones(1, device=kd.context().device)
    dist.all_reduce(value)
    return value.item(), dist.get_backend()


def test_c0_two_ranks_on_one_gpu():
    assert [value for value, _ in launch(sums, number_of_processes=2)] == [2.0, 2.0]


@pytest.mark.gpu
def test_c1_two_ranks_with_the_same_gpu_on_one_host_are_told_so(monkeypatch):
    monkeypatch.setenv("KALE_DIST_SHARED_GPU", "one host")
    with pytest.raises(JobFailedError, match="same GPU"):
        launch(sums, number_of_processes=2)


def make(kind):
    torch.manual_seed(3)
    if kind == "unused":
        return WithUnused()
    if kind == "batchnorm":
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    return net()


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused = net(), nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(
    "kind",
    ["plain", "unused", "batchnorm", "accumulate", "clip", pytest.param("compile", marks=pytest.mark.real("Triton"))],
)
def test_c2_ddp_equals_one_process(kind):
    models = [make(kind).double() for _ in range(2)]
    options = {"accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.1}}.get(kind, {})
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    given = DataLoader(Doubled(), 4)
    trained = torch.compile(models[0]) if kind == "compile" else models[0]
    train(trained, given, nn.CrossEntropyLoss(), optimizer, number_of_processes=2, epochs=2, **options)
    alone = torch.optim.SGD(models[1].parameters(), lr=0.1)
    models[1].to(DEVICE)
    for _ in range(2):
        for x, y in DataLoader(Doubled(), 16 if kind == "accumulate" else 8):
            alone.zero_grad()
            nn.functional.cross_entropy(models[1](x.to(DEVICE)), y.to(DEVICE)).backward()
            if kind == "clip":
                nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
            alone.step()
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) < 1e-8


class Doubled(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = data()[index]
        return x.double(), y


STRATEGIES = {
    "ddp": lambda: "ddp",
    "fp16": lambda: kd.strategies.DDP(compress="fp16"),
    "bf16": lambda: kd.strategies.DDP(compress="bf16"),
    "powersgd": lambda: kd.strategies.DDP(compress="powersgd"),
    "fsdp": lambda: "fsdp",
    "tensor": lambda: "tensor",
    "local-sgd": lambda: "local-sgd",
    "gossip": lambda: "gossip",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_c3_each_strategy_trains(name, figures):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    began = time.monotonic()
    result = train(
        model,
        loader(128),
        nn.CrossEntropyLoss(),
        optimizer,
        number_of_processes=2,
        epochs=2,
        strategy=STRATEGIES[name](),
    )
    figures(seconds=time.monotonic() - began, loss=result.metrics["loss"])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_c4_a_pipeline_trains_and_writes_checkpoints(optimizer):
    model = net()
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](model.parameters(), lr=0.01)
    train(model, loader(), nn.CrossEntropyLoss(), made, number_of_processes=2, epochs=2, strategy="pipeline")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def step_with_its_peak(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_c5_a_divided_model_need_not_fit_whole(strategy, figures):
    """256 MiB of weights: with their gradients 512, of which each rank has half. The last epoch's peak includes a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given = DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 2048), torch.randn(16, 2048)), 4)
    result = train(
        model, given, nn.MSELoss(), optimizer, step_with_its_peak, number_of_processes=2, epochs=2, strategy=strategy
    )
    figures(peak_mib=result.metrics["peak_mib"])
    assert result.metrics["peak_mib"] < 480


def step_that_draws(model, data_loader, criterion, optimizer, device, args):
    drawn = 0.0
    for x, y in data_loader:
        drawn += torch.rand((), device=device).item()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    everyone = [None] * 2
    dist.all_gather_object(everyone, drawn)
    return {"differs": float(everyone[0] != everyone[1])}


def test_c6_peers_draw_the_same_numbers_on_the_gpu():
    """Dropout in one stage alone uses more of its random numbers; the next batch begins alike all the same."""
    model = net(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train(
        model, loader(), nn.CrossEntropyLoss(), optimizer, step_that_draws, number_of_processes=2, strategy="pipeline"
    )
    assert result.metrics["differs"] == 0


def leaves():
    value = torch.ones(1, device=kd.context().device)
    if kd.context().rank:
        return
    dist.all_reduce(value)
    value.item()


def test_c7_a_rank_that_leaves_is_found(figures):
    job = kd.launch(leaves, number_of_processes=2, cuda=CUDA, on="local", timeout_s=40)
    began = time.monotonic()
    job.exception(50)
    figures(verdict_s=time.monotonic() - began)
    assert job.status.cause == FailureCause.LEFT
    job.delete()


def fails(how):
    value = torch.ones(1, device=kd.context().device)
    dist.all_reduce(value)
    if kd.context().rank:
        if how == "error":
            raise ValueError("mine")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        dist.all_reduce(value)
        value.item()
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["error", "killed"])
def test_c8_the_rank_that_fails_is_blamed(how, figures):
    began = time.monotonic()
    job = kd.launch(fails, how, number_of_processes=2, cuda=CUDA, on="local", timeout_s=40)
    job.exception(50)
    figures(verdict_s=time.monotonic() - began)
    assert "Rank 1" in job.status.reason
    job.delete()


def step_unequal(model, data_loader, criterion, optimizer, device, args):
    for number, (x, y) in enumerate(data_loader):
        if args == "leaves" and kd.context().rank and number == 2:
            break
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if not (args == "skips" and kd.context().rank and number == 2):
            loss.backward()
        optimizer.step()
    return {"loss": 0.0}


@pytest.mark.parametrize("how", ["skips", "leaves"])
def test_c9_unequal_steps_are_an_error_of_ours(how):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobFailedError) as caught:
        train(model, loader(), nn.CrossEntropyLoss(), optimizer, step_unequal, train_args=how, number_of_processes=2)
    assert isinstance(caught.value.__cause__, KaleDistError)


def step_with_overlap(model, data_loader, criterion, optimizer, device, args):
    """How many gradients are still to come when the first bucket leaves."""
    parameters, to_come = list(model.parameters()), []
    original = dist.all_reduce

    def counted(*given, **options):
        to_come.append(sum(parameter.grad is None for parameter in parameters))
        return original(*given, **options)

    dist.all_reduce = counted
    for x, y in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        to_come.clear()
        loss.backward()
        optimizer.step()
    dist.all_reduce = original
    return {"to_come": float(to_come[0])}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.real("Triton"))])
def test_c10_buckets_leave_during_the_backward_pass(is_compiled, figures):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)), nn.Linear(512, 4))
    trained = torch.compile(model) if is_compiled else model
    given = DataLoader(data(64, 512), 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    result = train(
        trained, given, nn.CrossEntropyLoss(), optimizer, step_with_overlap, number_of_processes=2,
        strategy=kd.strategies.DDP(bucket_mib=4, exchange="torch"),
    )  # fmt: skip
    figures(gradients_to_come=result.metrics["to_come"])
    assert result.metrics["to_come"] > 0 or is_compiled


@pytest.mark.gpu
@pytest.mark.real("NCCL's interfaces")
def test_c11_a_wrong_interface_is_named():
    with pytest.raises(JobFailedError, match="NCCL_SOCKET_IFNAME"):
        launch(sums, number_of_processes=2, environment={"NCCL_SOCKET_IFNAME": "none0"})
