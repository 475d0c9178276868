"""Jobs over a fake backend: what the handle makes of what a backend says."""

import re
import threading
import time

import pytest
import trainings
from fake_backend import FakeBackend
from waiting import until

import kale_dist as kd
from kale_dist.cli import launch_command
from kale_dist.errors import (
    ConfigError,
    JobCancelledError,
    JobFailedError,
    JobTimeoutError,
    RankError,
    ResultUnavailableError,
    WaitTimeoutError,
)
from kale_dist.job.handle import inside
from kale_dist.wire import FailureCause, StateName
from kale_dist.worker.training.result import TrainingResult


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def nothing():
    pass


def start(script=None, processes=2):
    return kd.launch(nothing, number_of_processes=processes, on=FakeBackend(script))


def returning(run):
    for rank in range(2):
        run.line(rank, f"line {rank}")
        run.returns(rank, {"rank": rank})


def failing(run):
    run.raises(1, ValueError("boom"))


def ending(state, cause, reason="it is so"):
    return lambda run: run.event("state", state=state, cause=cause, reason=reason)


def until_cancelled(run):
    run.line(0, "ready")
    run.cancelled.wait(30)


def test_a_job_is_a_future_of_rank_0s_value():
    job = start(returning)
    assert job.result(timeout=30) == {"rank": 0}
    assert job.results() == [{"rank": 0}, {"rank": 1}]
    assert job.exception() is None
    assert job.done()
    assert job.wait() == job.status
    assert job.status.state is StateName.SUCCEEDED
    assert job.result() is job.result()


@pytest.mark.parametrize(
    ("ask", "meant"),
    [
        (lambda job: job.stop(), "Did you mean 'cancel'?"),
        (lambda job: job.history, "Did you mean 'metrics'?"),
        (lambda job: job.metrics["loss"], "[row['loss'] for row in job.metrics if 'loss' in row]"),
        (lambda _: TrainingResult(metrics={}, epochs=1)["loss"], "result.metrics['loss']"),
        (lambda _: kd.train, "Did you mean 'distribute'?"),
        (lambda _: kd.launch(nothing, on="cluster"), "Did you mean 'kubernetes'?"),
    ],
)
def test_names_of_other_libraries_are_answered_with_what_was_meant(ask, meant):
    with pytest.raises((AttributeError, TypeError, kd.KaleDistError), match=re.escape(meant)):
        ask(start(returning))


def test_it_knows_its_name():
    job = start(returning)
    assert job.name.startswith("nothing-")
    assert job.ref == f"fake://{job.name}"
    job.wait()
    assert repr(job) == f"<Job {job.ref} succeeded>"
    assert job.spec.topology.number_of_processes == 2


def test_a_failure_has_the_ranks_own_exception_as_its_cause(capsys):
    job = start(failing)
    status = job.wait()
    assert status.state is StateName.FAILED
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "Rank 1 raised ValueError: boom" in said
    with pytest.raises(JobFailedError, match="boom") as caught:
        job.result()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.ref == job.ref
    error = job.exception()
    assert isinstance(error, JobFailedError)
    assert error.__cause__ is caught.value.__cause__
    with pytest.raises(JobFailedError):
        job.results()


@pytest.mark.parametrize(
    ("state", "cause", "kind"),
    [
        (StateName.FAILED, FailureCause.DIED, JobFailedError), (StateName.FAILED, FailureCause.LEFT, JobFailedError),
        (StateName.FAILED, FailureCause.NOT_STARTED, JobFailedError),
        (StateName.FAILED, FailureCause.AGENT_DIED, JobFailedError),
        (StateName.FAILED, FailureCause.TIMEOUT, JobTimeoutError),
        (StateName.FAILED, FailureCause.STALLED, JobTimeoutError),
        (StateName.CANCELLED, FailureCause.USER, JobCancelledError),
        (StateName.CANCELLED, FailureCause.KERNEL_ENDED, JobCancelledError),
    ],
)  # fmt: skip
def test_each_bad_end_has_its_error_and_says_why(state, cause, kind):
    job = start(ending(state, cause))
    with pytest.raises(kind, match="it is so") as caught:
        job.result()
    assert type(caught.value) is kind
    assert state is StateName.CANCELLED or isinstance(caught.value.__cause__, RankError)


