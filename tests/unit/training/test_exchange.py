"""Gradients are averaged whatever the step does, or there is an error: never silently not."""

import contextlib
import copy
import io

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import fit

from kale_dist.errors import KaleDistError
from kale_dist.strategies import DDP, Tensor
from kale_dist.worker.parallel.buckets import average_sparse
from kale_dist.worker.parallel.data_parallel import DataParallel
from kale_dist.worker.training.rank_group import Group


class Net(nn.Module):
    """A model whose loss is not made by forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x))).squeeze(1)

    def loss(self, x, y):
        return ((self(x) - y) ** 2).mean()


def data(samples=22):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1))


def run(body, samples=22, batch=4, model=None, epochs=2, make_optimizer=None, train_step=None, **options):
    """Train a Net with `body(model, x, y, optimizer)` as the inside of the loop; return its weights."""
    model = Net() if model is None else model()
    optimizer = make_optimizer(model) if make_optimizer else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            body(model, x, y, optimizer)

    loader = DataLoader(data(samples), batch, shuffle=True, generator=torch.Generator().manual_seed(2))
    fit(model, loader, optimizer, criterion=None, train_step=train_step or step, epochs=epochs, **options)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(body, world, samples=22, batch=4, model=None, epochs=2, make_optimizer=None):
    """The same without kale_dist, in one process."""
    model = Net() if model is None else model()
    optimizer = make_optimizer(model) if make_optimizer else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    loader = DataLoader(data(samples), batch * world, shuffle=True, generator=torch.Generator().manual_seed(2))
    for _ in range(epochs):
        for x, y in loader:
            body(model, x, y, optimizer)
    return {name: p.detach() for name, p in model.named_parameters()}


def by_method(model, x, y, optimizer):
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()


def by_parts(model, x, y, optimizer):
    optimizer.zero_grad()
    out = model.head(torch.tanh(model.encoder(x))).squeeze(1)
    nn.functional.mse_loss(out, y).backward()
    optimizer.step()


def clipping(model, x, y, optimizer):
    optimizer.zero_grad()
    model.loss(x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def two_backwards(model, x, y, optimizer):
    optimizer.zero_grad()
    model.loss(x, y).backward()
    (0.5 * model.encoder(x).pow(2).mean()).backward()
    optimizer.step()


def by_hand(model, x, y, optimizer):
    parameters = [*model.encoder.parameters(), *model.head.parameters()]
    for p, g in zip(parameters, torch.autograd.grad(model.loss(x, y), parameters), strict=True):
        p.grad = g
    optimizer.step()


def by_a_copy(model, x, y, optimizer):
    """Gradients that no hook of the model's own parameters has seen."""
    other = copy.deepcopy(model)
    other.zero_grad()
    other.loss(x, y).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad = q.grad
    optimizer.step()


