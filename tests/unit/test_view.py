"""The pictures of a job: what they say, and that nothing a rank writes can break them."""

import dataclasses
import html.parser
import json
import re
import subprocess
import sys

import pytest

from kale_dist import wire
from kale_dist.job import view
from kale_dist.job.status import JobStatus, RankProgress, ReplicaStatus
from kale_dist.job.view import curves, facts, markup, plain
from kale_dist.wire import BatchLoss, FailureCause, LogLine, MetricRow, RankStateName, StateName, Stream

VOID = {"br", "img", "hr", "meta", "input", "wbr"}
LINE = r'<path d="(M[^"]*L[^"]*)" fill="none" stroke="(#\w+)"'
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></div><style>*{display:none}</style>",
    "\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "a\rb\x00c\x07",
    "\u202eright to left",
    "half \ud800 pair",
    "x" * 100_000,
    "&amp; &lt;b&gt;",
    "{curly} %s %(x)s",
]


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects them, their attributes and the text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)

    def find(self, **wanted):
        return [one for _, one in self.tags if all(one.get(name) == value for name, value in wanted.items())]


def progress(**changes):
    values = {"phase": "train", "epoch": 3, "epochs": 8, "step": 12, "steps": 24, "samples": 384}
    return RankProgress(**{**values, "samples_per_s": 4000.0, "loss": 0.1234, "time": 10.0, **changes})


def line(text, rank=0):
    return LogLine(sequence=0, time=0.0, attempt=0, rank=rank, stream=Stream.STDOUT, text=text)


def row(source="train", rank=None, epoch=1, step=None, **values):
    return MetricRow(time=0.0, rank=rank, epoch=epoch, step=step, source=source, values=tuple(values.items()))


def running(**changes):
    replicas = tuple(ReplicaStatus(rank=rank, state=RankStateName.RUNNING, progress=progress()) for rank in range(2))
    values = {"ref": "local://train-net-abcde", "state": StateName.RUNNING, "created": 0.0, "started": 1.0}
    return JobStatus(**{**values, "replicas": replicas, **changes})


def test_a_running_job_says_where_it_is():
    text = view.text(running(), [line("hello", 1)], now=11.0)
    assert "local://train-net-abcde  running" in text
    assert "Epoch 3 of 8, step 12 of 24" in text
    assert "31 %" in text
    assert "8,000 samples/s" in text
    assert "about 22 s left" in text
    assert re.search(r"^ +1  running +3/8  12/24 +4,000  0.1234$", text, re.MULTILINE)
    assert text.endswith("[1] hello")


def test_a_later_attempt_is_told():
    assert plain.text(running(attempt=1), now=110.0).splitlines()[1].startswith("Attempt 2: ")
    assert "in attempt 3" in plain.text(running(attempt=2, state=StateName.SUCCEEDED), now=110.0)


def test_html_says_the_same_and_is_accessible():
    read = Reader(view.html(running(), [line("hello", 1)], now=11.0))
    for words in ("train-net-abcde", "running", "Epoch 3 of 8, step 12 of 24", "31 %", "8,000 samples/s", "hello"):
        assert words in read.text
    (bar,) = read.find(role="progressbar")
    assert (bar["aria-valuenow"], bar["aria-valuemin"], bar["aria-valuemax"]) == ("31", "0", "100")
    assert bar["aria-label"]
    assert len(read.find(scope="col")) == 6
    assert len(read.find(scope="row")) == 2


def test_a_warning_is_told_from_a_note():
    status = running(notes=("Data is divided.", "The loss is nan."), warnings=("The loss is nan.",))
    assert "Data is divided.Warning: The loss is nan." in Reader(view.html(status, [], now=2.0)).text
    assert view.text(status, [], now=2.0).splitlines()[-2:] == ["note: Data is divided.", "warning: The loss is nan."]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_only_text(text):
    status = running(
        state=StateName.FAILED,
        reason=text,
        notes=(text,),
        metrics=(row(**{text: 1.0}), row(epoch=2, **{text: 2.0}), row(source=text, epoch=3, **{text: 2.0})),
        replicas=(
            ReplicaStatus(rank=0, state=RankStateName.FAILED, error=text, signal=text, progress=progress(phase=text)),
        ),
    )
    source = view.html(status, [line(text)], now=2.0)
    source.encode()
    read = Reader(source)
    assert {tag for tag, _ in read.tags}.isdisjoint({"script", "style", "img", "b"})
    assert not [name for _, found in read.tags for name in found if name.startswith("on")]
    in_terminal = view.text(status, [line(text)], now=2.0)
    in_terminal.encode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", in_terminal)


