"""Every argument of the public calls, given nonsense: it is refused at the call, by a sentence, and nothing is touched."""

import dataclasses
import inspect
import os
import pathlib
import re
import sys

import numpy as np
import pytest
import torch
from trainings import classifying

import kale_dist as kd
from kale_dist import sweeps
from kale_dist.calls import starting
from kale_dist.errors import ConfigError, JobNotFoundError


class Unspeakable:
    def __repr__(self):
        raise RuntimeError


class Incomparable:
    __hash__ = None

    def __eq__(self, other):
        raise ValueError

    def __bool__(self):
        raise ValueError


NONSENSE = (
    None, -1, 10**30, -0.5, float("nan"), "", "ü漢字\u202e", "a\0b", "/does/not/exist", "x" * 5000, b"bytes", True, [None], {1: 2},
    {"a": {"b": [1]}}, {1}, (1, 2), [["a"]], object(), int, torch.zeros(3), np.float32(1), np.arange(3), 1j,
    pathlib.Path("/does/not/exist"), kd.Local, iter([]), Incomparable(), torch.nn.Linear(2, 2), "pvc://", "://",
)  # fmt: skip


ANYTHING = ("train_args", "eval_args")
"""Arguments that are the user's own, whatever they are."""


class AcceptedError(Exception):
    pass


class NoInit(torch.nn.Module):
    def __init__(self):
        pass


def work(number=1):
    return number


def training(**changes):
    names = ("model", "train_data_loader", "criterion", "optimizer")
    return kd.distribute(**{**dict(zip(names, classifying(), strict=True)), **changes})


def on(place):
    return lambda **given: kd.launch(work, on=place(**{"image": "team/torch:2", **given}))


def monitoring(callback):
    return lambda **given: training(callbacks=[callback(**{"monitor": "train/loss", **given})])


def averaging(callback):
    return lambda **given: training(callbacks=[callback(**given)])


def strategy(kind):
    return lambda **given: training(strategy=kind(**given))


CALLS = {
    "distribute": (training, list(inspect.signature(kd.distribute).parameters)),
    "launch": (
        lambda **given: kd.launch(given.pop("fn", work), **given),
        ["fn", "number_of_processes", "cuda", "name", "on", "environment", "track"],
    ),
    "render": (lambda **given: kd.render(given["fn"]), ["fn"]),
    "attach": (lambda **given: kd.attach(**{"ref": "local://there-is-none", **given}), ["ref", "trust"]),
    "jobs": (kd.jobs, ["on"]),
    **{
        place.__name__: (on(place), [field.name for field in dataclasses.fields(place)])
        for place in (kd.Docker, kd.Kubernetes)
    },
    **{
        one.__name__: (monitoring(one), [field.name for field in dataclasses.fields(one)])
        for one in (kd.callbacks.EarlyStopping, kd.callbacks.ModelCheckpoint)
    },
    **{
        one.__name__: (averaging(one), [field.name for field in dataclasses.fields(one)])
        for one in (kd.callbacks.EMA, kd.callbacks.SWA)
    },
    **{
        one.__name__: (strategy(one), [field.name for field in dataclasses.fields(one)])
        for one in (kd.strategies.DDP, kd.strategies.FSDP, kd.strategies.Gossip, kd.strategies.LocalSGD)
    },
}

NAMED_AS = {
    "distribute": ("optimizer",),
    "render": ("render",),
    **dict.fromkeys(("EarlyStopping", "ModelCheckpoint", "EMA", "SWA"), ("callbacks",)),
    **dict.fromkeys(("DDP", "FSDP", "Gossip", "LocalSGD"), ("strategy",)),
}
"""What a refusal may name beside the argument itself, as the verb has it: the object that the argument belongs to."""

touched = []
watching = []


def audit(event, args):
    """Note what would show that a call has written, started or connected something."""
    if not watching:
        return
    if event == "open":
        _, mode, flags = args
        is_written = bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
    else:
        is_written = event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir", "socket.connect")
    if is_written:
        touched.append((event, args))


@pytest.fixture(scope="module")
def audited():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "start", accept)
        with pytest.raises(AcceptedError):
            training()  # so that torch has imported what it imports late
    sys.addaudithook(audit)  # stays for the life of the process


def accept(*_):
    raise AcceptedError


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(starting, "start", accept)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("call", "argument"), [(call, name) for call, (_, names) in CALLS.items() for name in names])
@pytest.mark.filterwarnings("ignore")
def test_nonsense_is_refused_at_the_call_by_the_arguments_name(call, argument, audited):
    refusals = {}
    for index, value in enumerate(NONSENSE):
        touched.clear()
        watching.append(True)
        try:
            CALLS[call][0](**{argument: value})
        except ConfigError as error:
            refusals[index] = error
        except JobNotFoundError:
            touched.clear()
        except AcceptedError:
            pass
        finally:
            watching.clear()
        assert not touched, value
    of_no_use = {index for index, value in enumerate(NONSENSE) if type(value) in (object, complex, Incomparable)}
    assert of_no_use <= set(refusals) or argument in ANYTHING
    for error in refusals.values():
        assert re.match(r"\w+", error.argument)[0] in (argument, *NAMED_AS.get(call, ()))
        assert error.problem
        assert error.remedy


def test_a_model_whose_init_forgot_that_of_its_base_is_refused():
    with pytest.raises(ConfigError, match=r"Begin it with super\(\).__init__\(\)"):
        training(model=NoInit())


def test_a_long_value_is_not_repeated_in_its_refusal():
    with pytest.raises(ConfigError) as caught:
        training(epochs="x" * 5000)
    assert "an object of type str is not a whole number" in str(caught.value)


@pytest.mark.parametrize("argument", ["call", "metric", "trials", "parallel", "processes", "direction", "name"])
def test_a_sweep_refuses_nonsense(argument, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(sweeps, "_open", accept)
    for value in (-1, 1.5, "", " ", [], object(), np.arange(3), Unspeakable()):
        with pytest.raises(ConfigError):
            kd.sweep(**{"call": work, "metric": "loss", argument: value})
