"""Live ranks, as their agent and a notebook's messages see them: cells, errors, interrupts, repairs."""

import dataclasses
import json
import os
import random
import secrets
import signal
import threading
import time

import pytest
from agent_jobs import descriptors
from own_files import own_files

from kale_dist.snapshot import outcome
from kale_dist.snapshot.capture import capture
from kale_dist.wire import Op, decode, messages
from kale_dist.wire.messages import Answer, Cell, EndLive, Give, Interrupt, Load, Repair, Restart
from kale_dist.worker.rank import live_rank


def answer_in(event):
    return decode(Answer, {name: event[name] for name in Answer.__slots__ if name in event})


class Live:
    """Live ranks, and the messages by which a notebook has them do something."""

    def __init__(self, jobs, ranks=2, idle_s=None, **options):
        self.jobs, self.size, self.number, self.generation = jobs, ranks, 0, 0
        self.job = jobs.run(live_rank.serve, idle_s, ranks=ranks, **options)
        self.job.until(lambda: len(self.answers(0)) == ranks)

    def answers(self, number):
        found = {event["rank"]: answer_in(event) for event in self.job.events("cell") if event["number"] == number}
        return {rank: answer for rank, answer in found.items() if not answer.is_refused}

    def send(self, message, rank=-1):
        line = json.loads(messages.encode(message))
        self.jobs.client._send({"op": Op.SEND, "job": self.job.order.job, "rank": rank, "message": line})

    def ask(self, message):
        self.number += 1
        self.send(dataclasses.replace(message, number=self.number, name=secrets.token_hex(4)))
        return self.number

    def wait(self, number, ranks=None, limit_s=30.0):
        wanted = set(range(self.size) if ranks is None else ranks)
        deadline = time.monotonic() + limit_s
        while not wanted <= (found := self.answers(number)).keys():
            assert time.monotonic() < deadline, f"no answer from {wanted - found.keys()}"
            time.sleep(0.01)
        return [found[rank] for rank in sorted(found)]

    def run(self, source, ranks=None, limit_s=30.0):
        label = f"Cell In[{self.number + 1}]"
        cell = Cell(source=source, file=f"<live {self.number + 1}>", label=label, ranks=tuple(ranks or ()))
        return self.wait(self.ask(cell), ranks, limit_s)

    def values(self, source, ranks=None):
        answers = self.run(source, ranks)
        assert all(answer.ok for answer in answers), answers
        return [(answer.value or {}).get("text/plain") for answer in answers]

    def start(self, source):
        return self.ask(Cell(source=source, file=f"<live {self.number + 1}>", label="Cell"))

    def repair(self):
        self.generation += 1
        return self.wait(self.ask(Repair(repair=self.generation)))


SHARE = """
import kale_dist as kd
from torch.utils.data import DataLoader
sorted(int(one) for batch in kd.share(DataLoader(range(8), 2, shuffle=True)) for one in batch)
"""


@pytest.fixture
def live(jobs):
    made = []

    def make(ranks=2, **options):
        made.append(Live(jobs, ranks, **options))
        return made[-1]

    yield make
    for one in made:
        one.send(EndLive())
        jobs.client.cancel(one.job.order.job, 0.5)
        one.job.wait(20)


SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


def test_variables_and_the_group_stay_between_cells(live):
    ranks = live()
    assert ranks.values("k = rank * 10") == [None, None]
    assert ranks.values("k += 1; k") == ["1", "11"]
    assert ranks.values(SUM) == ["2.0", "2.0"]
    assert ranks.values("import asyncio\nawait asyncio.sleep(0, k)") == ["1", "11"]
    assert ranks.run("k = 5; _hidden = 1")[0].names == ("k",)
    assert ranks.values("only = 1; only", [1]) == ["1"]
    assert ranks.values("'only' in globals()") == ["False", "True"]


def test_ranks_that_are_terminated_succeed(live):
    ranks = live()
    ranks.send(EndLive())
    assert ranks.job.wait(20)["state"] == "succeeded", ranks.job.log_text()
    assert ranks.job.log_text() == ""


def test_the_end_of_a_cell_comes_after_its_lines(live):
    ranks = live()
    for number in range(30):
        ranks.run(f"print('line {number}', end=chr(10) * {number % 2}, flush=True)")
        assert ranks.job.log_text().count(f"line {number}\n") + ranks.job.log_text().endswith(f"line {number}") == 2


