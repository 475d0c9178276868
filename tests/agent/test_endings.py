"""How jobs end that do not succeed: errors, deaths, hangs, limits, cancels."""

from __future__ import annotations

import re
import signal
import time

import pytest
from agent_jobs import RunningJob, add_ranks, all_running, named, survivors

from kale_dist.places.agent_client import cancel_message, send
from kale_dist.wire import JobFiles


def fail_on_one():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the seventh batch is empty")
    dist.barrier()


def test_an_exception_ends_the_others_and_is_the_cause(jobs):
    job = jobs.run(fail_on_one)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "error")
    assert "Rank 1" in state["reason"]
    assert "ValueError: the seventh batch is empty" in state["reason"]
    assert isinstance(job.outcome(1).error, ValueError)
    assert "the seventh batch is empty" in job.log_text(rank=1)
    outcome = next(event for event in job.events("outcome") if event["rank"] == 1)
    assert (outcome["ok"], outcome["error_type"]) == (False, "ValueError")
    ends = {event["rank"]: event["state"] for event in job.events("rank")}
    assert ends == {0: "stopped", 1: "failed"}
    assert survivors(named(job.pids().values()), 0.1) == []


def leave_early():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return
    dist.all_reduce(torch.ones(1))


def leave_early_in_backward():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3 if dist.get_rank() == 0 else 4):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("function", [leave_early, pytest.param(leave_early_in_backward, marks=pytest.mark.nightly)])
def test_a_rank_that_left_others_in_a_collective_is_reported_soon(jobs, function):
    job = jobs.run(function)
    job.until(lambda: job.events("outcome"))
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "left")
    assert state["reason"].startswith("Rank 0 ended while rank 1 waits for it in a collective")
    assert f"in {function.__name__}" in state["reason"]
    waiting = job.events("waiting")[-1]
    assert (waiting["waiting"], waiting["busy"]) == ([1], [])


def work_on():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return 0
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        torch.ones(100, 100) @ torch.ones(100, 100)
    time.sleep(1)
    return 1


@pytest.mark.nightly
def test_a_rank_that_works_on_alone_is_left_alone(jobs):
    job = jobs.run(work_on)
    assert job.wait()["state"] == "succeeded"
    assert job.outcome(1).value == 1


def hang_on_one():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_a_stall_shows_all_stacks_and_who_waits_then_fails(jobs):
    job = jobs.run(hang_on_one, stall_warn_s=4.0, stall_timeout_s=8.0)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "stalled")
    assert "stall_timeout_s" in state["reason"]
    assert re.search(r"Rank 1 is in \S+/test_endings.py:\d+ in hang_on_one, rank 0 waits for it\.", state["reason"])
    waiting = job.events("waiting")[0]
    assert (waiting["waiting"], waiting["busy"]) == ([0], [1])
    log = job.log_text()
    assert "Rank 0:" in log
    assert "Rank 1:" in log
    assert "hang_on_one" in log


@pytest.mark.nightly
def test_progress_keeps_a_stall_away(jobs):
    def slow():
        from kale_dist.wire import context

        for _ in range(16):
            time.sleep(0.5)
            context.mark_progress()

    job = jobs.run(slow, ranks=1, stall_warn_s=5.0, stall_timeout_s=6.0)
    assert job.wait()["state"] == "succeeded"
    assert job.events("waiting") == []


@pytest.mark.nightly
def test_a_rank_that_signs_and_writes_a_large_result_is_not_stalled(jobs):
    job = jobs.run(lambda: bytes(600 << 20), ranks=1, stall_timeout_s=1.0)
    assert job.wait()["state"] == "succeeded"


def test_a_hang_that_runs_into_the_timeout_names_its_line_and_shows_a_stack_of_each_rank(jobs):
    job = jobs.run(hang_on_one, timeout_s=5.0)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "timeout")
    assert survivors(named(job.pids().values()), 0.1) == []
    assert re.search(r"rank 1 is in \S+/test_endings.py:\d+ in hang_on_one, rank 0 waits for it\.", state["reason"])
    assert "more time" not in state["reason"]
    shown, end, _ = job.log_text().partition("timeout_s of 5 s")
    stacks = shown.partition("Where each of them is:")[2]
    assert end
    assert [stacks.count(f"Rank {rank}:") for rank in range(2)] == [1, 1]
    assert stacks.count("in hang_on_one") == 2


def sleep_with_children():
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    escaped = subprocess.Popen(["sh", "-c", "sleep 601 & echo $!; wait"], start_new_session=True)
    print(child.pid, escaped.pid)
    time.sleep(600)


def all_started(job):
    """The ranks of `sleep_with_children`, and the three processes that each has started."""
    pids = all_running(job)
    words = job.until(lambda: len(found := job.log_text(rank=0).split() + job.log_text(rank=1).split()) == 6 and found)
    return named([*pids.values(), *map(int, words)])


def test_cancel_ends_ranks_and_what_they_started_and_nothing_of_another_job(jobs):
    job, other = jobs.run(sleep_with_children), jobs.run(sleep_with_children)
    ours, theirs = all_started(job), all_started(other)
    jobs.client.cancel(job.order.job)
    jobs.client.cancel(job.order.job)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("cancelled", "user")
    assert survivors(ours, 30) == []
    assert len(survivors(theirs, 0.0)) == len(theirs) == 8
    jobs.client.cancel(job.order.job)
    jobs.client.cancel(other.order.job)
    assert other.wait()["state"] == "cancelled"
    assert survivors(theirs, 30) == []


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(jobs):
    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(600)

    job = jobs.run(stubborn, ranks=1)
    job.until(job.log)
    start = time.monotonic()
    jobs.client.cancel(job.order.job, grace_s=0.5)
    assert job.wait()["state"] == "cancelled"
    assert time.monotonic() - start > 0.4


def test_cancel_at_once_and_before_the_order(jobs):
    order = jobs.order(sleep_with_children)
    assert send(jobs.client.address, cancel_message(order.job))
    JobFiles(order.folder).cancelled.write_text("ann@laptop")
    jobs.client.take(order)
    assert RunningJob(order).wait()["state"] == "cancelled"
    job = jobs.run(sleep_with_children)
    jobs.client.cancel(job.order.job, grace_s=0.2)
    assert job.wait()["state"] == "cancelled"
    assert survivors(named(job.pids().values()), 30) == []


def test_a_damaged_snapshot_is_told_not_raised(jobs):
    order = jobs.order(add_ranks, 99)
    path = jobs.store.path(order.snapshot)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"t", b"T", 1))
    jobs.client.take(order)
    state = RunningJob(order).wait()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert "damaged" in state["reason"]
