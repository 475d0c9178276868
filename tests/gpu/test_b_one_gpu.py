"""Group B: one rank on one GPU, against the same in this process."""

import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from gpu_jobs import CUDA, DEVICE, data, largest_difference, launch, loader, net, plain_loop, train
from torch import nn
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.worker.agent.usage import Driver
from kale_dist.worker.rank.process_group import collectives


def step_with_scaler(model, data_loader, criterion, optimizer, device, scaler):
    for x, y in data_loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"loss": loss.item()}


def test_b1_used_objects_train_as_here():
    """A model and Adam's state on the GPU after two steps, and a pinned loader with workers."""
    models = [net().to(DEVICE) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        plain_loop(model, loader(16), optimizer, 1)
    given = DataLoader(data(), 8, num_workers=2, pin_memory=CUDA)
    train(models[0], given, nn.CrossEntropyLoss(), optimizers[0], epochs=2)
    plain_loop(models[1], loader(), optimizers[1], 2)
    assert next(models[0].parameters()).device.type == DEVICE
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) < 1e-5


@pytest.mark.real("Triton")
def test_b1_scaler_compiled_model_and_generator():
    model = torch.compile(net().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, enabled=CUDA)
    generator = torch.Generator(DEVICE).manual_seed(7)
    result = train(
        model,
        loader(),
        nn.CrossEntropyLoss(),
        optimizer,
        step_with_scaler,
        train_args=scaler,
        state=[{"generator": generator}],
    )
    assert result.metrics["loss"] > 0


@pytest.mark.gpu
def test_b2_a_default_device_in_the_notebook():
    script = """
        import torch, kale_dist as kd
        torch.set_default_device("cuda")
        from torch import nn
        model = nn.Linear(4, 2)
        def call(model):
            return str(torch.ones(1).device), str(next(model.parameters()).device)
        assert kd.launch(call, model, number_of_processes=1, cuda=True).result() == ("cuda:0", "cuda:0")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=50)


def product_tflops():
    a = torch.randn(4096, 4096, device=kd.context().device)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 4096**3 / (time.perf_counter() - began) / 1e12


@pytest.mark.real("speed")
@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["", "torch.set_float32_matmul_precision('high')", "torch.backends.cuda.matmul.fp32_precision = 'tf32'"])  # fmt: skip
def test_b3_tf32_is_taken_over(switch, figures):
    script = f"import torch, kale_dist as kd\nfrom test_b_one_gpu import product_tflops\n{switch}\nprint(kd.launch(product_tflops, number_of_processes=1, cuda=True).result())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    tflops = float(ended.stdout.splitlines()[-1])
    figures(tflops=tflops)
    if switch:
        # An H100 has 50 TFLOP/s of plain fp32.
        assert tflops > 100 or "H100" not in torch.cuda.get_device_name(0)


def step_on_its_device(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x.to(args)), y.to(args)).backward()
        optimizer.step()
    return {"index": float(args.index or 0)}


def test_b4_a_device_of_another_number_is_the_ranks_own():
    model = net()
    given = model, loader(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), step_on_its_device
    assert train(*given, train_args=torch.device("cuda:3")).metrics["index"] == 0


@pytest.mark.parametrize("name", ["adam", "adamw_fused", "adam_capturable", "adafactor", "lbfgs", "sgd_momentum"])
def test_b5_states_of_optimizers_go_and_come_back(name):
    """The notebook's model is on the CPU; the second call brings the state of the first."""
    if not CUDA and name == "adam_capturable":
        pytest.skip("needs a GPU")
    model = net()
    make = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "adam_capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    }[name]
    optimizer = make(model.parameters())
    step = closure_step if name == "lbfgs" else None
    for _ in range(2):
        train(model, loader(), nn.CrossEntropyLoss(), optimizer, step)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def closure_step(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    return {"loss": float(loss)}


def dtypes_of_products(precision):
    """Of the forward products, in a rank."""
    seen = set()
    model = net().to(kd.context().device)
    for layer in model:
        layer.register_forward_hook(lambda _m, _i, output: seen.add(str(output.dtype)))
    with torch.autocast(torch.device(kd.context().device).type, dtype=precision):
        model(torch.randn(4, 16, device=kd.context().device)).sum().backward()
    return sorted(seen)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.gpu)])
def test_b6_mixed_precision_is_near_a_plain_autocast_loop(precision):
    models = [net().to(DEVICE) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    train(models[0], loader(), nn.CrossEntropyLoss(), optimizers[0], precision=precision, epochs=2)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")
    for _ in range(2):
        for x, y in loader():
            optimizers[1].zero_grad()
            with torch.autocast(DEVICE, dtype=dtype):
                loss = nn.functional.cross_entropy(models[1](x.to(DEVICE)), y.to(DEVICE))
            scaler.scale(loss).backward()
            scaler.step(optimizers[1])
            scaler.update()
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) < 5e-3


def step_counting_waits(model, data_loader, criterion, optimizer, device, args):
    import collections
    import warnings

    places = collections.Counter()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x, y in data_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - began
    for one in found:
        if "synchroniz" in str(one.message):
            places[f"{pathlib.Path(one.filename).name}:{one.lineno}"] += 1
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    print("WAITS", dict(places))
    return {"waits": float(sum(places.values())), "seconds": seconds}


