"""A training has a curve while its first epoch runs, and with an epoch's end the losses of all its batches."""

import itertools
import time

import pytest
import torch
from torch import nn
from trainings import classifying

import kale_dist as kd
from kale_dist.job.view import curves


def slowly(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        # Ranks send their progress ten times a second.
        time.sleep(0.03)
    return {"loss": 0.0}


@pytest.fixture
def started():
    """Starts trainings that are deleted after the test."""
    jobs = []

    def start(*args, **options):
        jobs.append(kd.distribute(*args, number_of_processes=2, threads=1, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
        job.delete()


def test_however_short_a_training_is_its_curve_has_all_batches(started):
    model, loader, criterion, optimizer = classifying(160, batch_size=2, lr=0.0)
    whole = [criterion(model(x), y).item() for x, y in loader]
    job = started(model, loader, criterion, optimizer, epochs=2)
    job.result()
    losses = job.status.losses
    assert [(one.epoch, one.step) for one in losses] == [(e, s) for e in (1, 2) for s in range(1, 41)]
    # Both ranks have a batch of the loader in each step.
    means = [(one + other) / 2 for one, other in zip(whole[::2], whole[1::2], strict=True)]
    assert [one.loss for one in losses] == pytest.approx(means * 2, rel=1e-4)
    (loss, *_) = curves.collect(job.status.metrics, losses)
    batches, epochs = loss.series
    assert [x for x, _ in batches.points] == [step / 40 for step in range(1, 81)]
    assert (batches.is_faint, batches.last) == (True, batches.points[-1][1])
    assert epochs.points[-1] == (2.0, epochs.last)


@pytest.mark.nightly
def test_of_a_long_training_ever_fewer_batches_are_kept_and_none_beside_the_loader(started):
    def quick(model, data_loader, criterion, optimizer, device, args):
        criterion(torch.zeros(1), torch.ones(1))
        for x, _ in data_loader:
            criterion(x[0], x[0] + 1)

    _, _, _, optimizer = given = classifying(6000, batch_size=1)
    job = started(given[0], given[1], nn.L1Loss(), optimizer, quick, epochs=2)
    job.result()
    assert job.status.losses[0].step > 0
    counts = [sum(1 for _ in some) for _, some in itertools.groupby(job.status.losses, lambda one: one.epoch)]
    assert 700 <= counts[0] <= 800
    assert 350 <= counts[1] <= 450


def test_an_epoch_that_runs_has_a_curve_whose_points_are_no_metrics(started):
    job = started(*classifying(160, batch_size=2), slowly)
    while len(losses := job.status.losses) < 3:
        assert not job.status.is_final
        time.sleep(0.05)
    assert all(one.epoch == 1 and 1 < one.step <= one.steps == 40 for one in losses)
    steps = [one.step for one in losses]
    assert steps == sorted(steps)
    assert len(curves.collect((), losses)) == 1
    job.result()
    assert [row["source"] for row in job.metrics] == ["train"]
