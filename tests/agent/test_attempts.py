"""Ranks that are lost and started again: when that happens, when it never does, and what is told of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time

import pytest
from agent_jobs import RunningJob, named, survivors
from plain_jobs import speak_and_sleep

import kale_dist as kd
from kale_dist.job.status import JobStatus, ReplicaStatus, reduce_events
from kale_dist.places.agent_client import cancel_message, send


def told(job):
    """Attempts and states of a job, in their order."""
    return [(event["attempt"], event["state"]) for event in job.events("state")]


def lost_at_first(rank, how, times):
    """Dies on one rank in its first attempts; then adds up what all have."""
    import torch
    import torch.distributed as dist

    here = kd.context()
    total = torch.ones(1)
    dist.all_reduce(total)
    if here.rank == rank and here.attempt < times:
        print(f"last words in attempt {here.attempt}")
        os.kill(os.getpid(), how) if how > 0 else os._exit(-how)
    dist.all_reduce(total)
    return here.attempt, total.item(), os.environ["TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.parametrize(
    ("rank", "how", "times"),
    [(1, signal.SIGKILL, 1), pytest.param(0, -3, 2, marks=pytest.mark.nightly)],
)
def test_a_lost_rank_starts_all_again(jobs, rank, how, times):
    job = jobs.run(lost_at_first, rank, int(how), times, max_restarts=2)
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert [job.outcome(number, times).value for number in range(2)] == [(times, 4.0, str(times))] * 2
    expected = [(attempt, state) for attempt in range(times) for state in ("starting", "running")]
    assert told(job) == [*expected, (times, "starting"), (times, "running"), (times, "succeeded")]
    again = [line.text for line in job.log() if line.rank is None and "started again" in line.text]
    assert [text.rpartition(": ")[2] for text in again] == [f"attempt {n + 2} of 3" for n in range(times)]
    assert all(text.startswith(f"Rank {rank} ") for text in again)
    begun = [event for event in job.events("state") if event["state"] == "starting"][-1]
    assert begun["reason"].startswith(f"Starting again, attempt {times + 1} of 3: Rank {rank} ")
    assert {line.attempt for line in job.log() if line.text.startswith("last words")} == set(range(times))
    pids = [event["pid"] for event in job.events("rank") if event["pid"]]
    assert len(set(pids)) == 2 * (times + 1)
    assert survivors(named(pids), 30) == []


def how_many():
    """How many ranks there are, by all that says it; the group's sum goes through all of them."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    here, told = kd.context(), os.environ
    return here.world_size, dist.get_world_size(), int(total.item()), int(told["WORLD_SIZE"]), told["GROUP_WORLD_SIZE"]


@pytest.mark.nightly
def test_the_members_of_an_attempt_decide_the_world_size(jobs):
    # The order asks for two agents, and this one forms the attempt alone.
    order = dataclasses.replace(jobs.order(how_many, ranks=4), processes_per_agent=2, sizes=(2, 4))
    jobs.client.take(order)
    job = RunningJob(order)
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert [job.outcome(rank).value for rank in range(2)] == [(2, 2, 2, 2, "1")] * 2
    asked = JobStatus(ref="local/j", replicas=tuple(ReplicaStatus(rank=rank) for rank in range(4)))
    replicas = reduce_events(asked, job.events()).replicas
    assert [(one.rank, one.agent, one.state) for one in replicas] == [(0, 0, "succeeded"), (1, 0, "succeeded")]


def test_restarts_are_counted_and_then_the_job_fails(jobs):
    job = jobs.run(lost_at_first, 1, int(signal.SIGKILL), 9, max_restarts=1)
    state = job.wait()
    assert (state["state"], state["cause"], state["attempt"], state["failed_rank"]) == ("failed", "died", 1, 1)
    assert state["reason"].endswith("This was attempt 2 of 2")


def raise_after_a_peer():
    import torch
    import torch.distributed as dist

    if kd.context().rank == 1:
        raise ConnectionError("peer has left")
    dist.all_reduce(torch.ones(1))


