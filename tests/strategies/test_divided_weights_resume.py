"""Strategies that divide weights: a lost rank, evaluation, schedulers and reduced precision, through `kd.distribute`."""

import os
import signal

import pytest
import torch
from test_tensor import Transformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.strategies import FSDP, Mesh, Tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


def step(model, loader, criterion, optimizer, device, args):
    """One epoch; a rank dies in the second one of the first attempt."""
    total = 0.0
    args["epochs"] += 1
    if args["lost"] and kd.context().attempt == 0 and kd.context().rank == 1 and args["epochs"] == 2:
        next(iter(loader))
        os.kill(os.getpid(), signal.SIGKILL)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = criterion(model(x).flatten(0, 1), x.roll(1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        total += loss.item() * len(x)
    return {"loss": total / len(loader.dataset)}


def evaluate(model, loader, criterion, device, args):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for (x,) in loader:
            right += (model(x).argmax(-1) == x.roll(1, 1)).sum().item()
            total += x.numel()
    model.train()
    return {"accuracy": right / max(1, total)}


def train(strategy, lost=False, processes=2, **options):
    torch.manual_seed(3)
    model = Transformer()
    own = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randint(0, 12, (22, 5), generator=torch.Generator().manual_seed(1))
    job = kd.distribute(
        model,
        DataLoader(TensorDataset(data), 4, shuffle=True),
        nn.CrossEntropyLoss(),
        optimizer,
        step,
        eval_data_loader=DataLoader(TensorDataset(data[:5]), 2),
        eval_step=evaluate,
        epochs=3,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        train_args={"epochs": 0, "lost": lost},
        strategy=strategy,
        seed=2,
        number_of_processes=processes,
        threads=1,
        max_restarts=1,
        **options,
    )
    try:
        result = job.result()
        assert job.model is model
        assert type(model) is Transformer
        assert all(one is own[name] for name, one in model.named_parameters())
        assert model.head.weight is model.embedding.weight
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)
        return job.status.attempt, result.metrics, job.state_dict(), optimizer.state_dict()
    finally:
        job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [FSDP(), Tensor()], ids=["fsdp", "tensor"])
def test_a_lost_rank_resumes_as_if_nothing_had_happened(strategy):
    expected, found = train(strategy), train(strategy, lost=True)
    assert (expected[0], found[0]) == (0, 1)
    assert found[1] == expected[1]
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())
    assert str(found[3]) == str(expected[3])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [Mesh(data=2, tensor=2), Mesh(fsdp=2, tensor=2), Mesh(data=2, pipeline=2)],
    ids=["data", "fsdp", "pipelines"],
)
def test_a_lost_rank_of_a_mesh_resumes(strategy):
    expected, found = train(strategy, processes=4), train(strategy, lost=True, processes=4)
    assert found[1] == expected[1]
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


def measure(model, loader, criterion, optimizer, device, args):
    """One epoch, and the bytes of all tensors that are there in it."""
    import gc

    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    del x, y
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = [(one.to_local() if hasattr(one, "to_local") else one).untyped_storage() for one in tensors]
    args["bytes"].append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
    return 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [FSDP(), Tensor()], ids=["fsdp", "tensor"])
def test_what_a_checkpoint_gathers_is_let_go(strategy):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    size = sum(p.nbytes for p in model.parameters())
    found = {"bytes": []}
    job = kd.distribute(
        model,
        DataLoader(TensorDataset(torch.randn(8, 256), torch.randn(8, 256)), 2),
        nn.MSELoss(),
        torch.optim.AdamW(model.parameters()),
        measure,
        epochs=3,
        train_args=found,
        state=[found],
        strategy=strategy,
        number_of_processes=2,
        threads=1,
    )
    try:
        job.result()
    finally:
        job.delete()
    first, *later = found["bytes"]
    # The writer keeps its copy of the weights and two moments, and nothing else stays.
    assert all(one - first < 3.5 * size for one in later), (found, size)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [FSDP(), Tensor()], ids=["fsdp", "tensor"])
def test_bf16_is_close_to_full_precision(strategy):
    full, reduced = train(strategy), train(strategy, precision="bf16")
    assert reduced[1]["loss"] == pytest.approx(full[1]["loss"], rel=0.05)
