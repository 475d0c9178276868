"""What a rank finds, and what comes back from it."""

from __future__ import annotations

import base64
import os
import pathlib
import signal
import sys
import time

import pytest
from agent_jobs import RunningJob, add_ranks, descriptors
from waiting import until

from kale_dist import wire
from kale_dist.wire import BlockReader


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_every_rank_returns_its_value(jobs, ranks):
    job = jobs.run(add_ranks, 1, ranks=ranks)
    assert job.wait()["state"] == "succeeded"
    expected = sum(range(1, ranks + 1))
    assert [job.outcome(rank).value for rank in range(ranks)] == [expected] * ranks


def test_several_jobs_at_once(jobs):
    running = [jobs.run(add_ranks, number) for number in range(4)]
    assert [job.wait()["state"] for job in running] == ["succeeded"] * 4
    assert [job.outcome().value for job in running] == [2 * number + 1 for number in range(4)]


def read_twice(size):
    from torch.utils.data import DataLoader

    import kale_dist as kd

    loader = DataLoader(range(size), 3, shuffle=True)
    return [[int(one) for batch in kd.share(loader) for one in batch] for _ in range(2)]


def test_a_function_shares_a_loader(jobs):
    job = jobs.run(read_twice, 10)
    assert job.wait()["state"] == "succeeded"
    first, second = (job.outcome(rank).value for rank in (0, 1))
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[*range(10)]] * 2
    assert first[0] != first[1]
    assert "shared: 10 samples, 2 ranks x 5, batch 3 x 2 = 6" in job.log_text()


def environment_of_rank():
    import random
    import sys

    import numpy as np
    import torch

    names = {name: value for name, value in os.environ.items() if name.isupper()}
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())  # noqa: NPY002 - the state that is seeded
    return names, str(pathlib.Path.cwd()), sys.argv[:], torch.get_num_threads(), drawn, sys.stdin.read(), os.getpid()


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
    assert names["ACCELERATE_USE_CPU"] == "True"
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
        [("|", "from C"), ("|", "from a child"), ("!", "from stderr"), ("!", "no end"), ("|", "\\xff\\x00raw")]
    )
    assert [line.sequence for line in job.log()] == list(range(5))


def test_what_gloo_says_of_a_complete_group_is_left_out(jobs):
    said = "[Gloo] Rank 0 is connected to {} peer ranks. Expected number of connected peer ranks is : {}"
    own = [said.format(0, 1), f"mine: {said.format(1, 1)}", f"{said.format(1, 1)}!", "[Gloo] mine", ""]

    def talk():
        print(said.format(1, 1), *own, said.format(15, 15), "last", sep="\n", flush=True)
        half = said.format(3, 3).encode()
        os.write(1, half[:30])
        time.sleep(0.3)
        os.write(1, half[30:] + b"\nend\n")

    job = jobs.run(talk, ranks=1)
    job.wait()
    assert [line.text for line in job.log()] == [*own, "last", "end"]
    assert [line.sequence for line in job.log()] == list(range(len(own) + 2))


def test_a_flood_of_lines_is_whole(jobs):
    def flood():
        from kale_dist.wire import context

        block = b"".join(b"%07d %s\n" % (number, b"x" * 71) for number in range(200_000))
        for start in range(0, len(block), 1 << 16):
            os.write(1, block[start : start + (1 << 16)])
        return context.context().rank

    job = jobs.run(flood)
    assert job.wait()["state"] == "succeeded"
    for rank in (0, 1):
        numbers = [int(line.text[:7]) for line in job.log() if line.rank == rank]
        assert numbers == list(range(200_000))


