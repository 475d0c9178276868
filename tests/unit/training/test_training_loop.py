"""Metrics, early stop, buffers, devices, checkpoints, and what comes back."""

import collections
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import re
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
from recorded import events_in
from torch import nn
from torch.utils.data import DataLoader
from trainings import fit, labelled, net

from kale_dist.errors import ConfigError, KaleDistError, StoreError
from kale_dist.job.status import JobStatus, ReplicaStatus, reduce_events, values_of
from kale_dist.job.view import facts
from kale_dist.snapshot import sources
from kale_dist.snapshot.changes import shown
from kale_dist.strategies import DDP, FSDP, Gossip, LocalSGD, Mesh, Pipeline, Tensor
from kale_dist.wire import RankStateName, StateName, context
from kale_dist.wire.events import Event
from kale_dist.worker.pod.prometheus import Gauges
from kale_dist.worker.training import checkpoint, supervised
from kale_dist.worker.training.checkpoint import Checkpoint


def test_a_rank_without_numpy_says_how_to_add_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(KaleDistError, match=r"packages=\['numpy'\]"):
        fit()


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_an_error_in_a_layer_names_it_its_inputs_and_the_batch(is_evaluation):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x):
            return self.body(x if self.training == is_evaluation else torch.cat([x, x], 1))

    with pytest.raises(RuntimeError) as caught:
        fit(Net(), eval_data_loader=DataLoader(labelled(21), 5))
    batch, rows = ("batch 1 of the evaluation after epoch 1", 5) if is_evaluation else ("batch 1 of epoch 1", 4)
    layer = "layer 'body.0', Linear(in_features=3, out_features=4, bias=True)"
    assert caught.value.__notes__ == [f"Raised in {layer}, called with float32 ({rows}, 6), in {batch}."]
    text = sources.format_error(caught.value)
    assert "return self.body(" in text
    assert "_call_impl" not in text
    assert "training/loop.py" not in text


def test_an_error_in_the_loss_or_outside_of_layers():
    with pytest.raises(IndexError) as caught:
        fit(nn.Linear(3, 1))
    assert "Raised in the criterion, called with float32 (4, 1), int64 (4,), in batch" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as caught:
        fit(train_step=lambda *_: 1 / 0)
    assert not hasattr(caught.value, "__notes__")


def test_what_a_step_may_not_return_is_said_without_frames():
    with pytest.raises(ConfigError) as caught:
        fit(train_step=lambda *_: {"loss": torch.ones(3)})
    caught.value.__traceback__ = caught.value.__traceback__.tb_next.tb_next
    assert "File" not in sources.format_error(caught.value)


def by_loader(model, loader, criterion, device, args):
    model.eval()
    with torch.no_grad():
        return {"loss": sum(criterion(model(x), y).item() for x, y in loader) / len(loader)}


def by_dataset(model, loader, criterion, device, args):
    correct = loss = 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            correct += (out.argmax(1) == y).sum().item()
            loss += criterion(out, y).item() * len(y)
    return {"accuracy": correct / len(loader.dataset), "loss": loss / len(loader.dataset)}


@pytest.mark.parametrize(
    ("step", "samples"), [(by_loader, 24), (by_dataset, 24), (by_dataset, 21), (by_dataset, 5), (by_dataset, 1)]
)
@pytest.mark.parametrize("world", [2, 3])
def test_both_tutorial_forms_of_a_metric_equal_one_process(ranks, step, samples, world):
    def job():
        return fit(
            loader=DataLoader(labelled(24), 24 // (2 * 3)),
            train_step=lambda *_: None,
            eval_data_loader=DataLoader(labelled(samples), 4),
            eval_step=step,
        ).metrics

    expected = step(net(), DataLoader(labelled(samples), 4), nn.CrossEntropyLoss(), None, None)
    for metrics in ranks(world, job):
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_ready_made_steps(ranks):
    def job():
        return fit(
            loader=DataLoader(labelled(40), 4, shuffle=True), eval_data_loader=DataLoader(labelled(40), 8), epochs=15
        )

    first, second = ranks(2, job)
    assert set(first.metrics) == {"loss", "accuracy", "eval_loss", "eval_accuracy"}
    assert first.metrics == second.metrics
    assert first.metrics["eval_accuracy"] > 0.9
    assert second.model_state is None
    assert first.model is None


def test_ready_made_steps_take_mappings_and_refuse_what_they_do_not_know():
    items = [{"x": x, "label": y} for x, y in labelled(21)]
    assert set(fit(loader=DataLoader(items, 4)).metrics) == {"loss", "accuracy"}
    with pytest.raises(ConfigError, match="train_step: is left out, and the loader's batches are not pairs"):
        fit(loader=DataLoader([(x, y, y) for x, y in labelled(21)], 4))
    with pytest.raises(ConfigError, match="dicts with 'x', 'y', of which none is 'labels' or 'target'"):
        fit(loader=DataLoader([{"x": x, "y": y} for x, y in labelled(21)], 4))


@pytest.mark.parametrize(
    ("returned", "metrics"),
    [
        (None, {}),
        (0.5, {"loss": 0.5}),
        (torch.tensor(0.5), {"loss": 0.5}),
        ((0.5, 2), {"loss": 0.5, "metric_1": 2.0}),
        ({"f1": torch.tensor([3.0]), "n": 2}, {"f1": 3.0, "n": 2.0}),
        ([0.25, torch.tensor(0.75)], {}),
        ({"loss": [1, 3]}, {"loss": 2.0}),
    ],
)
def test_what_a_step_may_return(returned, metrics):
    assert fit(train_step=lambda *_: returned).metrics == metrics


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("good", "returned 'good', a str"),
        ({"loss": []}, r"returned\['loss'\] is \[\], a list"),
        ({"loss": ["good"]}, r"returned\['loss'\] is 'good', a str"),
        ({1: 2.0}, "a metric whose name is 1"),
        ({"x" * 900: 2.0}, "cannot be shown"),
        (torch.ones(3), r"returned a tensor of shape \(3,\), not one element"),
    ],
)
def test_what_a_step_may_not_return(returned, problem):
    with pytest.raises(ConfigError, match=f"train_step: .*{problem}"):
        fit(train_step=lambda *_: returned)


