"""`breakpoint()` in ranks: what the agent gets from them and sends to them, and how a rank is left alone."""

import json
import time

import pytest
import torch
from own_files import own_files
from waiting import until

import kale_dist as kd
from kale_dist.job import interrupts
from kale_dist.wire import Debugging, Op, messages
from kale_dist.wire.messages import Typed, Visit


class Debugger:
    """Types at the prompts of one rank."""

    def __init__(self, jobs, job, rank):
        self._jobs, self._job, self._rank = jobs, job, rank
        self._seen = 0

    def prompts(self):
        return [event for event in self._job.events("debug") if event["rank"] == self._rank]

    def next(self):
        """The next event of the rank's debugger."""
        found = self._job.until(lambda: self.prompts()[self._seen :])[0]
        self._seen += 1
        return found

    def send(self, message):
        line = json.loads(messages.encode(message))
        self._jobs.client._send({"op": Op.SEND, "job": self._job.order.job, "rank": self._rank, "message": line})

    def type(self, *lines):
        """Answer the prompts that come; gives what the debugger has printed for each line."""
        at = self.prompts()[self._seen - 1] if self._seen and self.prompts()[self._seen - 1]["prompt"] else self.next()
        texts = []
        for line in lines:
            self.send(Typed(prompt=at["prompt"], text=line))
            at = self.next()
            assert at["typed"] == line
            texts.append(at["text"].removesuffix(f"(rank {self._rank}) "))
        return texts


@pytest.fixture
def debug(jobs):
    def debug(job, rank=1):
        return Debugger(jobs, job, rank)

    return debug


def stop_in_one(first=1):
    import torch
    import torch.distributed as dist

    x = torch.arange(4.0)
    if dist.get_rank() == first:
        breakpoint()
        x += 1
    dist.all_reduce(x)
    return x.sum().item()


def test_a_tensor_is_changed_while_the_others_wait_and_are_not_called_stalled(jobs, debug):
    job = jobs.run(stop_in_one, stall_warn_s=3.0, stall_timeout_s=3.0)
    texts = debug(job).type("p x", "!x.mul_(100)", "import time; time.sleep(4.5)", "c")
    assert texts == ["tensor([0., 1., 2., 3.])\n", "tensor([  0., 100., 200., 300.])\n", "", ""]
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert job.outcome(0).value == job.outcome(1).value == 6 + 600 + 4
    assert "No rank has made progress" not in job.log_text()
    assert job.log_text().count("Rank 1 waits in breakpoint() at test_breakpoints.py:") == 1


def test_the_debugger_begins_at_the_users_frame_and_steps_through_statements(jobs, debug):
    def outer():
        return inner(2) + 1

    def inner(k):
        breakpoint()
        values = [k]
        return sum(values)

    job = jobs.run(outer, ranks=1)
    at = debug(job, 0)
    texts = at.type(
        "w", "n", "up", "p k", "down", "p k", "for i in range(2):", "    print(i,\tk)", "", "values.append(5)", "n", "n"
    )
    frames = [line for line in texts[0].splitlines() if "test_breakpoints.py" in line]
    assert [line.rpartition(")")[0].rpartition(")")[2] for line in frames] == ["outer(", "inner("]
    assert own_files(texts[0]) == []
    assert "NameError" in texts[3]
    assert texts[5:9] == ["2\n", "...      ", "...      ", "0 2\n1 2\n"]
    assert "--Return--" in texts[10]
    at.type("c")
    assert job.wait()["state"] == "succeeded", job.log_text()
    assert job.outcome().value == 8


@pytest.mark.nightly
def test_steps_past_the_users_function_end_the_debugger(jobs, debug):
    job = jobs.run(stop_in_one, 0, ranks=1)
    at = debug(job, 0)
    prompt = at.next()
    while prompt["prompt"]:
        assert own_files(prompt["text"]) == []
        assert "pickle" not in prompt["text"]
        at.send(Typed(prompt=prompt["prompt"], text="n"))
        prompt = at.next()
    assert job.wait()["state"] == "succeeded"


@pytest.mark.nightly
def test_pdb_set_trace_is_the_same(jobs, debug):
    def stop():
        import pdb

        pdb.set_trace(header="look here")
        return "went on"

    job = jobs.run(stop, ranks=1)
    at = debug(job, 0)
    assert at.next()["text"].startswith("look here\n")
    at.send(Typed(prompt=at.prompts()[-1]["prompt"], text="c"))
    job.wait()
    assert job.outcome().value == "went on"


def test_q_ends_the_job_and_says_so(jobs, debug):
    job = jobs.run(stop_in_one)
    debug(job).type("q")
    ended = job.wait()
    assert ended["state"] == "failed"
    assert "Rank 1" in ended["reason"]
    assert "`q`" in ended["reason"]