def test_a_disk_that_hangs_stops_the_ranks_and_costs_no_line(jobs, tmp_path):
    def talk(folder):
        from kale_dist.wire import context

        for number in range(100_000):
            print(f"{number:07d} {'x' * 100}")
            if number % 5000 == 0:
                (folder / f"{context.context().rank}").write_text(f"{number}")

    def at():
        return [int((tmp_path / f"{rank}").read_text() or 0) for rank in (0, 1)]

    # Below the five seconds after which a disk is called slow and the four of the look behind it, and enough for a busy machine's own disk.
    order = jobs.order(talk, tmp_path, stall_timeout_s=6.0)
    job = RunningJob(order)
    # A disk whose cache is full: it takes what fits into a pipe.
    os.mkfifo(job.files.log)
    disk = os.open(job.files.log, os.O_RDWR)
    jobs.client.take(order)
    job.until(lambda: jobs.client.disk_problems.get(order.job))
    stopped_at = at()
    time.sleep(4)
    assert at() == stopped_at
    assert max(stopped_at) < 95_000
    blocks, numbers = BlockReader(), {0: [], 1: [], None: []}
    while min(map(len, (numbers[0], numbers[1]))) < 100_000:
        for block in blocks.feed(os.read(disk, 1 << 20)):
            numbers[block.rank] += [line.text[:7] for line in block.lines()]
    assert job.wait()["state"] == "succeeded"
    os.close(disk)
    assert numbers[0] == numbers[1] == [f"{number:07d}" for number in range(100_000)]
    assert jobs.client.disk_problems[order.job] == ""


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
        from kale_dist.wire import context, events

        for step in range(1, 101):
            context.emit(events.RankProgress(epoch=1, epochs=1, step=step, steps=100, samples=step))
        context.report(loss=0.5, epoch=1)

    job = jobs.run(train)
    job.wait()
    assert [event["rank"] for event in job.events("metrics")] in ([0, 1], [1, 0])
    first = job.events("metrics")[0]
    assert (first["values"], first["epoch"], first["source"]) == ([["loss", 0.5]], 1, "report")
    assert job.events("progress") == []
    (progress,) = wire.decode_json_lines(job.files.progress.read_bytes())
    assert {rank: progress[rank]["step"] for rank in "01"} == {"0": 100, "1": 100}


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
    assert time.monotonic() - start > 4.5


def load_data():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, num_workers=2, persistent_workers=True)
    return sum(int(batch.sum()) for (batch,) in loader)


def test_data_loader_workers_do_not_hold_a_job_up(jobs):
    job = jobs.run(load_data)
    assert job.wait()["state"] == "succeeded"
    assert job.outcome().value == sum(range(64))


def test_nothing_is_left_in_the_agent(jobs):
    jobs.run(add_ranks, 1).wait()
    time.sleep(1.0)
    before, shared = descriptors(jobs.client.pid), shared_memory()
    for _ in range(5):
        jobs.run(add_ranks, 1).wait()
    until(lambda: descriptors(jobs.client.pid) == before and shared_memory() <= shared, 60)


def shared_memory():
    return {file.name for file in pathlib.Path("/dev/shm").iterdir()}


def test_code_opens_stores_of_its_own_at_master_port_as_under_plain_torch(jobs):
    def remote():
        import torch
        from torch.distributed import rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank))
        rpc.shutdown()
        return value.tolist()

    def by_hand():
        from torch.distributed import TCPStore, barrier

        rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = TCPStore(*address, 2, is_master=rank == 0)
        store.set(f"from {rank}", str(rank))
        found = store.get(f"from {1 - rank}")
        # The store ends with rank 0's function.
        barrier()
        return found

    for function, expected in ((remote, [2.0, 2.0]), (by_hand, b"0")):
        job = jobs.run(function)
        assert job.wait()["state"] == "succeeded"
        assert job.outcome(1).value == expected


def test_a_step_that_destroys_the_group_does_not_end_the_training(jobs):
    from torch.distributed import destroy_process_group, init_process_group

    def tutorial():
        from trainings import fit

        def step(model, loader, criterion, optimizer, device, args):
            init_process_group("gloo")
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
            destroy_process_group()

        return fit(train_step=step, epochs=2).epochs

    job = jobs.run(tutorial)
    assert job.wait()["state"] == "succeeded"
    assert job.outcome().value == 2


def test_a_training_imports_nothing_in_its_ranks(jobs):
    def imported():
        from trainings import fit

        from kale_dist.worker.training import loop, settings  # noqa: F401

        before = set(sys.modules)
        fit()
        return sorted(set(sys.modules) - before)

    job = jobs.run(imported)
    assert job.wait()["state"] == "succeeded"
    assert job.outcome().value == []


def test_pictures_of_rank_0_are_events_and_others_print(jobs):
    def show():
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        axes.plot([1, 2])
        plt.show()
        display(figure)  # noqa: F821 - what IPython has in its cells
        display("text")  # noqa: F821
        return plt.get_backend()

    job = jobs.run(show)
    assert job.wait()["state"] == "succeeded", job.log_text()
    shown = [event for event in job.events() if event["event"] == "display"]
    assert [event["rank"] for event in shown] == [0, 0]
    assert base64.b64decode(shown[0]["data"]["image/png"]).startswith(b"\x89PNG")
    assert "Figure" in shown[0]["data"]["text/plain"]
    assert job.log_text().count("Figure(") == 2
    assert job.log_text().count("text") == 2