def test_static_safe():
    source = view.html(running(metrics=(row(loss=1.0), row(epoch=2, loss=0.5))), [line("x")], now=2.0)
    assert "<script" not in source
    assert "<style" not in source
    assert ' id="' not in source
    assert "url(" not in source


def test_failure_shows_the_first_failing_ranks_error_once():
    status = running(
        state=StateName.FAILED,
        reason="Rank 1 raised ValueError",
        cause=FailureCause.ERROR,
        ended=9.0,
        failed_rank=1,
        replicas=(
            ReplicaStatus(rank=0, state=RankStateName.FAILED, error="RuntimeError: connection closed"),
            ReplicaStatus(rank=1, state=RankStateName.FAILED, error="ValueError: odd\nsecond line", exit_code=1),
        ),
    )
    text = view.text(status)
    assert "Failed after 8.0 s: rank 1 raised ValueError" in text
    assert "error of rank 1: ValueError: odd\nsecond line" in text
    assert text.count("odd") == 1
    assert "RuntimeError: connection closed" in text
    repeats = dataclasses.replace(status, reason="Rank 1 failed: ValueError: odd\nsecond line")
    assert view.text(repeats).count("second line") == 1
    assert "second line" in Reader(view.html(status)).text


def test_an_error_that_followed_from_another_rank_is_not_shown_as_the_cause():
    status = running(
        state=StateName.FAILED,
        reason="Rank 1 was killed by SIGKILL",
        failed_rank=1,
        replicas=(
            ReplicaStatus(rank=0, state=RankStateName.FAILED, error="RuntimeError: connection closed", exit_code=1),
            ReplicaStatus(rank=1, state=RankStateName.FAILED, signal="SIGKILL"),
        ),
    )
    text = view.text(status)
    assert "error of rank" not in text
    assert "0  failed  RuntimeError: connection closed" in text
    assert ">Rank 0<" not in view.html(status)


def test_ranks_that_have_ended_add_nothing_to_the_rate():
    ended = ReplicaStatus(rank=0, state=RankStateName.SUCCEEDED, progress=progress())
    assert "4,000 samples/s" in facts.progress(running(replicas=(*running().replicas[1:], ended)), 11.0)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (StateName.PENDING, "Waiting for its ranks"),
        (StateName.STARTING, "Starting on 2 ranks"),
        (StateName.RUNNING, "Running on 2 ranks"),
        (StateName.SUCCEEDED, "Succeeded on 2 ranks"),
        (StateName.CANCELLED, "Cancelled"),
        (StateName.FAILED, "Failed"),
    ],
)
def test_every_state_without_times_progress_or_log(state, words):
    status = JobStatus(ref="local://x", state=state, replicas=(ReplicaStatus(rank=0), ReplicaStatus(rank=1)))
    assert words in view.text(status)
    assert words in Reader(view.html(status)).text


def test_a_job_without_ranks_has_no_table():
    assert "<table" not in view.html(JobStatus(ref="local://x"))


def test_only_success_is_100_per_cent():
    at_the_end = tuple(ReplicaStatus(rank=0, progress=progress(phase="eval", epoch=8)) for _ in range(1))
    assert facts.percent(running(replicas=at_the_end)) == 99
    assert facts.percent(running(replicas=at_the_end, state=StateName.SUCCEEDED)) == 100


def test_many_ranks_are_folded_and_those_in_trouble_stay():
    replicas = [ReplicaStatus(rank=rank, state=RankStateName.RUNNING) for rank in range(500)]
    replicas[400] = dataclasses.replace(replicas[400], state=RankStateName.FAILED, error="ValueError: here")
    status = running(replicas=tuple(replicas))
    source = view.html(status)
    assert "500 ranks: 499 running, 1 failed" in Reader(source).text
    assert "ValueError: here" in source
    assert "and 436 more ranks" in source
    text = view.text(status)
    assert "ValueError: here" in text
    assert "and 484 more" in text