def test_an_answer_to_another_prompt_does_nothing(jobs, debug):
    job = jobs.run(stop_in_one)
    at = debug(job)
    first = at.next()["prompt"]
    at.send(Typed(prompt=first, text="x.add_(1)"))
    second = at.next()["prompt"]
    # Sent again, as by a second debugger, or by a stranger who has recorded the request.
    at.send(Typed(prompt=first, text="x.add_(1)"))
    at.send(Typed(prompt="made-up", text="q"))
    at.send(Typed(prompt=second, text="c"))
    job.wait()
    assert job.outcome(0).value == 6 + 6 + 4 + 4


@pytest.mark.nightly
def test_threads_of_a_rank_are_debugged_one_after_the_other(jobs, debug):
    def stop():
        import threading

        def work(number):
            breakpoint()
            done.append(number)

        done = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(done)

    job = jobs.run(stop, ranks=1)
    at = debug(job, 0)
    first = at.type("p number", "c")[0]
    second = at.type("p number", "c")[0]
    assert {first, second} == {"0\n", "1\n"}
    job.wait()
    assert job.outcome().value == [0, 1]


def many(times=3):
    total = 0
    for number in range(times):
        breakpoint()
        total += number
    return total


def test_without_a_person_breakpoints_are_passed_over_at_once_with_one_line(jobs):
    job = jobs.run(many, 1000, ranks=1, debugging=Debugging(breakpoint_wait_s=0))
    assert job.wait()["state"] == "succeeded"
    assert job.outcome().value == sum(range(1000))
    assert job.log_text().count("has passed over breakpoint()") == 1
    assert [note["warns"] for note in job.events("note")] == [True]
    assert job.events("debug") == []


def test_where_no_person_comes_the_rank_goes_on_and_passes_over_those_that_follow(jobs):
    job = jobs.run(many, ranks=2, debugging=Debugging(breakpoint_wait_s=0.5))
    assert job.wait()["state"] == "succeeded"
    assert job.outcome(1).value == 3
    assert "go on from breakpoint(): nothing was typed for 0.5 s" in job.log_text()
    assert len(job.events("debug")) == 4


@pytest.mark.nightly
def test_a_person_who_has_come_is_waited_for(jobs, debug):
    job = jobs.run(stop_in_one, debugging=Debugging(breakpoint_wait_s=1.5))
    at = debug(job)
    prompt = at.next()["prompt"]
    at.send(Visit())
    time.sleep(3)
    at.send(Typed(prompt=prompt, text="c"))
    assert job.wait()["state"] == "succeeded"
    assert "nothing was typed" not in job.log_text()


@pytest.mark.nightly
def test_a_worker_of_a_loader_has_no_debugger(jobs):
    def load():
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                breakpoint()
                return index

        # A child of Python 3.14 would have to unpickle a class of this function.
        return list(DataLoader(Data(), num_workers=1, multiprocessing_context="fork"))

    job = jobs.run(load, ranks=1)
    assert job.wait()["state"] == "failed"
    assert "num_workers=0" in str(job.outcome().error)


def test_pythonbreakpoint_0_switches_breakpoints_off(jobs, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    job = jobs.run(many, ranks=1)
    assert job.wait()["state"] == "succeeded"
    assert "breakpoint()" not in job.log_text()


@pytest.mark.nightly
def test_what_a_command_prints_is_cut_at_64_ki_characters(jobs, debug):
    job = jobs.run(stop_in_one)
    at = debug(job)
    text, _ = at.type("print('x' * 1_000_000)", "c")
    assert text.endswith("[1,000,000 characters]\n")
    assert len(text) < 66_000
    job.wait()


def train_step(model, loader, criterion, optimizer, device, args):
    for number, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        if number == args["stop"] and kd.context().rank == 0:
            breakpoint()
    return loss.item()


@pytest.fixture
def training(monkeypatch):
    made = []

    def train(stop):
        monkeypatch.setattr(interrupts, "has_person", lambda: True)
        model = torch.nn.Linear(2, 1)
        data = torch.utils.data.TensorDataset(torch.randn(4000, 2), torch.randn(4000, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = kd.distribute(
            model, torch.utils.data.DataLoader(data, 4), torch.nn.MSELoss(), optimizer, train_step,
            train_args={"stop": stop}, number_of_processes=2,
        )  # fmt: skip
        made.append(job)
        return job

    yield train
    for job in made:
        job.delete()


def test_a_training_that_is_cancelled_at_a_breakpoint_is_not_asked_for_a_checkpoint(training, monkeypatch):
    job = training(stop=2)
    until(lambda: job.status.at_breakpoints)
    monkeypatch.setattr(interrupts, "has_person", lambda: False)
    job.cancel()
    assert job.wait(10).state == "cancelled"
    assert job.status.checkpoint_epoch is None


@pytest.mark.nightly
def test_a_training_that_has_left_its_breakpoint_writes_a_checkpoint_when_it_is_cancelled(training, monkeypatch):
    job = training(stop=2)
    until(lambda: job.status.at_breakpoints)
    monkeypatch.setattr("builtins.input", lambda prompt: "c")
    job.debug()
    until(lambda: job.status.replicas[0].progress is not None and job.status.replicas[0].progress.step > 5)
    job.cancel()
    assert job.wait(30).state == "cancelled"
    assert job.state_dict(partial=True)
