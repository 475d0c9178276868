"""Torch's objects through a snapshot: memory shared as it was, optimizers, schedulers, loaders and generators whole."""

import multiprocessing
import pathlib
import random
import weakref

import numpy as np
import pytest
import torch
from played import play
from torch import nn, optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from kale_dist.snapshot import loading
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs


@pytest.fixture
def store(tmp_path):
    return blobs.FolderStore(tmp_path / "blobs")


@pytest.fixture
def travel(store):
    def travel(*values, **options):
        snapshot = capture(len, values, {}, store=store, label="len")
        loaded = loading.load(store, snapshot.digest, fill_main=False, **options)
        return loaded.args[0] if len(values) == 1 else loaded.args

    return travel


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0),
        lambda: torch.tensor(5),
        lambda: torch.arange(12).reshape(3, 4).t(),
        lambda: torch.arange(100)[10:20:3],
        lambda: torch.randn(300, 400, dtype=torch.float64),
        lambda: torch.ones(600_000, dtype=torch.bfloat16),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.tensor([True, False]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(2, 3, dtype=torch.uint16).t(),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)", "ignore:.*quantize.*", "ignore:TypedStorage")
def test_tensors_come_as_they_were(travel, make):
    tensor = make()
    got = travel(tensor)
    assert (got.dtype, got.shape, got.layout, got.device) == (tensor.dtype, tensor.shape, tensor.layout, tensor.device)
    if tensor.layout is torch.strided:
        assert got.stride() == tensor.stride()
    if tensor.device.type != "meta":
        dense = (got.dequantize(), tensor.dequantize()) if tensor.is_quantized else (got.to_dense(), tensor.to_dense())
        assert torch.equal(*dense)


def test_parameters_keep_their_kind_gradients_flag_and_attributes(travel):
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    weight.note = "mine"
    got = travel(weight)
    assert type(got) is nn.Parameter
    assert not got.requires_grad
    assert got.note == "mine"


@pytest.mark.parametrize("size", [10, 1_000, 1_000_000])
def test_what_shared_memory_shares_it_and_what_was_only_equal_does_not(travel, size):
    base = torch.arange(float(size))
    other = base.clone()
    view, same, equal = travel(base[2:5], base, other)
    same[2] = -1
    assert view[0] == -1
    assert equal[2] == 2


def test_equal_tensors_are_stored_once(store):
    one, other = torch.arange(100_000), torch.arange(100_000)
    snapshot = capture(len, ([one, other],), {}, store=store, label="len")
    assert snapshot.size_bytes < 1.1 * one.nbytes


def test_tied_weights_stay_tied_and_large_tensors_are_mapped_and_private(store):
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    model[1].weight = model[0].weight
    snapshot = capture(len, (model,), {}, store=store, label="len")
    first, second = (loading.load(store, snapshot.digest, fill_main=False).args[0] for _ in range(2))
    assert first[0].weight is first[1].weight
    assert torch.equal(first[0].weight, model[0].weight)
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert any(blob in maps for blob in snapshot.blobs)
    with torch.no_grad():
        first[0].weight.zero_()
    assert second[0].weight.any()
    assert model[0].weight.any()
    assert all(blobs.digest_of((store.open(blob),)) == blob for blob in snapshot.blobs)


def test_arrays_are_out_of_band_and_writable(travel, store):
    array = np.arange(200_000.0)
    small = np.arange(3)
    got, got_small = travel(array, small)
    assert np.array_equal(got, array)
    got[0], got_small[0] = 5, 5
    assert (array[0], small[0]) == (0, 0)
    fortran = np.asfortranarray(np.arange(60_000.0).reshape(200, 300))
    assert np.array_equal(travel(fortran), fortran)


RESIZE = """
def call(tensors):
    import torch
    big, grown, like, source = tensors
    mapped = big.untyped_storage().data_ptr()
    big.resize_(1_200_000)
    assert big.untyped_storage().data_ptr() != mapped and big[999_999] == 1
    grown.resize_as_(source.repeat(2))
    source.resize_as_(source.clone())
    like.set_(source.untyped_storage(), 0, (1_500_000,), (1,))
    assert like[999_999] == 1 and like.numel() == 1_500_000
    free = torch.from_numpy(__import__("numpy").zeros(3))
    try:
        free.resize_(10)
    except RuntimeError as error:
        return str(error)
"""


