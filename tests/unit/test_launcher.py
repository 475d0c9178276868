"""What the launcher form finds in a notebook, and the call that it writes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.calls import form, verbs
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
    found = form.find(namespace)
    assert found == {
        "model": ["model", "teacher"],
        "train_data_loader": ["train_loader", "test_loader"],
        "eval_data_loader": ["test_loader", "train_loader"],
        "criterion": ["criterion", "my_loss"],
        "optimizer": ["optimizer"],
        "train_step": ["train_one_epoch"],
        "eval_step": ["eval_step"],
    }
    assert form.missing(found) == []


def test_the_guessed_call_is_one_that_would_run(namespace):
    choice = form.guess(form.find(namespace))
    verbs.check(**form.arguments(choice, namespace))
    text = form.code({**choice, "number_of_processes": "2"})
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
    arguments = form.arguments({**choice, "number_of_processes": "2"}, namespace)
    positional = given.pop("positional")
    assert positional == tuple(
        arguments.pop(name) for name in ("model", "train_data_loader", "criterion", "optimizer", "train_step")
    )
    assert given == arguments


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ({"on": "kubernetes"}, "    on='kubernetes',\n"),
        (
            {"on": "kubernetes", "image": " team/torch:2 ", "cpu": "0.5", "memory": "2Gi"},
            "    on=kd.Kubernetes(\n        image='team/torch:2',\n        resources={'cpu': 0.5, 'memory': '2Gi'},\n    ),\n",
        ),
        (
            {"on": "docker", "volumes": "/data=here, /x=there:ro"},
            "volumes={'/data': 'here', '/x': 'there:ro'},\n    ),",
        ),
        (
            {"on": "docker", "packages": "einops, timm>=1,<2, kale[a,b]"},
            "on=kd.Docker(\n        packages=['einops', 'timm>=1,<2', 'kale[a,b]'],\n",
        ),
        ({"on": "docker", "packages": "auto"}, "packages='auto'"),
        ({"name": "it's"}, 'name="it\'s"'),
        ({"epochs": "many"}, "epochs='many'"),
        ({"cuda": "yes"}, "cuda=True"),
        ({"cuda": "no"}, "cuda=False"),
        ({"on": "local", "image": "left over"}, "None, None, None, None,\n)"),
    ],
)
def test_what_is_filled_in_is_written(choice, written):
    assert written in form.code(choice)


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
    choice = {**form.guess(form.find(namespace)), **changed}
    with pytest.raises(ConfigError) as error:
        verbs.check(**form.arguments(choice, namespace))
    assert error.value.argument == argument


def test_an_empty_notebook_says_what_is_looked_for():
    assert form.missing(form.find({})) == ["a model", "a DataLoader", "an optimizer"]
    assert form.guess(form.find({}))["model"] == ""


def test_outside_of_a_notebook_there_is_no_form():
    with pytest.raises(ConfigError, match="no notebook"):
        kd.form()


def test_the_form_advises_a_strategy_and_writes_the_chosen_one():
    model = torch.nn.Linear(4, 2)
    namespace = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    choice = {"model": "model", "optimizer": "optimizer", "number_of_processes": "2", "memory": "4Gi"}
    assert "Do not distribute this, it is too small" in form.advice(choice, namespace)
    assert form.advice({**choice, "number_of_processes": "many"}, namespace) == ""
    assert form.advice({**choice, "memory": "4 bananas"}, namespace) == ""
    assert form.advice({}, namespace) == ""
    assert "strategy='pipeline'" in form.code({**choice, "strategy": "pipeline"})
