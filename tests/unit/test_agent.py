"""The agent with real ranks: how jobs succeed, fail, hang, are cancelled, and what is left afterwards."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from agent_jobs import Jobs, RunningJob, descriptors, is_alive

from kale_dist import contract
from kale_dist.backends.agent_client import AgentClient, cancel_message, send
from kale_dist.contract import EventKind


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    client = AgentClient()
    client.start()
    yield Jobs(tmp_path_factory.mktemp("agent"), client)
    client.close()
    assert not is_alive(client.pid)
    assert client.last_words == ""


def gone_within(pids, limit_s):
    deadline = time.monotonic() + limit_s
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_running(job: RunningJob):
    return job.until(lambda: job.state()["state"] == "running" and job.pids())


def add_ranks(start):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_returns_its_value(jobs, ranks):
    job = jobs.run(add_ranks, 1, ranks=ranks)
    assert job.wait()["state"] == "succeeded"
    expected = sum(range(1, ranks + 1))
    assert [job.outcome(rank).value for rank in range(ranks)] == [expected] * ranks


def test_sixteen_ranks_on_few_cores(jobs):
    job = jobs.run(add_ranks, 0, ranks=16)
    assert job.wait()["state"] == "succeeded"
    assert job.outcome(15).value == sum(range(16))


def test_several_jobs_at_once(jobs):
    running = [jobs.run(add_ranks, number) for number in range(4)]
    assert [job.wait()["state"] for job in running] == ["succeeded"] * 4
    assert [job.outcome().value for job in running] == [2 * number + 1 for number in range(4)]


def environment_of_rank():
    import random
    import sys

    import torch

    import numpy

    names = {name: value for name, value in os.environ.items() if name.isupper()}
    drawn = (random.random(), float(numpy.random.rand()), torch.rand(1).item())
    return names, os.getcwd(), sys.argv[:], torch.get_num_threads(), drawn, sys.stdin.read(), os.getpid()


def test_a_rank_is_what_torchrun_would_have_made(jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_SETTING", "seven")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    job = jobs.run(environment_of_rank, seed=5)
    assert job.wait()["state"] == "succeeded"
    names, folder, argv, threads, drawn, stdin, pid = job.outcome(1).value
    assert (names["RANK"], names["LOCAL_RANK"], names["WORLD_SIZE"], names["LOCAL_WORLD_SIZE"]) == ("1", "1", "2", "2")
    assert (names["GROUP_RANK"], names["GROUP_WORLD_SIZE"], names["ROLE_RANK"]) == ("0", "1", "1")
    assert names["MASTER_ADDR"] == "127.0.0.1"
    assert int(names["MASTER_PORT"]) > 0
    assert names["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert names["MY_SETTING"] == "seven"
    assert folder == str(tmp_path)
    assert argv == sys.argv
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2) == int(names["OMP_NUM_THREADS"])
    assert stdin == ""
    assert job.pids()[1] == pid
    assert drawn != job.outcome(0).value[4]
    again = jobs.run(environment_of_rank, seed=5)
    again.wait()
    assert again.outcome(1).value[4] == drawn


def test_a_removed_variable_is_removed_in_the_rank(jobs, monkeypatch):
    monkeypatch.delenv("HOME")
    job = jobs.run(lambda: "HOME" in os.environ, ranks=1)
    job.wait()
    assert job.outcome().value is False


@pytest.mark.parametrize(("given", "expected"), [({"threads": 3}, 3), ({}, 4)])
def test_threads_are_the_users_if_set(jobs, monkeypatch, given, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")

    def threads():
        import torch

        return torch.get_num_threads()

    job = jobs.run(threads, ranks=1, **given)
    job.wait()
    assert job.outcome().value == expected


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
    outcome = next(event for event in job.events(EventKind.OUTCOME) if event["rank"] == 1)
    assert (outcome["ok"], outcome["error_type"]) == (False, "ValueError")
    ends = {event["rank"]: event["state"] for event in job.events(EventKind.RANK)}
    assert ends == {0: "stopped", 1: "failed"}
    assert gone_within(job.pids().values(), 0.1)


def die_on_one(how):
    import torch
    import torch.distributed as dist

    print("about to train", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        print("last words of one")
        os.kill(os.getpid(), how) if how > 0 else os._exit(-how)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "named"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (-3, "exit code 3")])
def test_a_death_ends_the_others_and_is_reported(jobs, how, named):
    job = jobs.run(die_on_one, int(how))
    pids = all_running(job)
    start = time.monotonic()
    state = job.wait()
    assert time.monotonic() - start < 2.5
    assert gone_within(pids.values(), 0.1)
    assert (state["state"], state["cause"]) == ("failed", "died")
    assert "Rank 1" in state["reason"]
    assert named in state["reason"]
    assert "last words of one" in job.log_text(rank=1)
    if how != signal.SIGSEGV:
        assert "last words of one" in state["reason"]
    last = [event for event in job.events(EventKind.RANK) if event["rank"] == 1][-1]
    assert last["signal"] == named or last["exit_code"] == 3


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


def leave_early_in_wait():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


@pytest.mark.parametrize("function", [leave_early, leave_early_in_backward, leave_early_in_wait])
def test_a_rank_that_left_others_in_a_collective_is_reported_soon(jobs, function):
    job = jobs.run(function)
    job.until(lambda: job.events(EventKind.OUTCOME))
    start = time.monotonic()
    state = job.wait()
    assert time.monotonic() - start < 2.5
    assert (state["state"], state["cause"]) == ("failed", "left")
    assert state["reason"].startswith("Rank 0 ended while rank 1 waits for it in a collective")
    assert f"in {function.__name__}" in state["reason"]
    waiting = job.events(EventKind.WAITING)[-1]
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
    job = jobs.run(hang_on_one, stall_warn_s=0.8, stall_timeout_s=3.0)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "stalled")
    assert "stall_timeout_s" in state["reason"]
    assert "Rank 0 waits in a collective, rank 1 is not" in state["reason"]
    waiting = job.events(EventKind.WAITING)[0]
    assert (waiting["waiting"], waiting["busy"]) == ([0], [1])
    log = job.log_text()
    assert "Rank 0:" in log
    assert "Rank 1:" in log
    assert "hang_on_one" in log


def test_progress_keeps_a_stall_away(jobs):
    def slow():
        from kale_dist.runtime import context

        for _ in range(8):
            time.sleep(0.25)
            context.mark_progress()

    job = jobs.run(slow, ranks=1, stall_warn_s=1.0, stall_timeout_s=1.5)
    assert job.wait()["state"] == "succeeded"
    assert job.events(EventKind.WAITING) == []


def test_timeout(jobs):
    job = jobs.run(hang_on_one, timeout_s=1.0)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("failed", "timeout")
    assert "timeout_s of 1 s" in state["reason"]
    assert gone_within(job.pids().values(), 0.1)


def sleep_with_children():
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    escaped = subprocess.Popen(["sleep", "601"], start_new_session=True)
    print(child.pid, escaped.pid)
    time.sleep(600)


def test_cancel_ends_ranks_and_what_they_started(jobs):
    job = jobs.run(sleep_with_children)
    pids = all_running(job)
    job.until(lambda: len([line for line in job.log() if line.rank is not None]) == 2)
    children = [int(word) for line in job.log() if line.rank is not None for word in line.text.split()]
    jobs.client.cancel(job.order.job)
    jobs.client.cancel(job.order.job)
    state = job.wait()
    assert (state["state"], state["cause"]) == ("cancelled", "user")
    assert gone_within([*pids.values(), *children], 2)
    jobs.client.cancel(job.order.job)


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
    assert 0.4 < time.monotonic() - start < 3


def test_cancel_at_once_and_before_the_order(jobs):
    order = jobs.order(sleep_with_children)
    assert send(jobs.client.socket_path, cancel_message(order.job))
    jobs.client.take(order)
    assert RunningJob(order).wait()["state"] == "cancelled"
    job = jobs.run(sleep_with_children)
    jobs.client.cancel(job.order.job, grace_s=0.2)
    assert job.wait()["state"] == "cancelled"
    assert gone_within(job.pids().values(), 1)


def test_a_damaged_snapshot_is_told_not_raised(jobs):
    order = jobs.order(add_ranks, 1)
    path = jobs.store.path(order.snapshot)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b"t", b"T", 1))
    jobs.client.take(order)
    state = RunningJob(order).wait()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert "damaged" in state["reason"]


def own_group():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.init_process_group(world_size=2)
    dist.destroy_process_group()
    before = dist.is_initialized()
    dist.init_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    try:
        dist.init_process_group(world_size=7)
    except ValueError as error:
        return before, total.item(), str(error)


def test_the_users_own_calls_for_a_group(jobs):
    job = jobs.run(own_group)
    assert job.wait()["state"] == "succeeded"
    before, total, refusal = job.outcome().value
    assert before is False
    assert total == 2
    assert "world_size=7" in refusal
    assert "number_of_processes" in refusal
    assert "keeps the group" in job.log_text(rank=0)


def test_output_of_python_c_and_children_in_whole_lines(jobs):
    def talk():
        import ctypes
        import subprocess

        libc = ctypes.CDLL(None)
        libc.printf(b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        sys.stderr.write("from stderr\nno end")
        os.write(1, b"\xff\x00raw\n")

    job = jobs.run(talk, ranks=1)
    job.wait()
    lines = [(line.stream.value, line.text) for line in job.log()]
    assert sorted(lines) == sorted(
        [("o", "from C"), ("o", "from a child"), ("e", "from stderr"), ("e", "no end"), ("o", "\\xff\x00raw")]
    )
    assert [line.sequence for line in job.log()] == list(range(5))


def test_a_flood_of_lines_is_whole_and_quick(jobs):
    def flood():
        from kale_dist.runtime import context

        block = b"".join(b"%07d %s\n" % (number, b"x" * 71) for number in range(200_000))
        for start in range(0, len(block), 1 << 16):
            os.write(1, block[start : start + (1 << 16)])
        return context.context().rank

    start = time.monotonic()
    job = jobs.run(flood)
    assert job.wait()["state"] == "succeeded"
    assert time.monotonic() - start < 15
    for rank in (0, 1):
        numbers = [int(line.text[:7]) for line in job.log() if line.rank == rank]
        assert numbers == list(range(200_000))


def test_a_line_before_a_kill_is_kept(jobs):
    def last():
        for number in range(1000):
            print(f"line {number}")
        os.kill(os.getpid(), signal.SIGKILL)

    job = jobs.run(last, ranks=1)
    job.wait()
    assert job.log_text(rank=0).splitlines() == [f"line {number}" for number in range(1000)]


def test_reports_and_progress_of_every_rank(jobs):
    def train():
        from kale_dist.runtime import context

        for step in range(1, 101):
            context.emit(
                EventKind.PROGRESS, phase="train", epoch=1, epochs=1, step=step, steps=100,
                samples=step, samples_per_s=None, loss=None,
            )  # fmt: skip
        context.report(loss=0.5, epoch=1)

    job = jobs.run(train)
    job.wait()
    assert [event["rank"] for event in job.events(EventKind.METRICS)] in ([0, 1], [1, 0])
    assert job.events(EventKind.METRICS)[0] | {"time": 0, "rank": 0} == {
        "event": "metrics", "time": 0, "rank": 0, "attempt": 0, "values": {"loss": 0.5}, "source": "report", "epoch": 1,
    }  # fmt: skip
    assert job.events(EventKind.PROGRESS) == []
    (progress,) = contract.decode_records(job.files.progress.read_bytes())
    assert {rank: event["step"] for rank, event in progress.items()} == {"0": 100, "1": 100}


@pytest.mark.parametrize("code", [0, None, 3, "text"])
def test_sys_exit_is_as_in_a_script(jobs, code):
    job = jobs.run(sys.exit, code, ranks=1)
    assert job.wait()["state"] == ("succeeded" if code in (0, None) else "failed")


def test_atexit_runs_for_a_while(jobs, tmp_path):
    def leave():
        import atexit
        import threading

        atexit.register(lambda: (tmp_path / "flushed").write_text("yes"))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread is done"))).start()

    job = jobs.run(leave, ranks=1)
    assert job.wait()["state"] == "succeeded"
    assert (tmp_path / "flushed").read_text() == "yes"
    assert "thread is done" in job.log_text()


def test_atexit_that_hangs_does_not(jobs):
    def leave():
        import atexit

        atexit.register(time.sleep, 600)

    job = jobs.run(leave, ranks=1)
    start = time.monotonic()
    assert job.wait()["state"] == "succeeded"
    assert 4.5 < time.monotonic() - start < 9


def load_data():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, num_workers=2, persistent_workers=True)
    return sum(int(batch.sum()) for (batch,) in loader)


def test_data_loader_workers_do_not_hold_a_job_up(jobs):
    job = jobs.run(load_data)
    assert job.wait(20)["state"] == "succeeded"
    assert job.outcome().value == sum(range(64))


def test_nothing_is_left_in_the_agent(jobs):
    jobs.run(add_ranks, 1).wait()
    time.sleep(1.0)
    before, shared = descriptors(jobs.client.pid), set(os.listdir("/dev/shm"))
    for _ in range(5):
        jobs.run(add_ranks, 1).wait()
    time.sleep(1.0)
    assert descriptors(jobs.client.pid) == before
    assert set(os.listdir("/dev/shm")) <= shared


SCRIPT = """
import os, pathlib, sys, time
sys.path[:0] = {path!r}
from agent_jobs import Jobs, RunningJob
from kale_dist.backends.agent_client import AgentClient