def test_of_a_thousand_ranks_those_that_wait_and_the_slowest_are_shown():
    replicas = [
        ReplicaStatus(rank=rank, state=RankStateName.RUNNING, progress=progress(samples_per_s=1000.0 - rank))
        for rank in range(997)
    ]
    replicas += [ReplicaStatus(rank=rank) for rank in (997, 998, 999)]
    status = running(replicas=tuple(replicas))
    shown = [int(row[0]) for row in facts.table(status, 8).rows]
    assert shown == [992, 993, 994, 995, 996, 997, 998, 999]
    assert "1,000 ranks: 3 pending, 997 running" in Reader(view.html(status)).text


def test_stalled_ranks_are_named():
    replicas = tuple(ReplicaStatus(rank=rank, state=RankStateName.RUNNING, in_collective=rank == 0) for rank in (0, 1))
    text = view.text(running(replicas=replicas))
    assert "waits for the others" in text
    assert "the others wait for it" in text


def test_curves_tell_train_from_eval_and_average_has_no_rank():
    rows = [row(source, rank=0, epoch=epoch, loss=1 / epoch) for epoch in (1, 2, 3) for source in ("train", "eval")]
    (curve,) = curves.collect(rows)
    assert curve.summary == "0.3333 train, 0.3333 eval"
    picture = curves.svg(curve)
    assert [colour for _, colour in re.findall(LINE, picture)] == [*curves.COLOURS[:2]]
    assert 'aria-label="loss: 0.3333 train, 0.3333 eval"' in picture


def test_reports_of_several_ranks_are_lines_of_their_own():
    rows = [row("report", rank=rank, epoch=None, step=step, x=step) for step in (1, 2) for rank in (0, 1)]
    assert [one.label for one in curves.collect(rows)[0].series] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    "values",
    [
        [float("nan")] * 3,
        [1.0, float("inf"), 2.0],
        [0.0, 0.0, 0.0],
        [1e308, -1e308, 1e308],
        [5e-324, 0.0, 5e-324],
        [1.0],
    ],
)
def test_odd_numbers_make_finite_pictures(values):
    rows = [row(epoch=epoch, loss=value) for epoch, value in enumerate(values, 1)]
    picture = curves.svg(curves.collect(rows)[0])
    for points in re.findall(r' d="([^"]*)"', picture):
        assert "nan" not in points
        assert "inf" not in points
    Reader(view.html(running(metrics=tuple(rows)), now=2.0))
    view.text(running(metrics=tuple(rows)), now=2.0)


def diverged(**changes):
    losses = [
        BatchLoss(
            epoch=1 + step // 20, step=1 + step % 20, steps=20, loss=1.0 / (1 + step) if step < 13 else float("nan")
        )
        for step in range(60)
    ]
    rows = [row(epoch=epoch, loss=float("nan")) for epoch in (1, 2, 3)]
    return running(state=StateName.SUCCEEDED, nan_since=(1, 14), losses=tuple(losses), metrics=tuple(rows), **changes)


def test_a_loss_that_is_nan_is_no_plain_success():
    status = diverged()
    assert "succeeded, loss is nan since epoch 1, step 14" in view.text(status)
    assert markup.colour(status) == markup.colour(JobStatus(ref="local://x", state=StateName.STARTING))
    picture = view.html(status)
    assert "loss is nan since epoch 1, step 14" in Reader(picture).text
    # The axis goes to the end of the training, and what has no numbers is shaded from the last that has.
    assert ">epoch 0<" in picture
    assert ">3<" in picture
    (gap,) = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"[^>]*><title>not a number', picture)
    assert float(gap[0]) == pytest.approx(1000 * 0.65 / 3, abs=1)
    assert float(gap[0]) + float(gap[1]) == pytest.approx(1000, abs=1)
    (chart,) = json.loads(view.parts(status)["curves"])["charts"]
    assert chart["series"][0]["gaps"] == [[0.65, 3.0]]
    assert chart["series"][0]["places"]["step"]["gaps"] == [[13.0, 60.0]]