def test_metrics_are_weighed_by_samples_and_may_be_nan(ranks):
    def job():
        import torch.distributed as dist

        def step(model, loader, *_):
            samples = sum(len(x) for x, _ in loader)
            only = {"mine": 1.0} if dist.get_rank() else {}
            return {"n": samples, "bad": math.nan, **only}

        return fit(
            loader=DataLoader(labelled(5), 2),
            train_step=lambda *_: None,
            eval_data_loader=DataLoader(labelled(5), 2),
            eval_step=step,
        ).metrics

    for metrics in ranks(2, job):
        assert metrics["n"] == pytest.approx((3 * 3 + 2 * 2) / 5)
        assert metrics["mine"] == 1.0
        assert math.isnan(metrics["bad"])


def test_any_rank_may_stop_the_training(ranks):
    def job():
        import torch.distributed as dist

        epochs = []

        def step(*_):
            epochs.append(1)
            return {"loss": 1.0, "stop": dist.get_rank() == 1 and len(epochs) == 2}

        result = fit(train_step=step, epochs=5)
        return result.epochs, result.stopped_early, result.metrics

    assert ranks(2, job) == [(2, True, {"loss": 1.0})] * 2


def test_buffers_are_averaged_before_the_evaluation(ranks):
    def job():
        import torch.distributed as dist

        model = nn.Sequential(nn.BatchNorm1d(3), net())

        def step(model, loader, criterion, optimizer, device, args):
            for x, _ in loader:
                model(x)
            step.own = model[0].running_mean.clone()

        fit(model, loader=DataLoader(labelled(24), 4), train_step=step)
        everyone = [torch.empty(3) for _ in range(2)]
        dist.all_gather(everyone, step.own)
        return everyone, model[0].running_mean, model[0].num_batches_tracked.item()

    (everyone, first, batches), (_, second, _) = ranks(2, job)
    assert not everyone[0].equal(everyone[1])
    torch.testing.assert_close(first, (everyone[0] + everyone[1]) / 2)
    assert first.equal(second)
    assert batches == 3


