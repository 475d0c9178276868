"""The training loss within an epoch: how often it is told, and what the status keeps of it."""

import pytest

from kale_dist.job.status import JobStatus, reduce_events
from kale_dist.wire import BatchLoss
from kale_dist.wire.events import RankProgress
from kale_dist.worker.agent import losses


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])
    return now


def progress(rank=0, step=2, loss=1.0, **changes):
    return rank, RankProgress(**{"epoch": 1, "step": step, "steps": 9, "loss": loss, **changes})


def test_the_mean_over_the_ranks_is_told_once_for_all_of_them(clock):
    found = losses.Losses()
    assert found.take(*progress(rank=0, loss=1.0)).loss == 1.0
    assert found.take(*progress(rank=1, loss=3.0)) is None
    assert found.take(*progress(rank=0, step=3, loss=2.0)) == BatchLoss(epoch=1, step=3, steps=9, loss=2.5)


@pytest.mark.parametrize("changes", [{"phase": "eval"}, {"step": 1}, {"loss": None}, {"epoch": 0}])
def test_what_is_no_training_loss_is_passed_over(clock, changes):
    assert losses.Losses().take(*progress(**changes)) is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e308])
def test_odd_losses_stop_nothing(clock, odd):
    found = losses.Losses()
    found.take(*progress(rank=1, loss=-odd))
    assert found.take(*progress(rank=0, loss=odd)) is not None


def test_a_rank_without_a_loss_does_not_hold_up_the_others(clock):
    found = losses.Losses()
    assert found.take(*progress(rank=0, loss=None)) is None
    assert found.take(*progress(rank=3, loss=0.5)).loss == 0.5


def test_a_training_of_a_week_has_some_thousand_values(clock):
    found, told, week = losses.Losses(), 0, 7 * 86_400
    while clock[0] < week:
        told += found.take(*progress()) is not None
        # Ranks would send ten a second; later most of them are known to be too early.
        clock[0] += max(losses.SOONEST_S, (clock[0] - 100) / losses.SHARE / 4)
    assert 1000 < told < 4000


def test_the_status_forgets_batches_that_are_trained_again():
    def loss(epoch, step):
        return {"event": "loss", "attempt": 0, "epoch": epoch, "step": step, "steps": 4, "loss": 1.0}

    status = reduce_events(JobStatus(ref="local://x"), [loss(epoch, step) for epoch in (1, 2) for step in (2, 4)])
    assert len(status.losses) == 4
    assert status.metrics == ()
    resumed = reduce_events(status, [{"event": "resumed", "attempt": 1, "epoch": 1, "batches": 2}])
    assert [(one.epoch, one.step) for one in resumed.losses] == [(1, 2), (1, 4), (2, 2)]
    whole = {
        "event": "losses",
        "attempt": 1,
        "epoch": 2,
        "steps": 4,
        "batches": [[step, 50.0 + step, 0.5] for step in (3, 4)],
    }
    ended = reduce_events(resumed, [loss(2, 3) | {"attempt": 1}, whole])
    assert [(one.epoch, one.step, one.loss) for one in ended.losses[2:]] == [(2, 2, 1.0), (2, 3, 0.5), (2, 4, 0.5)]
    # Of a long training, few batches of an epoch are kept.
    assert reduce_events(ended, [whole | {"batches": [[2, 50.0, 0.5]]}]).losses == ended.losses
    again = reduce_events(resumed, [{"event": "resumed", "attempt": 2, "epoch": 0}])
    assert again.losses == ()