def test_a_page_knows_the_places_of_points_by_step_and_by_minutes_since_the_start():
    batches = tuple(dataclasses.replace(one, time=61.0 + 6 * one.step) for one in losses(2.0, 1.5, 1.2, 1.1))
    rows = [dataclasses.replace(row(epoch=epoch, loss=1.0, lr=0.1), time=61.0 + 60 * epoch) for epoch in (1, 2)]
    status = running(started=61.0, metrics=tuple(rows), losses=batches)
    found = {chart["name"]: chart["series"] for chart in json.loads(view.parts(status)["curves"])["charts"]}
    each, epochs = found["loss"]
    assert each["places"]["step"]["points"] == [1.0, 2.0, 3.0, 4.0]
    assert each["places"]["minute"]["points"] == [0.1, 0.2, 0.3, 0.4]
    assert epochs["places"]["step"]["points"] == found["lr"][0]["places"]["step"]["points"] == [4.0, 8.0]
    assert epochs["places"]["minute"]["points"] == [1.0, 2.0]
    reports = (
        dataclasses.replace(row("report", epoch=None, step=step, x=1.0), time=61.0 + 30 * step) for step in (2, 4)
    )
    status = running(started=61.0, metrics=tuple(reports))
    (chart,) = json.loads(view.parts(status)["curves"])["charts"]
    assert chart["series"][0]["places"] == {"minute": {"points": [1.0, 2.0], "gaps": []}}


def test_a_loss_that_is_a_number_again_in_a_later_epoch_is_a_success():
    rows = (row(epoch=1, loss=float("nan")), row(epoch=2, loss=0.5))
    status = running(state=StateName.SUCCEEDED, nan_since=(1, 2), metrics=rows)
    assert facts.state(status) == "succeeded"
    assert facts.state(dataclasses.replace(status, metrics=rows[:1])).startswith("succeeded, loss is nan")


def test_lines_of_different_rhythm_have_an_axis_each():
    rows = [row("report", epoch=None, step=step, loss=1.0 + step) for step in (0, 250, 500)]
    rows += [row("eval", epoch=epoch, loss=2.0) for epoch in (1, 2, 3)]
    picture = curves.svg(curves.collect(rows)[0])
    assert ">step 0 · epoch 1<" in picture
    assert ">500 · 3<" in picture
    # Each goes from side to side.
    lines = [path for path, _ in re.findall(LINE, picture)]
    assert [(path.split(" ")[0], path.rpartition("L")[2].split(" ")[0]) for path in lines] == [("M0.0", "1000.0")] * 2


def test_of_two_equal_lines_the_second_is_dashed():
    rows = [row("report", rank=rank, epoch=None, step=step, x=step) for step in (1, 2) for rank in (0, 1)]
    rows += [row("report", rank=2, epoch=None, step=step, x=-step) for step in (1, 2)]
    rows += [row("report", rank=1, epoch=None, step=3, x=3)]
    assert [one.is_dashed for one in curves.collect(rows)[0].series] == [False, True, False]


def test_a_gap_within_a_line_ends_at_the_next_number():
    rows = [
        row(epoch=epoch, loss=value) for epoch, value in enumerate([1.0, float("nan"), float("inf"), 2.0, 3.0, 4.0], 1)
    ]
    assert curves.collect(rows)[0].series[0].gaps == ((1.0, 4.0),)


def test_a_long_series_keeps_its_spikes_and_stays_small():
    rows = [row("report", epoch=None, step=step, loss=100.0 if step == 777 else 1.0) for step in range(10_000)]
    (curve,) = curves.collect(rows)
    assert len(curve.series[0].points) <= curves.MAX_POINTS
    assert max(value for _, value in curve.series[0].points) == 100.0
    assert len(view.html(running(metrics=tuple(rows)))) < 20_000


def test_a_source_has_one_colour_in_every_picture():
    rows = [row("train", epoch=epoch, loss=1.0) for epoch in (1, 2)]
    rows += [row("eval", epoch=epoch, loss=1.0, accuracy=1.0) for epoch in (1, 2)]
    loss, accuracy = curves.collect(rows)
    assert [(one.label, one.colour) for one in loss.series] == [
        ("train", curves.COLOURS[0]),
        ("eval", curves.COLOURS[1]),
    ]
    assert accuracy.series[0].colour == curves.COLOURS[1]


