"""What ranks used and waited for: how often it is kept, what a moment has, the status, the pictures, and no line in a pod's log."""

import json

import pytest

from kale_dist.job import view
from kale_dist.job.status import JobStatus, reduce_events
from kale_dist.job.view import curves
from kale_dist.wire import Moment, StateName
from kale_dist.wire.events import Counters, Event, RankProgress, Usage
from kale_dist.worker.agent.history import History
from kale_dist.worker.agent.usage import EACH_S

GIB = 1 << 30


def usage(memory=GIB, **changes):
    return Usage(memory_bytes=memory, **changes)


def progress(at=0.0, batches=0, data_s=0.0, exchange_s=0.0, **changes):
    counted = {"trained": 8 * batches, "meets": True, "num_workers": 0, "checkpoint_s": 0.0} | changes
    counters = Counters(batches=batches, data_s=data_s, exchange_s=exchange_s, **counted)
    return RankProgress(time=at, epoch=1, step=batches, steps=900, counters=counters)


def values(moment):
    return dict(moment.values)


def begun(ranks=1):
    history = History()
    history.begin_attempt(ranks)
    return history


def looked(ranks, seconds):
    """How many moments a job of that length has; later looks that are too early to matter are left out."""
    history, now, moments = begun(ranks), 0.0, 0
    for rank in range(ranks):
        history.take_usage(rank, usage())
    while now < seconds:
        moments += history.moment(now) is not None
        now += max(EACH_S, now / 400)
    return moments


