"""One test for each rule of the simulated GPUs; `test_on_simulated_gpus.py` runs them where there are two."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


def in_a_child(function):
    """How a forked child ends that calls a function: 0, the signal that killed it, or 1 after an exception."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_there_are_two_and_they_compute():
    assert torch.cuda.device_count() == 2
    torch.manual_seed(1)
    x, weight = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
    there = weight.detach().to(SECOND).requires_grad_()
    (x @ weight).tanh().sum().backward()
    (x.to(SECOND) @ there).tanh().sum().backward()
    assert there.grad.device == SECOND
    assert torch.equal(there.grad.cpu(), weight.grad)


def test_the_host_cannot_read_a_devices_memory():
    import ctypes

    pointer = torch.ones(4, device=FIRST).data_ptr()
    assert in_a_child(lambda: ctypes.string_at(pointer, 4)) == -signal.SIGSEGV


@pytest.mark.parametrize("other", [CPU, SECOND])
def test_devices_do_not_mix(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=other)
    assert (torch.ones(2, device=FIRST) + torch.tensor(1.0)).sum() == 4


def test_new_memory_is_nan():
    assert torch.empty(8, device=FIRST).isnan().all()


def test_a_copy_arrives_when_it_is_waited_for():
    here = torch.zeros(4).pin_memory()
    here.copy_(torch.ones(4, device=FIRST), non_blocking=True)
    assert here.isnan().all()
    torch.cuda.synchronize(FIRST)
    assert here.tolist() == [1.0] * 4


def test_a_forked_child_has_no_cuda():
    torch.ones(1, device=FIRST)

    def use():
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            torch.ones(1, device=FIRST)

    assert in_a_child(use) == 0


def test_memory_ends():
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(int(os.environ.get("SIMCUDA_MIB", "1024")) << 20, device=FIRST)


@pytest.mark.parametrize("visible", ["", "1", "1,0", "7"])
def test_cuda_visible_devices_hides(visible):
    program = "import torch; print(torch.cuda.device_count())"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    counted = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert int(counted.stdout) == {"": 0, "1": 1, "1,0": 2, "7": 0}[visible]


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (lambda value: value.sum().item(), "aten::_local_scalar_dense"),
        (lambda value: value.cpu(), "copy to the host"),
        (lambda value: value.copy_(torch.ones(4)), "copy to the GPU"),
        (lambda value: recorded().synchronize(), "event.synchronize"),
        (lambda value: torch.cuda.synchronize(), "synchronize"),
        (lambda value: value.copy_(torch.ones(4).pin_memory(), non_blocking=True), ""),
    ],
)
def test_each_wait_of_the_host_is_written_down(wait, what):
    syncs = pathlib.Path(os.environ["SIMCUDA_SYNCS"])
    value = torch.zeros(4, device=FIRST)
    before = len(syncs.read_text().splitlines()) if syncs.exists() else 0
    wait(value)
    written = syncs.read_text().splitlines()[before:] if syncs.exists() else []
    assert [line.partition(" | ")[0].split(" ", 1)[1] for line in written] == ([what] if what else [])


def recorded():
    event = torch.cuda.Event()
    event.record()
    return event


def exchange(rank, store, devices, dtype, lines):
    """A rank: whether a sum is there before and after `wait()`, or how it is refused."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        value = torch.full((4,), rank + 1, dtype=dtype, device=device)
        work = dist.all_reduce(value, async_op=True)
        is_early = (value == 3).all().item()
        work.wait()
        lines[rank] = f"{is_early} {(value == 3).all().item()}"
    except (RuntimeError, ValueError) as error:
        lines[rank] = str(error)


@pytest.mark.parametrize(
    ("devices", "dtype", "expected"),
    [
        (("cuda:0", "cuda:1"), torch.float32, "False True"),
        (("cpu", "cpu"), torch.float32, "No backend type associated with device type cpu"),
        (("cuda:0", "cuda:0"), torch.float32, "Duplicate GPU detected"),
        (("cuda:0", "cuda:1"), torch.int16, "not supported for NCCL"),
        (("cuda:0", "cuda:1"), torch.uint32, "not supported for NCCL"),
    ],
)
def test_nccl(tmp_path, devices, dtype, expected):
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager:
        lines = manager.dict()
        ranks = [
            spawn.Process(target=exchange, args=(rank, str(tmp_path / "store"), devices, dtype, lines))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            rank.kill()
        assert all(expected in lines[rank] for rank in range(2)), dict(lines)