def sleep():
    print("asleep")
    time.sleep({seconds})
    return "slept"

client = AgentClient()
client.start()
order = Jobs(pathlib.Path({root!r}), client).order(sleep, job="one", detach={detach})
client.take(order)
job = RunningJob(order)
job.until(lambda: job.state()["state"] == "running")
print(client.pid, client.socket_path, *job.pids().values(), order.key, order.snapshot, flush=True)
time.sleep(600)
"""


def start_kernel(root, *, detach, seconds):
    here = pathlib.Path(__file__)
    text = SCRIPT.format(
        root=str(root), detach=detach, seconds=seconds, path=[str(here.parent), str(here.parents[2])]
    )
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
    agent, path, *ranks, _, _ = process.stdout.readline().split()
    return process, int(agent), pathlib.Path(path), [int(pid) for pid in ranks]


def read_job(root):
    from kale_dist.contract import JobOrder

    return RunningJob(
        JobOrder(job="one", world_size=2, local_world_size=2, folder=str(root / "jobs/one"), store="", snapshot="", key="")
    )


def test_the_kernels_death_ends_its_jobs(tmp_path):
    kernel, agent, path, ranks = start_kernel(tmp_path, detach=False, seconds=600)
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert gone_within(ranks, 2)
    state = read_job(tmp_path).wait(2)
    assert (state["state"], state["cause"], state["reason"]) == ("cancelled", "kernel-ended", "The notebook's kernel ended")
    assert gone_within([agent], 3)
    assert not path.parent.exists()


def test_a_detached_job_outlives_the_kernel(tmp_path):
    kernel, agent, path, ranks = start_kernel(tmp_path, detach=True, seconds=2)
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    time.sleep(0.3)
    assert all(is_alive(pid) for pid in [agent, *ranks])
    assert read_job(tmp_path).wait(10)["state"] == "succeeded"
    assert gone_within([agent, *ranks], 3)
    assert not path.parent.exists()


def test_a_detached_job_can_be_cancelled_from_elsewhere(tmp_path):
    kernel, agent, path, ranks = start_kernel(tmp_path, detach=True, seconds=600)
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert send(path, cancel_message("one"))
    assert read_job(tmp_path).wait(5)["cause"] == "user"
    assert gone_within([agent, *ranks], 3)
    assert not send(path, cancel_message("one"))


def test_ranks_do_not_outlive_a_killed_agent(tmp_path):
    kernel, agent, _, ranks = start_kernel(tmp_path, detach=False, seconds=600)
    os.kill(agent, signal.SIGKILL)
    assert gone_within(ranks, 2)
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()


def test_a_killed_forkserver_fails_the_job_and_is_replaced(jobs):
    job = jobs.run(sleep_with_children)
    all_running(job)
    agent = jobs.client.pid
    command = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(agent)}
    (server,) = [pid for pid, text in command.items() if b"forkserver" in text]
    os.kill(server, signal.SIGKILL)
    state = job.wait(5)
    assert (state["state"], state["cause"]) == ("failed", "died")
    assert "forks ranks" in state["reason"]
    again = jobs.run(add_ranks, 1)
    assert again.wait() | {"time": 0} == {**again.state(), "time": 0, "state": "succeeded"}


def children_of(pid):
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