@pytest.mark.parametrize(
    ("ranks", "seconds", "fewest", "most"),
    [
        (2, 60, 25, 31),
        (64, 86_400, 300, 400),
        (2, 365 * 86_400, 500, 600),
        # As many numbers as 64 ranks have.
        pytest.param(1024, 86_400, 10, 40, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_has_at_most_600_moments_however_long_its_job_is(ranks, seconds, fewest, most):
    assert fewest <= looked(ranks, seconds) <= most


def test_a_moment_has_the_most_memory_and_means_of_all_looks_since_the_one_before():
    history = begun()
    history.take_usage(0, usage(memory=GIB, gpu_percent=0, gpu_memory_bytes=2 * GIB))
    assert values(history.moment(0.0)) == {"memory_gib": (1.0,), "gpu_percent": (0.0,), "gpu_memory_gib": (2.0,)}
    history.take_usage(0, usage(memory=3 * GIB, gpu_percent=100, gpu_memory_bytes=GIB))
    assert history.moment(1.0) is None
    history.take_usage(0, usage(memory=2 * GIB, gpu_percent=51, gpu_memory_bytes=GIB))
    history.take_progress(0, progress(at=100.0, batches=10, data_s=1.0, exchange_s=5.0))
    assert values(history.moment(2.0)) == {"memory_gib": (3.0,), "gpu_percent": (75.5,), "gpu_memory_gib": (1.0,)}
    history.take_progress(0, progress(at=104.0, batches=30, data_s=2.0, exchange_s=7.0))
    assert values(history.moment(4.0)) == {
        "memory_gib": (2.0,), "gpu_percent": (51.0,), "gpu_memory_gib": (1.0,), "data_percent": (25.0,),
        "exchange_percent": (50.0,), "samples_per_s": (40.0,),
    }  # fmt: skip


def test_an_unknown_exchange_and_batches_that_another_rank_reads_are_left_out():
    history = begun(2)
    for at, batches in ((0.0, 0), (2.0, 4)):
        for rank, samples in ((0, 8 * batches), (1, None)):
            history.take_usage(rank, usage())
            history.take_progress(rank, progress(at, batches, exchange_s=None, trained=samples))
        moment = history.moment(at)
    assert values(moment) == {
        "memory_gib": (1.0, 1.0),
        "data_percent": (0.0, 0.0),
        "samples_per_s": (16.0, None),
    }


def test_an_attempt_with_other_ranks_counts_from_its_own_beginning():
    history = begun(1)
    history.take_usage(0, usage())
    history.take_progress(0, progress(at=1000.0, batches=500, data_s=900.0))
    assert history.moment(0.0) is not None
    history.begin_attempt(2)
    assert history.moment(10.0) is None
    assert history.moment(10.0, is_last=True) is None
    for rank in (0, 1):
        history.take_usage(rank, usage())
        history.take_progress(rank, progress(at=1010.0, batches=1))
    assert values(history.moment(12.0)) == {"memory_gib": (1.0, 1.0)}
    for rank in (0, 1):
        history.take_progress(rank, progress(at=1014.0, batches=9, data_s=1.0))
    assert values(history.moment(14.0))["data_percent"] == (25.0, 25.0)


def test_a_job_that_is_over_before_the_second_moment_has_its_shares_too():
    history = begun()
    history.take_usage(0, usage())
    history.take_progress(0, progress(at=0.0, batches=1))
    assert "data_percent" not in values(history.moment(0.0))
    history.take_progress(0, progress(at=1.0, batches=11, data_s=0.5))
    assert history.moment(1.0) is None
    last = values(history.moment(1.0, is_last=True))
    assert (last["data_percent"], last["samples_per_s"]) == ((50.0,), (80.0,))


@pytest.mark.parametrize("odd", ["x", None, float("nan"), 10**400, [], True])
@pytest.mark.parametrize(
    "name", ["time", "batches", "data_s", "exchange_s", "checkpoint_s", "trained", "num_workers", "meets"]
)
def test_odd_progress_of_a_rank_stops_nothing(name, odd):
    history = begun()
    history.take_usage(0, usage())
    history.take_progress(0, progress(at=0.0))
    record = Event(progress(at=1.0, batches=3), 1.0).record()
    record = record | {name: odd} if name == "time" else record | {"counters": record["counters"] | {name: odd}}
    if (event := Event.read(json.loads(json.dumps(record)))) is not None:
        history.take_progress(0, event.what)
    if (event := Event.read(Event(usage(), 1.0).record() | {"gpu_percent": odd, "gpu_memory_bytes": odd})) is not None:
        history.take_usage(0, event.what)
    assert values(history.moment(2.0))["memory_gib"] == (1.0,)
    assert history.bottleneck() == ""


def test_a_lost_rank_has_no_values_any_more():
    history = begun(2)
    for at in (0.0, 2.0):
        for rank in (0, 1):
            history.take_usage(rank, usage())
            history.take_progress(rank, progress(at, batches=round(at)))
        moment = history.moment(at)
    assert values(moment)["memory_gib"] == (1.0, 1.0)
    history.forget(1)
    history.take_progress(0, progress(4.0, batches=4))
    moment = values(history.moment(4.0))
    assert (moment["memory_gib"], moment["samples_per_s"]) == ((1.0, None), (8.0, None))


def events(moments=3, ranks=2, **values):
    each = {"memory_gib": 0.5, "data_percent": 12.5, **values}
    return [
        Event(Moment(values=tuple((name, (value,) * ranks) for name, value in each.items())), 60.0 * index).record()
        for index in range(moments)
    ]


def test_the_status_has_the_moments_and_a_row_of_each_rank():
    status = reduce_events(JobStatus(ref="local://x"), events())
    status = reduce_events(status, events(1, memory_gib=None))
    assert status.metrics == ()
    assert len(status.history) == 4
    rows = [row for moment in status.history for row in moment.rows()]
    assert [(row.time, row.rank, row.source) for row in rows[:3]] == [
        (0, 0, "usage"),
        (0, 1, "usage"),
        (60, 0, "usage"),
    ]
    assert dict(rows[0].values) == {"memory_gib": 0.5, "data_percent": 12.5}
    assert dict(rows[-1].values) == {"data_percent": 12.5}


@pytest.mark.parametrize(
    "broken", [{"time": "x"}, {"values": 3}, {"values": [["memory_gib", 3]]}, {"values": [["memory_gib", ["x"]]]}]
)
def test_a_damaged_moment_is_passed_over(broken):
    assert reduce_events(JobStatus(ref="local://x"), [{**events(1)[0], **broken}]).history == ()


def shown(ranks=2, **values):
    return reduce_events(JobStatus(ref="local://x", state=StateName.RUNNING), events(ranks=ranks, **values))


def test_the_picture_has_it_folded_over_minutes_and_from_zero():
    status = shown(exchange_percent=40.0)
    drawn = view.html(status)
    assert drawn.count("<details") == drawn.count("Memory, GPUs and waiting</summary>") == 1
    assert all(f">{name}</span>" in drawn for name in ("memory, GiB", "waiting for data, %", "in exchange, %"))
    assert "minute 0" in drawn
    assert ">0</span>" in drawn or ">0.0</span>" in drawn
    data = json.loads(view.parts(status)["history"])
    assert [chart["zero"] for chart in data["charts"]] == [True] * 3
    assert data["charts"][0]["series"][1]["points"] == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert data["remark"] == ""


def test_the_picture_says_that_the_exchange_of_gpus_is_unknown():
    assert "In exchange: unknown" in view.html(shown())
    assert "In exchange: unknown" in json.loads(view.parts(shown())["history"])["remark"]


def test_before_there_are_lines_nothing_is_shown():
    for status in (JobStatus(ref="local://x"), reduce_events(JobStatus(ref="local://x"), events(1))):
        assert "Memory, GPUs" not in view.html(status)


def test_many_ranks_are_their_mean_between_the_lowest_and_the_highest():
    moments = [Moment(time=60.0 * at, values=(("gpu_percent", tuple(map(float, range(64)))),)) for at in (0, 1)]
    (curve,) = curves.collect_history(moments)
    (series,) = curve.series
    assert series.label.startswith("mean of 64 ranks")
    assert series.points == ((0.0, 31.5), (1.0, 31.5))
    assert series.band == ((0.0, 63.0), (0.0, 63.0))


def test_a_comparison_has_the_mean_over_time_and_the_most_memory():
    moments = [
        Moment(time=60.0 * at, values=(("memory_gib", (memory, 1.0)), ("data_percent", (share, share))))
        for at, memory, share in ((0, 1.0, 90.0), (1, 3.0, 10.0), (4, 1.0, 50.0))
    ]
    memory, share = curves.collect_history(moments, is_compared=True)
    assert (memory.series[0].last, share.series[0].last) == (2.0, 40.0)
    assert share.series[0].band == ()


def test_a_gap_between_two_attempts_weighs_as_the_moment_before_it():
    minutes = ((0, 10.0), (1, 10.0), (61, 90.0), (62, 10.0), (63, 10.0))
    moments = [Moment(time=60.0 * at, values=(("data_percent", (share,)),)) for at, share in minutes]
    (curve,) = curves.collect_history(moments, is_compared=True)
    assert curve.series[0].last == 30.0
