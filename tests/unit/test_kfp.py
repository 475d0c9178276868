"""Components of Kubeflow Pipelines without kfp: what is refused, and what a step does with its job. With kfp: tests/cluster."""

import importlib.util
import os
import signal
import sys
import time
import types

import pytest
import torch

import kale_dist as kd
from kale_dist import kfp
from kale_dist.errors import ConfigError, JobFailedError, KaleDistError

pytestmark = pytest.mark.usefixtures("own_state")


class Artifact:
    def __init__(self, path=None):
        self.path = path
        self.metadata = {}

    def log_metric(self, name, value):
        self.metadata[name] = value


@pytest.fixture
def dsl(monkeypatch):
    """A kfp that gives back what it was given."""
    made = types.ModuleType("kfp.dsl")
    made.component = lambda function, **options: (function, options)
    made.Output, made.Model, made.Metrics = {"Model": "model", "Metrics": "metrics"}, "Model", "Metrics"
    monkeypatch.setitem(sys.modules, "kfp", types.ModuleType("kfp"))
    monkeypatch.setitem(sys.modules, "kfp.dsl", made)


def step(work, model, metrics):
    """Run a step as the text that kfp writes into a file of its own."""
    names = {"__name__": "ephemeral_component", "kd": kd, "work": work}
    exec("def call(count):\n    return kd.launch(work, number_of_processes=count)\n", names)
    kfp.run(names["call"], {"count": 1}, model, metrics)
    assert names["call"].__module__ == "__main__"


def plain(epochs: int, lr: float = 0.1):
    return kd.launch(print, epochs, lr)


def takes_all(*values: int):
    return values


def takes_model(model: str):
    return model


@pytest.mark.skipif(importlib.util.find_spec("kfp") is not None, reason="kfp is installed")
def test_without_kfp_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install kfp"):
        kfp.component(plain)


def test_options_go_to_kfp_and_the_function_keeps_its_name(dsl):
    function, options = kfp.component(base_image="team/kale:1")(plain)
    assert function.__name__ == "plain"
    assert options["base_image"] == "team/kale:1"
    assert [helper.__name__ for helper in options["additional_funcs"]] == ["plain_call"]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (takes_all, "without names"), (takes_model, "an output of the component"), (lambda: None, "not a plain function"),
        (print, "no source"), (Artifact, "not a plain function"), (3, "no source"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_component_is_refused(dsl, fn, words):
    with pytest.raises(ConfigError, match=words):
        kfp.component(fn)


def test_a_step_saves_the_value_and_the_last_metrics(tmp_path, capsys):
    def work():
        print("at work")
        for loss in (0.5, 0.25):
            kd.report(loss=loss)
        return {"weight": torch.ones(2)}

    model, metrics = Artifact(str(tmp_path / "model")), Artifact()
    step(work, model, metrics)
    assert torch.equal(torch.load(model.path, weights_only=True)["weight"], torch.ones(2))
    assert metrics.metadata == {"loss": 0.25}
    assert model.metadata["job"].startswith("local://")
    assert "[0] at work" in capsys.readouterr().out


def test_a_step_that_is_terminated_deletes_its_job(tmp_path):
    step_process, before = os.getpid(), [job.ref for job in kd.jobs(on="local")]

    def work():
        os.kill(step_process, signal.SIGTERM)
        time.sleep(600)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        step(work, Artifact(str(tmp_path / "model")), Artifact())
    assert left.value.code == 143
    assert [job.ref for job in kd.jobs(on="local")] == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_step_that_is_terminated_deletes_jobs_that_its_function_has_not_returned():
    step_process, before = os.getpid(), [job.ref for job in kd.jobs(on="local")]

    def work(ends):
        if ends:
            os.kill(step_process, signal.SIGTERM)
        time.sleep(600)

    def make():
        kd.launch(work, False, number_of_processes=1)
        job = kd.launch(work, True, number_of_processes=1)
        job.wait()
        return job

    with pytest.raises(SystemExit), kfp.in_pod(make):
        pass
    assert [job.ref for job in kd.jobs(on="local")] == before


def test_a_function_that_ends_by_itself_keeps_its_jobs():
    def make():
        job = kd.launch(print, number_of_processes=1)
        job.wait()
        sys.exit(f"not good enough: {job.ref}")

    with pytest.raises(SystemExit, match="not good enough") as left, kfp.in_pod(make):
        pass
    kd.attach(str(left.value).split()[-1]).delete()


def test_a_step_fails_with_its_job_and_without_one(tmp_path):
    def fail():
        raise ValueError("no data")

    with pytest.raises(JobFailedError, match="no data"):
        step(fail, Artifact(str(tmp_path / "model")), Artifact())
    with pytest.raises(KaleDistError, match="not a job"):
        kfp.run(eval("lambda: None", {"__name__": "x"}), {}, Artifact(), Artifact())
