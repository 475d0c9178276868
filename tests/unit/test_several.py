"""`kd.jobs()` as a table, and `kd.compare`: what they show of jobs, and what they refuse."""

import json
import re

import pytest
import torch
import trainings
from fake_backend import FakeBackend

import kale_dist as kd
from kale_dist.calls import verbs
from kale_dist.errors import ConfigError, JobNotFoundError
from kale_dist.job import call_arguments
from kale_dist.job.handle import inside
from kale_dist.job.several import Jobs
from kale_dist.job.view import tables
from kale_dist.wire import StateName


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def trains(loss):
    def script(run):
        run.event("state", state=StateName.RUNNING)
        for epoch in (1, 2):
            for source in ("train", "eval"):
                values = [["loss", loss / epoch]]
                run.event("metrics", rank=None, values=values, epoch=epoch, source=source)
        run.returns(0, None)

    return script


def trained(lr, loss, **changes):
    job = kd.distribute(*trainings.classifying(lr=lr), number_of_processes=1, on=FakeBackend(trains(loss)), **changes)
    job.exception()
    return job


def failed():
    def raises(run):
        run.raises(0, ValueError("boom"))

    job = kd.launch(print, number_of_processes=1, on=FakeBackend(raises))
    job.exception()
    return job


def test_a_list_of_jobs_is_a_list_and_shows_itself_as_a_table():
    jobs = Jobs([trained(0.1, 1.0), failed()])
    assert isinstance(jobs, list)
    head, first, second = repr(jobs).splitlines()
    assert head.split()[:3] == ["job", "state", "ranks"]
    assert first.split()[:3] == ["0", jobs[0].name, "succeeded"]
    assert "eval/loss 0.5" in first
    assert second.split()[:3] == ["1", jobs[1].name, "failed"]
    drawn = jobs._repr_html_()
    assert drawn.count("<tr") == 3
    assert "eval/loss 0.5" in drawn


def test_the_list_of_all_jobs_is_such_a_list():
    assert isinstance(kd.jobs(), Jobs)
    assert repr(kd.jobs()) == "There are no jobs."


def test_only_the_newest_of_many_are_shown_with_their_numbers_in_the_list():
    job = failed()
    jobs = Jobs([job] * (tables.MAX_ROWS + 3))
    _, first, *_, last = repr(jobs).splitlines()
    assert first.split()[0] == "3"
    assert jobs[3] is job
    assert last == "and 3 older"


def test_the_list_is_filtered_by_state_and_name():
    good, bad = trained(0.1, 1.0), failed()
    jobs = Jobs([good, bad])
    assert jobs.filter(state="failed") == [bad]
    assert jobs.filter(name="train-*") == [good]
    assert jobs.filter(state="running") == []
    with pytest.raises(ConfigError, match="'running'"):
        jobs.filter(state="runing")


def test_jobs_are_compared_by_what_differs_and_by_their_metrics():
    jobs = [trained(0.1, 1.0, epochs=2), trained(0.5, 2.0, epochs=2), trained(0.5, 3.0, epochs=4)]
    comparison = kd.compare(*jobs)
    head, *rows, same = repr(comparison).splitlines()
    assert head.split() == ["job", "state", "epochs", "lr", "eval/loss", "train/loss"]
    assert [row.split()[3:] for row in rows] == [
        ["2", "0.1", "0.5000", "0.5000"],
        ["2", "0.5", "1", "1"],
        ["4", "0.5", "1.500", "1.500"],
    ]
    assert "optimizer=SGD" in same
    drawn = comparison._repr_html_()
    # One picture for each metric, with a line for each job, whose colour its row has, too.
    pictures = drawn.split("<svg")[1:]
    assert len(pictures) == 2
    lines = re.findall(r'<path d="M[^"]*L[^"]*" fill="none" stroke="(#\w+)"', pictures[0])
    assert len(set(lines)) == 3
    table = drawn[drawn.index("<tbody>") :]
    assert all(colour in table for colour in lines)