def test_metrics_without_a_curve_are_counted():
    status = JobStatus(ref="local://x", created=0.0, metrics=(row(**{f"metric_{number}": 1.0 for number in range(9)}),))
    assert "and 3 more in job.metrics" in view.html(status, (), 0.0)


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([0.18, 1.79], ["0.5", "1.0", "1.5"]),
        ([0.0, 1.0], ["0.0", "0.5", "1.0"]),
        ([100.001, 100.004], ["100.001", "100.002", "100.003", "100.004"]),
        ([3.0, 3.0], ["2", "3", "4"]),
        ([1000.0, 52000.0], ["10,000", "20,000", "30,000", "40,000", "50,000"]),
        ([1e-9, 3e-9], ["1.00e-09", "3.00e-09"]),
        ([1e20, 3e20], ["1.00e+20", "3.00e+20"]),
    ],
)
def test_the_axes_have_round_numbers(values, numbers):
    (curve,) = curves.collect([row(epoch=epoch, loss=value) for epoch, value in enumerate(values, 3)])
    assert re.findall("<span [^>]*>([^<]*)</span>", curves.svg(curve)) == [*numbers, "epoch 3", "4"]


def test_the_values_under_the_pointer_are_told_by_the_browser():
    rows = [
        row(source, epoch=epoch, loss=value / epoch)
        for epoch in (1, 2)
        for source, value in (("train", 1), ("eval", 2))
    ]
    (curve,) = curves.collect(rows)
    assert "<title>epoch 2: 0.5000 train, 1 eval</title>" in curves.svg(curve)


def test_a_page_that_draws_curves_itself_gets_their_points_and_how_many_metrics_have_none():
    rows = [row(epoch=epoch, **{f"metric_{number}": epoch / 3 for number in range(9)}) for epoch in (1, 2)]
    data = json.loads(view.parts(running(metrics=tuple(rows)))["curves"])
    assert (len(data["charts"]), data["remark"]) == (curves.MAX_CURVES, "and 3 more in job.metrics")
    (series,) = data["charts"][0]["series"]
    assert series["points"] == [[1.0, 0.333333], [2.0, 0.666667]]
    assert view.parts(running())["curves"] == ""


def test_an_ended_training_shows_the_mean_pace_of_its_training_and_not_of_its_last_evaluation():
    evaluated = (ReplicaStatus(rank=0, progress=progress(phase="eval", samples_per_s=90_000.0)),)
    paces = tuple(row("pace", epoch=epoch, samples_per_s=pace) for epoch, pace in ((1, 1000.0), (2, 1500.0)))
    status = JobStatus(ref="local://x", state=StateName.SUCCEEDED, replicas=evaluated, metrics=paces)
    assert facts.rate(status) == "1,200 samples/s"
    assert facts.rate(dataclasses.replace(status, metrics=())) == "90,000 samples/s"


def test_an_ended_training_says_how_long_it_started_and_ran_and_where_its_evaluations_were_best():
    rows = (
        row("eval", epoch=1, loss=0.5, accuracy=0.75), row("eval", epoch=2, loss=float("nan"), accuracy=0.75),
        row("eval", epoch=3, loss=0.625, accuracy=0.875),
    )  # fmt: skip
    ended = running(state=StateName.SUCCEEDED, created=0.0, started=7.0, ended=11.0, metrics=rows)
    best = "Best evaluation: loss 0.5000 after epoch 1, accuracy 0.8750 after epoch 3"
    assert facts.sentence(ended, None) == f"Succeeded on 2 ranks, started in 7.0 s, ran 4.0 s. {best}"
    assert best not in facts.sentence(dataclasses.replace(ended, metrics=rows[:1]), None)
    spoilt = (
        row("eval", epoch=1, loss=0.5, accuracy=0.25), row("eval", epoch=2, loss=0.75, accuracy=0.5),
        row("eval", epoch=3, loss=float("nan"), accuracy=0.75),
    )  # fmt: skip
    nan = dataclasses.replace(ended, metrics=spoilt, nan_since=(3, 1))
    assert (
        facts.best_evaluation(nan)
        == "Best evaluation before the nan: loss 0.5000 after epoch 1, accuracy 0.5000 after epoch 2"
    )
    assert facts.best_evaluation(dataclasses.replace(nan, nan_since=(1, 2))) == ""
    trainer = (row("eval", epoch=None, step=20, loss=1.0), row("eval", epoch=None, step=10, loss=2.0))
    assert facts.best_evaluation(dataclasses.replace(ended, metrics=trainer)) == "Best evaluation: loss 1 at step 20"