def return_early():
    import torch
    import torch.distributed as dist

    if kd.context().rank == 0:
        dist.all_reduce(torch.ones(1))


def sleep_long():
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "limits", "cause"),
    [
        (raise_after_a_peer, {}, "error"),
        pytest.param(return_early, {}, "left", marks=pytest.mark.nightly),
        pytest.param(sleep_long, {"timeout_s": 0.5}, "timeout", marks=pytest.mark.nightly),
    ],
)
def test_what_another_attempt_would_not_mend_is_not_tried_again(jobs, function, limits, cause):
    job = jobs.run(function, max_restarts=3, **limits)
    state = job.wait()
    assert (state["state"], state["cause"], state["attempt"]) == ("failed", cause, 0)


def stall_at_first():
    if kd.context().attempt == 0:
        time.sleep(600)


@pytest.mark.nightly
def test_a_stall_counts_as_lost(jobs):
    job = jobs.run(stall_at_first, max_restarts=1, stall_timeout_s=3.0)
    assert (job.wait()["state"], job.state()["attempt"]) == ("succeeded", 1)


def linger_when_lost():
    """The rank that is not lost takes its time to end, so that something can happen meanwhile."""
    here = kd.context()
    if here.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os._exit(3)


def test_a_cancel_between_two_attempts_holds(jobs):
    job = jobs.run(linger_when_lost, max_restarts=3)
    job.until(lambda: any(event["exit_code"] == 3 for event in job.events("rank")))
    send(jobs.client.address, cancel_message(job.order.job, 0.1))
    state = job.wait()
    assert (state["state"], state["attempt"]) == ("cancelled", 0)


def die_each_time():
    time.sleep(0.4)
    os._exit(3)


@pytest.mark.nightly
def test_the_time_limit_is_that_of_all_attempts_together(jobs):
    job = jobs.run(die_each_time, max_restarts=1000, timeout_s=5.0)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "timeout")
    assert 0 < state["attempt"] < 13


# -- in pods ---------------------------------------------------------------------------------------------------------


def meet(times):
    """All ranks wait for one that the test kills; in the last attempt no rank is waited for."""
    import torch
    import torch.distributed as dist

    here = kd.context()
    total = torch.ones(1)
    dist.all_reduce(total)
    while here.attempt < times:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    return here.attempt, total.item()


@pytest.mark.nightly
def test_ranks_of_all_pods_are_started_again(make):
    job = make(meet, 1, ranks=4, processes_per_agent=2, max_restarts=1).put_input().start_all()
    job.until_running()
    os.kill(job.pods[0].pids()[3], signal.SIGKILL)
    assert job.end() == [0, 0], job.text()
    assert told(job) == [
        (0, "starting"),
        (0, "running"),
        (1, "starting"),
        (1, "running"),
        (1, "succeeded"),
    ]
    assert [job.outcome(rank, 1).value for rank in range(4)] == [(1, 4.0)] * 4
    ends = {(event["attempt"], event["rank"]): event["state"] for event in job.events("rank")}
    assert {ends[1, rank] for rank in range(4)} == {"succeeded"}
    assert job.text().count("attempt 2 of 2") == 1
    assert job.pods[0].last_words["state"] == "succeeded"


def test_a_port_that_is_taken_is_told(make_bare):
    job = make_bare(speak_and_sleep, ranks=2, max_restarts=1).put_input()
    with socket.create_server(("127.0.0.1", job.order.port)):
        assert job.start_all().pods[0].end() == 1
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert "in use" in state["reason"]


