"""What holds a training up: each cause is named right, once, after a minute, and a healthy training is told nothing."""

import pytest

from kale_dist.wire.events import Counters, RankProgress
from kale_dist.worker.agent.bottlenecks import HALF_S, Bottlenecks, Spent

MINUTE_S = 2 * HALF_S


class Training:
    """Ranks whose counters grow by given shares of the time, seen by a clock that the test turns."""

    def __init__(self, ranks=4, gpu_percent=0, **fields):
        self.found = Bottlenecks()
        self.gpu_percent, self.looks = gpu_percent, 0
        self.ranks = ranks
        self.fields = fields
        self.now = 1000.0
        self.spent = {rank: [0.0, 0.0, 0.0, 0.0] for rank in range(ranks)}
        """Seconds for data, in exchange and for checkpoints, and batches."""

    def runs(self, seconds, batch_s=0.1, each_s=2.0, **shares):
        """Let the time pass; shares of data, exchange and checkpoints are numbers for all ranks, or one for each."""
        told = []
        for _ in range(round(seconds / each_s)):
            self.now += each_s
            for rank, spent in self.spent.items():
                for index, name in enumerate(("data", "exchange", "checkpoints")):
                    share = shares.get(name, 0.0)
                    spent[index] += each_s * (share[rank] if isinstance(share, list) else share)
                spent[3] += each_s / batch_s
                self.take(rank)
            told.append(self.found.sentence())
        return [one for one in told if one]

    def take(self, rank):
        data_s, exchange_s, checkpoint_s, batches = self.spent[rank]
        given = {
            "data_s": data_s,
            "exchange_s": exchange_s,
            "checkpoint_s": checkpoint_s,
            "num_workers": 0,
            "meets": True,
        }
        counters = Counters(**{"batches": batches, "trained": 8 * batches, **given, **self.fields})
        progress = RankProgress(time=self.now, counters=counters)
        self.looks += 1
        self.found.take(rank, Spent.of(progress, self.gpu_percent * self.looks, self.looks * (self.gpu_percent > 0)))


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ({"data": 0.61, "exchange": 0.05}, "Ranks wait 61% of the time for data: num_workers=0. Try DataLoader(num_workers=2): workers read ahead"),
        (
            {"data": [0.02, 0.02, 0.5, 0.02], "exchange": [0.5, 0.5, 0.02, 0.5]},
            "The others wait for rank 2, and it waits 50% of the time for data: num_workers=0",
        ),
        (
            {"exchange": [0.5, 0.45, 0.5, 0.05], "data": 0.03},
            "Rank 3 is the slowest: the others wait 43% of the time for it",
        ),
        ({"exchange": 0.55, "batch_s": 0.2}, "Gradients are exchanged for 55% of the time (110 ms a batch). Try accumulate="),
        ({"exchange": 0.45, "batch_s": 0.002}, "(0.9 ms a batch). Try larger batches: batch_size="),
        (
            # Rank 0 writes, and the others wait for it.
            {"checkpoints": [0.09, 0.0, 0.0, 0.0], "exchange": [0.05, 0.14, 0.14, 0.14]},
            "Checkpoints take 9% of the time. Write them more rarely: checkpoint_every=",
        ),
        ({"checkpoints": 0.3}, "Checkpoints take 30% of the time"),
    ],
)  # fmt: skip
def test_each_cause_is_named_once_when_it_was_true_for_a_minute(shares, sentence):
    training = Training()
    assert training.runs(MINUTE_S - 2, **shares) == []
    (told,) = training.runs(10, **shares)
    assert sentence in told
    assert training.runs(10 * MINUTE_S, **shares) == []


@pytest.mark.parametrize(
    "shares",
    [
        {"data": 0.1, "exchange": 0.2, "checkpoints": 0.01},
        {"exchange": [0.1, 0.2, 0.25, 0.2]},
        {"data": [0.0, 0.15, 0.0, 0.0], "exchange": [0.17, 0.02, 0.17, 0.17]},
    ],
)
def test_a_healthy_training_is_told_nothing(shares):
    assert Training().runs(20 * MINUTE_S, **shares) == []


def test_what_lasts_less_than_a_minute_is_not_named():
    training = Training()
    told = training.runs(MINUTE_S, data=0.05) + training.runs(20, data=0.9) + training.runs(MINUTE_S, data=0.05)
    assert told == []


def test_a_rank_that_stands_still_at_a_breakpoint_is_not_the_slowest():
    training = Training(2)
    told = training.runs(10, data=0.02)
    for _ in range(3):
        # Rank 0 waits for it in its exchange.
        told += training.runs(300, each_s=300, batch_s=300, exchange=[0.99, 0.0])
    assert told + training.runs(2 * MINUTE_S, data=0.02) == []


def test_a_rank_that_is_slow_now_and_then_is_not_the_slowest():
    training, told = Training(2), []
    for turn in range(60):
        told += training.runs(2, exchange=[0.6, 0.0] if turn % 2 else [0.0, 0.6])
    assert told == []


def test_another_cause_later_is_named_too():
    training = Training()
    assert len(training.runs(2 * MINUTE_S, data=0.6)) == 1
    assert len(training.runs(3 * MINUTE_S, exchange=0.7)) == 1


def test_workers_that_are_too_few_are_named_by_their_number():
    (told,) = Training(num_workers=2).runs(2 * MINUTE_S, data=0.4)
    assert "num_workers=2. Try more of them, persistent_workers=True" in told


def test_one_process_waits_for_nobody():
    assert Training(1).runs(3 * MINUTE_S, exchange=0.0) == []
    assert len(Training(1).runs(3 * MINUTE_S, data=0.3)) == 1


@pytest.mark.parametrize(
    ("gpu_percent", "shares", "count"),
    [
        (0, {"exchange": 0.9}, 0),
        (40, {"data": [0.0, 0.0, 0.6, 0.0]}, 1),
        # The next batch is read while the GPU computes.
        (95, {"data": 0.6}, 0),
        # It is not known whether the GPU waits.
        (0, {"data": 0.6}, 0),
        (95, {"checkpoints": [0.1, 0.0, 0.0, 0.0], "data": [0.0, 0.01, 0.0, 0.0]}, 1),
    ],
)
def test_of_gpus_whose_exchange_is_unknown_only_data_and_checkpoints_are_named(gpu_percent, shares, count):
    assert len(Training(gpu_percent=gpu_percent, exchange_s=None).runs(3 * MINUTE_S, **shares)) == count


def test_ranks_that_do_not_meet_in_each_step_have_no_slowest():
    assert Training(meets=False).runs(3 * MINUTE_S, exchange=[0.7, 0.2, 0.7, 0.7]) == []
    assert Training(meets=False).runs(3 * MINUTE_S, exchange=0.8) == []


def test_another_attempt_begins_another_minute():
    training = Training()
    training.runs(MINUTE_S - 4, data=0.6)
    training.found.begin_attempt()
    training.spent = {rank: [0.0, 0.0, 0.0, 0.0] for rank in range(4)}
    assert training.runs(MINUTE_S - 4, data=0.6) == []
    assert len(training.runs(10, data=0.6)) == 1


def test_a_lost_rank_is_not_waited_for():
    training = Training(2)
    training.runs(10, data=0.6)
    training.spent.pop(1)
    assert training.runs(2 * MINUTE_S, data=0.6) == []
    training.found.forget(1)
    assert len(training.runs(2 * MINUTE_S, data=0.6)) == 1