def test_an_error_frees_the_ranks_that_wait_and_shows_the_cells_lines(live):
    ranks = live(3)
    ranks.run(SUM)
    began = time.monotonic()
    answers = ranks.run("def f(k):\n    return 1 // k\nif rank == 1:\n    f(0)\ndist.all_reduce(x)")
    took = time.monotonic() - began
    assert took < 10
    assert [answer.ok for answer in answers] == [False] * 3
    assert [bool(answer.is_freed) for answer in answers] == [True, False, True]
    assert "return 1 // k" in answers[1].traceback
    assert 'File "Cell In[2]", line 4' in answers[1].traceback
    assert own_files(answers[1].traceback) == []
    assert all(answer.ok for answer in ranks.repair())
    assert ranks.values(SUM) == ["3.0"] * 3


WRAPPED = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
part = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
model(torch.ones(2, 4)).sum().backward()
"""
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
sharded = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
fully_shard(sharded, mesh=mesh["b"])
sharded(torch.ones(2, 8)).sum().backward()
"""
WAITS = (
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier()",
    "dist.recv(torch.ones(1), src=3)",
    "dist.all_reduce(torch.ones(1), group=part)",
    "dist.all_reduce(torch.ones(1), async_op=True).wait()",
    "model(torch.ones(2, 4)).sum().backward()",
    "sharded(torch.ones(2, 8)).sum().backward()",
)


@pytest.mark.nightly
def test_wrapped_models_and_subgroups_go_on_after_each_kind_of_wait(live):
    ranks = live(4)
    ranks.values(WRAPPED + SHARDED)
    for wait in WAITS:
        answers = ranks.run(f"if rank == 3: raise KeyError('gone')\n{wait}")
        assert answers[3].error_type == "KeyError"
        assert all(answer.ok or answer.is_freed for answer in answers[:3]), (wait, answers)
        assert all(answer.ok for answer in ranks.repair()), wait
        assert ranks.values("x = torch.ones(1)\ndist.all_reduce(x, group=part)\nx.item()") == ["2.0"] * 4
        assert (
            ranks.values(
                "model.zero_grad()\nmodel(torch.ones(2, 4) * rank).sum().backward()\nmodel.module.weight.grad[0, 0].item()"
            )
            == ["3.0"] * 4
        )
        ranks.values("sharded(torch.ones(2, 8)).sum().backward()")


@pytest.mark.nightly
def test_a_model_whose_first_backward_pass_was_broken_off_goes_on(live):
    ranks = live()
    for made in ("", ", find_unused_parameters=True", ", static_graph=True"):
        ranks.values(
            f"{WRAPPED.partition('part =')[0].replace('(4, 4))', f'(4, 4){made})')}\nmodel.register_comm_hook(model.process_group, hooks.fp16_compress_hook)"
        )
        answers = ranks.run("if rank: raise KeyError('gone')\nmodel(torch.ones(2, 4)).sum().backward()")
        assert answers[0].is_freed
        assert all(answer.ok for answer in ranks.repair())
        for _ in range(3):
            step = "model.zero_grad()\nmodel(torch.ones(2, 4) * rank).sum().backward()\nmodel.module.weight.grad[0, 0].item()"
            assert ranks.values(step) == ["1.0"] * 2


def test_a_rank_that_works_is_not_ended_by_the_error_of_another(live):
    ranks = live()
    answers = ranks.run(
        "import time\nif rank == 0: raise ValueError\nend = time.time() + 2\nwhile time.time() < end: pass\n'done'"
    )
    assert [answer.ok for answer in answers] == [False, True]
    assert answers[1].value["text/plain"] == "'done'"
    answers = ranks.run("if rank == 0: raise ValueError\ntime.sleep(2)\n'slept'")
    assert [answer.ok for answer in answers] == [False, True]


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(60)",
        "while True: pass",
        "import torch, torch.distributed as dist\nif rank: dist.all_reduce(torch.ones(1))\nelse: import time; time.sleep(60)",
    ],
    ids=["sleep", "loop", "collective"],
)
def test_an_interrupt_ends_the_cell_and_not_the_ranks(live, source):
    ranks = live()
    ranks.run("kept = 5")
    number = ranks.start(source)
    time.sleep(0.5)
    began = time.monotonic()
    ranks.send(Interrupt(number=number))
    answers = ranks.wait(number)
    assert time.monotonic() - began < 5
    assert [answer.ok for answer in answers] == [False, False]
    ranks.repair()
    assert ranks.values(f"{SUM}, kept") == ["(2.0, 5)"] * 2
    # A cut that was planned for the interrupted cell does not come later.
    time.sleep(live_rank.CUT_AFTER_S + 1.2)
    assert ranks.values(SUM) == ["2.0"] * 2


def test_an_interrupt_of_another_cell_does_nothing(live):
    ranks = live()
    number = ranks.start("import time; time.sleep(1); 'ended'")
    ranks.send(Interrupt(number=number - 1))
    ranks.send(Interrupt(number=number + 1))
    assert [answer.value["text/plain"] for answer in ranks.wait(number)] == ["'ended'"] * 2


