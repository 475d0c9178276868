"""Where the time goes: phases that exclude each other, and the time in collectives of each epoch."""

import time

import pytest
from torch.utils.data import DataLoader, RandomSampler
from trainings import classifying

import kale_dist as kd
from kale_dist.worker.training.clock import CLOCK

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_count_the_time_in_collectives(processes):
    job = kd.distribute(
        *classifying(64, 4, batch_size=4), on="local", epochs=2, number_of_processes=processes, threads=1
    )
    try:
        job.result()
        rows = [row for row in job.metrics if row["source"] == "train"]
        assert [row["epoch"] for row in rows] == [1, 2]
        assert {row.get("collective_s", 0) > 0 for row in rows} == {processes == 2}
        assert {row.get("bytes_sent", 0) > 0 for row in rows} == {processes == 2}
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