class Centred(nn.CrossEntropyLoss):
    """A loss of outputs from which their moving average is taken, as that of DINO."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, outputs, targets):
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return super().forward(outputs - self.center, targets)


def test_buffers_of_the_criterion_are_averaged_as_the_models(ranks):
    def job():
        criterion = Centred()

        def step(model, loader, *given):
            supervised.train_epoch(model, loader, *given)
            step.own = criterion.center.clone()

        fit(criterion=criterion, loader=DataLoader(labelled(24), 4), train_step=step, epochs=2)
        return step.own, criterion.center

    (mine, first), (other, second) = ranks(2, job)
    assert not mine.equal(other)
    assert first.equal(second)
    torch.testing.assert_close(first, (mine + other) / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_buffers_that_are_equal_on_all_ranks_keep_their_bits(ranks, dtype):
    table = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))

    def job():
        model, criterion = net(), nn.CrossEntropyLoss(weight=table[:2].real.float().abs())
        model.register_buffer("table", table.clone())
        # Views, whose bytes lie in another form.
        model.register_buffer("turned", table.conj())
        model.register_buffer("wide", table[:1].expand(5))
        weight = criterion.weight.clone()
        fit(model, criterion=criterion, loader=DataLoader(labelled(24), 4), epochs=3)
        return model.table.equal(table), criterion.weight.equal(weight)

    assert ranks(3, job) == [(True, True)] * 3


def test_buffers_with_the_same_numbers_in_another_order_differ(ranks):
    def job():
        import torch.distributed as dist

        model = net()
        model.register_buffer("counts", torch.zeros(2))

        def step(model, loader, *given):
            supervised.train_epoch(model, loader, *given)
            model.counts[dist.get_rank()] += 4

        fit(model, loader=DataLoader(labelled(24), 4), train_step=step)
        return model.counts.tolist()

    assert ranks(2, job) == [[2, 2]] * 2


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "uint16", "uint32", "uint64"])
def test_buffers_of_whole_numbers_are_rank_0s_after_an_epoch(ranks, dtype):
    def job():
        import torch.distributed as dist

        model = net()
        model.register_buffer("mine", torch.zeros(2, 3).to(getattr(torch, dtype)).t())

        def step(model, loader, criterion, optimizer, device, args):
            for x, _ in loader:
                model(x)
            model.mine = torch.full((3, 2), 1.0 - dist.get_rank()).to(getattr(torch, dtype)).contiguous()

        fit(model, loader=DataLoader(labelled(24), 4), train_step=step)
        return model.mine.tolist()

    assert ranks(2, job) == [[[1, 1]] * 3] * 2


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(sync_every=1), Gossip()], ids=lambda one: type(one).__name__)
def test_buffers_whose_shapes_differ_stay_each_ranks_own(ranks, strategy):
    def job():
        import torch.distributed as dist

        model = net()

        def step(model, loader, criterion, optimizer, device, args):
            for x, y in loader:
                # As a table for the longest sample so far.
                model.register_buffer("table", torch.ones(2 + dist.get_rank()), persistent=False)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()

        fit(model, loader=DataLoader(labelled(24), 4), train_step=step, strategy=strategy)
        return len(model.table)

    assert ranks(2, job) == [2, 3]


def test_one_loader_for_both(ranks):
    def job():
        loader = DataLoader(labelled(24), 4)
        given = []
        fit(
            loader=loader,
            eval_data_loader=loader,
            train_step=lambda m, d, *_: given.append(d is loader),
            eval_step=lambda m, d, *_: given.append(len(d.dataset)),
        )
        return given

    assert ranks(2, job) == [[True, 12]] * 2


def test_steps_get_their_arguments():
    seen = []
    fit(
        train_step=lambda *a: seen.append((len(a), a[-2], a[-1])),
        train_args={"a": 1},
        eval_data_loader=DataLoader(labelled(21), 4),
        eval_step=lambda *a: seen.append((len(a), a[-2], a[-1])),
        eval_args="b",
    )
    assert seen == [(6, torch.device("cpu"), {"a": 1}), (5, torch.device("cpu"), "b")]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_got_its_shape_comes_back_itself():
    model = nn.Sequential(nn.LazyLinear(2))
    result = fit(model)
    assert result.model is model
    assert result.reason == "0.weight got its shape (2, 3) in the rank"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_that_no_batch_uses_stays_without_a_shape(ranks, tmp_path):
    def job():
        model, rank = net(), torch.distributed.get_rank()
        model.spare = nn.LazyLinear(2)
        with pathlib.Path(os.devnull).open("wb") as nowhere:
            context.activate(
                context.Context(job="j", in_job=True, folder=tmp_path, rank=rank, world_size=2),
                os.dup(nowhere.fileno()),
            )
        state = fit(model, optimizer=torch.optim.SGD([model.weight, model.bias], lr=0.1)).model_state
        return rank or nn.parameter.is_lazy(state["spare.weight"])

    assert ranks(2, job, keep=False)[0]
    assert set(checkpoint.read(tmp_path / "checkpoint").model) == {"weight", "bias"}


def test_a_module_replaced_in_the_rank_comes_back_itself():
    model = nn.Sequential(net(), nn.ReLU())

    def step(model, *_):
        model[1] = nn.Tanh()

    result = fit(model, train_step=step)
    assert result.model is model
    assert result.reason == "module 1 changed in the rank from ReLU to Tanh"


def test_the_optimizers_state_goes_on():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, optimizer=optimizer)
    result = fit(model, optimizer=optimizer)
    assert result.optimizer_state["state"][0]["step"] == 12
    assert set(result.model_state) == {"weight", "bias"}


def events_of_rank(folder, **options):
    """What one of several ranks of a job sends while it trains on 22 samples; it takes 20 ms for each batch."""
    rank, (read, write) = torch.distributed.get_rank(), os.pipe()
    context.activate(context.Context(job="j", in_job=True, folder=folder, rank=rank, world_size=4), write)
    model = nn.Sequential(net(), nn.Tanh(), nn.Linear(2, 2))
    model.register_forward_hook(lambda *_: time.sleep(0.02))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*processes share", UserWarning)
        fit(model, DataLoader(labelled(22), 4), epochs=2, checkpoint_every=None, **options)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return events_in(pipe.read())


@pytest.mark.parametrize(
    ("world", "strategy", "readers"),
    [
        (2, DDP(), [0, 1]),
        pytest.param(2, Tensor(), [0], marks=pytest.mark.nightly),
        pytest.param(2, Pipeline(micro_batches=2), [0], marks=pytest.mark.nightly),
        pytest.param(4, Mesh(data=2, tensor=2), [0, 2], marks=pytest.mark.nightly),
    ],
    ids=["ddp", "tensor", "pipeline", "mesh"],
)
def test_samples_that_ranks_share_count_once_in_every_sum(ranks, tmp_path, world, strategy, readers):
    told = ranks(world, functools.partial(events_of_rank, strategy=strategy), tmp_path, keep=False)
    events = [event for of_rank in told for event in of_rank]
    last = {event["rank"]: event for event in events if event["event"] == "progress"}
    assert [rank for rank in last if last[rank]["samples_per_s"]] == readers
    rate = sum(last[rank]["samples_per_s"] for rank in readers)

    status = reduce_events(JobStatus(ref="j", replicas=tuple(ReplicaStatus(rank=n) for n in range(world))), events)
    replicas = tuple(dataclasses.replace(replica, state=RankStateName.RUNNING) for replica in status.replicas)
    status = dataclasses.replace(status, state=StateName.RUNNING, replicas=replicas)
    assert facts.rate(status) == f"{facts.number(rate)} samples/s"
    assert values_of(status, "pace/samples_per_s")[-1] == pytest.approx(rate, rel=0.01)

    gauges = Gauges("j", world)
    for event in events:
        gauges.note(Event.read(event))
    totals = re.findall(r'^kale_dist_samples_total{rank="(\d)"} (\d+)$', gauges.text(), re.MULTILINE)
    assert [int(rank) for rank, _ in totals] == readers
    assert sum(int(samples) for _, samples in totals) == 2 * 22
    assert len(re.findall("^kale_dist_loss{", gauges.text(), re.MULTILINE)) == world


def in_job(folder):
    """Make this forked process rank 0 of a job; its events are what the pipe gives."""
    read, write = os.pipe()
    context.activate(context.Context(job="j", in_job=True, folder=folder), write)
    model = nn.Sequential(net(), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fit(
        model,
        DataLoader(labelled(22), 4),
        optimizer=optimizer,
        scheduler=scheduler,
        epochs=3,
        checkpoint_every=2,
        eval_data_loader=DataLoader(labelled(21), 4),
    )
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        events = events_in(pipe.read())
    return events, model.state_dict(), optimizer.state_dict()


def rates_of_a_slow_step(folder, batch_size):
    """What progress says of a step that takes 50 ms for each batch."""
    read, write = os.pipe()
    context.activate(context.Context(job="j", in_job=True, folder=folder), write)

    def step(model, data_loader, criterion, optimizer, device, args):
        for _ in data_loader:
            time.sleep(0.05)

    fit(net(), DataLoader(labelled(12), batch_size), train_step=step, epochs=2)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        events = events_in(pipe.read())
    return [(e["epoch"], e["step"], e["samples_per_s"]) for e in events if e["event"] == "progress"]


def test_samples_in_hand_do_not_count_as_done_in_the_rate(ranks, tmp_path):
    rates = ranks(1, rates_of_a_slow_step, tmp_path, 4, keep=False)[0]
    assert rates[0] == (1, 1, None)
    told = [rate for _, _, rate in rates[1:]]
    assert all(0 < rate <= 80 for rate in told), rates
    # The first step of an epoch goes on with the last that is known.
    assert (2, 1) in [(epoch, step) for epoch, step, _ in rates]


def test_an_epoch_of_one_batch_has_a_rate(ranks, tmp_path):
    rates = ranks(1, rates_of_a_slow_step, tmp_path, 12, keep=False)[0]
    assert all(0 < rate <= 240 for _, _, rate in rates[1:]), rates
    assert len(rates) > 1


def test_events_and_checkpoints_of_a_job(ranks, tmp_path):
    events, model, optimizer = ranks(1, in_job, tmp_path, keep=False)[0]
    by_kind = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    assert [(e["source"], e["epoch"]) for e in by_kind["metrics"]] == [
        (source, epoch) for epoch in (1, 2, 3) for source in ("pace", "train", "eval")
    ]
    assert [e["epoch"] for e in by_kind["checkpoint"]] == [2, 3]
    assert [e["text"].split(":")[0] for e in by_kind["note"]] == ["train", "eval"]
    last = [e for e in by_kind["progress"] if e["phase"] == "train"][-1]
    # During and after an evaluation, loss and rate stay those of the training.
    evaluated = by_kind["progress"][-1]
    assert evaluated["phase"] == "eval"
    assert (evaluated["loss"], evaluated["samples_per_s"]) == (last["loss"], last["samples_per_s"])
    assert (last["epoch"], last["epochs"], last["step"], last["steps"], last["samples"]) == (3, 3, 6, 6, 22)
    assert last["loss"] > 0
    saved = checkpoint.read(tmp_path / "checkpoint")
    assert saved.epoch == 3
    torch.testing.assert_close(dict(saved.model), dict(model))
    torch.testing.assert_close(saved.optimizer["state"], optimizer["state"])
    assert saved.scheduler["last_epoch"] == 3
    assert saved.left_out == ()
    fresh = nn.Sequential(net(), nn.BatchNorm1d(2))
    fresh.load_state_dict(saved.model)
    torch.optim.Adam(fresh.parameters()).load_state_dict(saved.optimizer)


def test_checkpoints_of_odd_values(tmp_path):
    weight = torch.randn(3, 4).t()
    states = {
        "a": weight,
        "tied": weight,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "plain": [1, 2.5, None, True, ("x", {3: "y"})],
        "of numpy": [np.float64(0.1), np.float32(0.5), np.int64(3), np.str_("x")],
        "object": object(),
    }
    path = tmp_path / "checkpoint"
    whole = checkpoint.collect(Checkpoint(model=states, epoch=1))
    checkpoint.save(path, whole)
    left_out = whole["left_out"]
    assert left_out == ("model.object",)
    read = checkpoint.read(path)
    assert read.left_out == left_out
    assert read.optimizer is None
    assert read.model.pop("plain") == states["plain"]
    assert read.model.pop("of numpy") == [0.1, 0.5, 3, "x"]
    for name, value in read.model.items():
        torch.testing.assert_close(value, states[name])
    assert read.model["a"].data_ptr() == read.model["tied"].data_ptr()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_checkpoint_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="could not be written: No such file or directory"):
        checkpoint.save(tmp_path / "gone" / "checkpoint", {})

    def full(_value, _path):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726\nC++ frames")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StoreError, match=r"its disk has [0-9,]+ bytes free \(\[enforce.*726\)\. Free some space"):
        checkpoint.save(tmp_path / "checkpoint", {})
    assert list(tmp_path.iterdir()) == []


class ItsOwnLoss(nn.Module):
    """Takes a whole batch and gives its loss, as a model of Hugging Face does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.head = nn.Linear(3, 2)

    def forward(self, x, labels=None):
        logits = self.head(x)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def test_a_model_that_gives_its_own_loss_needs_neither_criterion_nor_step(ranks):
    def job(key):
        batches = [{"x": x, key: y} for x, y in labelled(16)]
        loader = DataLoader(batches, 4)
        return fit(ItsOwnLoss(), loader, criterion=None, eval_data_loader=DataLoader(batches, 4), epochs=4).metrics

    for key in ("labels", "label"):
        metrics = ranks(2, lambda key=key: job(key))[0]
        assert set(metrics) == {"loss", "accuracy", "eval_loss", "eval_accuracy"}

    def pairs():
        with pytest.raises(ConfigError, match=r"gives no loss for a list.*write a train_step"):
            fit(ItsOwnLoss(), criterion=None)

    ranks(1, pairs, keep=False)


