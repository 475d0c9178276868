"""What users do with two GPUs; `test_on_simulated_gpus.py` runs it where there are two."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import CellError, JobFailedError
from kale_dist.job.handle import inside
from kale_dist.worker.training.result import on_cpu

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.jit|accumulate_grad)")


def data(samples=16):
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 4, generator=drawn), torch.randint(3, (samples,), generator=drawn))


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def in_plain_pytorch(rank_batch=4, epochs=2):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in DataLoader(data(), 2 * rank_batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def by_hand(kind):
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    context = kd.context()
    model = net().to(context.device)
    if kind == "ddp":
        model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = data()
    for _ in range(2):
        for start in range(0, 16, 8):
            mine = [samples[start + index] for index in range(context.rank, 8, 2)]
            x, y = (torch.stack(parts).to(context.device) for parts in zip(*mine, strict=True))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = (model.module if kind == "ddp" else model).state_dict()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.cpu() for name, value in whole.items()}, str(context.device), dist.get_backend()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_torchs_own_ddp_and_fsdp2_in_launch(kind, jobs):
    jobs.append(kd.launch(by_hand, kind, number_of_processes=2, on="local"))
    found = jobs[0].results()
    assert [device for _, device, _ in found] == ["cuda:0", "cuda:1"]
    assert all("nccl" in backend for _, _, backend in found)
    for name, value in in_plain_pytorch().items():
        torch.testing.assert_close(found[0][0][name], value)


def change_one(model):
    model.to(kd.context().device)
    model[2].bias.data.add_(1)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_of_a_model_on_a_gpu_only_what_has_changed_comes_back(device, jobs):
    model = nn.Sequential(nn.Linear(4, 30_000), nn.Tanh(), nn.Linear(30_000, 3)).to(device)
    expected = {name: value.cpu() + (name == "2.bias") for name, value in model.state_dict().items()}
    jobs.append(kd.launch(change_one, model, number_of_processes=2, on="local"))
    jobs[0].wait()
    for name, value in model.state_dict().items():
        assert value.device == torch.device(device)
        assert torch.equal(value.cpu(), expected[name])
    assert inside(jobs[0]).files.outcome(0, 0).stat().st_size < 10_000


def test_a_one_line_call_trains_on_both_and_gives_the_model_back_where_it_was(jobs):
    model = net().to("cuda:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.append(
        kd.distribute(
            model, DataLoader(data(), 4), nn.CrossEntropyLoss(), optimizer, epochs=2, number_of_processes=2, on="local"
        )
    )
    result = jobs[0].result()
    assert next(model.parameters()).device == torch.device("cuda:1")
    assert all(value.device.type == "cpu" for value in result.model_state.values())
    for name, value in in_plain_pytorch().items():
        torch.testing.assert_close(result.model_state[name], value)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, found, y):
        self.center += found.detach().mean(0) - self.center
        return nn.functional.cross_entropy(found - self.center, y)


def counts(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        assert model.batches.device == x.device == device
        criterion(model(x), y).backward()
        model.batches += 1
        args["rows"] += len(x)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_what_a_step_changes_on_a_gpu_comes_back_to_where_it_was(device, jobs):
    model, criterion, args = net().to(device), Centred().to(device), {"rows": torch.zeros((), dtype=torch.int64)}
    model.register_buffer("batches", torch.zeros((), device=device), persistent=False)
    loader = DataLoader(data(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    there = batches, center, rows = model.batches, criterion.center, args["rows"]
    jobs.append(
        kd.distribute(
            model, loader, criterion, optimizer, counts, epochs=2, train_args=args, number_of_processes=2, on="local"
        )
    )
    jobs[0].wait()
    assert all(one is other for one, other in zip(there, (model.batches, criterion.center, args["rows"]), strict=True))
    assert (batches.item(), rows.item()) == (4, 16)
    assert str(batches.device) == str(center.device) == device
    assert center.count_nonzero() == 3


@pytest.mark.filterwarnings("ignore:number_of_processes")
def test_more_processes_than_gpus_train_on_the_cpu_and_the_model_stays_where_it_was(jobs, capsys):
    model = net().to("cuda:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = model, DataLoader(data(), 4), nn.CrossEntropyLoss(), optimizer
    jobs.append(kd.distribute(*arguments, number_of_processes=3, on="local"))
    jobs[0].result()
    assert next(model.parameters()).device == torch.device("cuda:1")
    assert "The model is on cuda:1, and the processes train on the CPU" in capsys.readouterr().err


def test_the_doctor_counts_them():
    asked = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "doctor"], capture_output=True, text=True, check=False
    )
    assert "2 x SimCUDA (CUDA 13.0)" in asked.stdout


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.head.weight, self.other = self.words.weight, nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head(x + self.words.weight.mean(0)) + self.other(x)


def test_tied_weights_come_back_tied(jobs):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.append(kd.distribute(model, DataLoader(data(), 4), nn.CrossEntropyLoss(), optimizer, on="local"))
    state = jobs[0].result().model_state
    assert state["words.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["words.weight"].data_ptr() != state["other.weight"].data_ptr()
    assert torch.equal(state["words.weight"], model.words.weight)
    assert torch.equal(state["other.weight"], model.other.weight)


def test_what_looks_alike_on_a_gpu_stays_apart_on_the_cpu():
    value = torch.arange(4.0, device="cuda:1").view(2, 2)
    found = on_cpu(
        {"plain": value, "turned": value.T, "again": value, "part": value[0], "bits": value.view(torch.int32)}
    )
    assert found["plain"].tolist() == [[0, 1], [2, 3]]
    assert found["turned"].tolist() == [[0, 2], [1, 3]]
    assert found["part"].tolist() == [0, 1]
    assert found["bits"].dtype == torch.int32
    assert found["again"] is found["plain"]


def moved(x):
    return x.to(kd.context().device)


def doubled_there(x, kept=[]):  # noqa: B006 - the first call keeps it
    if not kept:
        kept.append(torch.full((4,), 2.0, device=kd.context().device))
    return (kept[0] * 2).cpu() * x


class OnTheGpu(TensorDataset):
    """Its items use a GPU in the worker that reads them."""

    def __init__(self, use):
        super().__init__(*data().tensors)
        self.use = use

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.use(x), y


def reads_first(model, data_loader, criterion, optimizer, device, args):
    data_loader.dataset[0]
    for x, y in data_loader:
        criterion(model(x), y).backward()


@pytest.mark.parametrize("use", [moved, doubled_there])
def test_a_worker_that_uses_a_gpu_is_told_what_to_do(jobs, use):
    model, samples = net(), OnTheGpu(use)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples, 4, num_workers=1)
    jobs.append(
        kd.distribute(model, loader, nn.CrossEntropyLoss(), optimizer, reads_first, number_of_processes=2, on="local")
    )
    with pytest.raises(JobFailedError, match="Keep the dataset's tensors on the CPU"):
        jobs[0].result()


def test_memory_that_runs_out_names_the_remedy(jobs):
    def fill():
        return [torch.empty(64 << 20, device=kd.context().device) for _ in range(64)]

    jobs.append(kd.launch(fill, number_of_processes=2, on="local"))
    with pytest.raises(JobFailedError, match="The GPU's memory ran out"):
        jobs[0].results()


def test_live_ranks_survive_an_error_on_one_gpu(jobs):
    live = kd.live(number_of_processes=2, on="local")
    jobs.append(live)
    live.run("import torch, torch.distributed as dist; x = torch.full((2,), rank + 1.0, device=device)")
    with pytest.raises(CellError, match="different devices"):
        live.run("x + torch.ones(2) if rank else x.sum()")
    live.run("x = torch.full((2,), rank + 1.0, device=device); dist.all_reduce(x)")
    assert live.pull("x.sum().item()") == [6.0, 6.0]
    live.stop()