def test_b7_waits_for_the_gpu(figures):
    model = net(hidden=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = train(model, loader(1600, 8), nn.CrossEntropyLoss(), optimizer, step_counting_waits)
    figures(waits=result.metrics["waits"], steps=200, seconds=result.metrics["seconds"])
    assert result.metrics["waits"] < 200, "the library waits for the GPU in each step"


def step_with_a_trace(model, data_loader, criterion, optimizer, device, args):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for x, y in data_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    path = pathlib.Path(args)
    trace.export_chrome_trace(str(path))
    return {"loss": 0.0}


def streams_of(trace):
    """On which streams copies to the GPU, and kernels, ran."""
    import json

    events = json.loads(trace.read_text())["traceEvents"]
    copies = {e["args"].get("stream") for e in events if "Memcpy HtoD" in e.get("name", "")}
    kernels = {e["args"].get("stream") for e in events if e.get("cat") == "kernel"}
    return copies, kernels


@pytest.mark.gpu
@pytest.mark.real("the profiler")
@pytest.mark.parametrize("pinned", [True, False])
def test_b8_on_which_stream_batches_are_copied(pinned, tmp_path, figures):
    model = net(hidden=512)
    given = DataLoader(data(256), 8, pin_memory=pinned)
    path = tmp_path / "trace.json"
    train(model, given, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), step_with_a_trace, train_args=str(path))  # fmt: skip
    copies, kernels = streams_of(path)
    figures(copies=sorted(map(str, copies)), kernels=sorted(map(str, kernels)))
    # As docs/gpus.md says.
    assert copies
    assert copies <= kernels


def too_much():
    return torch.empty(900 << 30, dtype=torch.uint8, device=kd.context().device)


@pytest.mark.gpu
def test_b9_out_of_memory_says_what_to_do_and_the_next_job_works():
    with pytest.raises(JobFailedError, match="batch_size") as caught:
        launch(too_much)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert launch(fine) == ["fine"]


def fine():
    return "fine"


def bad_index():
    x = torch.zeros(4, device=kd.context().device)
    i = torch.tensor([9], device=kd.context().device)
    if kd.context().attempt:
        return "again"
    x[i].sum().item()
    return "never"


@pytest.mark.gpu
@pytest.mark.real("asserts on the device")
def test_b10_a_device_side_assert_is_explained_and_not_repeated(figures):
    began = time.monotonic()
    with pytest.raises(JobFailedError, match="out of range"):
        launch(bad_index, max_restarts=1)
    figures(verdict_s=time.monotonic() - began)


def sees():
    return torch.cuda.is_available(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_b11_a_rank_without_cuda_sees_no_gpu():
    job = kd.launch(sees, number_of_processes=1, cuda=False, on="local")
    assert job.result() == (False, "")
    job.delete()


def peak_of_a_pod():
    """Memory of a rank that trains a ResNet-like net with four workers: its own, and shared memory."""
    import resource

    from torch.utils.data import DataLoader, TensorDataset

    device = kd.context().device
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = DataLoader(TensorDataset(torch.randn(256, 3, 224, 224), torch.zeros(256, dtype=torch.long)), 32, num_workers=4, pin_memory=CUDA)  # fmt: skip
    for x, y in given:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    shm = os.statvfs("/dev/shm")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, (shm.f_blocks - shm.f_bfree) * shm.f_frsize >> 20


@pytest.mark.gpu
@pytest.mark.real("memory of a context")
def test_b12_memory_of_a_rank(figures):
    ((rss_mib, shm_mib),) = launch(peak_of_a_pod)
    figures(rss_mib=rss_mib, shm_mib=shm_mib)
    # Less than what a pod gets unless it asks for something else.
    assert rss_mib + shm_mib < 16 << 10


@pytest.mark.gpu
@pytest.mark.real("NVML")
def test_b13_the_driver_says_how_full_the_gpu_is(figures):
    kept = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    gpu = Driver().read()[0]
    figures(used_gib=gpu.used_bytes / 2**30, total_gib=gpu.total_bytes / 2**30)
    assert gpu.used_bytes >= kept.nbytes
    assert abs(gpu.total_bytes / torch.cuda.get_device_properties(0).total_memory - 1) < 0.1


class DiesInTheThirdEpoch:
    def __init__(self, dies):
        self.dies, self.epochs = dies, 0

    def __call__(self, model, data_loader, criterion, optimizer, device, args):
        self.epochs += 1
        total = 0.0
        for x, y in data_loader:
            if self.dies and self.epochs == 3 and not kd.context().attempt:
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return {"loss": total}


def test_b14_a_training_resumes_bit_for_bit():
    states = []
    for dies in (False, True):
        model = net(dropout=0.3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        given = DataLoader(data(), 8, shuffle=True)
        train(
            model, given, nn.CrossEntropyLoss(), optimizer, DiesInTheThirdEpoch(dies), epochs=4, seed=5, max_restarts=1
        )
        states.append(model.state_dict())
    assert largest_difference(*states) == 0.0


def counts():
    """What counts collectives, and its count before and after each of three calls of each kind."""
    world, device = dist.group.WORLD, torch.device(kd.context().device)
    one, other, counted = torch.ones(1, device=device), torch.ones(1, device=device), {}
    for kind, call in {
        "all_reduce": lambda: dist.all_reduce(one),
        "asynchronous all_reduce": lambda: dist.all_reduce(one, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(other, one),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(other, one),
    }.items():
        counted[kind] = [collectives(world, device)]
        for _ in range(3):
            call()
            counted[kind].append(collectives(world, device))
    return type(world._get_backend(device)).__name__, counted


def test_b15_each_collective_is_counted(figures):
    """Which rank waits for which, and whether ranks exchange anything, is read from these counts: each collective must raise them.

    On a real GPU with torch 2.15 or later, this decides whether nccl2 counts every collective.
    """
    ((backend, counted),) = launch(counts)
    figures(backend=backend, **counted)
    assert all(found == sorted(set(found)) for found in counted.values()), counted
    assert "NCCL" in backend or not CUDA