class OwnParameters(nn.Linear):
    """Overrides `parameters` without torch's arguments, to train a part."""

    def parameters(self):
        return iter([self.weight])


@pytest.mark.parametrize("strategy", [DDP(), FSDP(), Tensor(), Pipeline(), LocalSGD(), Gossip()], ids=repr)
def test_a_model_may_have_a_method_parameters_of_its_own(ranks, strategy):
    def job():
        model = nn.Sequential(OwnParameters(3, 4), nn.Tanh(), OwnParameters(4, 2))
        before = model[0].bias.detach().clone()
        optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
        return before, fit(model, optimizer=optimizer, strategy=strategy).model_state

    before, state = ranks(2, job)[0]
    assert state["0.bias"].equal(before)


history, average, best = [], nn.Linear(3, 2), 0.0


def said_by(job, ranks, world=2):
    """What all ranks print."""

    def printed():
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            job()
        return text.getvalue()

    return "".join(ranks(world, printed))


def changed_by(job, ranks):
    """What comes back of the objects of a training that both ranks run, besides states."""
    return " ".join(sorted({shown(path) for one in ranks(2, lambda: job().changes)[0] for path, _ in one.places}))


def moving_average(model, loader, criterion, optimizer, device, args):
    global best  # noqa: PLW0603 - as in notebooks
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        remember_in(loss)
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
    best = 1.0