def test_a_mapped_tensor_that_the_user_resizes_is_copied_out_first(tmp_path):
    play(
        tmp_path,
        "import torch\ntensors = [torch.ones(1_000_000) + n - n for n in range(4)]",
        RESIZE,
        args="(tensors,)",
        after="assert 'not resizable' in outcome.value\nassert [len(t) for t in tensors] == [1_000_000] * 4",
    )


# -- optimizers and schedulers ---------------------------------------------------------------------------------------


class Halving(optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


MAKERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam([{"params": [p[0]], "lr": 0.1}, {"params": p[1:]}], 0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "adagrad": lambda p: optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5),
    "lbfgs": lambda p: optim.LBFGS(p, 0.5, max_iter=3, history_size=3),
    "own": lambda p: Halving(p, 0.1),
}


def steps(model, optimizer, count, scheduler=None):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randn(4, 3, generator=generator)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_goes_on_where_it_was(travel, name):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = MAKERS[name](list(model.parameters()))
    steps(model, optimizer, 3)
    optimizer.note = {"my": "attribute"}
    got_model, got = travel(model, optimizer)
    assert type(got) is type(optimizer)
    assert got.note == optimizer.note
    assert set(vars(got)) == set(vars(optimizer))
    assert got.param_groups[0]["params"][0] is got_model.weight
    if name == "own":
        assert got.calls == 3
    for one, other in zip(steps(got_model, got, 3), steps(model, optimizer, 3), strict=True):
        assert torch.equal(one, other)


SCHEDULERS = {
    "step": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "cyclic": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "warm restarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.ConstantLR(o, 0.1, 2), optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_and_watches_its_own_optimizer(travel, name):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    steps(model, optimizer, 3, scheduler)
    got_model, got, got_scheduler = travel(model, optimizer, scheduler)
    assert got_scheduler.optimizer is got
    got._opt_called = False
    got.step()
    assert got._opt_called
    for one, other in zip(steps(got_model, got, 5, got_scheduler), steps(model, optimizer, 5, scheduler), strict=True):
        assert torch.equal(one, other)
    assert got.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_plateau_scheduler_keeps_its_count(travel):
    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scheduler.step(1.0)
    scheduler.step(2.0)
    got = travel(scheduler)
    got.step(3.0)
    assert got.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_without_its_scheduler_has_a_plain_step(travel):
    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    got = travel(optimizer)
    assert "step" in vars(optimizer)
    assert "step" not in vars(got)
    got.step()


def test_a_class_with_pickling_of_its_own_keeps_it(travel):
    class Own(optim.SGD):
        def __getstate__(self):
            return {**super().__getstate__(), "asked": True}

    got = travel(Own(nn.Linear(1, 1).parameters(), 0.1))
    assert got.asked


def test_an_optimizer_and_a_scheduler_of_the_notebook_in_a_rank(tmp_path):
    play(
        tmp_path,
        "import torch\nfrom torch import nn, optim",
        "class Mine(optim.Optimizer):\n"
        "    def __init__(self, params, lr):\n        super().__init__(params, {'lr': lr})\n"
        "    @torch.no_grad()\n    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n            for p in group['params']:\n"
        "                p -= group['lr'] * torch.ones_like(p)\n",
        "p = nn.Parameter(torch.zeros(2))\no = Mine([p], 0.5)\ns = optim.lr_scheduler.LambdaLR(o, lambda e: 0.5 ** e)",
        "def call(p, *, o, s):\n    o.step(); s.step(); o.step()\n    return p.detach(), type(o), s, o",
        args="(p,)",
        kwargs="{'o': o, 's': s}",
        after="value, cls, scheduler, optimizer = outcome.value\nassert value.tolist() == [-0.75, -0.75] and cls is Mine\n"
        "assert scheduler.optimizer is optimizer and optimizer.param_groups[0]['lr'] == 0.25\n"
        "assert p.tolist() == [0, 0]",
    )


def test_parametrized_modules_keep_their_generated_class(travel):
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    got = travel(model)
    x = torch.ones(1, 3)
    assert torch.equal(got(x), model(x))
    assert type(got).__name__ == "ParametrizedLinear"
    assert isinstance(got, nn.Linear)
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in model.named_parameters()]


# -- loaders, generators, contexts -----------------------------------------------------------------------------------


class Loader(DataLoader):
    built = 0

    def __init__(self, *args, extra, **kwargs):
        type(self).built += 1
        super().__init__(*args, **kwargs)
        self.extra = extra


