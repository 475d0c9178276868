"""Warm pods as processes of this machine: jobs one after the other in the same pods, each with its own key, folder and verdict."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_jobs import descriptors, named, survivors
from plain_jobs import fail_on_last, rank, speak_and_sleep
from pod_jobs import WarmJob

from kale_dist.errors import BackendError, SnapshotDamagedError
from kale_dist.wire import Policy


def leave_traces():
    """Change whatever a process can change."""
    import random

    import torch
    import torch.distributed as dist

    os.environ["LEFT_BEHIND"] = "yes"
    sys.modules["left_behind"] = torch
    torch.set_default_dtype(torch.float64)
    pathlib.Path("left-behind.txt").write_text("yes")
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    shared = torch.zeros(100_000)
    shared.share_memory_()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("first", dist.get_rank())
    return total.item(), os.getpid(), child.pid, random.random(), torch.rand(1).item()


def look_for_traces():
    import random

    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    print("second", dist.get_rank())
    found = os.environ.get("LEFT_BEHIND"), "left_behind" in sys.modules, str(torch.get_default_dtype())
    return *found, pathlib.Path("left-behind.txt").exists(), total.item(), random.random(), torch.rand(1).item()


def look_and_leave(number):
    return look_for_traces(), leave_traces(), os.getpid(), number


def held_by(pids):
    """Descriptors, threads, children and kB of each process."""
    found = []
    for pid in pids:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        threads, kilobytes = (int(status.partition(f"\n{name}:")[2].split()[0]) for name in ("Threads", "VmRSS"))
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found.append((descriptors(pid), threads, len(children), kilobytes))
    return found


def until_idle(pods, jobs):
    """Wait until the pods have said that they are idle after so many jobs: what they write is read a moment later."""
    pods.until(lambda: len(pods.events("state")) == 1 + 2 * jobs)


def warm(make, ranks=2, **options):
    """Warm pods, and the name of the call that they are made for."""
    pods = make(rank, ranks=ranks, idle_s=options.pop("idle_s", 120.0), replaces_pods=False, **options)
    pods.put_input()
    for number in range(pods.number_of_pods):
        pods.start(number, HOME=str(pods.root / f"pod-{number}-{number}"))
    pods.until_running()
    return pods, pods.order.job


@pytest.mark.nightly
def test_nothing_of_a_job_is_seen_by_the_next_one_in_the_same_pods(make):
    pods, name = warm(make)
    first = WarmJob(pods, leave_traces, job_id=name)
    assert first.offer()
    assert (first.follow()["state"], "first 1" in first.text()) == ("succeeded", True)
    left = [first.outcome(number).value for number in range(2)]
    first.client.ack()
    second = WarmJob(pods, look_for_traces, job_id="second")
    second.offer()
    assert (second.follow()["state"], "first" in second.text()) == ("succeeded", False)
    seen = [second.outcome(number).value for number in range(2)]
    assert [one[:5] for one in seen] == [(None, False, "torch.float32", False, 2.0)] * 2
    assert {one[5:] for one in seen}.isdisjoint({one[3:] for one in left})
    for _, pid, child, *_ in left:
        assert survivors(named([pid, child]), 0.0) == []
    assert not (pods.pods[0].folder / "work" / "jobs" / name).exists()
    # Its own verdict and key: what one has signed is refused for the other.
    with pytest.raises(SnapshotDamagedError):
        second.outcome(0, key=first.key)
    with pytest.raises(SnapshotDamagedError):
        second.outcome(0, job=first.order.job)
    second.client.ack()
    until_idle(pods, 2)
    idle = "Waits for a call that fits"
    assert [event["reason"] for event in pods.events("state")] == [
        idle, f"Runs {first.order.job}", idle, f"Runs {second.order.job}", idle
    ]  # fmt: skip
    assert not list(pathlib.Path("/dev/shm").glob(f"torch_{left[0][1]}_*"))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_hundred_jobs_leave_nothing_in_the_pods(make):
    """Neither for the next one, nor in the memory of the head and of the relay."""
    pods, name = warm(make)
    pids = [pod.process.pid for pod in pods.pods]
    ended, held, seeds = [], [], set()
    for number in range(200):
        job = WarmJob(pods, look_and_leave, number, job_id=f"{name}" if not number else f"job-{number}")
        job.offer()
        assert job.follow()["state"] == "succeeded", (number, job.text())
        for rank_ in range(2):
            traces, left, pid, given = job.outcome(rank_).value
            assert (traces[:5], given) == ((None, False, "torch.float32", False, 2.0), number)
            seeds.update(left[3:])
            ended.append(pid)
        job.client.ack()
        until_idle(pods, number + 1)
        assert not [one for pid in ended[-2:] for one in pathlib.Path("/dev/shm").glob(f"torch_{pid}_*")]
        held.append(held_by(pids))
    assert len(seeds) == 800
    for place in range(2):
        rows = [one[place] for one in held]
        for kind, slack in ((0, 4), (1, 2), (2, 2), (3, 4096)):
            assert max(row[kind] for row in rows[-20:]) <= max(row[kind] for row in rows[20:60]) + slack, (
                place,
                kind,
                rows[::20],
            )
    assert not list(pods.pods[0].folder.glob("work/jobs/*"))


def test_an_order_that_is_sent_again_does_nothing_and_strangers_are_refused(make_bare):
    pods, name = warm(make_bare, ranks=1)
    stolen = WarmJob(pods, rank, job_id="stolen")
    assert "another call" in stolen.offer()["busy"]
    job = WarmJob(pods, rank, job_id=name)
    job.offer()
    assert job.follow()["state"] == "succeeded"
    head = job.client_of(pods.key, "")
    assert head.offer(job.described(), b"") == {"missing": []}
    job.client.ack()
    assert head.offer(job.described(), b"") == {"missing": []}
    until_idle(pods, 1)
    assert len([event for event in pods.events("state") if not event.get("idle_s")]) == 1
    again = WarmJob(pods, rank, job_id="again")
    again.offer()
    end = again.follow()
    assert end["state"] == "succeeded", (end, again.text())
    for client in (job.client_of(os.urandom(32), ""), again.client_of(job.key), again.client_of(pods.key)):
        with pytest.raises(BackendError, match="refused"):
            client.cancel(0.0)


def test_a_failed_job_leaves_the_pods_and_only_what_is_new_is_sent(make_bare):
    pods, name = warm(make_bare, ranks=2, processes_per_agent=1)
    job = WarmJob(pods, fail_on_last, job_id=name)
    job.offer()
    end = job.follow()
    assert (end["state"], end["failed_rank"]) == ("failed", 1), (end, job.text())
    job.client.ack()
    again = WarmJob(pods, fail_on_last, job_id="again")
    assert again.offer() == {"missing": []}
    assert again.follow()["state"] == "failed"
    again.client.ack()


def test_a_second_job_finds_the_pods_busy_and_a_cancel_of_the_set_ends_both(make_bare):
    pods, name = warm(make_bare, ranks=2)
    job = WarmJob(pods, speak_and_sleep, job_id=name)
    job.offer()
    assert f"they run {job.order.job}" in WarmJob(pods, rank, job_id="other").offer()["busy"]
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(job.follow)
        pods.until(lambda: "last words" in job.text())
        job.client_of(pods.key, "").cancel(1.0)
        assert following.result()["state"] == "cancelled"
    assert pods.end() == [143, 143] or pods.state()["state"] == "cancelled"


def test_warm_pods_end_when_no_call_comes_or_the_kernels_are_gone(make_bare):
    idle, _ = warm(make_bare, ranks=2, idle_s=0.5)
    assert idle.end() == [0, 0]
    assert (idle.state()["state"], idle.pods[0].last_words["state"]) == ("succeeded", "succeeded")
    released, name = warm(make_bare, ranks=2)
    job = WarmJob(released, rank, job_id=name)
    job.offer()
    assert job.follow()["state"] == "succeeded"
    job.client_of(released.key, "").ack()
    job.client.ack()
    assert released.end() == [0, 0]


@pytest.mark.nightly
def test_warm_pods_end_with_a_pod_that_is_lost_while_they_are_idle(make_bare):
    pods, name = warm(make_bare, ranks=2)
    job = WarmJob(pods, rank, job_id=name)
    job.offer()
    assert job.follow()["state"] == "succeeded"
    job.client.ack()
    until_idle(pods, 1)
    pods.pods[1].process.kill()
    pods.pods[0].end()
    assert (pods.state()["state"], pods.state()["cause"]) == ("failed", "lost")


@pytest.mark.nightly
def test_a_timeout_ends_only_its_job(make_bare):
    pods, name = warm(make_bare, ranks=1)
    job = WarmJob(pods, speak_and_sleep, job_id=name, policy=Policy(timeout_s=0.5, stall_warn_s=None))
    job.offer()
    end = job.follow()
    assert (end["state"], end["cause"]) == ("failed", "timeout")
    job.client.ack()
    again = WarmJob(pods, rank, job_id="again")
    again.offer()
    assert again.follow()["state"] == "succeeded"
