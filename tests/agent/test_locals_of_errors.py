"""The local variables of a rank's error: where they come, and where texts never do."""

import json
import pickle

import pytest
from recorded import events_in

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.job import view
from kale_dist.job.handle import inside


def train(lr, token):
    import torch

    h = torch.zeros(3)
    h[0] = float("nan")
    return h @ torch.ones(4) * lr, token


@pytest.fixture
def failed(monkeypatch):
    made = []

    def fail(show_locals=""):
        monkeypatch.setenv("KALE_DIST_SHOW_LOCALS", show_locals)
        made.append(kd.launch(train, 0.5, "hunter2", number_of_processes=1))
        error = made[-1].exception()
        assert isinstance(error, JobFailedError)
        return made[-1], error

    yield fail
    for job in made:
        job.delete()


def event(job):
    found = events_in(inside(job).files.events.read_bytes())
    return next(one for one in found if one["event"] == "outcome")


def test_an_error_has_its_local_variables_in_its_text_its_attribute_the_log_and_folded_in_the_card(failed):
    job, error = failed()
    assert dict(error.locals[-1].values) == {
        "h": "Tensor (3,) float32 cpu, 0, 1 not finite", "lr": "0.5", "token": "str of 7"
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(error)).locals == error.locals
    for text in (str(error), str(job.logs())):
        assert "h = Tensor (3,) float32 cpu, 0, 1 not finite" in text
        assert "hunter2" not in text
    card = view.html(job.status)
    assert "<details" in card
    assert "1 not finite" in card.partition("<details")[2].partition("</details>")[0]


def test_texts_are_shown_if_they_are_asked_for_but_never_in_the_log(failed):
    job, error = failed("full")
    assert error.locals[-1].values["token"] == "'hunter2'"
    assert "token = 'hunter2'" in str(error)
    assert "hunter2" not in str(job.logs())
    assert "hunter2" not in job.status.reason
    assert "hunter2" in event(job)["locals"]


def test_they_can_be_switched_off(failed):
    job, error = failed("none")
    assert error.locals == ()
    assert "Tensor (3,)" not in str(error) + str(job.logs()) + json.dumps(event(job))
    assert "Local variables" not in view.html(job.status)
