"""Which of several failed ranks is to blame, and the sentence that says so."""

from __future__ import annotations

import types

import pytest
import torch

from kale_dist.wire import FailureCause, RankStateName
from kale_dist.wire.messages import Done
from kale_dist.worker.agent.ending import blame, rank_state
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.rank import stand_ins


def failed(rank, error_type="ValueError", error_text="bad", **more):
    done = Done(ok=False, error_type=error_type, error_text=error_text, **more)
    return types.SimpleNamespace(rank=rank, done=done, end=None)


def died(rank, tail=(), **end):
    return types.SimpleNamespace(rank=rank, done=None, end=End(**end, tail=tuple(tail)))


LOST_PEER = ("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("failures", "rank", "cause"),
    [
        ([failed(0), failed(1)], 0, FailureCause.ERROR),
        ([failed(0, *LOST_PEER), failed(1)], 1, FailureCause.ERROR),
        ([failed(0, *LOST_PEER), died(1, signal="SIGKILL")], 1, FailureCause.DIED),
        ([failed(0), died(1, signal="SIGKILL")], 0, FailureCause.ERROR),
        ([died(1, signal="SIGKILL"), failed(0)], 1, FailureCause.DIED),
        ([failed(0, *LOST_PEER)], 0, FailureCause.ERROR),
        ([failed(1, is_not_started=True)], 1, FailureCause.NOT_STARTED),
        ([died(1, reason="no memory")], 1, FailureCause.NOT_STARTED),
    ],
)
def test_the_first_cause_is_found(failures, rank, cause):
    verdict = blame(failures)
    assert verdict.cause == cause
    assert verdict.reason.startswith(f"Rank {rank} ")


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (failed(0, error_text=""), "Rank 0 failed: ValueError"),
        (died(2, exit_code=3), "exit code 3"),
        (died(2, signal="SIGKILL"), "memory ran out"),
        (
            died(2, signal="SIGKILL", memory_limit="a limit of 2.0 GiB"),
            "memory ran out (its container has a limit of 2.0 GiB)",
        ),
        (died(2, signal="SIGSEGV", tail=["a", "b"]), 'SIGSEGV. Its last lines: "a / b"'),
        (
            died(
                1, signal="SIGABRT", tail=["[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 84 vs 72."]
            ),
            "drop_last=True",
        ),
        (died(2, signal="SIGKILL", reason="the forkserver went"), "because the forkserver went"),
        (died(2, signal="SIGKILL", reason="the forkserver went", memory_limit="a limit of 0.2 GiB"), "memory ran out"),
        (died(2, reason="the forkserver went", memory_limit="a limit of 0.2 GiB"), "memory ran out"),
    ],
)
def test_the_sentence_says_what_is_known(rank, text):
    assert text in blame([rank]).reason


@pytest.mark.parametrize(
    ("rank", "stopped", "state"),
    [
        (failed(0), False, RankStateName.FAILED),
        (failed(0), True, RankStateName.FAILED),
        (died(0, signal="SIGTERM"), True, RankStateName.STOPPED),
        (died(0, signal="SIGKILL"), False, RankStateName.FAILED),
    ],
)
def test_the_final_state_of_a_rank(rank, stopped, state):
    assert rank_state(rank, stopped=stopped) == state


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (died(1, signal="SIGKILL"), True),
        (died(1, exit_code=0), True),
        (died(1, signal="SIGKILL", reason="the forkserver went"), True),
        (died(1, signal="SIGKILL", memory_limit="a limit of 2.0 GiB"), False),
        (died(1, reason="no process to be had"), False),
        (failed(1), False),
        (failed(1, *LOST_PEER), False),
        (failed(1, is_not_started=True), False),
    ],
)
def test_another_attempt_is_for_lost_ranks_alone(rank, expected):
    assert blame([rank]).may_restart is expected


class Reset:
    """A DataLoader's queue, whose other end a dead worker was."""

    def get(self, timeout=None):
        raise ConnectionResetError(104, "Connection reset by peer")


class Unreachable(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_connection_that_a_dead_loader_worker_cut_is_named_after_it():
    batches = iter(torch.utils.data.DataLoader([0], num_workers=1))
    batches._data_queue, queue = Reset(), batches._data_queue
    with pytest.raises(ConnectionResetError) as raised:
        next(batches)
    batches._data_queue = queue
    assert str(stand_ins.clearer(raised.value)).startswith("A DataLoader worker died")


class Corrupt(Unreachable):
    def __getitem__(self, index):
        raise ValueError("corrupt file 37.png")


def test_what_a_loader_worker_raised_begins_with_its_own_words():
    with pytest.raises(ValueError, match="Caught ValueError") as raised:
        next(iter(torch.utils.data.DataLoader(Corrupt(), num_workers=1)))
    assert str(stand_ins.clearer(raised.value)).startswith("corrupt file 37.png (in a DataLoader worker)\nCaught")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_connection_that_the_dataset_lost_keeps_its_error(num_workers):
    with pytest.raises(ConnectionResetError) as raised:
        next(iter(torch.utils.data.DataLoader(Unreachable(), num_workers=num_workers)))
    assert stand_ins.clearer(raised.value) is raised.value