def remember_in(loss):
    history.append(loss.item())


def test_what_a_step_changes_comes_back_and_a_name_that_means_something_else_is_named_once(ranks):
    said = said_by(lambda: fit(train_step=moving_average, epochs=2), ranks)
    assert said.count("Changed by a step, and left behind in the ranks: best.") == 1
    assert said.count("Changed on each rank in its own way: history.") == 1
    assert changed_by(lambda: fit(train_step=moving_average), ranks) == "average.bias average.weight history"
    assert changed_by(lambda: fit(train_step=moving_average, state=[average, history]), ranks) == ""

    def quiet(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return 0.5

    def late(model, loader, criterion, optimizer, device, args):
        if records:
            history.append(torch.distributed.get_rank())
        records["epoch"] = 1
        return quiet(model, loader, criterion, optimizer, device, args)

    assert "in its own way: history." in said_by(lambda: records.clear() or fit(train_step=late, epochs=3), ranks)
    assert "each rank" not in said_by(lambda: fit(train_step=quiet), ranks)
    assert changed_by(lambda: fit(train_step=quiet), ranks) == ""


records, weights, tables = {"best": 0.0}, {"mean": torch.zeros(2)}, [{"lr": 0.1}]


def test_what_a_step_writes_into_a_dict_or_list_of_the_same_length_comes_back(ranks):
    def step(model, loader, *_):
        for _batch in loader:
            weights["mean"].add_(1)
        records["best"] = 0.9
        tables[0]["lr"] += 0.1
        return 0.5

    assert changed_by(lambda: fit(train_step=step), ranks) == "records.best tables[0].lr weights.mean"


@pytest.mark.parametrize(
    ("criterion", "values", "left_out"),
    [
        (nn.CrossEntropyLoss(), [0, -100] * 4, "Targets of -100 are left out"),
        (nn.CrossEntropyLoss(ignore_index=1), [0, 1] * 4, "Targets of 1 are left out"),
        (nn.CrossEntropyLoss(reduction="sum"), [0, -100] * 4, ""),
        (nn.MSELoss(), [torch.full((2,), -100.0)] * 8, ""),
    ],
)
def test_targets_that_the_loss_leaves_out_are_named_and_no_others(capsys, criterion, values, left_out):
    context.log_once.cache_clear()
    model, loader = net(), DataLoader([(torch.ones(3), value) for value in values], 4)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        supervised.train_epoch(model, loader, criterion, optimizer, "cpu", is_divided=True)
    said = capsys.readouterr().out
    assert left_out in said
    assert said.count("left out of the loss") == bool(left_out)


def by_words(outputs, x):
    """Each sample has as many words as its first number says."""
    return outputs.repeat_interleave(1 + (x[:, 0] > 0).long(), 0)


def padded(outputs, x):
    """Time first, to the length of the rank's longest."""
    return outputs.expand(3 + int((x[:, 0] > 0).sum()), *outputs.shape)


@pytest.mark.parametrize(
    ("rows", "reduction", "samples", "is_said"),
    [(by_words, "mean", 24, True), (by_words, "sum", 24, False), (padded, "mean", 24, False),
     (lambda outputs, x: outputs, "mean", 21, False)],
)  # fmt: skip
def test_a_mean_over_other_numbers_of_rows_is_said_once(ranks, rows, reduction, samples, is_said):
    def step(model, loader, criterion, optimizer, device, args):
        for x, _ in loader:
            optimizer.zero_grad()
            given = rows(model(x), x)
            criterion(given, torch.zeros_like(given)).backward()
            optimizer.step()
        return 0.5

    loader = DataLoader(labelled(samples), 4)
    said = said_by(
        lambda: fit(None, loader, train_step=step, criterion=nn.MSELoss(reduction=reduction), epochs=2), ranks
    )
    assert said.count("rows on ranks with equally many samples. Its loss is the mean over the rows") == is_said


class Warmup:
    """A schedule without a state."""

    def __init__(self):
        self._step = 0


def test_queues_arrays_and_attributes_come_back(ranks):
    replay, stats, noam = collections.deque([1, 2], maxlen=2), np.zeros(3), Warmup()
    a, b, idle, large = [], {}, collections.deque([1]), np.zeros(1 << 20)

    def step(model, loader, *_):
        for _batch in loader:
            replay.append(3.5)
            stats[0] += 1
            large[0] += len(idle)
            noam._step += 1
            a.append(1)
            b[1] = 1
        return 0.5

    assert changed_by(lambda: fit(train_step=step), ranks) == "a b[1] large noam._step replay stats"


def test_what_a_step_notes_in_its_arguments_comes_back(ranks):
    def step(model, loader, criterion, optimizer, device, args):
        for _batch in loader:
            args.best += 1
        return 0.5

    args = types.SimpleNamespace(best=0.0, of=("numbers", 3))
    assert changed_by(lambda: fit(train_step=step, train_args=args), ranks) == "train_args.best"

    def extend(model, loader, criterion, optimizer, device, args):
        args["losses"].append(sum(len(x) for x, _ in loader))
        return 0.5

    losses = []
    given = {"train_args": {"losses": losses}, "state": [losses]}
    assert changed_by(lambda: fit(train_step=extend, **given), ranks) == ""


class OddList(list):
    def __len__(self):
        raise TypeError("not that way")


class OddText(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __ne__(self, other):
        raise TypeError("not that way")

    __eq__ = __ne__


class OddProxy:
    """Asks the object that it stands for, which is not there."""

    def __getattribute__(self, name):
        raise RuntimeError("not connected")

    __repr__ = __eq__ = __hash__ = None


class OddState:
    load_state_dict = print

    def state_dict(self):
        raise RuntimeError("not now")

    def __repr__(self):
        raise TypeError("not that way")


class OddLayer(nn.Linear):
    def extra_repr(self):
        raise TypeError("not that way")


def fit_beside(odd, change=lambda odd: None, **options):
    """Train with a step that uses an odd object, and a list whose change is to be named all the same."""
    global beside
    noted, beside = [], odd

    def step(model, loader, criterion, optimizer, device, args):
        change(odd)
        assert beside is odd
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            noted.append(len(y))
        return 0.5

    return fit(train_step=step, **options)


def distributed():
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor

    return DTensor.from_local(torch.ones(2), DeviceMesh("cpu", range(dist.get_world_size())))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: OddList([1]),
        lambda: OddText("a"),
        OddProxy,
        OddState,
        distributed,
    ],
    ids=["coo", "csr", "len", "eq", "proxy", "state", "dtensor"],
)
@pytest.mark.parametrize(
    "hold", [lambda odd: odd, lambda odd: [odd], lambda odd: {"a": odd}], ids=["bare", "list", "dict"]
)
def test_what_a_step_uses_may_be_odd(ranks, make, hold):
    """It is a global name, in the step's closure and in its arguments."""
    assert changed_by(lambda: fit_beside(odd := hold(make()), train_args=odd), ranks) == "noted"