def with_closure(model, x, y, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        return loss

    optimizer.step(closure)


def unfreezing(model, x, y, optimizer):
    if len(x) < 4 and not model.encoder.weight.requires_grad:
        model.encoder.requires_grad_(True)
    by_method(model, x, y, optimizer)


def checkpointed(model, x, y, optimizer):
    optimizer.zero_grad()
    x = x.clone().requires_grad_(True)
    from torch.utils.checkpoint import checkpoint

    out = model.head(torch.tanh(checkpoint(model.encoder, x, use_reentrant=True))).squeeze(1)
    (nn.functional.mse_loss(out, y) + checkpoint(model.encoder, x, use_reentrant=True).pow(2).mean()).backward()
    optimizer.step()


def saved_within(model, x, y, optimizer):
    by_method(model, x, y, optimizer)
    torch.save(model, io.BytesIO(), pickle_module=cloudpickle)
    torch.save(optimizer.state_dict(), io.BytesIO())
    assert copy.deepcopy(model).encoder.weight.equal(model.encoder.weight)
    assert type(model) is Net
    assert "encoder.weight" in model.state_dict()


BODIES = [by_method, by_parts, clipping, two_backwards, by_hand, by_a_copy, checkpointed, saved_within]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", [DDP(), DDP(exchange="torch"), DDP(exchange="torch", bucket_mib=1e-5)], ids=repr)
def test_any_step_equals_one_process(ranks, body, strategy):
    def job():
        return run(body, strategy=strategy)

    own = ranks(2, job)
    expected = plain(body, 2)
    for weights in own:
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    assert own[0]["spare.weight"].equal(Net().spare.weight)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def test_lbfgs_takes_the_same_turns_everywhere(ranks):
    own = ranks(2, lambda: run(with_closure, make_optimizer=lbfgs, samples=16))
    expected = plain(with_closure, 2, make_optimizer=lbfgs, samples=16)
    torch.testing.assert_close(own[0], expected, rtol=1e-3, atol=1e-5)
    assert all(own[0][name].equal(own[1][name]) for name in expected)


def frozen():
    model = Net()
    model.encoder.requires_grad_(False)
    return model


def test_parameters_unfrozen_in_the_middle(ranks):
    def body(model, x, y, optimizer):
        if body.calls == 2:
            model.encoder.requires_grad_(True)
        body.calls += 1
        by_method(model, x, y, optimizer)

    def job(world):
        body.calls = 0
        return run(body, model=frozen)

    body.calls = 0
    expected = plain(body, 2, model=frozen)
    for weights in ranks(2, job, 2):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_parameters_that_one_rank_does_not_use(ranks):
    def job():
        import torch.distributed as dist

        def body(model, x, y, optimizer):
            optimizer.zero_grad()
            out = model.spare if dist.get_rank() else model.head
            ((out(torch.tanh(model.encoder(x))).squeeze(1) - y) ** 2).mean().backward()
            assert model.spare.weight.grad is not None
            assert model.head.weight.grad is not None
            optimizer.step()

        return run(body)

    first, second = ranks(2, job)
    assert all(first[name].equal(second[name]) for name in first)
    assert not first["spare.weight"].equal(Net().spare.weight)


def test_tied_weights(ranks):
    def tied():
        model = Net()
        model.spare.weight = model.head.weight
        return model

    def body(model, x, y, optimizer):
        optimizer.zero_grad()
        hidden = torch.tanh(model.encoder(x))
        ((model.head(hidden) + model.spare(hidden)).squeeze(1) - y).pow(2).mean().backward()
        optimizer.step()

    expected = plain(body, 2, model=tied)
    for weights in ranks(2, lambda: run(body, model=tied)):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.table((x.abs() * 10).long().clamp(max=49)).mean(1)).squeeze(1)


def test_sparse_gradients(ranks):
    def body(model, x, y, optimizer):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        assert model.table.weight.grad.is_sparse
        optimizer.step()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    expected = plain(body, 2, model=Words, make_optimizer=sgd)
    for weights in ranks(2, lambda: run(body, model=Words, make_optimizer=sgd)):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_of_any_dtype_are_averaged(ranks):
    dtypes = torch.float16, torch.bfloat16, torch.float64, torch.complex64

    def job():
        group = Group(torch.device("cpu"))
        found = []
        for dtype in dtypes:
            parameter = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
            rows = [0, 2] if group.rank else [2]
            values = torch.full((len(rows), 2), 1 + group.rank, dtype=dtype)
            parameter.grad = torch.sparse_coo_tensor([rows], values, (4, 2))
            average_sparse(parameter, group)
            found.append(parameter.grad.to_dense())
        return found

    for averages in ranks(2, job):
        for dtype, average in zip(dtypes, averages, strict=True):
            assert average.equal(torch.tensor([[1.0] * 2, [0.0] * 2, [1.5] * 2, [0.0] * 2]).to(dtype))


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes_stay_equal(ranks, dtype):
    def job():
        def body(model, x, y, optimizer):
            optimizer.zero_grad()
            out = model.head(model.encoder(x.to(dtype))).squeeze(1)
            ((out - y) * (out - y).conj()).real.mean().backward()
            optimizer.step()

        return run(body, model=lambda: Net().to(dtype))

    first, second = ranks(2, job)
    assert all(first[name].equal(second[name]) for name in first)
    assert not first["head.weight"].equal(Net().to(dtype).head.weight)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(8)
        self.norm = nn.LazyBatchNorm1d()
        self.second = nn.LazyLinear(1)

    def loss(self, x, y):
        return (self.second(torch.relu(self.norm(self.first(x)))).squeeze(1) - y).pow(2).mean()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_start_from_one_value(ranks):
    def job():
        import torch.distributed as dist

        torch.manual_seed(100 + dist.get_rank())
        return run(by_method, model=Lazy)

    first, second = ranks(2, job)
    assert first["first.weight"].shape == (8, 4)
    assert all(first[name].equal(second[name]) for name in first)


