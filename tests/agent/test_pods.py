"""Pods of one job, as processes of this machine: how they find each other, how jobs end, how bytes come and go."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import resource
import signal
import socket
import threading
import time

import pytest
from agent_jobs import add_ranks, named, survivors
from debugged import stops_on_1
from plain_jobs import (
    fail_on_last,
    large_result,
    name_of,
    rank,
    save_where_another_user_may,
    speak_and_sleep,
    sum_of,
    write_much,
)

from kale_dist import wire
from kale_dist.wire import BlockReader, EventBlock, LineBlock, OutcomePart, ProgressBlock, Source, messages
from kale_dist.wire.messages import Typed
from kale_dist.worker.pod.relay_protocol import FRAME


def surroundings():
    import torch

    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MY_SETTING",
        "OPENBLAS_NUM_THREADS",
    )
    values = [os.environ.get(name) for name in names]
    return values, torch.get_num_threads(), torch.get_default_dtype() == torch.float64, add_ranks(10)


def test_ranks_of_all_pods_work_together_with_the_pods_environment_and_the_notebooks_flags(make):
    job = make(surroundings, ranks=3, processes_per_agent=2, torch_flags=(("default_dtype", "float64"),)).put_input()
    for number in range(2):
        job.start(number, MY_SETTING="seven", KALE_DIST_CPU_REQUEST="1500")
    assert job.end() == [0, 0]
    assert (job.state()["state"], job.state()["reason"]) == ("succeeded", "")
    assert job.outcome(0).value[3] == 33.0
    assert job.outcome(1).value == (["1", "1", "0", "2", "2", "seven", None], 1, True, 33.0)
    assert job.outcome(2).value == (["2", "0", "1", "2", "1", "seven", None], 2, True, 33.0)
    assert {event["rank"]: event["state"] for event in job.events("rank")} == dict.fromkeys(range(3), "succeeded")
    assert job.pods[0].last_words["state"] == "succeeded"


def test_ranks_may_open_as_many_files_as_their_container_allows(make_bare):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        job = make_bare(resource.getrlimit, resource.RLIMIT_NOFILE, ranks=1).put_input().start_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert job.end() == [0]
    assert tuple(job.outcome(0).value) == (hard, hard)


def test_a_refused_write_in_a_pod_names_the_user_and_the_setting_that_chooses_it(make_bare):
    job = make_bare(save_where_another_user_may, ranks=1).put_input().start_all()
    job.end()
    (note,) = job.outcome(0).error.__notes__
    assert f"user {os.getuid()}" in note
    assert "run_as_user=" in note
    assert note in job.text()


def test_a_volume_that_cannot_be_written_is_a_line_and_no_failure(make_bare, tmp_path):
    job = make_bare(os.getpid, ranks=1, folders=(str(tmp_path), "/proc/self")).put_input().start_all()
    assert job.end() == [0]
    (line,) = (line for line in job.text().splitlines() if "cannot write there" in line)
    assert line.startswith(f"[kale-dist] /proc/self: the processes, which are user {os.getuid()}, cannot write there.")


# -- endings ---------------------------------------------------------------------------------------------------------


def test_an_exception_in_another_pod_is_the_cause(make_bare):
    job = make_bare(fail_on_last, ranks=3).put_input().start_all()
    assert job.end() == [1, 0, 0]
    state = job.state()
    assert (state["state"], state["cause"], state["failed_rank"]) == ("failed", "error", 2)
    assert state["reason"] == "Rank 2 failed: ValueError: the seventh batch is empty"
    assert isinstance(job.outcome(2).error, ValueError)
    told = {"state": "failed", "cause": "error", "reason": state["reason"], "failed_rank": 2}
    assert job.pods[0].last_words == told


@pytest.mark.nightly
def test_a_head_whose_disk_is_full_stops_ranks_in_all_pods_and_loses_no_line(make_bare, tmp_path):
    job = make_bare(write_much, str(tmp_path), ranks=2, processes_per_agent=1, stall_timeout_s=2.0).put_input()
    head = job.start(0)
    full = (2 << 20, resource.RLIM_INFINITY)
    resource.prlimit(head.process.pid, resource.RLIMIT_FSIZE, full)
    job.start(1)
    told = job.until(lambda: [item.event for item in job.items(ProgressBlock) if item.event["event"] == "disk"])
    assert "cannot be written" in told[0]["problem"]
    stopped_at = [(tmp_path / f"{rank}").read_text() for rank in (0, 1)]
    time.sleep(3)
    assert [(tmp_path / f"{rank}").read_text() for rank in (0, 1)] == stopped_at
    assert max(map(int, stopped_at)) < 129_000
    resource.prlimit(head.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert job.end() == [0, 0]
    found = list(BlockReader().feed((head.folder / "work" / "job" / "log").read_bytes()))
    assert [block.first for block in found[1:]] == [block.next for block in found[:-1]]
    for number in (0, 1):
        numbers = [int(line.text[:6]) for block in found if block.rank == number for line in block.lines()]
        assert numbers == list(range(130_000))


def test_a_rank_killed_in_another_pod_ends_all(make_bare):
    job = make_bare(speak_and_sleep, ranks=4, processes_per_agent=2).put_input().start_all()
    job.until(lambda: "last words 3" in job.text())
    job.until_running()
    os.kill(job.pods[0].pids()[3], signal.SIGKILL)
    assert job.end() == [1, 0]
    state = job.state()
    assert (state["state"], state["cause"], state["failed_rank"]) == ("failed", "died", 3)
    assert "Rank 3 was killed by SIGKILL" in state["reason"]
    assert "last words 3" in state["reason"]
    ends = {event["rank"]: event["state"] for event in job.events("rank")}
    assert ends == {0: "stopped", 1: "stopped", 2: "stopped", 3: "failed"}


def wait_in_barrier():
    import torch.distributed as dist

    if dist.get_rank() == 2:
        time.sleep(600)
    dist.barrier()


def test_an_agent_that_is_killed_takes_its_pod_along_and_is_named(make_bare):
    job = make_bare(speak_and_sleep, ranks=3).put_input().start_all()
    job.until_running()
    ranks = named(pid for pod in job.pods for pid in pod.pids().values())
    job.pods[1].process.kill()
    assert job.end() == [1, -signal.SIGKILL, 0]
    assert survivors(ranks, 30) == []
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "lost")
    assert state["reason"].startswith("Pod 1 (rank 1) is gone")


def test_a_head_that_is_killed_ends_the_other_pods(make_bare):
    job = make_bare(speak_and_sleep, ranks=3).put_input().start_all()
    job.until_running()
    ranks = named(pid for pod in job.pods for pid in pod.pids().values())
    job.pods[0].process.kill()
    assert job.end() == [-signal.SIGKILL, 144, 144]
    assert survivors(ranks, 0.1) == []


@pytest.mark.parametrize("told", [(0, 1), (0,), (1,)])
def test_a_head_that_is_terminated_is_suspended_and_another_pod_is_lost(make_bare, told):
    job = make_bare(speak_and_sleep, ranks=3, processes_per_agent=2).put_input().start_all()
    job.until_running()
    for number in told:
        job.pods[number].process.terminate()
    assert job.end() == [143 if 0 in told else 1, 143 if 1 in told else 0]
    state = job.state()
    expected = ("cancelled", "suspended") if 0 in told else ("failed", "lost")
    assert (state["state"], state["cause"]) == expected
    assert state["next_line"] == sum(item.count for item in job.items(LineBlock))
    assert "received SIGTERM" in state["reason"]
    ends = {event["rank"]: event["state"] for event in job.events("rank")}
    assert ends == dict.fromkeys(range(3), "stopped")


def test_a_pod_that_waits_for_others_can_be_terminated(make_bare):
    job = make_bare(rank, ranks=2).put_input()
    head = job.start(0)
    job.until(lambda: head.termination_log.parent.joinpath("work/job/log").exists())
    time.sleep(0.5)
    head.process.terminate()
    assert job.end() == [143]
    assert job.state()["state"] == "cancelled"


def test_what_is_typed_reaches_a_rank_of_another_pod(make_bare):
    job, prompts = make_bare(stops_on_1, 2, ranks=2).put_input().start_all(), []
    for text in ("value = 40", "c"):
        new = job.until(lambda: [one for one in job.events("debug") if one["prompt"] not in ("", *prompts)])
        prompts.append(new[0]["prompt"])
        job.pods[0].ask("POST", "/send?rank=1", messages.encode(Typed(prompt=prompts[-1], text=text)))
    assert (job.end(), job.outcome(1).value) == ([0, 0], 41)


def test_a_time_limit(make_bare):
    job = make_bare(speak_and_sleep, ranks=3, timeout_s=0.5).put_input().start_all()
    assert job.end() == [1, 0, 0]
    assert (job.state()["state"], job.state()["cause"]) == ("failed", "timeout")


def leave_early():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return
    dist.all_reduce(torch.ones(1))


@pytest.mark.nightly
def test_a_rank_that_left_ranks_of_other_pods_in_a_collective(make):
    job = make(leave_early, ranks=3, processes_per_agent=2).put_input().start_all()
    assert job.end() == [1, 0]
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "left")
    assert state["reason"].startswith("Rank 0 ended while ranks 1 and 2 wait for it in a collective")
    assert "in leave_early" in state["reason"]


@pytest.mark.nightly
def test_a_stall_shows_the_stacks_of_all_pods(make):
    job = (
        make(wait_in_barrier, ranks=3, processes_per_agent=2, stall_warn_s=2.0, stall_timeout_s=6.0)
        .put_input()
        .start_all()
    )
    assert job.end() == [1, 0]
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "stalled")
    assert re.search(r"Rank 2 is in \S+ in wait_in_barrier, ranks 0 and 1 wait for it\.", state["reason"])
    waiting = job.events("waiting")[-1]
    assert (waiting["waiting"], waiting["busy"]) == ([0, 1], [2])
    assert job.text().count("in wait_in_barrier") >= 3


# -- who joins -------------------------------------------------------------------------------------------------------


def test_pods_and_their_input_may_be_late(make_bare):
    job = make_bare(rank, ranks=3)
    job.start(1)
    time.sleep(0.5)
    job.put_input().start(0)
    time.sleep(1.5)
    job.start(2)
    assert job.end() == [0, 0, 0]
    assert job.outcome(2).value == 2


def test_pods_that_never_come_are_named(make_bare):
    job = make_bare(rank, ranks=3, start_wait_s=2.0).put_input()
    job.start(0)
    job.start(1)
    assert job.end() == [1, 0]
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert "Missing: 2. Look at their state" in state["reason"]


def test_who_does_not_hold_the_key_is_not_let_in(make_bare, tmp_path):
    job = make_bare(rank, ranks=2).put_input()
    job.start(0)
    other = make_bare(rank, ranks=2, port=job.order.port, start_wait_s=2.0).put_input()
    stranger = other.start(1)
    assert other.end() == [70]
    assert "could not be reached" in stranger.termination_log.read_text()
    assert job.state()["state"] == "pending"
    job.start(1)
    assert job.end() == [0, 0]


def test_noise_at_the_agents_port_harms_nobody(make_bare):
    job = make_bare(rank, ranks=2).put_input()
    head = job.start(0)
    job.until(lambda: _missing(head) == [])
    with contextlib.ExitStack() as connections:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\n" * 100, b"[1]\n{}\n", b"x" * 100_000):
            noise = connections.enter_context(socket.create_connection(("127.0.0.1", job.order.port + 1)))
            sent = garbage
            for message in ({"op": "hello", "agent": 1, "version": wire.VERSION, "nonce": ""}, {"op": "proof"}):
                data = json.dumps(message).encode()
                sent += FRAME.pack(len(data), b"M", 0) + data
            noise.sendall(sent)
        job.start(1)
        assert job.end() == [0, 0]


def change_manifest(job, **changes):
    """The snapshot of a notebook that has something else."""
    import dataclasses

    manifest = json.loads(bytes(job.store.open(job.order.snapshot))) | changes
    digest = job.store.put([json.dumps(manifest).encode()])
    rest = tuple(blob for blob in job.order.blobs if blob != job.order.snapshot)
    job.order = dataclasses.replace(job.order, snapshot=digest, blobs=(digest, *rest))


def test_an_image_of_another_python_is_told_in_a_sentence(make_bare):
    job = make_bare(rank, ranks=2)
    change_manifest(job, python="3.9")
    job.put_input().start_all()
    assert job.end() == [1, 0]
    check_that_it_does_not_fit(job, "python is 3.9 in the notebook and 3.")


@pytest.mark.nightly
def test_an_image_of_another_torch_is_told_in_a_sentence(make):
    job = make(add_ranks, 0, ranks=1)
    change_manifest(job, torch="1.13.1")
    job.put_input().start_all()
    assert job.end() == [1]
    check_that_it_does_not_fit(job, "torch is 1.13.1 in the notebook and ")


def check_that_it_does_not_fit(job, why):
    sentence = f"The image does not fit the notebook: {why}"
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert sentence in state["reason"]
    assert sentence in job.pods[0].last_words["reason"]


# -- bytes -----------------------------------------------------------------------------------------------------------


def upload(job):
    """What the notebook does once the first pod is there."""
    head = job.pods[0]
    job.until(lambda: _missing(head))
    assert sorted(_missing(head)) == sorted(job.order.blobs)
    for digest in job.order.blobs:
        assert head.ask("PUT", f"/blobs/{digest}?offset=0", bytes(job.store.open(digest)))[0] == 201


def written_by(pod):
    """Bytes that its agent has written into files and connections."""
    text = pathlib.Path(f"/proc/{pod.process.pid}/io").read_text(encoding="ascii")
    return int(dict(line.split(": ") for line in text.splitlines())["wchar"])


def test_eight_pods_get_a_snapshot_that_the_first_one_sends_twice(make_bare):
    data = os.urandom(20_000_000)
    job = make_bare(name_of, data, ranks=8, source=Source.STREAM, outcomes_on_stdout=False).put_input().start_all()
    upload(job)
    job.until(lambda: job.state()["state"] == "succeeded")
    # Once into its own store, and into two connections.
    assert 2.9 < written_by(job.pods[0]) / len(data) < 3.1
    for number in range(8):
        outcome = job.pods[0].ask("GET", f"/files/outcome-0-{number}")[1]
        assert job.read_outcome(number, outcome).value == (number, hashlib.sha256(data).hexdigest())
    job.pods[0].ask("POST", "/ack", b"{}")
    assert job.end() == [0] * 8


class SlowNetwork:
    """Stands before the head's address: what comes from there takes its time, and is counted."""

    def __init__(self, job, address, bytes_per_s):
        self.sent = 0
        self._bytes_per_s = bytes_per_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(address, job.order.port))
        self._thread.start()

    def _run(self, address, port):
        async def serve():
            servers = [
                await asyncio.start_server(functools.partial(self._connect, number), address, number)
                for number in (port + 1, port + 2)
            ]
            self._end = asyncio.Event()
            await self._end.wait()
            for server in servers:
                server.close()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(serve())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    async def _connect(self, port, reader, writer):
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, there[1], 0), self._copy(there[0], writer, 1 / self._bytes_per_s))

    async def _copy(self, reader, writer, pause_s):
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(20_000):
                writer.write(data)
                await writer.drain()
                self.sent += len(data) * (pause_s > 0)
                await asyncio.sleep(len(data) * pause_s)
        writer.close()

    def close(self):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.mark.nightly