@pytest.mark.parametrize(
    "options", [{}, {"max_restarts": 5, "replaces_pods": False}], ids=["no restarts", "no controller"]
)
def test_a_lost_pod_that_nobody_makes_again_is_not_waited_for(make_bare, options):
    job = make_bare(speak_and_sleep, ranks=2, **options).put_input().start_all()
    job.until_running()
    job.pods[1].process.send_signal(signal.SIGKILL)
    assert job.pods[0].end() == 1
    state = job.state()
    assert (state["state"], state["cause"], state["attempt"]) == ("failed", "lost", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_pod_that_is_made_again_takes_its_place_and_all_ranks_start_again(make, how):
    job = make(meet, 1, ranks=4, processes_per_agent=2, max_restarts=1).put_input().start_all()
    job.until_running()
    job.pods[1].process.send_signal(how)
    assert job.pods[1].end() == (143 if how == signal.SIGTERM else -how)
    waits = job.until(lambda: [event for event in job.events("state") if "Waits" in event["reason"]])
    assert waits[0]["state"] == "starting"
    assert waits[0]["reason"].startswith(
        "Waits for a pod: 1. Starting again, attempt 2 of 2: Pod 1 (ranks 2 and 3) is gone"
    )
    job.start(1)
    assert [job.pods[0].end(), job.pods[2].end()] == [0, 0], job.text()
    assert [job.outcome(rank, 1).value for rank in range(4)] == [(1, 4.0)] * 4
    assert told(job)[2:] == [(1, "starting"), (1, "starting"), (1, "running"), (1, "succeeded")]
    again = job.events("state")[3]
    assert again["reason"].startswith("Starting again, attempt 2 of 2: Pod 1 ")


def test_a_pod_is_made_again_as_often_as_the_job_may_restart(make_bare):
    job = make_bare(speak_and_sleep, ranks=2, max_restarts=1).put_input().start_all()
    for lost in range(2):
        job.until(lambda lost=lost: job.text().count("last words 1") == lost + 1)
        job.pods[-1].process.kill()
        job.pods[-1].end()
        if not lost:
            job.start(1)
    job.until(lambda: job.state()["state"] == "failed")
    assert job.state()["reason"].endswith("This was attempt 2 of 2")
    # Its controller does not know of that yet, and this pod must not wait for a head that is gone.
    assert job.start(1).end() == 0
    assert job.pods[0].end() == 1


@pytest.mark.nightly
def test_a_pod_that_is_lost_while_it_is_waited_for_counts(make_bare):
    job = make_bare(speak_and_sleep, ranks=3, max_restarts=1).put_input()
    for number in (0, 1, 1):
        pod = job.start(number)
        if number:
            job.until(lambda pod=pod: (pod.folder / "work" / "job").exists())
            time.sleep(1)
            pod.process.kill()
    job.until(lambda: job.state()["state"] == "failed")
    assert job.start(1).end() == 0
    assert job.start(2).end() == 0
    assert job.pods[0].end() == 1
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "lost")
    assert state["reason"].startswith("Pod 1 is gone")


def test_what_ends_a_job_ends_its_wait_for_a_pod(make_bare):
    job = make_bare(speak_and_sleep, ranks=2, max_restarts=1).put_input().start_all()
    job.until_running()
    job.pods[1].process.kill()
    job.until(lambda: "Waits for a pod" in job.state().get("reason", ""))
    assert job.pods[0].ask("POST", "/cancel", b'{"grace_s": 0.2}')[0] == 200
    assert job.start(1).end() == 0
    assert job.pods[0].end() == 1
    assert (job.state()["state"], job.state()["reason"]) == ("cancelled", "The job was cancelled")


@pytest.mark.nightly
@pytest.mark.parametrize(("timeout_s", "code"), [(3.0, 1), (None, 143)])
def test_a_pod_that_gets_sigterm_past_its_deadline_is_not_made_again(make_bare, timeout_s, code):
    waits = {"start_wait_s": 6.0, "input_wait_s": 0.1, "collect_wait_s": 0.1}
    job = make_bare(speak_and_sleep, ranks=2, max_restarts=1, timeout_s=timeout_s, **waits).put_input().start_all()
    job.until_running()
    # The head ends the job at its time limit, and the cluster ends pods only if it does not.
    job.pods[0].process.send_signal(signal.SIGSTOP)
    time.sleep(9.5)
    job.pods[1].process.terminate()
    time.sleep(0.5)
    job.pods[0].process.kill()
    assert job.pods[1].end() == code