class Meter:
    """An object with a state, whose tensors are new in each state dict."""

    def __init__(self):
        self.seen = torch.zeros(())

    def state_dict(self):
        return {"seen": self.seen.clone()}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_whatever_has_a_state_that_changed_comes_back(ranks):
    critic, meter, idle = nn.Linear(2, 1), Meter(), Meter()
    second = torch.optim.Adam(critic.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)
    scaler = torch.amp.GradScaler("cpu")
    untouched = torch.optim.Adam(critic.parameters())

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            second.zero_grad()
            scaler.scale(critic(model(x).detach()).mean()).backward()
            scaler.step(second)
            scaler.update()
            meter.seen += len(x) + idle.seen
        schedule.step()
        return len(untouched.state)

    found = changed_by(lambda: fit(train_step=step), ranks)
    assert found == "critic.bias critic.weight meter scaler schedule second"
    kept = [critic, meter, scaler, schedule, second]
    assert changed_by(lambda: fit(train_step=step, state=kept), ranks) == ""


def test_a_module_of_parts_that_come_back_comes_once(ranks):
    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            both[1](both[0](x), y).backward()
            optimizer.step()
        return 0.5

    def job():
        global both  # noqa: PLW0603 - as in notebooks
        model, criterion = net(), nn.CrossEntropyLoss(weight=torch.ones(2))
        both = nn.ModuleList([model, criterion])
        return fit(model, train_step=step, criterion=criterion)

    assert changed_by(job, ranks) == ""