def test_a_message_that_comes_twice_does_nothing(live):
    ranks = live()
    ranks.run("runs = 0")
    cell = Cell(source="runs += 1; runs", file="<a>", label="", number=2, name="once")
    ranks.send(cell)
    ranks.send(cell)
    ranks.number = 2
    assert ranks.values("runs") == ["1", "1"]
    # Another notebook's message of a number that has passed is refused, and not passed over in silence.
    ranks.send(dataclasses.replace(cell, name="another"))
    assert ranks.values("runs") == ["1", "1"]
    assert [e["name"] for e in ranks.job.events("cell") if e.get("is_refused")] == ["another"] * 2


def test_connections_of_the_users_own_are_not_cut(live):
    ranks = live()
    ranks.run(
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\nmine = socket.create_connection(server.getsockname())\ntheirs = server.accept()[0]"
    )
    assert ranks.run(f"{SUM}\nif rank: raise ValueError\ndist.barrier()")[0].is_cut
    assert ranks.values("mine.sendall(b'there'); theirs.recv(5)") == ["b'there'"] * 2


def test_names_are_loaded_and_values_are_given(live, jobs):
    ranks = live()
    ranks.run("scale = 10")
    snapshot = capture(max, (), {"lr": 0.5, "table": {"a": [1, 2]}}, store=jobs.store, label="names")
    assert all(answer.ok for answer in ranks.wait(ranks.ask(Load(snapshot=snapshot.digest))))
    assert ranks.values("lr * scale, table") == ["(5.0, {'a': [1, 2]})"] * 2
    number = ranks.ask(Give(ranks=(1,), expression="[rank, table]"))
    name = next(iter(ranks.job.until(lambda: ranks.answers(number)).values())).name
    signer = outcome.Signer(
        key=bytes.fromhex(ranks.job.order.key), job=f"{ranks.job.order.job} {name}", attempt=0, rank=1
    )
    path = ranks.job.files.outcome(0, 1)
    assert outcome.read_outcome(path, signer=signer, resolve=lambda _: None).value == [1, {"a": [1, 2]}]


@pytest.mark.nightly
def test_ranks_are_watched_only_while_a_cell_runs(live):
    ranks = live(stall_warn_s=1.0, stall_timeout_s=1.5)
    time.sleep(3)
    assert ranks.values("1") == ["1", "1"]
    ranks.start("import time; time.sleep(30)")
    ended = ranks.job.wait(20)
    assert (ended["state"], ended["cause"]) == ("failed", "stalled")


def test_a_rank_that_dies_ends_the_job_and_a_restart_gives_new_processes(live, jobs):
    ranks = live()
    ranks.run("before = 1")
    pids = ranks.job.pids()
    for _ in range(2):
        ranks.send(Restart(attempt=0))
    ranks.job.until(lambda: [e for e in ranks.job.events("cell") if e["attempt"] == 1 and e["number"] == 0][1:])
    assert not set(ranks.job.pids().values()) & set(pids.values())
    assert ranks.values("'before' in globals()") == ["False", "False"]
    assert {e["attempt"] for e in ranks.job.events()} == {0, 1}
    os.kill(ranks.job.pids()[1], signal.SIGKILL)
    assert ranks.job.wait(20)["state"] == "failed"


@pytest.mark.nightly
def test_random_interrupts_never_hurt_a_later_cell(live):
    rng = random.Random(1)
    ranks = live()
    ranks.run(SUM + "\nimport time")
    cells = ["time.sleep(0.02)", "dist.all_reduce(torch.ones(1))", "for i in range(20000): pass", "1 + 1"]
    for _ in range(60):
        number = ranks.start(rng.choice(cells))
        timer = threading.Timer(rng.random() * 0.03, lambda number=number: ranks.send(Interrupt(number=number)))
        timer.start()
        answers = ranks.wait(number)
        timer.join()
        if any(not answer.ok or answer.is_cut for answer in answers):
            ranks.repair()
        assert ranks.values(SUM) == ["2.0", "2.0"]


@pytest.mark.nightly
def test_a_hundred_repairs_take_few_descriptors_and_none_hurts_the_next(live):
    ranks = live()
    ranks.run(SUM)
    before = [descriptors(pid) for pid in ranks.job.pids().values()]
    for _ in range(100):
        assert all(answer.ok for answer in ranks.repair())
    assert ranks.values(SUM) == ["2.0", "2.0"]
    after = [descriptors(pid) for pid in ranks.job.pids().values()]
    assert all(now - then < 700 for then, now in zip(before, after, strict=True)), (before, after)


def test_cells_share_a_loader(live):
    first, second = map(json.loads, live().values(SHARE))
    assert sorted(first + second) == [*range(8)]