def losses(*values, epoch=1, steps=4):
    return tuple(BatchLoss(epoch=epoch, step=step, steps=steps, loss=value) for step, value in enumerate(values, 1))


def test_points_have_no_steps_where_attempts_had_epochs_of_other_lengths():
    batches = losses(2.0, 1.5, steps=2) + losses(1.4, 1.3, 1.2, 1.1, epoch=2)
    rows = [row(epoch=epoch, loss=1.0) for epoch in (1, 2)]
    status = running(started=61.0, metrics=tuple(rows), losses=batches)
    (chart,) = json.loads(view.parts(status)["curves"])["charts"]
    assert not any("step" in one.get("places", {}) for one in chart["series"])


def test_an_epoch_that_runs_has_a_curve_and_stands_behind_those_of_whole_epochs_later():
    (curve,) = curves.collect((), losses(2.0, 1.5))
    assert [(one.points, one.is_faint) for one in curve.series] == [(((0.25, 2.0), (0.5, 1.5)), True)]
    assert curve.summary == "1.500 train, single batches"
    assert curves.collect((), losses(2.0)) == ()
    found = losses(2.0, 1.5, 1.2, 1.1) + losses(1.0, 0.9, 0.8, 0.7, epoch=2)
    (curve,) = curves.collect([row(epoch=1, loss=1.4), row(epoch=2, loss=0.8)], found)
    batches, epochs = curve.series
    assert (batches.is_faint, batches.points[-1][0]) == (True, 2.0)
    assert [x for x, _ in epochs.points] == [1.0, 2.0]
    assert curve.summary == "0.8000 train"
    assert ">epoch 0<" in curves.svg(curve)


def test_the_mean_of_a_first_epoch_is_a_dot_at_the_end_of_its_batches():
    found = losses(2.0, 1.5, 1.2, 1.1)
    (curve,) = curves.collect([row(epoch=1, loss=1.4), row("eval", epoch=1, loss=1.3)], found)
    assert [one.label for one in curve.drawn] == ["train, single batches", "train", "eval"]
    assert curve.summary == "1.400 train, 1.300 eval"
    drawn = curves.svg(curve)
    # The batches' line from end to end, and a dot of each mean at its right end, in the range of the vertical axis.
    assert re.findall(r'd="M(1000\.0) (\S+)h0"', drawn) == [("1000.0", "666.7"), ("1000.0", "777.8")]
    assert ">epoch 0<" in drawn
    (alone,) = curves.collect([row(epoch=1, loss=1.4)])
    assert alone.drawn == ()


def test_batches_of_a_stream_are_counted_and_its_epochs_end_where_their_last_batch_is():
    found = losses(3.0, 2.0, steps=None) + losses(1.0, 0.5, epoch=2, steps=None)
    (curve,) = curves.collect([row(epoch=1, loss=2.5), row(epoch=2, loss=0.7)], found)
    assert [one.axis for one in curve.series] == ["step", "step"]
    assert [[x for x, _ in one.points] for one in curve.series] == [[1.0, 2.0, 3.0, 4.0], [2.0, 4.0]]


def test_many_ranks_are_one_line_between_the_lowest_and_the_highest():
    rows = [row("report", rank=rank, epoch=None, step=step, x=step + rank) for step in (1, 2) for rank in range(16)]
    (curve,) = curves.collect(rows)
    (mean,) = curve.series
    assert (mean.points, mean.band) == (((1.0, 8.5), (2.0, 9.5)), ((1.0, 16.0), (2.0, 17.0)))
    assert mean.label.startswith("mean of 16 ranks")
    assert "16 ranks" in Reader(view.html(running(metrics=tuple(rows)))).text