def test_a_loader_keeps_everything_and_its_constructor_is_not_called(travel):
    data = TensorDataset(torch.arange(10.0))
    loader = Loader(data, batch_size=3, shuffle=True, extra=[1], generator=torch.Generator().manual_seed(5))
    built = Loader.built
    got = travel(loader)
    assert Loader.built == built
    assert (got.extra, got.batch_size) == ([1], 3)
    assert got.sampler.generator is got.generator
    assert set(vars(got)) == set(vars(loader))
    assert [b[0].tolist() for b in got] == [b[0].tolist() for b in loader]


def test_a_loader_with_persistent_workers_in_use_travels_without_them(travel):
    loader = DataLoader(
        TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=1, persistent_workers=True,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    first = [batch[0].tolist() for batch in loader]
    assert loader._iterator is not None
    got = travel(loader)
    assert got._iterator is None
    assert loader._iterator is not None
    assert got.multiprocessing_context.get_start_method() == "forkserver"
    assert got.persistent_workers
    got.__dict__["num_workers"] = 0
    got.__dict__["persistent_workers"] = False
    assert [batch[0].tolist() for batch in got] == first
    loader._iterator._shutdown_workers()


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator().manual_seed(1), lambda g: torch.randn(3, generator=g).tolist()),
        (np.random.default_rng(1), lambda g: g.normal(size=3).tolist()),
        (np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
        (random.Random(1), lambda g: g.random()),
    ],
    ids=["torch", "numpy", "numpy legacy", "python"],
)
def test_generators_travel_with_their_state(travel, generator, draw):
    draw(generator)
    got = travel(generator)
    assert draw(got) == draw(generator)


def test_a_shared_generator_stays_shared(travel):
    generator = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(5), generator=generator)
    got, got_generator = travel(sampler, generator)
    assert got.generator is got_generator


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", None])
def test_start_methods(travel, method):
    context = multiprocessing.get_context(method)
    assert type(travel(context)) is type(context)


def test_a_torch_generator_of_an_absent_accelerator_keeps_its_seed():
    from kale_dist.snapshot import reducers

    here = reducers.Loading(storage=memoryview, main={}, references=reducers.References(), resolve=len)
    with reducers.loading(here):
        made = reducers.make_generator(b"odd", True, 7)
    assert made.initial_seed() == 7


def test_the_maps_go_with_the_tensors(store):
    snapshot = capture(len, (torch.ones(1_000_000),), {}, store=store, label="len")
    tensor = loading.load(store, snapshot.digest, fill_main=False).args[0]
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None
    assert not any(blob in pathlib.Path("/proc/self/maps").read_text() for blob in snapshot.blobs)


def test_memory_of_an_accelerator_is_copied_in_pieces(monkeypatch):
    from kale_dist.snapshot import pickling

    monkeypatch.setattr(pickling, "CHUNK_BYTES", 1000)
    storage = torch.arange(300, dtype=torch.int64).untyped_storage()
    memory = pickling.DeviceMemory(storage)
    pieces = [bytes(piece) for piece in memory]
    assert [len(piece) for piece in pieces] == [1000, 1000, 400]
    assert b"".join(pieces) == bytes(torch.arange(300, dtype=torch.int64).numpy())
    assert memory.nbytes == 2400
    assert blobs.digest_of(memory) == blobs.digest_of(pieces)


def test_tensors_of_an_accelerator_load_where_there_is_none(store, monkeypatch):
    """The pickle of a CUDA tensor differs from this one only by the flag that its memory was on an accelerator."""
    from kale_dist.snapshot import reducers

    make = reducers.make_storage
    monkeypatch.setattr(reducers, "make_storage", lambda index, accelerated: make(index, True))
    tensor = torch.arange(500_000.0)
    digest = capture(len, (tensor, torch.ones(3)), {}, store=store, label="len").digest
    big, small = loading.load(store, digest, fill_main=False, device="cpu").args
    assert torch.equal(big, tensor)
    assert small.device.type == "cpu"
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_go_to_the_ranks_device_or_to_main_memory(store):
    model = nn.Linear(1000, 1000, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    digest = capture(len, (model, generator), {}, store=store, label="len").digest
    here, _ = loading.load(store, digest, fill_main=False).args
    there, drawn = loading.load(store, digest, fill_main=False, device="cuda:0").args
    assert here.weight.device.type == "cpu"
    assert there.weight.device.type == drawn.device.type == "cuda"
    assert torch.equal(here.weight, model.weight.cpu())
    assert torch.equal(there.weight, model.weight)
