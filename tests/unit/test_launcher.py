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
        "train_args": [],
    }
    assert form.missing(found) == []
    assert form.find({**namespace, "settings": {"lr": 0.1}, "Out": {}})["train_args"] == ["settings"]


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
    assert {"train_args": None, **given} == arguments


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
        (
            {
                "on": "kubernetes",
                "namespace": "team",
                "queue": "gpus",
                "kind": "job",
                "gpus": "2",
                "keep_warm": "10 min",
            },
            "    on=kd.Kubernetes(\n        resources={'gpus': 2},\n        keep_warm='10 min',\n        namespace='team',\n        queue='gpus',\n        kind='job',\n",
        ),
        (
            {"on": "docker", "namespace": "left over", "gpus": "1"},
            "on=kd.Docker(\n        resources={'gpus': 1},\n    )",
        ),
        ({"criterion": "torch.nn.MSELoss()"}, "None, None, torch.nn.MSELoss(), None,"),
        ({"name": "it's"}, 'name="it\'s"'),
        ({"resume_from": "train-net-1"}, "resume_from='train-net-1'"),
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


def step_with_loss(model, data_loader, loss_fn, optimizer, device, args):
    for inputs, targets in data_loader:
        loss_fn(model(inputs), targets).backward()


def step_with_or_without(model, data_loader, loss_fn, optimizer, device, args):
    for inputs, targets in data_loader:
        (loss_fn(model(inputs), targets) if loss_fn is not None else model(inputs).mean()).backward()


@pytest.mark.parametrize(
    ("step", "criterion", "field"),
    [
        (step_with_loss, "", "criterion"),
        (step_with_loss, "nn.MSELoss()", None),
        (step_with_or_without, "", None),
        (train_one_epoch, "", None),
        (None, "", "criterion"),
        (None, "torch.nn.MSELoss()", None),
    ],
)
def test_a_loss_that_stands_inline_in_the_call_can_be_chosen_and_one_that_is_needed_is_asked_for(
    namespace, step, criterion, field
):
    namespace = {**namespace, "step": step, "nn": nn}
    launcher = form.LauncherForm(namespace)
    launcher.choice = {**launcher.choice, "train_step": "step" if step else "", "criterion": criterion}
    assert launcher.problem.get("field") == field
    (losses,) = [one["options"] for one in launcher.fields if one["name"] == "criterion"]
    assert "torch.nn.CrossEntropyLoss()" in [value for value, _ in losses]


def test_places_with_images_say_that_one_is_needed(namespace, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("KALE_DIST_IMAGE", "KALE_DIST_REGISTRY", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    launcher = form.LauncherForm(namespace)
    for on, image, field in (("docker", "", "image"), ("docker", "team/torch:2", None), ("local", "", None)):
        launcher.choice = {**launcher.choice, "on": on, "image": image}
        assert launcher.problem.get("field") == field
    monkeypatch.setenv("KALE_DIST_IMAGE", "team/torch:2")
    launcher.choice = {**launcher.choice, "on": "docker"}
    assert not launcher.problem


def test_only_a_cluster_has_namespaces_queues_and_kinds(namespace):
    only = {one["name"]: one.get("only") for one in form.LauncherForm(namespace).fields}
    assert [only[name] for name in ("namespace", "queue", "kind")] == [["kubernetes"]] * 3
    assert only["image"] == only["gpus"] == ["docker", "kubernetes"]
    assert only["epochs"] is None