def test_a_sparse_tensor_that_a_step_changes_is_named(ranks):
    job = lambda: fit_beside([torch.eye(3).to_sparse()], lambda odd: odd[0].mul_(2))  # noqa: E731
    assert "left behind in the ranks: beside[0]." in said_by(job, ranks)


def test_no_notice_fails_a_training():
    def compared(args):
        args["text"] = OddText("b")

    args = {"text": OddText("a")}
    assert fit_beside(args, compared, train_args=args).epochs == 1

    def complex_root(model):
        (model.bias.sum() * 1j).backward(torch.ones((), dtype=torch.complex64))

    model = net()
    assert fit_beside(model, complex_root, model=model).epochs == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(OddLayer(4, 2))


def test_a_rank_that_leaves_its_loader_alone_says_so_before_it_waits_for_the_others(ranks):
    """Were it rank 0's to say, and rank 0 waited in a step for this one, it would be said by the hang's stacks only."""
    said = said_by(lambda: fit(train_step=lambda *_: 0.5), ranks, 3)
    assert said.count("train_step did not iterate the loader it was given") == 1


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        first = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return iter([labelled(21)[i] for i in range(first, 20, 2)])


def test_a_stream_that_asks_for_its_rank_is_told_of_shard(ranks):
    """Divided by itself and by the loader, it would train on half of the data, and nothing would say so."""
    said = said_by(lambda: fit(loader=DataLoader(Stream(), 2)), ranks)
    assert "1 of every 2 items (Stream asks for its rank: if it leaves out data by that, pass shard=False)" in said