def test_more_jobs_than_lines_are_said():
    jobs = [trained(0.1, float(number)) for number in range(1, 9)]
    drawn = kd.compare(*jobs)._repr_html_()
    assert "the first 6 of 8 jobs" in drawn
    assert all(job.name in drawn for job in jobs)


@pytest.mark.parametrize("given", [0, 1, 2, 3.5, "two words"])
def test_what_cannot_be_compared_is_refused(given):
    job = failed()
    with pytest.raises(ConfigError) as caught:
        kd.compare(*([job] * given if isinstance(given, int) else [job, given]))
    assert caught.value.argument in ("jobs", "name", "ref")


def test_a_name_of_no_job_is_not_found():
    with pytest.raises(JobNotFoundError, match="no-such"):
        kd.compare(failed(), "no-such")


def test_a_list_of_jobs_and_their_references_are_compared():
    jobs = [trained(0.1, 1.0), trained(0.5, 2.0)]
    assert kd.compare(jobs).jobs == tuple(jobs)
    assert kd.compare([jobs[0]], jobs[1]).jobs == tuple(jobs)


def test_jobs_are_compared_by_their_names(monkeypatch):
    jobs = {name: trained(lr, 1.0, name=name) for name, lr in (("one", 0.1), ("other", 0.5))}
    monkeypatch.setattr(verbs, "attach", jobs.__getitem__)
    assert kd.compare("one", "other").jobs == tuple(jobs.values())


def differing(**changes):
    """The columns in which two jobs differ, of which the second has other arguments."""

    def job(
        weight_decay=0.0, bias_lr=0.1, gamma=0.5, args=None, step=trainings.train_step, max_restarts=0, strategy="ddp"
    ):
        model, loader, criterion, _ = trainings.classifying()
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": bias_lr}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=weight_decay)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=one) for one in (0.5, gamma)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [3])
        started = kd.distribute(
            model, loader, criterion, optimizer, step, scheduler=scheduler, train_args=args, number_of_processes=1,
            max_restarts=max_restarts, strategy=strategy, on=FakeBackend(trains(1.0)),
        )  # fmt: skip
        started.exception()
        return started

    head, first, second, *_ = repr(kd.compare(job(), job(**changes))).splitlines()
    shown = head.split()[2 : len(head.split()) - 2]
    assert first != second
    return shown


def other_step(model, data_loader, criterion, optimizer, device, args):
    return 0.0


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"weight_decay": 0.3}, ["weight_decay"]),
        ({"bias_lr": 0.3}, ["lr"]),
        ({"gamma": 0.9}, ["scheduler.1.gamma"]),
        ({"args": {"noise": {"scale": 0.3}}}, ["train_args.noise.scale"]),
        ({"step": other_step}, ["train_step"]),
        ({"max_restarts": 2}, ["max_restarts"]),
        ({"strategy": kd.strategies.LocalSGD(sync_every=7)}, ["strategy"]),
    ],
)
def test_each_argument_in_which_jobs_differ_has_a_column(changes, columns):
    assert differing(**changes) == columns


def test_texts_of_train_args_stay_out_of_trackers():
    job = trained(0.1, 1.0, train_step=trainings.train_step, train_args={"token": "s3cret", "noise": 0.5})
    recorded = json.loads(inside(job).files.arguments.read_text())
    assert recorded["train_args.token"] == "s3cret"
    kept = call_arguments.for_trackers(recorded)
    assert kept["train_args.noise"] == 0.5
    assert "train_args.token" not in kept
    assert kept["optimizer"] == "SGD"


def test_the_arguments_stay_beside_the_job_for_other_processes():
    job = trained(0.25, 1.0)
    for one in (job, job.retry()):
        assert json.loads(inside(one).files.arguments.read_text())["lr"] == 0.25
