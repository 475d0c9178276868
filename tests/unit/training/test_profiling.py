"""Where the time goes: phases that add up, a trace of each rank, and time in collectives without being asked."""

import gzip
import json
import time

import pytest
from torch.utils.data import DataLoader, RandomSampler
from trainings import classifying

import kale_dist as kd
from kale_dist.errors import ConfigError, ResultUnavailableError
from kale_dist.worker.training.profiling import CLOCK

PHASES = ("data_s", "forward_s", "backward_s", "exchange_s", "optimizer_s")

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


def start(**options):
    hidden = 8 if "strategy" in options else 0
    given = classifying(64, 4, hidden=hidden, batch_size=4)
    return kd.distribute(*given, on="local", seed=0, threads=1, **options)


def test_a_profile_says_where_each_rank_spends_its_time(tmp_path):
    job = start(number_of_processes=2, profile=3, epochs=2)
    try:
        job.result()
        profile = job.profile()
        assert [(row["rank"], row["steps"]) for row in profile.rows] == [(0, 3), (1, 3)]
        for row in profile.rows:
            assert sum(row[name] for name in PHASES) == pytest.approx(row["step_s"])
            assert all(row[name] > 0 for name in PHASES)
        assert repr(profile).splitlines()[1].split()[:4] == ["rank", "ms", "a", "step"]
        assert "Where the time of a step goes" in profile._repr_html_()
        assert "Where the time of a step goes" in job._repr_mimebundle_()["text/html"]
        trace = json.loads(gzip.decompress(profile.trace(1, tmp_path / "trace.gz").read_bytes()))
        assert trace["distributedInfo"]["rank"] == 1
        assert {"data", "forward", "backward", "optimizer"} <= {event.get("name") for event in trace["traceEvents"]}
        with pytest.raises(ConfigError, match="no rank 2"):
            profile.trace(2)
        numbers = [row for row in job.metrics if row["source"] == "train"]
        assert [row["epoch"] for row in numbers] == [1, 2]
        assert all(row["collective_s"] > 0 and row["bytes_sent"] > 0 for row in numbers)
    finally:
        job.delete()


def test_an_epoch_that_is_too_short_ends_the_profile_and_one_process_has_no_collectives():
    job = start(number_of_processes=1, profile=1000)
    try:
        job.result()
        assert [row["steps"] for row in job.profile().rows] == [15]
        assert not any("collective_s" in row for row in job.metrics)
    finally:
        job.delete()


def test_without_a_profile_the_remedy_is_told():
    job = start(number_of_processes=1)
    try:
        job.wait()
        with pytest.raises(ResultUnavailableError, match="Pass profile=10"):
            job.profile()
    finally:
        job.delete()
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="profile"):
            start(number_of_processes=1, profile=wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline", "local-sgd", "gossip", "parameter-server"])
def test_every_strategy_is_profiled(strategy):
    job = start(number_of_processes=2, profile=3, strategy=strategy)
    try:
        job.result()
        rows = job.profile().rows
        assert len(rows) == (1 if strategy == "parameter-server" else 2)
        assert all(sum(row[name] for name in PHASES) == pytest.approx(row["step_s"]) for row in rows)
        assert all(row["collective_s"] > 0 for row in job.metrics if row["source"] == "train")
    finally:
        job.delete()


def test_phases_exclude_each_other():
    before = dict(CLOCK.totals)
    with CLOCK.phase("outer"), CLOCK.phase("inner"), CLOCK.phase("inner"):
        pass
    assert CLOCK.totals["inner"] > before.get("inner", 0.0)
    assert CLOCK._stack == []


class Slow(RandomSampler):
    """Takes half a second before its first index: with workers, while the loader makes its iterator."""

    def __iter__(self):
        time.sleep(0.5)
        return super().__iter__()


def test_what_a_loader_does_before_an_epoch_is_a_wait_for_data_and_counts_in_the_pace():
    model, loader, *others = classifying(64, 4, batch_size=4)
    loader = DataLoader(loader.dataset, 4, sampler=Slow(loader.dataset), num_workers=1)
    job = kd.distribute(model, loader, *others, epochs=4, on="local", number_of_processes=1, threads=1)
    try:
        job.result()
        # The last row may be of the job's end alone.
        assert max(row.get("data_percent", 0.0) for row in job.usage) > 50
        paces = [row["samples_per_s"] for row in job.metrics if row["source"] == "train"]
        assert len(paces) == 4
        assert max(paces) < 64 / 0.5
    finally:
        job.delete()
