"""What the launcher form finds in a notebook, and the call that it writes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist import calls, candidates
from kale_dist.errors import ConfigError


def train_one_epoch(model, data_loader, criterion, optimizer, device, args):
    """As `distribute` calls it."""


def eval_step(model, loader, criterion, device, args):
    """Likewise."""


def my_loss(output, target):
    return (output - target).mean()


@pytest.fixture
def namespace():
    model = nn.Linear(2, 1)
    return {
        "teacher": nn.Linear(2, 1), "model": model, "criterion": nn.MSELoss(), "my_loss": my_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "test_loader": DataLoader([1, 2]),
        "train_loader": DataLoader([1, 2]), "train_one_epoch": train_one_epoch, "eval_step": eval_step,
        "_hidden": nn.Linear(1, 1), "Net": nn.Linear, "number": 3, "print": print, "torch": torch,
    }  # fmt: skip


def test_objects_are_found_and_the_likeliest_comes_first(namespace):
    found = candidates.find(namespace)
    assert found.model == ("model", "teacher")
    assert found.train_data_loader == ("train_loader", "test_loader")
    assert found.eval_data_loader == ("test_loader", "train_loader")
    assert set(found.criterion) == {"criterion", "my_loss"}
    assert (found.optimizer, found.train_step, found.eval_step) == (
        ("optimizer",),
        ("train_one_epoch",),
        ("eval_step",),
    )
    assert found.missing == ()


def test_the_guessed_call_is_one_that_would_run(namespace):
    choice = candidates.guess(candidates.find(namespace))
    calls.check(**candidates.arguments(choice, namespace))
    text = candidates.code({**choice, "number_of_processes": "2"})
    assert text == (
        "job = kd.distribute(\n"
        "    model, train_loader, criterion, optimizer, train_one_epoch,\n"
        "    eval_data_loader=test_loader,\n"
        "    eval_step=eval_step,\n"
        "    epochs=1,\n"
        "    number_of_processes=2,\n"
        ")\n"
        "job"
    )
    # The text and the objects make one and the same call.
    given = {}
    exec(text, {**namespace, "kd": type("Recorder", (), {"distribute": lambda *a, **k: given.update(k, positional=a)})})
    arguments = candidates.arguments({**choice, "number_of_processes": "2"}, namespace)
    positional = given.pop("positional")
    assert positional == tuple(
        arguments.pop(name) for name in ("model", "train_data_loader", "criterion", "optimizer", "train_step")
    )
    assert given == arguments


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ({"on": "kubernetes", "cpu": "0.5", "memory": "2Gi"}, "resources={'cpu': 0.5, 'memory': '2Gi'}"),
        (
            {"on": "kubernetes", "volumes": "/data=claim, /x=pvc://b/c"},
            "on=kd.Kubernetes(volumes={'/data': 'claim', '/x': 'pvc://b/c'})",
        ),
        ({"on": "docker", "image": " registry/a:1 "}, "on=kd.Docker(image='registry/a:1')"),
        ({"on": "docker", "packages": "einops==0.8, rich"}, "on=kd.Docker(packages=['einops==0.8', 'rich'])"),
        ({"on": "kubernetes", "packages": "auto"}, "on=kd.Kubernetes(packages='auto')"),
        ({"on": "kubernetes"}, "on='kubernetes'"),
        ({"on": "local", "image": "left/over:1"}, "None, None, None, None,\n)"),
        ({"cuda": "no"}, "cuda=False"),
        ({"name": "it's"}, 'name="it\'s"'),
        ({"epochs": "many"}, "epochs='many'"),
        ({"cuda": "yes"}, "cuda=True"),
        ({"on": "local"}, "None, None, None, None,\n)"),
    ],
)
def test_what_is_filled_in_is_written(choice, written):
    assert written in candidates.code(choice)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"epochs": "0"}, "epochs"),
        ({"epochs": "1.5"}, "epochs"),
        ({"number_of_processes": "-1"}, "number_of_processes"),
        ({"name": "UPPER"}, "name"),
        ({"criterion": "", "train_step": ""}, "criterion"),
        ({"eval_data_loader": ""}, "eval_step"),
        ({"model": "gone"}, "model"),
    ],
)
def test_a_wrong_choice_names_its_field(namespace, changed, argument):
    choice = {**candidates.guess(candidates.find(namespace)), **changed}
    with pytest.raises(ConfigError) as error:
        calls.check(**candidates.arguments(choice, namespace))
    assert error.value.argument == argument


def test_an_empty_notebook_says_what_is_looked_for():
    assert candidates.find({}).missing == ("a model", "a DataLoader", "an optimizer")
    assert candidates.guess(candidates.find({}))["model"] == ""


def test_outside_of_a_notebook_there_is_no_form():
    with pytest.raises(ConfigError, match="no notebook"):
        kd.form()
