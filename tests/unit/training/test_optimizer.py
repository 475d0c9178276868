"""Accumulation, schedulers, clipping and precision around steps of the user's."""

import contextlib
import functools
import io
import warnings

import pytest
import torch
import trainings
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainings import labelled, net

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import FSDP, Pipeline, Tensor
from kale_dist.worker.training.loop import train
from kale_dist.worker.training.settings import Training


def fit(step=None, model=None, optimizer=None, loader=None, **options):
    model = model or net()
    loader = DataLoader(labelled(), 4) if loader is None else loader
    return trainings.fit(model, loader, optimizer, train_step=step, **options), model


def zero_first(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def zero_last(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_by_model(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        model.zero_grad()
        criterion(model(x), y).backward()
        assert optimizer.step() is None


def two_parts(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.zero_grad()
        (criterion(model(x), y) / 2).backward()
        (criterion(model(x), y) / 2).backward()
        optimizer.step()


@pytest.mark.parametrize("step", [zero_first, zero_last, zero_by_model, two_parts])
@pytest.mark.parametrize("samples", [24, 20, 18])
def test_accumulation_is_a_larger_batch(step, samples):
    _, model = fit(step, loader=DataLoader(labelled(samples), 4), accumulate=3, epochs=2)
    _, expected = fit(zero_first, loader=DataLoader(labelled(samples), 12), epochs=2)
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-4, atol=1e-6)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(labelled(19))


def test_accumulation_over_a_stream_of_unknown_length(ranks):
    def job():
        return fit(zero_first, loader=DataLoader(Stream(), 2), accumulate=3)[1].weight.detach()

    # Each rank takes every other item, so a global batch of 12 is the same set of samples.
    _, expected = fit(zero_first, loader=DataLoader(labelled(19), 12))
    for weight in ranks(2, job):
        torch.testing.assert_close(weight, expected.weight.detach(), rtol=1e-4, atol=1e-6)


def test_a_window_left_early_is_applied():
    def leave(model, loader, criterion, optimizer, device, args):
        for number, (x, y) in enumerate(loader):
            zero_first(model, [(x, y)], criterion, optimizer, device, args)
            if number == 1:
                break

    _, model = fit(leave, accumulate=4)
    _, expected = fit(zero_first, loader=DataLoader(torch.utils.data.Subset(labelled(), range(8)), 8))
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-4, atol=1e-6)


class Waves(nn.Module):
    """Its weights are complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.cfloat) * 1j)

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.weight + 1).abs()


def test_gradients_of_complex_weights_accumulate():
    _, model = fit(zero_first, Waves(), accumulate=2)
    _, expected = fit(zero_first, Waves(), loader=DataLoader(labelled(), 8))
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-4, atol=1e-6)


def clipping(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()


def halving_data(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        for p in model.parameters():
            p.grad.data.mul_(0.5)
        optimizer.step()


def dropping(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        for p in model.parameters():
            p.grad = None
        criterion(model(x), y).backward()
        optimizer.step()


def closing(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        optimizer.step(lambda x=x, y=y: criterion(model(x), y))


def scaling(model, loader, criterion, optimizer, device, args):
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(criterion(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def stepping_twice(model, loader, criterion, optimizer, device, args):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.step()


def with_two_optimizers(model, loader, criterion, optimizer, device, args):
    other = torch.optim.SGD([model.bias], lr=0.1)
    for x, y in loader:
        criterion(model(x), y).backward()
        other.step()
        optimizer.step()


@pytest.mark.parametrize(
    ("step", "error", "remedy"),
    [
        (clipping, KaleDistError, "Clip by `clip_norm=`"),
        (halving_data, KaleDistError, "Clip by `clip_norm=`"),
        (dropping, KaleDistError, r"optimizer.zero_grad\(\) only"),
        (closing, ConfigError, "accumulate=1 with this optimizer"),
        (scaling, ConfigError, "Use precision='bf16'"),
        (stepping_twice, ConfigError, "one step a batch"),
        (with_two_optimizers, ConfigError, "accumulate=1 with more than one optimizer"),
    ],
)
def test_what_accumulation_refuses(step, error, remedy):
    with pytest.raises(error, match=remedy):
        fit(step, accumulate=2)
    fit(step)  # it is fine without


def test_a_scheduler_of_the_step_moves_after_real_steps_only():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            zero_first(model, [(x, y)], criterion, optimizer, device, args)
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(step, model, optimizer, accumulate=2, scheduler=scheduler)
    # Five batches make three real steps; the loop adds none of its own.
    assert scheduler.get_last_lr() == [0.125]


def test_the_scheduler_argument_is_stepped_each_epoch():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    result, _ = fit(zero_first, model, optimizer, epochs=2, scheduler=scheduler)
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert result.scheduler_state["last_epoch"] == 2
    assert result.optimizer_state["param_groups"][0]["lr"] == pytest.approx(0.01)


def test_a_plateau_scheduler_gets_the_evaluations_loss():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    fit(
        zero_first,
        model,
        optimizer,
        epochs=2,
        scheduler=scheduler,
        eval_data_loader=DataLoader(labelled(), 4),
        eval_step=lambda *_: 1.0,
    )
    assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_a_plateau_scheduler_without_a_loss_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="scheduler: ReduceLROnPlateau needs a loss"):
        fit(zero_first, model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_plateau_scheduler_in_a_step_sees_the_loss_of_all_ranks(ranks):
    """By the loss of its own samples, each rank would come to another learning rate, and so to other weights."""

    def job():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        given = iter((1.0, 4.0) if torch.distributed.get_rank() else (2.0, 2.0))

        def step(model, loader, criterion, optimizer, device, args):
            zero_first(model, loader, criterion, optimizer, device, args)
            scheduler.step(metrics=next(given), epoch=None)

        fit(
            step, model, optimizer, loader=DataLoader(labelled(3), 4), epochs=2
        )  # two samples for rank 0, one for rank 1
        return scheduler.best

    assert ranks(2, job) == pytest.approx([5 / 3, 5 / 3])


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_plateau_scheduler_that_only_rank_0_steps_is_told_at_once(ranks, has_buffers):
    """It needs the loss of all ranks: rank 0 would wait for the others for ever."""

    def job():
        model = nn.Sequential(net(), nn.BatchNorm1d(2, track_running_stats=has_buffers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

        def step(model, loader, criterion, optimizer, device, args):
            zero_first(model, loader, criterion, optimizer, device, args)
            if torch.distributed.get_rank() == 0:
                scheduler.step(1.0)

        try:
            fit(step, model, optimizer)
        except KaleDistError as error:
            return str(error)

    told = "Rank 0 is at ReduceLROnPlateau.step(), and rank 1 at the end of the step. All ranks"
    assert [text.startswith(told) for text in ranks(2, job)] == [True, True]


def test_learning_rates_that_a_step_sets_by_its_own_loss_are_equal_after_an_epoch(ranks):
    def job():
        text = io.StringIO()

        def step(model, loader, criterion, optimizer, device, args):
            zero_first(model, loader, criterion, optimizer, device, args)
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + torch.distributed.get_rank())

        with contextlib.redirect_stdout(text):
            _, model = fit(step, epochs=2)
        return model.weight.detach(), text.getvalue()

    (first, said), (second, _) = ranks(2, job)
    torch.testing.assert_close(first, second)
    assert "Learning rates were not equal on all ranks after epoch 1: rank 0's were copied to all." in said


def test_clip_norm_holds_for_the_gradient_of_all_ranks(ranks):
    def job():
        return fit(zero_first, clip_norm=0.05, accumulate=2)[1].weight.detach()

    def clip(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    _, expected = fit(clip, loader=DataLoader(labelled(), 16))
    for weight in ranks(2, job):
        torch.testing.assert_close(weight, expected.weight.detach(), rtol=1e-4, atol=1e-6)


def test_bf16_covers_the_whole_step():
    seen = []

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            seen.append(model(x).dtype)
            zero_first(model, [(x, y)], criterion, optimizer, device, args)

    _, model = fit(step, precision="bf16")
    assert set(seen) == {torch.bfloat16}
    assert model.weight.dtype is torch.float32


def test_bf16_sees_the_weights_of_each_step():
    """A cast weight that is kept through the epoch would train on the first batch's weights."""
    _, model = fit(precision="bf16", epochs=3)
    expected = net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in DataLoader(labelled(), 4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(expected(x), y)
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fp16_with_the_ready_made_step(ranks, accumulate):
    def job():
        result, model = fit(precision="fp16", clip_norm=10.0, accumulate=accumulate)
        return result.metrics["loss"], model.weight.detach()

    _, expected = fit(loader=DataLoader(labelled(), 8 * accumulate))
    (loss, first), (_, second) = ranks(2, job)
    assert 0 < loss < 2
    assert first.equal(second)
    torch.testing.assert_close(first, expected.weight.detach(), rtol=2e-2, atol=2e-3)


def test_fp16_needs_a_scaler_in_a_step_of_the_users():
    with pytest.raises(ConfigError, match="precision: 'fp16' needs a scaled loss"):
        fit(zero_first, precision="fp16")
    fit(scaling, precision="fp16")


def test_a_users_scaler_and_clip_norm_are_refused():
    with pytest.raises(ConfigError, match=r"clip_norm: .*Clip in the step"):
        fit(scaling, clip_norm=1.0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", [FSDP(), Tensor(), Pipeline(cut=("1",), micro_batches=1)], ids=["fsdp", "tensor", "pipeline"]
)
def test_a_users_scaler_is_refused_where_each_rank_sees_a_part_of_the_gradients(ranks, strategy):
    def job():
        model = nn.Sequential(net(), nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=r"strategy: .*GradScaler.*Use precision='bf16'"):
            fit(scaling, model, strategy=strategy)

    assert ranks(2, job, keep=False) == [None] * 2


def rates(make, samples, world_batch, epochs=2, **options):
    """Learning rates after training with a scheduler that the step moves in each batch."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(samples, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), world_batch)
    scheduler = make(optimizer, len(loader), epochs)

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train(Training(
            model=model, train_data_loader=loader, criterion=nn.MSELoss(), optimizer=optimizer, train_step=step,
            epochs=epochs, **options,
        ))  # fmt: skip
    return scheduler.last_epoch, optimizer.param_groups[0]["lr"], said.getvalue()


def one_cycle(optimizer, batches, epochs):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=batches)


def cosine_after_warmup(optimizer, batches, epochs):
    schedules = torch.optim.lr_scheduler
    warmup = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = schedules.CosineAnnealingLR(optimizer, T_max=epochs * batches - 3)
    return schedules.SequentialLR(optimizer, [warmup, cosine], milestones=[3])


def linear_of_transformers(optimizer, batches, epochs):
    def value(step, *, num_training_steps):
        return max(0.0, 1 - step / num_training_steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(value, num_training_steps=epochs * batches))


@pytest.mark.parametrize("make", [one_cycle, cosine_after_warmup, linear_of_transformers])
@pytest.mark.parametrize("samples", [80, 82])
def test_a_schedule_made_for_the_batches_of_one_process_ends_where_it_would_there(ranks, make, samples):
    last, rate, _ = rates(make, samples, 2)
    for world, options in ((2, {}), (3, {}), (2, {"accumulate": 3})):
        for found in ranks(world, lambda options=options: rates(make, samples, 2, **options)):
            assert found[0] == last
            assert found[1] == pytest.approx(rate, abs=1e-12)
    said = ranks(2, lambda: rates(make, samples, 2))[0][2]
    assert "stepped in proportion to the data read" in said


def test_a_schedule_made_for_the_ranks_is_stepped_once_a_batch(ranks):
    def for_two(optimizer, batches, epochs):
        return one_cycle(optimizer, -(-batches // 2), epochs)

    last, _, said = ranks(2, lambda: rates(for_two, 82, 2))[0]
    assert last == 42
    assert "OneCycleLR" not in said


def test_a_schedule_of_unknown_length_is_stepped_once_and_the_log_says_so(ranks):
    def unknown(optimizer, batches, epochs):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    last, _, said = ranks(2, lambda: rates(unknown, 82, 2))[0]
    assert last == 42
    assert "LambdaLR, of unknown length, is stepped once in each batch (41 batches an epoch on one process, 21" in said


SETS_RATE = "train_step sets the learning rate in each batch. The notebook's loader has 8 batches an epoch, and each rank takes 4"


@pytest.mark.parametrize(
    ("way", "world", "is_said"),
    [("in each batch", 2, True), ("in each batch", 1, False), ("in the first two", 2, False), ("once an epoch", 2, False),
     ("by a scheduler, too", 2, False)],
)  # fmt: skip
def test_a_rate_that_the_step_sets_in_each_batch_is_said_where_ranks_take_fewer(ranks, way, world, is_said):
    def job():
        optimizer = torch.optim.SGD((model := net()).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

        def step(model, loader, criterion, optimizer, device, args):
            for i, (x, y) in enumerate(loader):
                if i < {"in the first two": 2, "once an epoch": 1}.get(way, 99):
                    optimizer.param_groups[0]["lr"] *= 0.9
                if way == "by a scheduler, too":
                    scheduler.step()
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()

        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            fit(step, model, optimizer, DataLoader(labelled(32), 4), epochs=2)
        return said.getvalue()

    assert "".join(ranks(world, job)).count(SETS_RATE) == is_said


def test_a_model_may_have_a_sparse_table_among_its_buffers(ranks):
    """Buffers are averaged after each epoch; the edges of a graph are not."""

    def job():
        model = net()
        model.register_buffer("edges", torch.eye(3).to_sparse())
        fit(zero_first, model)
        return model.edges.to_dense().tolist()

    assert ranks(2, job) == [torch.eye(3).tolist()] * 2
