"""What user code may ask and tell, in a rank and outside one."""

from __future__ import annotations

import math
import os
import pathlib

import numpy as np
import pytest
import torch

from kale_dist import wire
from kale_dist.errors import ConfigError
from kale_dist.wire import context
from kale_dist.wire.events import RankProgress


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """This process as rank 1 of 2; gives a function that reads its events."""
    reader, writer = os.pipe()
    monkeypatch.setattr(context, "_current", context.Context())
    monkeypatch.setattr(context, "_channel", None)
    place = context.Context(rank=1, world_size=2, job="one", attempt=3, in_job=True, folder=tmp_path)
    context.activate(place, writer, attempt=3)
    os.set_blocking(reader, False)

    def events():
        try:
            return list(wire.decode_json_lines(os.read(reader, 1 << 20)))
        except BlockingIOError:
            return []

    yield events
    os.close(reader)
    os.close(writer)


def progress(step, *, epoch=1, phase="train", steps=1000):
    context.emit(RankProgress(phase=phase, epoch=epoch, epochs=2, step=step, steps=steps))


def test_outside_a_job_all_is_harmless():
    assert context.context() == context.Context(rank=0, world_size=1, device="cpu", in_job=False)
    assert context.context().files is None
    context.report(loss=1.0)
    context.mark_progress()
    context.flush()


def test_a_rank_knows_its_place_and_files(rank, tmp_path):
    assert (context.context().rank, context.context().world_size, context.context().in_job) == (1, 2, True)
    assert context.context().files.checkpoint == pathlib.Path(tmp_path) / "checkpoint"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1), (0.5, 0.5), (True, 1), (torch.tensor(2.5), 2.5), (torch.tensor([3]), 3), (np.float32(0.25), 0.25),
        (np.int64(7), 7), (np.array([1.5]), 1.5), (math.inf, math.inf), (torch.tensor(1.0, requires_grad=True), 1.0),
    ],
)  # fmt: skip
def test_numbers_of_all_kinds_are_reported(rank, value, expected):
    context.report(loss=value)
    (event,) = rank()
    assert event | {"time": 0} == {
        "event": "metrics", "time": 0, "rank": 1, "attempt": 3, "values": [["loss", expected]],
    }  # fmt: skip


@pytest.mark.parametrize("value", ["0.5", None, [1], torch.ones(2), np.ones(3), 1j, object()])
def test_what_is_not_a_number_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"^accuracy"):
        context.report(accuracy=value)


@pytest.mark.parametrize(("name", "value"), [("", 1.0), ("x" * 201, 1.0), ("\x1b[2J\n", 1.0), ("a", 10**400)])
def test_names_and_numbers_that_no_curve_can_show_are_refused(rank, name, value):
    with pytest.raises(ConfigError) as refused:
        context.report(**{name: value})
    assert refused.value.argument == (name if name == "a" else "metrics")
    assert len(str(refused.value)) < 400
    assert not rank()


def test_a_report_of_nothing_is_nothing(rank):
    context.report()
    context.report(epoch=2)
    assert rank() == []


def test_epoch_and_step_say_where_values_belong(rank):
    context.report(loss=1.0, epoch=2, step=7)
    (event,) = rank()
    assert (event["epoch"], event["step"], event["values"]) == (2, 7, [["loss", 1.0]])


def test_progress_is_thinned_but_the_last_of_a_phase_arrives(rank):
    for step in range(1, 1001):
        progress(step)
    steps = [event["step"] for event in rank()]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert len(steps) < 50


def test_the_last_of_a_phase_of_unknown_length_arrives_before_the_next(rank):
    for step in range(1, 500):
        progress(step, steps=None)
    progress(1, phase="eval", steps=None)
    found = [(event.get("phase", "train"), event["step"]) for event in rank()]
    assert found[-2:] == [("train", 499), ("eval", 1)]


def test_other_events_come_after_the_progress_before_them(rank):
    progress(1)
    progress(2)
    context.report(loss=0.1)
    assert [event["event"] for event in rank()] == ["progress", "progress", "metrics"]


def test_signs_of_life_are_rare(rank):
    for _ in range(1000):
        context.mark_progress()
    assert 1 <= len(rank()) <= 3


def test_a_forked_child_of_a_rank_is_silent(rank):
    pid = os.fork()
    if pid == 0:
        context.report(loss=1.0)
        context.mark_progress()
        os._exit(0)
    os.waitpid(pid, 0)
    assert rank() == []


def test_what_is_only_shown_fails_nothing_where_a_package_lacks_it_and_the_log_says_so_once(rank, capsys, monkeypatch):
    from kale_dist.worker.rank.process_group import collectives

    monkeypatch.setattr(context, "_not_shown", set())
    group = object()
    assert [collectives(group, "cpu"), collectives(group, "cpu")] == [0, 0]
    said = capsys.readouterr().out
    assert said.count("Which rank waits for which cannot be shown with the versions of this environment") == 1
    assert "_get_backend" in said
    assert [event["event"] for event in rank()] == ["note"]


def test_other_errors_in_what_is_shown_are_errors():
    with pytest.raises(ZeroDivisionError), context.only_shown("The rate"):
        1 / 0  # noqa: B018