def test_the_pod_that_passes_the_snapshot_on_is_killed_while_it_does(make_bare):
    data = os.urandom(8_000_000)
    options = {"outcomes_on_stdout": False, "max_restarts": 1, "head": "127.0.0.99"}
    job = make_bare(name_of, data, ranks=8, source=Source.STREAM, **options).put_input()
    network = SlowNetwork(job, "127.0.0.99", 2_000_000)
    job.start_all()
    upload(job)

    def half_there(pod):
        with contextlib.suppress(OSError):
            return any(path.stat().st_size > 4_000_000 for path in pod.folder.glob("work/blobs/.*.part"))

    # Of seven, those that are first have two others each that fetch from them.
    first = job.until(lambda: next((pod for pod in job.pods[1:] if half_there(pod)), None), 60)
    first.process.kill()
    job.start(first.number)
    job.until(lambda: job.state()["state"] == "succeeded")
    # To the two that were first, and what was left of it for those of the one that was killed.
    assert network.sent < 3.5 * len(data)
    attempt = job.state()["attempt"]
    for number in range(8):
        outcome = job.pods[0].ask("GET", f"/files/outcome-{attempt}-{number}")[1]
        assert job.read_outcome(number, outcome, attempt).value == (number, hashlib.sha256(data).hexdigest())
    job.pods[0].ask("POST", "/ack", b"{}")
    assert [pod.end() for pod in job.pods if pod is not first] == [0] * 8
    network.close()