def test_a_wait_that_is_too_short_leaves_the_job_running():
    job = start(until_cancelled)
    for call in (job.wait, job.result, job.results, job.exception):
        with pytest.raises(WaitTimeoutError):
            call(timeout=0.01)
    assert not job.done()
    job.cancel()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result()


def test_metrics_are_rows_for_a_table():
    pandas = pytest.importorskip("pandas")

    def script(run):
        run.event("metrics", rank=1, values=[["loss", 0.5]], step=3, source="report")
        run.event("metrics", rank=None, values=[["loss", 0.25], ["accuracy", 1]], epoch=1, source="train")

    job = start(script)
    job.wait()
    table = pandas.DataFrame(job.metrics)
    assert list(table["loss"]) == [0.5, 0.25]
    assert list(table.columns) == ["time", "epoch", "step", "rank", "source", "loss", "accuracy"]
    assert table.query("source == 'train'")["epoch"].item() == 1


def test_what_is_measured_of_an_epoch_is_in_its_row_of_the_training():
    def script(run):
        for epoch in (1, 2):
            run.event("metrics", rank=None, values=[["bytes_sent", 8 * epoch]], epoch=epoch, source="strategy")
            run.event("metrics", rank=None, values=[["lr", 0.5]], epoch=epoch, source="pace")
            if epoch == 1:
                run.event("metrics", rank=None, values=[["loss", 0.25]], epoch=epoch, source="train")
            run.event("metrics", rank=None, values=[["loss", 0.75]], epoch=epoch, source="eval")

    job = start(script)
    job.wait()
    found = [
        {name: value for name, value in row.items() if name not in ("time", "step", "rank")} for row in job.metrics
    ]
    assert found == [
        {"epoch": 1, "source": "train", "bytes_sent": 8, "lr": 0.5, "loss": 0.25},
        {"epoch": 1, "source": "eval", "loss": 0.75},
        {"epoch": 2, "source": "train", "bytes_sent": 16, "lr": 0.5},
        {"epoch": 2, "source": "eval", "loss": 0.75},
    ]


def ten_lines(run):
    for number in range(10):
        run.line(number % 2, f"{number}")
    run.line(None, "agent")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [*map(str, range(10)), "agent"]), ({"ranks": [1]}, ["1", "3", "5", "7", "9"]), ({"ranks": 0}, list("02468")),
        ({"ranks": (0, 1)}, [*map(str, range(10))]), ({"ranks": []}, []), ({"tail": 3}, ["8", "9", "agent"]),
        ({"tail": 2, "ranks": 1}, ["7", "9"]), ({"tail": 0}, []), ({"tail": 99}, [*map(str, range(10)), "agent"]),
        ({"follow": True, "tail": 1}, ["agent"]), ({"follow": True}, [*map(str, range(10)), "agent"]),
        ({"tail": 0, "follow": True}, []),
    ],
)  # fmt: skip
def test_logs_by_rank_and_from_the_end(arguments, expected):
    job = start(ten_lines)
    job.wait()
    lines = job.logs(**arguments)
    assert [line.partition(" ")[2] for line in str(lines).splitlines()] == expected
    assert [line.text for line in lines] == expected


