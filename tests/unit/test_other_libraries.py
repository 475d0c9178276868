"""Objects of other libraries, here small look-alikes: what a call refuses says what to pass, and that trains."""

import types

import pytest
import torch
import trainings
from torch import nn
from torch.utils.data import DataLoader
from trainings import classifying, labelled, net, train_step

import kale_dist as kd


def render(**changes):
    names = ("model", "train_data_loader", "criterion", "optimizer")
    four = [changes.pop(name, own) for name, own in zip(names, classifying(), strict=True)]
    return kd.render(*four, number_of_processes=2, on="local", **changes)


FastaiLoader = type("DataLoader", (), {"__module__": "fastai.data.load", "__iter__": lambda self: iter(())})


class ScheduledOptim:
    """The wrapper of "The Annotated Transformer"."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.steps = 0

    def step_and_update_lr(self):
        self.steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        self._optimizer.step()


def frozen():
    model = net(hidden=4)
    model.requires_grad_(False)
    return model


def test_a_loader_of_another_library_is_named_with_its_module(refusal):
    assert refusal(lambda: render(train_data_loader=FastaiLoader())).argument == "train_data_loader"


def test_a_step_in_the_place_of_the_criterion_is_refused(refusal):
    assert refusal(lambda: render(criterion=train_step)).argument == "criterion"
    render(train_step=train_step)


def test_a_model_that_is_frozen_whole_is_refused_and_a_thawed_part_trains(refusal):
    model = frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert refusal(lambda: render(model=model, optimizer=optimizer)).argument == "model"
    model[2].requires_grad_(True)
    render(model=model, optimizer=optimizer)
    before = model[2].weight.detach().clone()
    trainings.fit(model, optimizer=optimizer)
    assert not model[2].weight.equal(before)


def test_a_wrapper_of_an_optimizer_is_refused_and_the_inner_one_trains(refusal):
    model = net()
    wrapper = ScheduledOptim(torch.optim.SGD(model.parameters(), lr=0.1))
    assert refusal(lambda: render(model=model, optimizer=wrapper)).argument == "optimizer"

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            wrapper.step_and_update_lr()
        return 0.5

    before = model.weight.detach().clone()
    trainings.fit(model, DataLoader(labelled(20), 4), wrapper._optimizer, train_step=step)
    assert wrapper.steps == 5
    assert wrapper._optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    assert not model.weight.equal(before)


class GivesLogits(nn.Linear):
    """Takes labels and gives an output with its loss, as a model of Hugging Face does."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return types.SimpleNamespace(loss=loss, logits=logits)


def test_a_model_with_its_own_loss_says_to_leave_the_criterion_out():
    with pytest.raises(TypeError) as caught:
        trainings.fit(GivesLogits(3, 2))
    assert any(
        "give no criterion (None), and batches as dicts with `labels`" in note for note in caught.value.__notes__
    )
    batches = [{"x": x, "labels": y} for x, y in labelled(16)]
    trainings.fit(GivesLogits(3, 2), DataLoader(batches, 4), criterion=None)
