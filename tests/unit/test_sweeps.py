"""Sweeps over real local jobs: the best trial, pruning, failures, and a sweep that is killed and continued."""

import functools
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import kale_dist as kd
from kale_dist import cli, sweeps
from kale_dist.errors import BackendError, ConfigError, KaleDistWarning, WaitTimeoutError
from kale_dist.job import records
from kale_dist.job.view.sweep import SweepPicture, TrialRow, html, text
from kale_dist.sweeps import SweepError

optuna = pytest.importorskip("optuna", reason="needs Optuna")

ROOT = pathlib.Path(__file__).parents[2]
one_process = functools.partial(kd.launch, number_of_processes=1)


def descend(x, steps, pause_s):
    for step in range(steps):
        kd.report(loss=(x - 2.0) ** 2 + 1.0 / (step + 1), step=step)
        time.sleep(pause_s)
    return x


def job_of(trial, steps=3, pause_s=0.0):
    return one_process(descend, trial.suggest_float("x", -10, 10), steps, pause_s)


@pytest.fixture(autouse=True)
def no_jobs_are_left():
    yield
    for job in kd.jobs():
        job.delete()


def sweep(call=job_of, **options):
    return kd.sweep(call, **{"metric": "report/loss", "trials": 4, **options})


@pytest.mark.newest
def test_the_best_trial_has_its_parameters_its_value_and_its_job():
    grid = optuna.samplers.GridSampler({"x": [-4.0, 2.0, 5.0]})
    found = sweep(sampler=grid, trials=3)
    best = found.wait(120)
    assert best.params == {"x": 2.0}
    assert best.value == pytest.approx(1 / 3)
    assert best.job.result() == 2.0
    assert [trial.state for trial in found.trials] == ["complete"] * 3
    assert "3 of 3 trials; best report/loss 0.3333" in repr(found)


def test_a_name_whose_trials_are_all_done_is_told_that_nothing_runs():
    storage = optuna.storages.InMemoryStorage()
    sweep(name="done", storage=storage, trials=1).wait()
    with pytest.warns(KaleDistWarning, match="'done' has 1 trials already, and trials=1: the call is not made again"):
        assert sweep(name="done", storage=storage, trials=1).wait().number == 0


@pytest.mark.newest
def test_a_trial_that_does_badly_is_pruned_and_its_job_cancelled():
    grid = optuna.samplers.GridSampler({"x": [2.0, 9.0]}, seed=0)
    found = sweep(
        functools.partial(job_of, steps=200, pause_s=0.02),
        sampler=grid,
        trials=2,
        pruner=optuna.pruners.ThresholdPruner(upper=5.0),
    )
    found.wait(120)
    (pruned,) = [trial for trial in found.trials if trial.state == "pruned"]
    assert pruned.params == {"x": 9.0}
    assert pruned.reports < 200
    assert pruned.job.status.state.value == "cancelled"
    assert found.best.params == {"x": 2.0}


@pytest.mark.parametrize(
    ("options", "at_once"),
    [pytest.param({"parallel": 2}, 2, marks=pytest.mark.nightly), ({"parallel": 4, "processes": 2}, 2)],
)
def test_jobs_run_in_parallel_within_the_budget(options, at_once):
    found = sweep(functools.partial(job_of, steps=5, pause_s=0.1), **options)
    found.wait(120)
    spans = [(trial.job.status.created, trial.job.status.ended) for trial in found.trials]
    overlaps = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(overlaps) == at_once


def test_a_metric_that_is_not_reported_ends_the_sweep_and_names_those_that_are():
    with pytest.raises(SweepError, match=r"has not reported the metric 'eval/loss'. It reported report/loss"):
        sweep(metric="eval/loss").wait(120)


def test_a_call_that_raises_ends_the_sweep_with_its_error():
    def broken(trial):
        raise ZeroDivisionError(trial.suggest_float("x", 0, 1))

    search = sweep(broken)
    with pytest.raises(ZeroDivisionError):
        search.wait(120)
    assert "no report/loss; ended early: ZeroDivisionError: " in repr(search)


def test_a_call_without_a_job_is_told_what_to_return():
    with pytest.raises(SweepError, match="Return the job of distribute"):
        sweep(lambda trial: trial.suggest_float("x", 0, 1)).wait(120)


def test_a_range_of_processes_is_refused_before_a_job_is_submitted():
    from trainings import summing

    found = sweep(lambda _: kd.distribute(*summing(), number_of_processes=(1, 2), epochs=1), metric="train/loss")
    with pytest.raises(ConfigError) as caught:
        found.wait(60)
    assert caught.value.argument == "number_of_processes"
    assert not kd.jobs()


