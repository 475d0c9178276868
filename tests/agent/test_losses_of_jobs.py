"""A training has a curve while its first epoch runs: its head sends the mean of the ranks' losses now and then."""

import time

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


def test_a_training_of_one_epoch_has_a_curve_whose_points_are_no_metrics():
    job = kd.distribute(*classifying(160, batch_size=2), slowly, number_of_processes=2, threads=1)
    job.result()
    losses = job.status.losses
    assert len(losses) >= 3
    assert all(one.epoch == 1 and 1 < one.step <= one.steps == 40 for one in losses)
    steps = [one.step for one in losses]
    assert steps == sorted(steps)
    (curve,) = curves.collect(job.status.metrics, losses)
    assert len(curve.drawn) == 1
    assert [row["source"] for row in job.metrics] == ["train"]
    job.delete()
