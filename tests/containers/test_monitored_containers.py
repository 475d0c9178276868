"""Callbacks, a tracker and a sweep, in containers."""

import pytest
import torch
from monitored import series, train
from torch import nn

import kale_dist as kd
from kale_dist.callbacks import EMA, EarlyStopping, ModelCheckpoint
from kale_dist.trackers import TensorBoard

pytestmark = pytest.mark.nightly


def test_all_of_it_comes_back_from_containers(image, tmp_path):
    stop = EarlyStopping("train/loss", mode="max", patience=2)
    job = train(
        kd.Docker(image=image), epochs=9, track=TensorBoard(folder=str(tmp_path)),
        callbacks=[stop, ModelCheckpoint("eval/loss"), EMA(0.5)],
    )  # fmt: skip
    result = job.result()
    assert (result.epochs, result.stopped_early, result.best_epoch) == (3, True, 3)
    assert torch.equal(job.best_state_dict()["weight"], job.state_dict()["weight"])
    assert not torch.equal(job.averaged_state_dict()["weight"], job.state_dict()["weight"])
    found = series(tmp_path / job.name)
    assert (found["train/loss"], found["pace/lr"], found["strategy/collective_s"]) == (3, 3, 3)


def test_a_sweep_runs_its_trials_in_containers(image):
    on = kd.Docker(image=image)
    sweep = kd.sweep(lambda trial: train(on, trial.suggest_float("lr", 0.01, 1.0)), trials=2, metric="eval/loss")
    best = sweep.wait(400)
    assert [trial.state for trial in sweep.trials] == ["complete", "complete"]
    assert best.job.ref.startswith("docker://")
    assert isinstance(best.model, nn.Linear)