@pytest.mark.nightly
def test_three_failures_in_a_row_end_the_sweep_and_one_does_not():
    def fail(x):
        if x > 0:
            raise RuntimeError("too hot")
        kd.report(loss=x)

    def call(trial):
        return one_process(fail, trial.suggest_float("x", -1, 1))

    def over(*values):
        return sweep(call, sampler=optuna.samplers.GridSampler({"x": list(values)}, seed=3), trials=len(values))

    found = over(-1.0, 0.5)
    assert found.wait(120).params == {"x": -1.0}
    (failed,) = [trial for trial in found.trials if trial.state == "failed"]
    assert "too hot" in failed.reason
    with pytest.raises(SweepError, match=r"3 trials in a row have failed, the last because .*too hot"):
        over(0.1, 0.2, 0.3, 0.4).wait(120)


def test_a_cancelled_sweep_ends_its_jobs_and_continues_under_its_name():
    slow = functools.partial(job_of, steps=2000, pause_s=0.02)
    first = sweep(slow, trials=2, name="cancelled")
    with pytest.raises(WaitTimeoutError):
        first.wait(0.1)
    while not any(trial.ref for trial in first.trials):
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="'cancelled' runs already"):
        sweep(slow, trials=2, name="cancelled")
    first.cancel()
    # Its process may end now, and leaves no job behind.
    assert first.done()
    with pytest.raises(SweepError, match="no trial has been completed"):
        first.wait(60)
    (lost,) = first.trials[:1]
    assert lost.state == "repeated"
    assert lost.job.wait(60).state.value == "cancelled"
    with pytest.raises(ConfigError, match="was begun with 'minimize'"):
        sweep(name="cancelled", direction="maximize")
    second = sweep(trials=2, name="cancelled")
    second.wait(120)
    assert [trial.state for trial in second.trials] == ["repeated", "complete", "complete"]
    assert second.trials[1].params == lost.params


def test_a_second_sweep_of_a_storage_is_refused_and_one_whose_storage_fails_ends(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    slow = functools.partial(job_of, steps=200, pause_s=0.02)
    first = sweep(slow, name="shared", storage=storage)
    with pytest.raises(ConfigError, match="'shared' runs already"):
        sweep(name="shared", storage=storage)

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(storage, "set_trial_user_attr", fail)
    first.cancel()
    with pytest.raises(OSError, match="the disk is gone"):
        first.wait(60)
    assert first.done()


@pytest.mark.nightly
def test_a_sweep_whose_process_is_killed_loses_no_trial(tmp_path, capsys):
    script = tmp_path / "search.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time, optuna, kale_dist as kd

        def descend(x, pause_s):
            for step in range(20):
                kd.report(loss=x * x, step=step)
                time.sleep(pause_s)

        def call(trial):
            # From the third trial on, jobs of the process that is killed are too slow to end before it.
            pause_s = 60 if sys.argv[1:] == ["killed"] and trial.number > 1 else 0.01
            return kd.launch(descend, trial.suggest_float("x", -1, 1), pause_s, number_of_processes=1)

        # Optuna's default pruner would end the last trial early where its reports are seen in time.
        nop = optuna.pruners.NopPruner()
        found = kd.sweep(call, metric="loss", trials=6, parallel=2, name="killed", pruner=nop)
        found.wait()
        print("ended", len([trial for trial in found.trials if trial.state == "complete"]))
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, "killed"], env=environment, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        picture = sweeps.read("killed") if "killed" in sweeps.sweeps() else None
        runs = picture is not None and any(
            row.state == "running" and row.reports and row.number > 1 for row in picture.rows
        )
        if picture is not None and runs and picture.count("complete"):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = sweeps.read("killed")
    assert before.is_over
    assert 0 < before.count("complete") < 6
    kept = {row.number: row.value for row in before.rows if row.state == "complete"}
    lost = [dict(row.params) for row in before.rows if row.state == "running" and row.params]
    assert lost
    again = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert "ended 6" in again.stdout
    after = sweeps.read("killed")
    assert cli.main(["sweeps"]) == 0
    assert re.search(r"killed +ended +6 of 6 trials; best loss", capsys.readouterr().out)
    assert cli.main(["sweeps", "killed"]) == 0
    assert "repeated" in capsys.readouterr().out
    capsys.readouterr()
    assert cli.main(["sweeps", "--json"]) == cli.main(["sweeps", "killed", "--json"]) == 0
    assert '"name": "killed"' in capsys.readouterr().out
    assert cli.main(["sweeps", "missing"]) != 0
    assert "there is no sweep 'missing'" in capsys.readouterr().err
    assert kept.items() <= {row.number: row.value for row in after.rows}.items()
    complete = [dict(row.params) for row in after.rows if row.state == "complete"]
    assert all(params in complete for params in lost)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"call": 3}, "call"),
        ({"trials": 0}, "trials"),
        ({"parallel": 0}, "parallel"),
        ({"processes": 0}, "processes"),
        ({"direction": "up"}, "direction"),
        ({"metric": "eval/accuracy"}, "direction"),
        ({"metric": ""}, "metric"),
        ({"metric": "eval_loss"}, "metric"),
        ({"name": "../../etc"}, "name"),
        ({"sampler": optuna.samplers.TPESampler}, "sampler"),
        ({"pruner": "median"}, "pruner"),
        ({"storage": 3}, "storage"),
        ({"storage": "nonsense"}, "storage"),
        ({"storage": "sqlite:////no/such/folder/sweeps.db"}, "storage"),
    ],
)
def test_bad_arguments_are_refused_at_the_call_and_leave_no_file(options, argument):
    before = set(records.state_dir().rglob("*"))
    with pytest.raises(ConfigError) as caught:
        sweep(**options)
    assert caught.value.argument == argument
    left = set(records.state_dir().rglob("*")) - before
    assert not any("sweeps" in path.parts and path.is_file() for path in left)


