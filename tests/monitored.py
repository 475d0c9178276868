"""A training with everything that is monitored, for tests in containers and in pods."""

import pytest
from trainings import classifying

import kale_dist as kd


def train(on, lr=0.1, **options):
    """Train a small model with two processes, and evaluate it."""
    given = classifying(64, 4, batch_size=8, lr=lr)
    return kd.distribute(*given, eval_data_loader=given[1], number_of_processes=2, seed=1, on=on, **options)


def series(folder):
    """How many values each series has that TensorBoard finds in a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