def test_charts_with_the_same_lines_share_one_legend():
    rows = [row(source, epoch=epoch, loss=1.0, f1=1.0) for epoch in (1, 2) for source in ("train", "eval")]
    words = Reader(view.html(running(metrics=tuple(rows), replicas=()))).words
    assert [words.count(label) for label in ("train", "eval")] == [1, 1]


def test_a_step_that_comes_once_more_has_the_newest_value():
    rows = [
        row(epoch=None, step=step, loss=loss) for step, loss in ((10, 1.0), (20, 0.9), (30, 0.8), (20, 0.7), (20, 0.6))
    ]
    (curve,) = curves.collect(rows)
    assert (curve.series[0].axis, curve.series[0].points) == ("step", ((10.0, 1.0), (20.0, 0.6)))


def of_a_trainer(**changes):
    """A job whose ranks say how far another trainer is."""
    told = progress(**{"samples_per_s": None, "loss": None, **changes})
    replica = ReplicaStatus(rank=0, state=RankStateName.RUNNING, progress=told)
    return running(replicas=(replica,))


@pytest.mark.parametrize(
    ("changes", "sentence", "beside"),
    [
        # The job's own time would give 22 s.
        ({"left_s": 70.4, "training": 1}, "Epoch 3 of 8, step 12 of 24", "31 % · about 1 min 10 s left"),
        ({"left_s": 0.2, "training": 1}, "Epoch 3 of 8, step 12 of 24", "31 % · about 1 s left"),
        ({"training": 2, "left_s": None}, "Training 2, epoch 3 of 8, step 12 of 24", "31 %"),
        ({"training": 1, "epochs": 0, "share": 0.5}, "Step 12 of 24", "50 %"),
        ({"training": 1, "phase": "eval", "steps": None, "share": 0.5}, "Epoch 3 of 8, evaluation, step 12", "50 %"),
        ({"training": 2, "epochs": 0, "phase": "eval", "steps": None}, "Training 2, evaluation 12", ""),
        ({"epochs": 0, "epoch": 0, "phase": "bar Map", "step": 0}, "Bar Map: 0 of 24", ""),
        ({"epochs": 0, "epoch": 0, "phase": "\x1b[2Jbar"}, "Bar: 12 of 24", ""),
        # Between the cells of live ranks.
        ({"epochs": 0, "epoch": 0, "phase": "", "step": 0, "steps": None}, "Running on 1 rank", ""),
    ],
)
def test_what_another_trainer_tells_is_in_the_sentence_and_a_bar_is_no_percentage(changes, sentence, beside):
    status = of_a_trainer(**changes)
    assert facts.sentence(status, 11.0) == sentence
    assert facts.progress(status, 11.0) == beside


def test_a_reward_stands_before_the_twenty_others():
    rows = [row(epoch=None, step=step, entropy=1.0, kl=1.0, reward=0.5, loss=0.1) for step in (1, 2)]
    assert [curve.name for curve in curves.collect(rows)] == ["loss", "reward", "entropy", "kl"]


def test_each_training_of_a_function_has_curves_of_its_own():
    rows = [row(source, epoch=None, step=step, loss=1 / step) for source in ("train", "train 2") for step in (1, 2)]
    (curve,) = curves.collect(rows)
    assert [(one.label, one.points) for one in curve.series] == [
        ("train", ((1.0, 1.0), (2.0, 0.5))),
        ("train 2", ((1.0, 1.0), (2.0, 0.5))),
    ]
    assert len({one.colour for one in curve.series}) == 2


def test_the_box_of_a_failure_has_its_line_and_the_sentence_above_does_not_repeat_it():
    where = "Cell In[3]:5 in step\nreturn x @ w"
    failed = ReplicaStatus(rank=1, state=RankStateName.FAILED, error="ValueError: odd", where=where, exit_code=1)
    status = running(state=StateName.FAILED, reason="Rank 1 failed: ValueError: odd", ended=9.0, failed_rank=1)
    other = dataclasses.replace(failed, rank=0)
    status = dataclasses.replace(status, replicas=(other, failed))
    text = Reader(view.html(status)).text
    assert "Rank 1 in Cell In[3]:5 in step" in text
    assert "return x @ w" in text
    assert text.count("ValueError: odd") == 1
    assert "the same error" in text