def _missing(pod):
    try:
        return json.loads(pod.ask("GET", "/missing")[1])
    except OSError:
        return None


def test_a_notebook_that_is_gone_before_its_bytes_arrived(make_bare):
    job = make_bare(sum_of, (1,), ranks=2, source=Source.STREAM, input_wait_s=1.0).put_input().start_all()
    assert job.end() == [1, 0]
    state = job.state()
    assert (state["state"], state["cause"]) == ("failed", "not-started")
    assert "The notebook was gone before its bytes had arrived" in state["reason"]
    assert "nothing more came from the notebook for 1 s (input_wait_s)" in state["reason"]


def test_a_shared_folder_gives_the_bytes_and_keeps_the_results(make_bare, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    job = make_bare(large_result, ranks=2, source=Source.FOLDER, store=str(shared)).put_input().start_all()
    for digest in job.order.blobs:
        (shared / "new").write_bytes(job.store.open(digest))
        (shared / "new").rename(shared / digest)
    assert job.end() == [0, 0]
    for number in range(2):
        data = (shared / "jobs" / job.order.job / f"outcome-0-{number}").read_bytes()
        assert job.read_outcome(number, data).value == bytes([number]) * 800_000


def test_a_url_gives_the_bytes_and_keeps_the_results(make_bare, tmp_path):
    shared = tmp_path / "shared"
    job = make_bare(large_result, ranks=2, source=Source.URL, store=f"file://{shared}").put_input()
    shared.mkdir()
    for digest in job.order.blobs:
        (shared / digest).write_bytes(job.store.open(digest))
    job.start_all()
    assert job.end() == [0, 0]
    data = (shared / "jobs" / job.order.job / "outcome-0-1").read_bytes()
    assert job.read_outcome(1, data).value == b"\1" * 800_000


@pytest.mark.parametrize("on_stdout", [True, False])
def test_the_head_keeps_results_until_they_are_fetched(make_bare, on_stdout):
    function = large_result if on_stdout else rank
    job = make_bare(function, ranks=3, outcomes_on_stdout=on_stdout).put_input().start_all()
    assert [job.pods[number].end() for number in (1, 2)] == [0, 0]
    head = job.pods[0]
    job.until(lambda: job.state()["state"] == "succeeded")
    for number in range(3):
        value = job.read_outcome(number, head.ask("GET", f"/files/outcome-0-{number}")[1]).value
        assert value == (bytes([number]) * 800_000 if on_stdout else number)
    assert head.process.poll() is None
    assert head.ask("POST", "/ack", b"")[0] == 200
    assert head.end() == 0


# No job of these waits for a notebook: pods that would wait ten minutes do not end within a test.
ALONE = {"ends_unfollowed": True, "outcomes_on_stdout": False, "collect_wait_s": 600.0}


@pytest.mark.nightly
def test_without_a_notebook_larger_results_are_in_a_volume_and_the_head_ends(make_bare, tmp_path):
    folder = tmp_path / "data" / ".kale-dist"
    job = make_bare(large_result, ranks=2, left_in=str(folder), **ALONE).put_input().start_all()
    assert job.end() == [0, 0]
    for number in range(2):
        data = (folder / wire.mark_of(job.key) / "jobs" / job.order.job / f"outcome-0-{number}").read_bytes()
        assert job.read_outcome(number, data).value == bytes([number]) * 800_000


@pytest.mark.parametrize("fetches", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_results_are_in_the_log_of_a_connected_notebook_only_if_it_does_not_come_for_them(make_bare, fetches):
    job = make_bare(rank, ranks=1, **ALONE).put_input().start_all()
    reader = threading.Thread(target=job.pods[0].ask, args=("GET", "/stream?line=0&event=0"))
    job.until(lambda: _missing(job.pods[0]) is not None)
    reader.start()
    job.until(lambda: job.state()["state"] == "succeeded")
    assert not job.items(OutcomePart)
    if fetches:
        job.pods[0].ask("POST", "/ack", b"{}")
    assert job.end() == [0]
    reader.join()
    assert bool(job.items(OutcomePart)) is not fetches


def test_results_that_are_not_fetched_are_given_up_in_a_sentence(make_bare):
    job = make_bare(large_result, ranks=1, collect_wait_s=0.5, outcomes_on_stdout=False).put_input().start_all()
    assert job.end() == [0]
    assert "The results were not fetched within 0.5 s (collect_wait_s). They are lost" in job.text()
    assert job.items(EventBlock)[-1].event["state"] == "succeeded"
