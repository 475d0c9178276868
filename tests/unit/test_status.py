import json
import math
import time

import pytest

from kale_dist.job.status import JobStatus, ReplicaStatus, reduce_events
from kale_dist.job.view import facts
from kale_dist.wire import FailureCause, RankStateName, StateName


def status_of(*events, ranks=2):
    start = JobStatus(ref="local://j", replicas=tuple(ReplicaStatus(rank=rank) for rank in range(ranks)))
    return reduce_events(start, [{"time": 5.0, "rank": None, "attempt": 0, **event} for event in events])


def test_a_job_runs_from_pending_to_success():
    running = status_of(
        {"event": "state", "state": "starting", "reason": "", "cause": None},
        {"event": "rank", "rank": 1, "state": "running", "pid": 42},
        {"event": "state", "state": "running", "time": 7.0},
    )
    assert (running.state, running.started, running.ended) == (StateName.RUNNING, 7.0, None)
    assert running.replicas[1].pid == 42
    assert running.replicas[0].state is RankStateName.PENDING
    done = reduce_events(running, [{"event": "state", "state": "succeeded", "time": 9.0, "attempt": 0}])
    assert done.is_final
    assert (done.ended, done.fraction) == (9.0, 1.0)


def test_warm_pods_that_wait_for_a_call_run_until_they_end():
    idle = {"event": "state", "state": "running", "reason": "Waits for a call that fits", "idle_s": 20.0, "time": 7.0}
    assert {replica.state for replica in status_of(idle).replicas} == {RankStateName.RUNNING}
    ended = {"event": "state", "state": "succeeded", "reason": "No call came for 20 s", "time": 27.0}
    assert facts.state(status_of(idle)) == "ended after 20 s idle"
    assert facts.state(status_of({**idle, "time": time.time() - 5})) == "idle 5 of 20 s"
    ended = status_of(idle, ended)
    assert {replica.state for replica in ended.replicas} == {RankStateName.STOPPED}
    assert facts.sentence(ended, 30.0) == "Succeeded after 20 s on 2 ranks: no call came for 20 s"


def test_a_final_state_stays():
    status = status_of(
        {"event": "state", "state": "failed", "reason": "why", "cause": "died"}, {"event": "state", "state": "running"}
    )
    assert (status.state, status.cause, status.reason) == (StateName.FAILED, FailureCause.DIED, "why")


def test_the_first_failing_rank_is_kept():
    status = status_of(
        {"event": "outcome", "rank": 1, "ok": False, "error_type": "ValueError", "error_text": "boom"},
        {"event": "rank", "rank": 1, "state": "failed", "exit_code": 1},
        {"event": "rank", "rank": 0, "state": "failed", "signal": "SIGKILL"},
    )
    assert status.failed_rank == 1
    assert status.replicas[1].error == "ValueError: boom"
    assert (status.replicas[0].signal, status.replicas[0].exit_code) == ("SIGKILL", None)


def test_progress_and_what_is_known_of_it():
    status = status_of(
        {
            "event": "progress",
            "rank": 0,
            "phase": "train",
            "epoch": 2,
            "epochs": 4,
            "step": 5,
            "steps": 10,
            "loss": None,
        }
    )
    assert status.fraction == pytest.approx((1 + 0.5) / 4)
    unknown = status_of({"event": "progress", "rank": 0, "phase": "train", "epoch": 1, "epochs": 2, "steps": None})
    assert unknown.fraction == 0
    evaluating = status_of({"event": "progress", "rank": 0, "phase": "eval", "epoch": 1, "epochs": 2, "step": 1})
    assert evaluating.fraction == 0.5
    assert status_of().fraction is None


def test_metrics_become_rows_in_order():
    status = status_of(
        {"event": "metrics", "rank": 1, "values": [["loss", 1]], "source": "report"},
        {"event": "metrics", "values": [["loss", math.nan], ["acc", math.inf]], "epoch": 1, "source": "train"},
    )
    assert [(row.rank, row.epoch, row.source) for row in status.metrics] == [(1, None, "report"), (None, 1, "train")]
    assert status.metrics[0].values == (("loss", 1.0),)


def test_notes_are_kept_once_and_checkpoints_by_epoch():
    status = status_of(
        {"event": "note", "rank": 0, "text": "x"}, {"event": "note", "rank": 1, "text": "x"},
        {"event": "checkpoint", "rank": 0, "epoch": 3},
    )  # fmt: skip
    assert (status.notes, status.checkpoint_epoch) == (("x",), 3)


def test_a_loss_that_is_nan_at_the_same_place_in_two_attempts_is_nan_in_both():
    note = {"event": "note", "rank": 0, "text": "nan", "warns": True, "nan": [1, 2]}
    status = status_of(note, {"event": "rank", "rank": 0, "state": "running", "attempt": 1})
    assert status.nan_since is None
    status = status_of(note, {**note, "attempt": 1})
    assert (status.nan_since, status.notes, status.warnings) == ((1, 2), ("nan",), ("nan",))


