"""Callbacks of real jobs: what comes back, and that a restart loses nothing."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainings import classifying, labelled, net

import kale_dist as kd
from kale_dist.callbacks import EMA, SWA, EarlyStopping, ModelCheckpoint
from kale_dist.errors import ResultUnavailableError
from kale_dist.worker.training import supervised

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")

SCORES = [5.0, 3.0, 4.0, 4.5, 4.0, 1.0]


class Lost:
    """A step that kills its rank in the fourth epoch of the first attempt."""

    def __init__(self, rank):
        self.rank = rank
        self.epochs = 0

    def __call__(self, model, loader, criterion, optimizer, device, args):
        self.epochs += 1
        if kd.context().attempt == 0 and kd.context().rank == self.rank and self.epochs == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return supervised.train_epoch(model, loader, criterion, optimizer, device, args)


def score(model, loader, criterion, device, args):
    args["epoch"] += 1
    return {"score": SCORES[args["epoch"] - 1]}


def trained(strategy, average, lost=None):
    model, data = net(hidden=8), labelled(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    count = {"epoch": 0}
    stop = EarlyStopping("eval/score", patience=3)
    job = kd.distribute(
        model, DataLoader(data, 8, shuffle=True), nn.CrossEntropyLoss(), optimizer, Lost(lost), state=[count],
        eval_data_loader=DataLoader(data, 8), eval_step=score, eval_args=count, epochs=6, seed=3, strategy=strategy,
        number_of_processes=2, threads=1, max_restarts=1, on="local", callbacks=[stop, ModelCheckpoint("eval/score"), average],
    )  # fmt: skip
    try:
        result = job.result()
        assert job.status.attempt == (lost is not None)
        assert (result.epochs, result.stopped_early, result.best_epoch) == (5, True, 2)
        assert any(note.startswith("Stopped early, after epoch 5 of 6: eval/score") for note in job.status.notes)
        assert any("Epoch 2 was the best (eval/score 3)" in note for note in job.status.notes)
        return model.state_dict(), job.best_state_dict(), job.averaged_state_dict()
    finally:
        job.delete()


@pytest.mark.parametrize(
    ("strategy", "average"),
    [
        (None, EMA(0.9)),
        pytest.param("fsdp", EMA(0.9), marks=pytest.mark.nightly),
        pytest.param("fsdp", SWA(start=2), marks=pytest.mark.nightly),
    ],
)
def test_a_restart_changes_nothing(strategy, average):
    whole, resumed = trained(strategy, average), trained(strategy, average, lost=1)
    for one, other in zip(whole, resumed, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def fail_late(epoch, metrics, model):
    if epoch == 3:
        raise RuntimeError("no disk")


def test_the_best_weights_of_a_failed_job_are_in_its_checkpoint():
    model, *others = classifying()
    callbacks = [ModelCheckpoint("train/loss"), fail_late]
    job = kd.distribute(model, *others, epochs=4, number_of_processes=1, on="local", callbacks=callbacks)
    try:
        assert "no disk" in str(job.exception())
        assert job.best_state_dict(partial=True).keys() == model.state_dict().keys()
    finally:
        job.delete()


def test_weights_that_no_callback_has_kept_are_not_there():
    job = kd.distribute(*classifying(), number_of_processes=1, on="local")
    try:
        job.wait()
        with pytest.raises(ResultUnavailableError, match="ModelCheckpoint"):
            job.best_state_dict()
        with pytest.raises(ResultUnavailableError, match=r"EMA\(\) or SWA\(\)"):
            job.averaged_state_dict()
    finally:
        job.delete()