def test_a_table_of_parameters_is_answered_with_how_to_ask_for_them():
    with pytest.raises(ConfigError, match=r"asks its trial for parameters.*trial\.suggest_float"):
        kd.sweep(job_of, {"lr": [0.1, 0.2]})
    with pytest.raises(ConfigError, match="metric: it is missing"):
        kd.sweep(job_of)


def test_a_sweep_whose_cluster_is_away_says_how_to_continue_and_leaves_its_jobs_alone(tmp_path):
    go, calls = tmp_path / "go", []

    def waiting(x):
        while not go.exists():
            time.sleep(0.05)
        kd.report(loss=x)

    def call(trial):
        x = trial.suggest_float("x", 0, 1)
        calls.append(x)
        if len(calls) == 2:
            raise BackendError("The cluster cannot be reached.", retryable=True)
        return one_process(waiting, x)

    with pytest.raises(
        SweepError, match=r"be reached\. Jobs that run .* sweep\(\.\.\., name='away'\) again to continue"
    ):
        sweep(call, name="away", trials=2, parallel=2).wait(60)
    go.touch()
    again = sweep(call, name="away", trials=2, parallel=2)
    again.wait(60)
    assert [trial.state for trial in again.trials] == ["complete", "repeated", "complete"]
    assert calls[2:] == calls[1:2]
    assert len(kd.jobs()) == 2


def test_a_storage_that_fails_without_a_word_is_refused(monkeypatch):
    def fail(_):
        raise TimeoutError

    monkeypatch.setattr(optuna.storages, "get_storage", fail)
    with pytest.raises(ConfigError, match="cannot be opened: TimeoutError"):
        sweep(storage="sqlite:///sweeps.db")


def test_the_picture_says_what_the_text_says_and_escapes_what_trials_contain():
    rows = (
        TrialRow(number=0, state="complete", params={"lr": 0.1, "act": "<b>relu</b>"}, value=0.5, reports=3, reason=""),
        TrialRow(number=1, state="pruned", params={"lr": 0.5}, value=0.9, reports=1, reason=""),
        TrialRow(number=2, state="complete", params={"lr": 0.2}, value=0.25, reports=3, reason=""),
        TrialRow(number=3, state="failed", params={"lr": 0.3}, value=None, reports=0, reason="<script>"),
    )
    picture = SweepPicture(name="lr", metric="loss", wanted=8, is_maximised=False, is_over=False, rows=rows)
    assert "3 of 8 trials, 1 pruned, 1 failed; best loss 0.2500 (trial 2: lr=0.2)" in text(picture)
    drawn = html(picture)
    assert "<script>" not in drawn
    assert "<b>relu" not in drawn
    assert "best so far" in drawn
    assert drawn.count("<tr") == 1 + len(rows)


def test_the_picture_has_the_metric_over_each_parameter_and_leads_to_the_jobs():
    rows = tuple(
        TrialRow(
            number=number, state="complete", params={"lr": 10.0**-number, "width": 4 + number, "act": "relu"},
            value=0.1 * number, reports=1, reason="", ref=f"kubernetes://team/train-net-{number}",
        )
        for number in range(4)
    )  # fmt: skip
    picture = SweepPicture(name="s", metric="eval/loss", wanted=4, is_maximised=False, is_over=True, rows=rows)
    drawn = html(picture)
    assert [len(re.findall(rf"<span [^>]*>{axis} ", drawn)) for axis in ("trial", "lr", "width", "act")] == [1, 1, 1, 0]
    assert drawn.count("writing-mode:vertical-rl") == 3
    assert drawn.count("(log)") == 1
    # Four trials, whose learning rates are equally far apart on a logarithmic axis.
    drawing = drawn.split(">eval/loss by lr<")[1].split("</svg>")[0]
    places = [float(x) for x in re.findall(r"M([\d.]+) [\d.]+h0", drawing)]
    assert [round(b - a) for a, b in itertools.pairwise(places)] == [round((places[-1] - places[0]) / 3)] * 3
    assert "train-net-3" in drawn
    assert "sweep.trials[0].job" in drawn
    assert "sweep.trials[0].job" in text(picture)


def test_a_parameter_with_one_value_has_no_picture():
    rows = tuple(
        TrialRow(number=number, state="complete", params={"lr": 0.1}, value=0.5, reports=1, reason="")
        for number in range(2)
    )
    picture = SweepPicture(name="s", metric="loss", wanted=2, is_maximised=False, is_over=True, rows=rows)
    assert "by lr" not in html(picture)