def test_the_picture_functions_of_a_notebook_work_by_the_names_it_imported(jobs):
    from IPython.display import HTML, display
    from tqdm.notebook import tqdm

    def show():
        for _ in tqdm(range(3)):
            pass
        display(HTML("<b>bold</b>"))
        display(HTML("x" * 600_000))

    job = jobs.run(show)
    assert job.wait()["state"] == "succeeded", job.log_text()
    shown = [event["data"]["text/html"] for event in job.events() if event["event"] == "display"]
    assert shown == ["<b>bold</b>"]
    assert "585 KiB are too much to show (at most 512 KiB)" in job.log_text()
    assert "3/3" in job.log_text()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("input('name? ')", "a rank has no terminal. Ask in the notebook before the call"),
        ("import torch; torch.ones(1).cuda()", "this code asks for a GPU, and the rank has none"),
        ("import torch; torch.cuda.set_device(0)", "this code asks for a GPU, and the rank has none"),
        ("import torch; torch.nn.Linear(1, 1).to('cuda')", "pass cuda=True where there are GPUs"),
        ("import torch; torch.nn.Linear(1, 1).to(0)", "this code asks for a GPU, and the rank has none"),
    ],
)
def test_what_a_rank_does_not_have_is_said_in_one_sentence(jobs, body, said):
    def ask():
        exec(body)

    job = jobs.run(ask)
    assert job.wait()["state"] == "failed"
    assert said in str(job.outcome().error)


def test_torchs_compiler_may_ask_for_a_gpu_that_is_not_there(jobs):
    def ask():
        from torch._inductor.codecache import CacheBase

        return list(CacheBase.get_system())

    job = jobs.run(ask)
    assert job.wait()["state"] == "succeeded", job.log_text()
    found = job.outcome().value
    assert "hash" in found
    assert "device" not in found


def leaves_its_loader_alone():
    from trainings import fit

    fit(train_step=lambda *_: 0.5)


def test_what_two_ranks_note_is_printed_by_one(jobs):
    """Rank 0 may be in a step, in which it waits for the other."""
    job = jobs.run(leaves_its_loader_alone)
    assert job.wait()["state"] == "succeeded", job.log_text()
    noted = [event["rank"] for event in job.events("note") if "did not iterate" in event["text"]]
    assert sorted(noted) == [0, 1]
    assert job.log_text().count("train_step did not iterate the loader it was given") == 1


def train_alone(exchanges):
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        if exchanges:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()


def descend(model):
    """A step of an optimizer that is not torch's, as fastai's."""
    import torch

    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_that_is_no_argument_is_named_where_it_was_trained(jobs, trains):
    import torch

    net = torch.nn.Linear(1, 1)

    def train():
        for _ in range(2):
            descend(net) if trains else net(torch.ones(1, 1)).sum().backward()

    job = jobs.run(train)
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert ("The ranks made 2 backward passes and exchanged nothing" in job.log_text()) == trains
    assert [event["warns"] for event in job.events("note")] == [True] * trains


def test_copies_of_a_model_that_was_given_are_named_however_they_were_trained(jobs):
    import torch

    def evolve(model, alike):
        from kale_dist.wire import context

        with torch.no_grad():
            model.weight.add_(1 if alike else context.context().rank)
            model.weight.sub_(0.5)

    for alike in (True, False):
        job = jobs.run(evolve, torch.nn.Linear(1, 1), alike)
        assert job.wait()["state"] == "succeeded", job.log_text()
        said = "The ranks hold different weights of the models that they were given: has each of the 2"
        assert (said in job.log_text()) == (not alike)
        assert [said in event["text"] for event in job.events("note")] == [True] * (not alike)


def test_a_model_that_is_an_argument_comes_back_whatever_has_changed_it(jobs):
    import torch

    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    job = jobs.run(descend, model)
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert job.outcome().value.model_state["weight"].item() == pytest.approx(before - 0.1)


@pytest.mark.parametrize("exchanges", [False, True])
def test_ranks_that_train_and_never_exchange_anything_are_told(jobs, exchanges):
    job = jobs.run(train_alone, exchanges)
    assert job.wait()["state"] == "succeeded"
    said = "The ranks made 3 optimizer steps and exchanged nothing"
    assert job.log_text().count(said) == (not exchanges)
    warned = [event["text"] for event in job.events("note") if event["warns"]]
    assert any(said in text for text in warned) == (not exchanges)
