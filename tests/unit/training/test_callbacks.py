"""Early stopping, the best weights, averages of weights, and functions after each epoch."""

import functools
import math

import pytest
import torch
import trainings
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from trainings import labelled, net

import kale_dist as kd
from kale_dist.callbacks import EMA, SWA, EarlyStopping, ModelCheckpoint
from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import DDP, FSDP, LocalSGD, ParameterServer, Pipeline, Tensor
from kale_dist.wire import MetricRow, context

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


class Scripted:
    """An eval_step that gives the values of a list, one an epoch."""

    def __init__(self, values):
        self.values = iter(values)

    def __call__(self, *_):
        return {"score": next(self.values)}


def fit(callbacks, scores=None, epochs=4, batch=4, strategy=None, **options):
    model = net(hidden=8)
    if scores is not None:
        options |= {"eval_data_loader": DataLoader(labelled(32), 8), "eval_step": Scripted(scores)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, given = (
        DataLoader(labelled(32), batch),
        {"epochs": epochs, "callbacks": callbacks, "strategy": strategy or DDP()},
    )
    return trainings.fit(model, loader, optimizer=optimizer, **given, **options)


def ends_after(ranks, callback, scores):
    results = ranks(2, functools.partial(fit, [callback], scores, epochs=len(scores)))
    assert len({(result.epochs, result.stopped_early) for result in results}) == 1
    return results[0].epochs, results[0].stopped_early


def test_all_ranks_stop_when_a_metric_has_not_improved_for_some_epochs(ranks):
    falling = EarlyStopping("eval/score", patience=2)
    assert ends_after(ranks, falling, [3.0, 2.0, 2.5, 2.0, 1.0, 0.0]) == (4, True)
    assert ends_after(ranks, falling, [3.0, 2.0, 2.5, 1.0, 2.0, 0.5]) == (6, False)
    assert ends_after(ranks, EarlyStopping("eval/score", mode="max", patience=1), [1.0, 2.0, 3.0, 3.0, 4.0]) == (
        4,
        True,
    )
    assert ends_after(ranks, EarlyStopping("eval/score", min_delta=0.5, patience=1), [3.0, 2.6, 2.2]) == (2, True)
    assert ends_after(ranks, EarlyStopping("eval/score", patience=2), [math.nan] * 4) == (2, True)
    # Nothing is cut short by an end after the last epoch.
    assert ends_after(ranks, EarlyStopping("eval/score", patience=1), [1.0, 2.0]) == (2, False)


def test_it_says_why_it_ended(capsys):
    result = fit([EarlyStopping("eval/score", patience=2)], [3.0, 0.25, 2.5, 2.0, 1.0], epochs=5)
    assert result.stopped_early
    expected = (
        "Stopped early, after epoch 4 of 5: eval/score has not improved for 2 epochs; its best was 0.25, after epoch 2."
    )
    assert expected in capsys.readouterr().out


def test_a_metric_that_is_not_there_is_named_after_the_first_epoch(ranks):
    with pytest.raises(ConfigError, match=r"'eval/f1'.*after epoch 1.*'train/loss', 'train/accuracy', 'eval/score'"):
        fit([ModelCheckpoint("eval/f1")], [1.0] * 4)


@pytest.mark.parametrize("strategy", [DDP(), FSDP(), ParameterServer()], ids=lambda one: one.word)
def test_the_best_weights_are_those_of_the_best_epoch(ranks, strategy):
    shorter = ranks(2, functools.partial(fit, (), None, 2, strategy=strategy))[0]
    best = ranks(2, functools.partial(fit, [ModelCheckpoint("eval/score")], [3.0, 1.0, 2.0, 1.0], strategy=strategy))[0]
    assert (best.best_epoch, best.best_value) == (2, 1.0)
    for name, value in shorter.model_state.items():
        assert torch.allclose(value, best.best_state[name]), name
        assert not torch.equal(value, best.model_state[name]), name


def averaged_by_torch(after_step, batch, epochs=4):
    """AveragedModel's weights in a loop of one process over global batches."""
    model = net(hidden=8)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if after_step else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for x, y in DataLoader(labelled(32), batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if after_step:
                average.update_parameters(model)
        if not after_step and epoch >= 2:
            average.update_parameters(model)
    return average.module.state_dict()


STRATEGIES = [
    pytest.param(DDP(), 2, 8, id="ddp"),
    pytest.param(FSDP(), 2, 8, id="fsdp"),
    pytest.param(Pipeline(cut=["2"], micro_batches=2), 2, 4, id="pipeline", marks=pytest.mark.nightly),
    pytest.param(Tensor(plan={"0": "columns", "2": "rows"}), 2, 4, id="tensor", marks=pytest.mark.nightly),
    pytest.param(ParameterServer(), 3, 8, id="parameter-server", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("strategy", "world", "batch"), STRATEGIES)
@pytest.mark.parametrize(
    "average", [EMA(0.9, evaluate=True), pytest.param(SWA(start=3), marks=pytest.mark.nightly)], ids=["ema", "swa"]
)
def test_an_average_equals_torchs(ranks, strategy, world, batch, average):
    options = {"eval_data_loader": DataLoader(labelled(32), 8)} if average == EMA(0.9, evaluate=True) else {}
    results = ranks(world, functools.partial(fit, [average], strategy=strategy, **options))
    expected = averaged_by_torch(isinstance(average, EMA), batch)
    for name, value in results[0].averaged_state.items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
        assert not torch.allclose(value, results[0].model_state[name], atol=1e-6), name


def test_ranks_that_agree_after_epochs_alone_average_then(ranks):
    first, _ = ranks(2, functools.partial(fit, [SWA(start=4)], strategy=LocalSGD(sync_every=3)))
    for name, value in first.averaged_state.items():
        assert torch.allclose(value, first.model_state[name]), name


def test_averaged_weights_are_evaluated_and_can_decide(ranks, monkeypatch):
    sent = []
    monkeypatch.setattr(context, "emit", lambda what, **_: sent.append(what))
    result = fit(
        [EMA(0.5, evaluate=True), ModelCheckpoint("averaged/loss")],
        eval_data_loader=DataLoader(labelled(32), 8),
        epochs=3,
    )
    rows = [row for row in sent if isinstance(row, MetricRow) and row.source != "pace"]
    assert [row.source for row in rows] == ["train", "eval", "averaged"] * 3
    assert min(dict(row.values)["loss"] for row in rows if row.source == "averaged") == result.best_value


def test_a_function_is_called_after_each_epoch_in_rank_0():
    called = []
    result = fit(
        [lambda epoch, metrics, model: called.append((epoch, sorted(metrics), model(torch.ones(1, 3)).shape))],
        [1.0] * 2,
        2,
    )
    names = ["eval/score", "train/accuracy", "train/loss"]
    assert called == [(1, names, (1, 2)), (2, names, (1, 2))]
    assert result.epochs == 2


def call_model(epoch, metrics, model):
    with pytest.raises(KaleDistError, match="holds only a part of the weights"):
        model(torch.ones(1, 3))


def test_a_function_that_calls_divided_weights_is_told(ranks):
    assert [result.epochs for result in ranks(2, functools.partial(fit, [call_model], strategy=FSDP()))] == [4, 4]


NET = net(hidden=8)


def call(callbacks, **options):
    kd.render(
        NET, DataLoader(labelled(32), 4), nn.CrossEntropyLoss(), torch.optim.SGD(NET.parameters(), lr=0.1), callbacks=callbacks,
        number_of_processes=2, name="try", on="local", **options,
    )  # fmt: skip


class NoCallback:
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping("val_loss"), "Write it as 'eval/loss' or 'train/loss'"),
        (lambda: EarlyStopping(5), "monitor=5 is not the name"),
        (lambda: EarlyStopping("eval/"), "is not the name of a metric"),
        (lambda: EarlyStopping(mode="auto"), "mode='auto'"),
        (lambda: EarlyStopping(patience=0), "patience=0"),
        (lambda: EarlyStopping(patience=True), "patience=True"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta=-1"),
        (lambda: EarlyStopping(min_delta=math.nan), "min_delta=nan"),
        (lambda: EMA(1.0), "decay=1.0"),
        (lambda: EMA("a"), "decay='a'"),
        (lambda: SWA(start=0), "start=0"),
        (lambda: SWA(start=1.5), r"start=1\.5"),
        (lambda: call(EarlyStopping()), "is not a list"),
        (lambda: call([EarlyStopping]), "EarlyStopping is a class"),
        (lambda: call([NoCallback()]), "is no callback"),
        (lambda: call([lambda epoch: None]), "cannot take the 3 arguments"),
        (lambda: call([EarlyStopping()]), r"no eval_data_loader.*monitor='train/loss'"),
        (lambda: call([EMA(), SWA()]), "several averages"),
        (lambda: call([ModelCheckpoint("train/loss"), ModelCheckpoint("train/accuracy")]), "several ModelCheckpoint"),
        (lambda: call([EMA(evaluate=True)]), "no eval_data_loader"),
        (lambda: call([SWA(start=3)], epochs=2), "after the last of 2 epochs"),
        (
            lambda: call([EarlyStopping("averaged/loss")], eval_data_loader=DataLoader(labelled(32), 4)),
            "no averaged weights are evaluated",
        ),
        (lambda: call([EMA()], strategy="local-sgd"), "equal weights only after epochs.*Use SWA"),
    ],
)
def test_what_is_wrong_is_told_at_the_call(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
