"""Checkpoints that cannot be resumed from: the training fails, and says why. It never begins over them."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
import trainings
from torch import nn
from torch.utils.data import DataLoader
from trainings import labelled

from kale_dist.wire import context
from kale_dist.worker.training import checkpoint, supervised
from kale_dist.worker.training.contents import Checkpoint


def fit(model, epochs=1, **options):
    torch.manual_seed(5)
    return trainings.fit(model, DataLoader(labelled(12), 4), epochs=epochs, **options)


def attempt(number, folder, max_restarts=3):
    """Make this forked process rank 0 of a job's attempt; gives a function that reads its events."""
    read, write = os.pipe()
    place = context.Context(job="j", in_job=True, folder=folder, attempt=number, max_restarts=max_restarts)
    context.activate(place, write)

    def events():
        os.close(write)
        with os.fdopen(read) as pipe:
            return [json.loads(line) for line in pipe]

    return events


def after(folder, spoil):
    """Train two epochs, spoil something, train in the next attempt."""
    attempt(0, folder)
    fit(nn.Linear(3, 2), epochs=2)
    model, options = spoil(folder / "checkpoint")
    (folder / "checkpoint.1").unlink(missing_ok=True)
    events = attempt(1, folder)
    result = fit(model, epochs=3, **options)
    return result.epochs, events()


def nothing(path):
    return nn.Linear(3, 2), {}


def killed_while_writing(path):
    path.with_name(f".{path.name}.0123.part").write_bytes(b"half")
    return nn.Linear(3, 2), {}


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])
    return nn.Linear(3, 2), {}


def is_gone(path):
    path.unlink()
    return nn.Linear(3, 2), {}


def without_the_rest(path):
    found = checkpoint.read(path)
    checkpoint.save(path, checkpoint.collect(dataclasses.replace(found, scheduler=None, resume=None, callbacks={})))
    return nn.Linear(3, 2), {}


def another_shape(path):
    return nn.Linear(3, 4), {}


def another_name(path):
    return nn.Sequential(nn.Linear(3, 2)), {}


def another_optimizer(path):
    model = nn.Linear(3, 2)
    return model, {"optimizer": torch.optim.SGD([model.weight], lr=0.1)}


@pytest.mark.parametrize(
    ("spoil", "behind", "said"),
    [
        (nothing, 2, "resumes after epoch 2"),
        (killed_while_writing, 2, "resumes after epoch 2"),
        (is_gone, 0, "starts from the beginning"),
    ],
)
def test_what_is_whole_is_taken_up(ranks, tmp_path, spoil, behind, said):
    epochs, events = ranks(1, after, tmp_path, spoil, keep=False)[0]
    assert epochs == 3
    assert [event["epoch"] for event in events if event["event"] == "resumed"] == [behind]
    trained = [event["epoch"] for event in events if event.get("source") == "train"]
    assert trained == list(range(behind + 1, 4))
    assert any(said in event["text"] for event in events if event["event"] == "note")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "checkpoint.1"}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_short, "cannot be read"),
        (without_the_rest, "only what a result needs"),
        (another_shape, r"weight of the model has the shape \(4, 3\), and \(2, 3\) in the checkpoint"),
        (another_name, "of the model is"),
        (another_optimizer, "the optimizer has other parameters: 1, and 2 in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_not_begun_over(ranks, tmp_path, spoil, said):
    with pytest.raises(Exception, match=rf"cannot resume: .*{said}"):
        ranks(1, after, tmp_path, spoil, keep=False)
    assert (tmp_path / "checkpoint").exists()


def with_a_rate_of_numpy(folder):
    """Train two epochs, in which the step sets the learning rate from an array, and a third in the next attempt."""
    rates = []

    def step(model, loader, criterion, optimizer, device, args):
        if len(rates) < 2:
            optimizer.param_groups[0]["lr"] = np.linspace(0.5, 0.25, 2)[len(rates)]
        rates.append(optimizer.param_groups[0]["lr"])
        return supervised.train_epoch(model, loader, criterion, optimizer, device)

    for number in range(2):
        events = attempt(number, folder)
        fit(nn.Linear(3, 2), epochs=2 + number, train_step=step)
    return rates, [event["text"] for event in events() if event["event"] == "note"]


def test_a_learning_rate_that_is_a_number_of_numpys_is_resumed(ranks, tmp_path):
    rates, notes = ranks(1, with_a_rate_of_numpy, tmp_path, keep=False)[0]
    assert rates == [0.5, 0.25, 0.25]
    assert not any("Checkpoints do not hold" in text for text in notes)


def test_tensors_that_only_look_alike_are_kept_apart_and_tied_ones_once(tmp_path):
    value = torch.tensor([1 + 2j, 3 - 1j])
    state = {"plain": value, "conjugated": value.conj(), "tied": value, "part": value[:1]}
    path = tmp_path / "checkpoint"
    checkpoint.save(path, checkpoint.collect(Checkpoint(epoch=1, model=state)))
    found = checkpoint.read(path).model
    assert {name: one.tolist() for name, one in found.items()} == {name: one.tolist() for name, one in state.items()}
    assert found["tied"].data_ptr() == found["plain"].data_ptr()