def test_a_long_log_shows_its_end_when_it_is_printed():
    def script(run):
        for number in range(1203):
            run.line(0, str(number))

    job = start(script)
    job.wait()
    first, *shown = str(job.logs()).splitlines()
    assert first.startswith("(and 203 lines before these")
    assert shown == [f"[0] {number}" for number in range(203, 1203)]
    assert len(list(job.logs())) == 1203


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": [99]}, "ranks: the job has no rank 99. Its ranks are 0 to 1"), ({"ranks": -1}, "no rank -1"),
        ({"ranks": "0"}, "no rank '0'"), ({"ranks": True}, "no rank True"), ({"ranks": 1.5}, "no rank 1.5"),
        ({"tail": -1}, "tail: -1 is not"), ({"tail": 2.5}, "tail: 2.5 is not"), ({"tail": "3"}, "tail: '3' is not"),
        ({"tail": True}, "tail: True is not"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_are_refused_at_once(arguments, message):
    job = start(ten_lines)
    with pytest.raises(ConfigError, match=message):
        job.logs(**arguments)


@pytest.mark.parametrize("timeout", ["3", [], True, float("nan")])
def test_what_is_no_time_is_refused_also_when_there_is_nothing_to_wait_for(timeout):
    job = start(returning)
    job.wait()
    for call in (job.wait, job.result, job.results, job.exception):
        with pytest.raises(ConfigError, match=r"timeout: .* is not a number of seconds"):
            call(timeout=timeout)
    assert job.wait(0).is_final


def test_following_from_the_end_misses_and_doubles_nothing():
    go = threading.Event()

    def script(run):
        run.line(0, "a")
        run.line(0, "b")
        go.wait(30)
        run.line(0, "c")

    job = start(script)
    while len(list(job.logs())) < 2:
        time.sleep(0.01)
    lines = job.logs(follow=True, tail=1)
    assert next(lines).text == "b"
    go.set()
    assert [line.text for line in lines] == ["c"]


def test_streamed_logs_show_the_metrics_of_each_epoch(capsys):
    def script(run):
        for epoch in (1, 2):
            run.line(0, f"in epoch {epoch}")
            values = [["loss", 1 / epoch], ["accuracy", 0.5]]
            run.event("metrics", rank=None, epoch=epoch, source="pace", values=[["lr", 0.1]])
            run.event("metrics", rank=None, epoch=epoch, source="train", values=values)
        run.event("metrics", rank=None, epoch=2, source="averaged", values=[["loss", 0.25]])

    start(script).stream_logs()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        "[0] in epoch 1", "[0] in epoch 2", "epoch 1, train: loss 1, accuracy 0.5000", "epoch 2, averaged: loss 0.2500",
        "epoch 2, train: loss 0.5000, accuracy 0.5000",
    ]  # fmt: skip


def test_kales_verbs_have_kales_meaning(capsys):
    go = threading.Event()

    def script(run):
        run.line(1, "hello")
        go.wait(30)

    job = start(script)
    while job.get_job_status() == "Created":
        time.sleep(0.01)
    assert job.get_job_status() == "Running"
    go.set()
    job.stream_logs()
    assert capsys.readouterr().out == "[1] hello\n"
    assert job.get_job_status() == "Succeeded"
    resource = job.get()
    assert (resource["kind"], resource["metadata"]["name"]) == ("PyTorchJob", job.name)
    assert resource["spec"]["pytorchReplicaSpecs"] == {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}
    assert resource["status"]["conditions"][-1]["type"] == "Succeeded"
    assert resource["status"]["completionTime"] >= resource["status"]["startTime"]
    failed = start(failing)
    failed.wait()
    assert failed.get_job_status() == "Failed"
    failed.delete()
    assert failed.get_job_status() == ""
    assert repr(failed) == f"<Job {failed.ref} deleted>"


def test_a_restart_is_told_from_a_start():
    go = threading.Event()

    def script(run):
        run.event("state", state="starting", attempt=1)
        go.wait(30)

    job = start(script)
    while job.status.attempt == 0:
        time.sleep(0.01)
    assert job.get_job_status() == "Restarting"
    go.set()