@pytest.mark.parametrize(("last", "is_nan"), [(math.nan, True), (0.5, False)])
def test_a_loss_that_no_step_returns_is_judged_by_its_last_batches(last, is_nan):
    losses = [{"event": "loss", "epoch": 1, "step": step, "loss": loss} for step, loss in ((1, 0.9), (8, last))]
    note = {"event": "note", "rank": 0, "text": "nan", "nan": [1, 2]}
    status = status_of(*losses, note, {"event": "metrics", "values": [["mse", 0.4]], "epoch": 1, "source": "train"})
    assert status.is_nan == is_nan


def test_who_waits_in_a_collective():
    status = status_of({"event": "waiting", "waiting": [0, 1], "busy": [2], "seconds": 300}, ranks=3)
    assert [replica.in_collective for replica in status.replicas] == [True, True, False]


def test_a_new_attempt_sets_the_ranks_back_and_old_events_are_passed_over():
    status = status_of(
        {"event": "rank", "rank": 0, "state": "failed"},
        {"event": "metrics", "rank": 0, "values": [["loss", 1.0]]},
        {"event": "rank", "rank": 1, "state": "running", "attempt": 1},
        {"event": "rank", "rank": 1, "state": "failed", "attempt": 0},
    )
    assert (status.attempt, status.failed_rank) == (1, None)
    assert [replica.state for replica in status.replicas] == [RankStateName.PENDING, RankStateName.RUNNING]
    assert len(status.metrics) == 1


def test_each_attempt_says_which_ranks_there_are_and_who_runs_them():
    members = [{"agent": 0, "first_rank": 0, "processes": 2}, {"agent": 2, "first_rank": 2, "processes": 1}]
    running = {"event": "rank", "rank": 2, "attempt": 0, "state": "running", "pid": 5}
    status = status_of({"event": "attempt", "rank": None, "attempt": 0, "members": members}, running, ranks=4)
    assert [(one.rank, one.agent) for one in status.replicas] == [(0, 0), (1, 0), (2, 2)]
    assert status.replicas[2].state is RankStateName.RUNNING
    status = reduce_events(status, [{"event": "attempt", "rank": None, "attempt": 1, "members": members[:1]}])
    assert [(one.rank, one.state) for one in status.replicas] == [(0, "pending"), (1, "pending")]
    # What of an attempt cannot be read leaves the ranks as they are.
    assert len(reduce_events(status, [{"event": "attempt", "rank": None, "attempt": 1, "members": [5]}]).replicas) == 2


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": "later-version"},
        {"event": ["state"]},
        {"event": "note"},
        {"event": "state"},
        {"event": "state", "state": "bogus"},
        {"event": "state", "state": "running", "attempt": "x"},
        {"event": "rank", "rank": None, "state": "running"},
        {"event": "rank", "rank": "x", "state": "running"},
        {"event": "rank", "rank": -1, "state": "failed"},
        {"event": "rank", "rank": 30_000_000, "state": "running"},
        {"event": "progress", "rank": 0, "epoch": "x"},
        {"event": "usage", "rank": 0, "memory_bytes": math.inf},
        {"event": "usage", "rank": 0, "gpu_percent": 10**400},
        {"event": "metrics", "rank": 0, "values": [["loss", "x"]]},
        {"event": "metrics", "rank": 0, "values": [1]},
        {"event": "waiting", "waiting": 5},
    ],
)
def test_what_is_no_event_of_this_job_changes_nothing_and_hides_nothing(event):
    assert reduce_events(status_of(), [event]) == status_of()
    note = {"event": "note", "text": "later"}
    assert reduce_events(status_of(), [event, note]) == reduce_events(status_of(), [note])


def test_many_reports_are_reduced_in_little_time():
    event = json.loads('{"event":"metrics","rank":0,"attempt":0,"time":1.0,"values":[["loss", 0.5]]}')
    start = time.process_time()
    assert len(reduce_events(status_of(), [event] * 100_000).metrics) == 100_000
    assert time.process_time() - start < 20


def test_a_status_is_one_line():
    assert (
        repr(status_of({"event": "state", "state": "failed", "reason": "why"})) == "<JobStatus local://j failed: why>"
    )


def test_epochs_that_are_trained_once_more_count_once():
    def row(source, epoch, attempt):
        return {"event": "metrics", "source": source, "epoch": epoch, "values": [["loss", epoch]], "attempt": attempt}

    status = status_of(
        *(row("train", epoch, 0) for epoch in (1, 2, 3)),
        row("report", 3, 0),
        {"event": "checkpoint", "epoch": 3},
        {"event": "resumed", "epoch": 2, "attempt": 1},
        row("train", 2, 0),
        *(row("train", epoch, 1) for epoch in (3, 4)),
    )
    assert [(row.source, row.epoch) for row in status.metrics] == [
        ("train", 1), ("train", 2), ("report", 3), ("train", 3), ("train", 4),
    ]  # fmt: skip
    assert (status.attempt, status.checkpoint_epoch) == (1, 2)
    anew = reduce_events(status, [{"event": "resumed", "epoch": 0, "attempt": 2}])
    assert [(row.source, row.epoch) for row in anew.metrics] == [("report", 3)]
    assert anew.checkpoint_epoch is None


@pytest.mark.parametrize("epoch", [None, "x", [], {}])
def test_a_damaged_resumption_changes_no_metrics(epoch):
    row = {"event": "metrics", "source": "train", "epoch": 1, "values": [["loss", 1.0]]}
    status = status_of(row, {"event": "resumed", "epoch": epoch})
    assert len(status.metrics) == 1