def test_a_training_that_changes_nothing_is_told(ranks):
    def without_step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            criterion(model(x), y).backward()
        return 0.5

    def by_hand(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            model.zero_grad()
            criterion(model(x), y).backward()
            for weight in model.parameters():
                weight.data.add_(weight.grad, alpha=-0.1)
        return 0.5

    said = "Training has changed no weight of the model: "
    assert f"{said}train_step made no step of the optimizer that it got." in said_by(
        lambda: fit(train_step=without_step), ranks
    )
    assert said not in said_by(lambda: fit(train_step=by_hand), ranks)


@pytest.mark.parametrize("strategy", [DDP(), FSDP(), Pipeline()], ids=repr)
def test_a_training_without_a_backward_pass_or_a_learning_rate_is_told_that_it_changes_nothing(ranks, strategy):
    def without_backward(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            optimizer.step()
        return loss.item()

    def train(step, lr):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return fit(model, train_step=step, optimizer=optimizer, strategy=strategy, epochs=2)

    said = "Training has changed no weight of the model: the optimizer made"
    for step, lr, count in ((without_backward, 0.1, 1), (None, 0.0, 1), (None, 1e-30, 1), (None, 1e-7, 0)):
        assert said_by(lambda step=step, lr=lr: train(step, lr), ranks).count(said) == count, (step, lr)


def test_a_step_that_trains_another_model_by_another_optimizer_is_told_of_both(ranks):
    other = net()
    second = torch.optim.SGD(other.parameters(), lr=0.1)

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            second.zero_grad()
            criterion(other(x), y).backward()
            second.step()
        return 0.5

    said = said_by(lambda: fit(train_step=step), ranks)
    assert "no step of the optimizer that it got, and 3 of others, for other weights" in said
    assert "An optimizer of the step trains tensors that are not the model's (2)" in said
    assert "their gradients are averaged over the ranks, too" in said
    assert "Gradients were assigned" not in said


def test_a_step_without_metrics_is_told_how_to_return_them(ranks):
    said = said_by(lambda: fit(train_step=moving_average, epochs=2), ranks)
    assert said.count("train_step returned nothing, so there are no metrics. Return a number or a dict") == 1


def test_a_step_that_returns_a_list_has_no_metric_and_is_told_so(ranks):
    def losses(model, loader, criterion, optimizer, device, args):
        moving_average(model, loader, criterion, optimizer, device, args)
        return [0.5, 0.25]

    said = said_by(lambda: fit(train_step=losses, epochs=2), ranks)
    assert said.count("train_step returned a list, so there are no metrics. Return") == 1


def test_the_first_nan_is_told_with_its_rank_and_step(ranks):
    def diverging(model, loader, criterion, optimizer, device, args):
        rank = torch.distributed.get_rank()
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if rank == 1 and number == 1:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
        return 0.5

    said = said_by(lambda: fit(train_step=diverging, epochs=2), ranks)
    assert "The loss is nan on rank 1 in step 2 of epoch 1.\n" in said
    assert said.count("The loss is nan on rank") == 2  # rank 0's, a step later, says that the weights hold it


def events_of_nan(folder, checkpoint_every=1, skips=False, model=None, **options):
    """What a rank of a job sends whose loss becomes nan in the third batch of epoch 2, on rank 1 alone; and its error."""
    read, write = os.pipe()
    rank, error, steps = torch.distributed.get_rank(), "", 0
    context.activate(context.Context(job="j", in_job=True, folder=folder, rank=rank, world_size=2), write)

    def diverging(model, loader, criterion, optimizer, device, args):
        nonlocal steps
        for x, y in loader:
            steps += 1
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            (loss * float("nan") if rank == 1 and steps == 6 else loss).backward()
            if not (skips and steps == 6):
                optimizer.step()
        return loss.item()

    options |= {"train_step": diverging, "epochs": 4, "checkpoint_every": checkpoint_every}
    try:
        fit(model or nn.Linear(3, 2), DataLoader(labelled(22), 4), **options)
    except KaleDistError as found:
        error = str(found)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return events_in(pipe.read()), error, steps


@pytest.mark.parametrize("options", [{}, {"strategy": FSDP()}], ids=["ddp", "fsdp"])
def test_no_checkpoint_is_written_once_weights_are_nan(options, ranks, tmp_path):
    everyone = ranks(2, lambda: events_of_nan(tmp_path, **options), keep=False)
    events = [event for events, _, _ in everyone for event in events]
    assert [event["epoch"] for event in events if event["event"] == "checkpoint"] == [1]
    saved = checkpoint.read(tmp_path / "checkpoint")
    assert not any(value.isnan().any() for value in saved.model.values())
    replicas = tuple(ReplicaStatus(rank=rank) for rank in range(2))
    status = JobStatus(ref="local://j", state=StateName.SUCCEEDED, replicas=replicas)
    status = reduce_events(status, sorted(events, key=lambda event: event.get("time", 0.0)))
    assert status.nan_since == (2, 3)
    assert status.is_nan
    assert any("Weights are nan: no checkpoint is written from here on" in text for text in status.warnings)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"checkpoint_every": "auto"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint_every": None}, marks=pytest.mark.nightly),
        pytest.param({"strategy": LocalSGD(sync_every=3)}, marks=pytest.mark.nightly),
    ],
)
def test_stop_on_nan_ends_all_ranks_at_the_same_step_and_leaves_the_good_checkpoint(options, ranks, tmp_path):
    everyone = ranks(2, lambda: events_of_nan(tmp_path, stop_on_nan=True, **options), keep=False)
    assert all("(stop_on_nan=True)" in error for _, error, _ in everyone)
    assert len({steps for _, _, steps in everyone}) == 1
    assert 6 <= everyone[0][2] < 12
    if options.get("checkpoint_every", 1):
        assert not any(value.isnan().any() for value in checkpoint.read(tmp_path / "checkpoint").model.values())


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [DDP(), Pipeline(micro_batches=1)], ids=["ddp", "pipeline"])
def test_a_nan_whose_step_is_skipped_neither_stops_the_training_nor_its_checkpoints(strategy, ranks, tmp_path):
    model = nn.Sequential(net(), nn.Tanh(), nn.Linear(2, 2))
    options = {"stop_on_nan": True, "skips": True, "strategy": strategy, "model": model}
    everyone = ranks(2, lambda: events_of_nan(tmp_path, **options), keep=False)
    assert {error for _, error, _ in everyone} == {""}
    assert [one["epoch"] for one in everyone[0][0] if one["event"] == "checkpoint"] == [1, 2, 3, 4]