def test_launch_has_no_model():
    job = start(returning)
    for call in (lambda: job.model, lambda: job.optimizer, job.state_dict, lambda: job.state_dict(partial=True)):
        with pytest.raises(ResultUnavailableError, match="launch"):
            call()


def test_subscribers_and_waiters_are_told():
    waited, states = threading.Event(), []
    job = start(returning)
    job.subscribe(lambda status: states.append(status.state))
    inside(job).after_wait.append(waited.set)
    job.wait()
    assert waited.is_set()
    until(lambda: states and states[-1] is StateName.SUCCEEDED, 10)


def test_a_job_shows_itself_as_text_and_html():
    job = start(failing)
    job.wait()
    shown = job._repr_mimebundle_()
    assert job.name in shown["text/plain"]
    assert "boom" in shown["text/html"]


REASONS = (
    "Pod x waits: 1 of 3 nodes is free",
    "Pod x waits: 2 of 3 nodes is free",
    "The image\x1b[2J is absent",
    "Pod x waits: 1 of 3 nodes is free",
)


def waits_first(run):
    for reason in REASONS:
        run.event("state", state=StateName.PENDING, reason=reason)
        time.sleep(0.5)
    run.event("state", state=StateName.RUNNING)
    run.line(0, "works")
    run.returns(0, None)


@pytest.mark.parametrize(
    "wait",
    [
        lambda job: job.wait(),
        lambda job: job.result(),
        lambda job: job.stream_logs(),
        lambda job: launch_command.follow(job, [], as_json=True, has_value=False),
        lambda job: [job.stream_logs(), job.wait(), job.result()],
    ],
    ids=["wait", "result", "stream_logs", "launch", "one after the other"],
)
def test_whatever_waits_prints_each_reason_once_on_stderr(wait, capsys):
    job = start(waits_first, 1)
    wait(job)
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("[kale-dist] fake://") and "starts on" not in line
    ]
    assert said == [
        f"[kale-dist] {job.ref}: Pod x waits: 1 of 3 nodes is free",
        f"[kale-dist] {job.ref}: The image is absent",
    ]


def test_a_reason_that_a_widget_shows_is_not_printed(capsys):
    from kale_dist.notebook.widget import JobWidget

    job = start(waits_first, 1)
    JobWidget(job)
    job.wait()
    assert REASONS[-1] not in capsys.readouterr().err


def warns(run):
    run.event("state", state=StateName.RUNNING)
    run.event("note", text="train: 100 samples")
    run.event("note", text="The loss is nan", warns=True)
    run.line(0, "The loss is nan")
    run.returns(0, 7)


@pytest.mark.parametrize(
    ("wait", "where"),
    [
        (lambda job: job.wait(), "err"),
        (lambda job: [job.result(), job.wait()], "err"),
        (lambda job: [job.stream_logs(), job.result()], "out"),
    ],
    ids=["wait", "result", "stream_logs"],
)
def test_a_warning_of_a_rank_is_said_once_where_the_result_is_awaited(wait, where, capsys):
    job = start(warns, 1)
    wait(job)
    said = capsys.readouterr()
    assert (said.out + said.err).count("The loss is nan") == 1
    assert "The loss is nan" in getattr(said, where)
    assert "100 samples" not in said.err


def test_a_second_job_on_a_model_in_training_is_said_in_one_line(capsys):
    parts, backend = trainings.classifying(), FakeBackend(until_cancelled)
    jobs = [kd.distribute(*parts, number_of_processes=1, on=backend) for _ in range(3)]
    said = [line for line in capsys.readouterr().err.splitlines() if "kd.attach" in line]
    assert [[job.ref in line for job in jobs] for line in said] == [[True, False, False], [True, True, False]]
    for job in jobs:
        job.cancel()
        job.wait()
    kd.distribute(*parts, number_of_processes=1, on=backend).cancel()
    assert "kd.attach" not in capsys.readouterr().err