def test_weights_that_differ_at_the_start_become_rank_0s(ranks):
    def job():
        import torch.distributed as dist

        def different():
            model = Net()
            with torch.no_grad():
                model.head.weight += dist.get_rank()
            return model

        return run(by_method, model=different)

    expected = plain(by_method, 2)
    for weights in ranks(2, job):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_a_second_optimizer_over_a_network_of_the_notebook(ranks):
    def job():
        torch.manual_seed(3)
        critic = nn.Linear(1, 1)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

        def body(model, x, y, optimizer):
            critic_optimizer.zero_grad()
            (critic(model(x).detach()[:, None]).squeeze(1) - y).pow(2).mean().backward()
            critic_optimizer.step()
            by_method(model, x, y, optimizer)

        return run(body, samples=21), critic.weight.detach().clone(), critic.bias.detach().clone()

    torch.manual_seed(3)
    critic = nn.Linear(1, 1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def body(model, x, y, optimizer):
        critic_optimizer.zero_grad()
        (critic(model(x).detach()[:, None]).squeeze(1) - y).pow(2).mean().backward()
        critic_optimizer.step()
        by_method(model, x, y, optimizer)

    plain(body, 2, samples=21)
    for _, weight, bias in ranks(2, job):
        torch.testing.assert_close(weight, critic.weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(bias, critic.bias.detach(), rtol=1e-4, atol=1e-6)


def logged(body, **options):
    """The weights after a training of this rank, and its log."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        weights = run(body, **options)
    return weights, log.getvalue()


def test_noise_of_each_ranks_own_is_found_at_the_end_of_the_epoch(ranks):
    def job():
        import torch.distributed as dist

        noise = torch.Generator().manual_seed(dist.get_rank())

        def body(model, x, y, optimizer):
            optimizer.zero_grad()
            model.loss(x, y).backward()
            for p in model.head.parameters():
                p.grad += torch.randn(p.shape, generator=noise)
            optimizer.step()

        return logged(body)

    (first, log), (second, _) = ranks(2, job)
    assert all(first[name].equal(second[name]) for name in first)
    assert "Weights were not equal on all ranks after epoch 1 (head.weight, head.bias)" in log
    assert log.count("seed alike") == 1
    assert "Weights were not equal on all ranks after 2 epochs." in log


def replaces_weights(model, x, y, optimizer):
    """As a codebook of moving averages does: a new parameter, made of the rank's own samples."""
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()
    model.spare.weight = nn.Parameter(x.mean(0, keepdim=True).repeat(1, 2))


def test_parameters_that_a_step_replaces_are_made_equal_at_the_end_of_the_epoch(ranks):
    (first, log), (second, _) = ranks(2, lambda: logged(replaces_weights))
    assert all(first[name].equal(second[name]) for name in first)
    assert "Weights were not equal on all ranks after epoch 1 (spare.weight)" in log


class Scaled(Net):
    """Its forward makes a parameter of its first batch, on the ranks that `makes` takes."""

    makes = staticmethod(lambda _rank: True)

    def forward(self, x):
        if self.makes(torch.distributed.get_rank()) and not hasattr(self, "scale"):
            self.scale = nn.Parameter(x.std())
        return super().forward(x)


class ScaledOnOne(Scaled):
    """Only rank 1 makes it."""

    makes = staticmethod(lambda rank: rank == 1)


def test_a_parameter_that_a_forward_makes_is_made_equal_at_the_end_of_the_epoch(ranks):
    first, second = ranks(2, lambda: run(by_method, model=Scaled))
    assert first["scale"].equal(second["scale"])


def test_ranks_of_which_one_makes_a_parameter_are_refused(ranks):
    def job():
        with pytest.raises(KaleDistError, match="did not have the same parameters on all ranks after epoch 1"):
            run(by_method, model=ScaledOnOne)

    ranks(2, job)


def test_parameters_that_a_step_replaces_are_refused_where_ranks_have_parts(ranks):
    def job():
        with pytest.raises(KaleDistError, match=r"replaced or renamed the parameter spare\.weight.*use strategy='ddp'"):
            run(replaces_weights, strategy=Tensor(plan={"head": "whole", "spare": "whole"}))

    ranks(2, job)


def test_everything_is_as_before_afterwards(ranks):
    def job():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data(), 2, shuffle=True)
        before = (dict(loader.__dict__), set(optimizer.__dict__), type(loader.dataset))
        step = nn.Module.zero_grad, torch.optim.lr_scheduler.LRScheduler.step, torch.amp.GradScaler.step
        train_step = lambda m, d, c, o, *_: [by_method(m, x, y, o) for x, y in d] and None  # noqa: E731
        fit(model, loader, optimizer, criterion=nn.MSELoss(), train_step=train_step, accumulate=2)
        assert dict(loader.__dict__) == before[0]
        assert {"step", "zero_grad"}.isdisjoint(optimizer.__dict__)
        assert step == (nn.Module.zero_grad, torch.optim.lr_scheduler.LRScheduler.step, torch.amp.GradScaler.step)
        assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
        return len(loader), len(loader.dataset)

    assert ranks(2, job) == [(11, 22)] * 2


def late(body, **options):
    """Train as on a GPU, where control numbers are read one backward pass later."""
    kept = DataParallel._reads_late
    DataParallel._reads_late = property(lambda _: True)
    try:
        return run(body, strategy=DDP(exchange="torch"), **options)
    finally:
        DataParallel._reads_late = kept


def plain_step(model, x, y, optimizer):
    optimizer.zero_grad()
    model.loss(x, y).backward()
    optimizer.step()


@pytest.mark.parametrize("world", [2, 3])
def test_control_numbers_that_are_read_late_change_nothing(ranks, world):
    def sometimes_spare(model, x, y, optimizer):
        optimizer.zero_grad()
        loss = model.loss(x, y)
        if x[0, 0] > 0:
            loss = loss + model.spare(torch.tanh(model.encoder(x))).mean()
        loss.backward()
        optimizer.step()

    for body in (plain_step, sometimes_spare):
        expected = ranks(world, lambda body=body: run(body, strategy=DDP(exchange="torch")))[0]
        for found in ranks(world, lambda body=body: late(body)):
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(("leaves", "said"), [(True, "left the loop"), (False, "no backward pass in batch 2")])
def test_ranks_that_differ_are_still_told_apart_when_numbers_are_read_late(ranks, leaves, said):
    def job():
        rank = torch.distributed.get_rank()

        def step(model, loader, criterion, optimizer, device, args):
            for number, (x, y) in enumerate(loader):
                if rank == 1 and number == 1:
                    if leaves:
                        break
                    continue
                plain_step(model, x, y, optimizer)

        try:
            late(None, train_step=step)
        except KaleDistError as error:
            return str(error)
        return ""

    assert any(said in text for text in ranks(2, job, keep=False))


def adversaries():
    """A generator and a critic that train each other, and an average of the generator's weights."""
    torch.manual_seed(3)
    models = {"generator": nn.Linear(2, 4), "critic": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.Adam(one.parameters(), lr=0.01) for name, one in models.items()}
    average, losses = copy.deepcopy(models["generator"]), []

    def step(models, loader, criterion, optimizers, device, args):
        for x, _ in loader:
            optimizers["critic"].zero_grad()
            fake = models["generator"](x[:, :2])
            (models["critic"](fake.detach()) - models["critic"](x)).mean().backward()
            optimizers["critic"].step()
            optimizers["generator"].zero_grad()
            loss = -models["critic"](models["generator"](x[:, :2])).mean()
            loss.backward()
            optimizers["generator"].step()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), models["generator"].parameters(), strict=True):
                    mean.lerp_(now, 0.1)
        losses.append(len(losses))

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options = {"criterion": None, "train_step": step, "epochs": 3, "state": [average, losses]}
    return fit(models, DataLoader(data(24), 12 // world), optimizers, **options)


def test_two_models_with_two_optimizers_train_as_in_one_process(ranks):
    expected, found = adversaries(), ranks(2, adversaries)[0]
    assert set(found.model_state) == {"generator.weight", "generator.bias", "critic.weight", "critic.bias"}
    for name, value in expected.model_state.items():
        assert torch.allclose(found.model_state[name], value, atol=1e-6)
    assert set(found.optimizer_state["named"]) == {"generator", "critic"}
    assert torch.allclose(found.state[0]["weight"], expected.state[0]["weight"], atol=1e-6)
    assert found.state[1] == [0, 1, 2]