def test_rate_and_memory_of_a_job_that_has_ended_stay():
    replicas = tuple(dataclasses.replace(one, state=RankStateName.SUCCEEDED) for one in running().replicas)
    assert "100 % · 8,000 samples/s" in facts.progress(running(state=StateName.SUCCEEDED, replicas=replicas), 11.0)


def test_a_frozen_picture_does_not_look_alive():
    source = view.html(running(), [line("x")], 11.0, is_frozen=True)
    assert "was running" in Reader(source).text
    assert 'kd.attach("local://train-net-abcde") shows the job again' in Reader(source).text
    assert "left" not in Reader(source).text.replace("about", "")
    assert "#3b82f6" not in source.partition("End of the log")[0]
    ended = running(state=StateName.SUCCEEDED)
    assert view.html(ended, is_frozen=True) == view.html(ended)


def test_carriage_returns_show_what_a_terminal_would():
    assert wire.visible("10%\r50%\r100%\r") == "100%"


def test_numbers():
    values = (0.07214, 0.277, 12.3, 999.96, 8412.3, 1.2e-5, 3, 50_000, -0.0, None)
    shown = "0.07214 0.2770 12.30 1,000 8,412 1.20e-05 3 50,000 0 "
    assert list(map(facts.number, values)) == shown.split(" ")


def test_places_on_an_axis_are_written_as_a_person_writes_them():
    minutes = [facts.place("minute", x) for x in (0, 0.0061, 0.2117, 61.05)]
    assert minutes == ["0:00", "0:00.4", "0:13", "1:01:03"]
    assert [facts.place("epoch", x) for x in (0.8125, 5, 1500)] == ["0.81", "5", "1,500"]
    assert [facts.place("step", 12345), facts.place("lr", 0.00125)] == ["12,345", "0.001250"]


def test_below_one_per_cent_the_time_left_is_told_once_it_is_no_guess():
    status = running(
        replicas=(ReplicaStatus(rank=0, state=RankStateName.RUNNING, progress=progress(epoch=26, epochs=50_000)),)
    )
    assert "left" not in facts.progress(status, 10.0)
    assert "0 % · 4,000 samples/s · about 5 h" in facts.progress(status, 11.0)
    assert "Epoch 26 of 50,000" in facts.sentence(status, 11.0)
    assert "26/50,000" in plain.text(status, now=11.0)


def test_a_cancelled_job_says_so_once_and_not_by_which_signal_its_agent_ended_ranks():
    ranks = (ReplicaStatus(rank=0, state=RankStateName.STOPPED, signal="SIGKILL"),)
    status = running(state=StateName.CANCELLED, replicas=ranks, ended=4.3, reason="The job was cancelled")
    assert facts.sentence(status, None) == "Cancelled after 3.3 s"
    assert "SIGKILL" not in plain.text(status)
    by = dataclasses.replace(status, reason="The job was cancelled by ada")
    assert facts.sentence(by, None) == "Cancelled after 3.3 s: the job was cancelled by ada"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (-1, "0.0 s")]
)
def test_durations(seconds, text):
    assert facts.duration(seconds) == text


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0, 0.031])
def test_bars_are_equally_wide(fraction):
    assert len(plain.bar(fraction)) == len(plain.bar(0.7))


def test_views_load_without_torch_and_are_pure():
    code = (
        "import sys, json, kale_dist.job.view; "
        "print(json.dumps([name for name in ('torch', 'IPython', 'subprocess') if name in sys.modules]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
    assert view.html(running(), [line("x")], 5.0) == view.html(running(), [line("x")], 5.0)


def test_a_job_that_waits_for_a_person_looks_other_than_one_in_a_queue():
    queued = JobStatus(ref="local://x", reason="The image is absent")
    stuck = dataclasses.replace(queued, needs_action=True)
    heads = [view.parts(status)["head"] for status in (queued, stuck)]
    assert ["needs you" in head for head in heads] == [False, True]
    colours = [re.findall(r"background:(#\w{6})\"", head) for head in heads]
    assert colours[0] != colours[1]
    assert "pending, needs you" in view.text(stuck)
