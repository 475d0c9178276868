"""Trainings whose pods are lost, made again, told to end, or come late: plain processes here, and no notebook anywhere."""

import collections
import os
import pathlib
import re
import signal
import sys
import time

import pytest
import torch
from pod_jobs import making_pod_jobs
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kale_dist as kd
from kale_dist import wire
from kale_dist.wire import FailureCause
from kale_dist.worker.training import loop
from kale_dist.worker.training.settings import Training

pytestmark = pytest.mark.nightly
SAMPLES, BATCH, EPOCHS = 240, 12, 15

FASTER = """
import runpy, sys
from kale_dist.worker.agent import job_run
job_run.GATHER_S, job_run.GROW_EACH_S = {gather_s}, {grow_each_s}
sys.argv[1:] = ["pod"]
runpy.run_module("kale_dist.worker", run_name="__main__")
"""
"""The command of a pod that waits for seconds where the product waits for minutes."""


class Numbered(Dataset):
    """Samples that say which they are. In double precision: other numbers of ranks add up in another order."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, self.x[index], int(self.x[index].sum() > 0)


def step(model, loader, criterion, optimizer, device, pause):
    for indices, x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        print("saw", kd.context().attempt, f"{time.time():.3f}", *indices.tolist(), flush=True)
        time.sleep(float(pause.read_text()))
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    print("weights", *weights, flush=True)
    return {"loss": loss.item()}


def step_over_pairs(model, loader, criterion, optimizer, device, pause):
    """Cannot be resumed within an epoch."""
    return step(
        model, (batch for _, batch in zip(range(1000), loader, strict=False)), criterion, optimizer, device, pause
    )


def train_in(make, folder, *, ranks, pause_s=0.1, gather_s=2, grow_each_s=2, train_step=step, every="auto", **options):
    """A training of 300 batches, and the file that says how long ranks wait after each of them."""
    torch.manual_seed(0)
    pause = folder / "pause"
    pause.write_text(f"{pause_s}")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    training = Training(
        model=model, train_data_loader=DataLoader(Numbered(), BATCH, shuffle=True), train_step=train_step, train_args=pause,
        criterion=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        epochs=EPOCHS, split_batches=True, checkpoint_every=every,
    )  # fmt: skip
    job = make(loop.train, training, ranks=ranks, seed=3, threads=1, **options)
    job.command = ["-P", "-c", FASTER.format(gather_s=gather_s, grow_each_s=grow_each_s)]
    return job.put_input(), pause


def seen(job):
    """What ranks have seen: attempt, time, and indices of samples; in the order of time."""
    found = re.findall(r"saw (\d+) ([\d.]+) ([\d ]+)", job.text())
    return sorted((float(at), int(attempt), [int(one) for one in rest.split()]) for attempt, at, rest in found)


def repeated(job):
    """How many samples were seen more than once in an epoch; all samples of all epochs have to be seen."""
    counts = collections.Counter(index for _, _, found in seen(job) for index in found)
    assert all(counts[index] >= EPOCHS for index in range(SAMPLES))
    return sum(counts.values()) - SAMPLES * EPOCHS


def until_seen(job, attempt, batches=2):
    job.until(lambda: sum(one[1] == attempt for one in seen(job)) >= batches)


def sizes(job):
    """The world sizes of the attempts."""
    return [sum(member["processes"] for member in event["members"]) for event in job.events("attempt")]


def weights_of(job):
    """After the last epoch."""
    return torch.tensor([float(one) for one in re.findall(r"weights (.*)", job.text())[-1].split()])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a training in two pods to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    made = making_pod_jobs(folder, sys.executable)
    job, _ = train_in(next(made), folder, ranks=2, pause_s=0)
    job.start_all()
    assert job.end() == [0, 0], job.text()
    assert not repeated(job)
    yield weights_of(job)
    next(made, None)


@pytest.mark.parametrize("how", ["pod", "container"])
def test_a_pod_that_was_killed_and_made_again_changes_no_bit(make, tmp_path, undisturbed, how):
    job, pause = train_in(make, tmp_path, ranks=2, max_restarts=1)
    job.start_all()
    until_seen(job, 0, 30)
    pause.write_text("1")
    job.pods[1].process.kill()
    job.pods[1].end()
    pause.write_text("0")
    again = job.start(1, job.pods[1] if how == "container" else None)
    assert [job.pods[0].end(), again.end()] == [0, 0], job.text()
    assert sizes(job) == [2, 2]
    assert torch.equal(weights_of(job), undisturbed)


def test_sigterm_to_a_pod_loses_no_step_but_the_one_that_begins_meanwhile(make, tmp_path, undisturbed):
    job, pause = train_in(make, tmp_path, ranks=2, max_restarts=1)
    job.start_all()
    until_seen(job, 0, 30)
    pause.write_text("1")
    job.pods[1].process.terminate()
    assert job.pods[1].end() == 143
    pause.write_text("0")
    job.start(1)
    assert [job.pods[0].end(), job.pods[2].end()] == [0, 0], job.text()
    assert repeated(job) <= BATCH
    assert torch.equal(weights_of(job), undisturbed)


@pytest.mark.timeout(600)
def test_a_range_begins_with_fewer_grows_and_shrinks_with_the_pods_that_are_there(make, tmp_path, undisturbed):
    job, pause = train_in(make, tmp_path, ranks=3, pause_s=1.0, sizes=(2, 3), max_restarts=2)
    job.start(0)
    job.start(1)
    until_seen(job, 0)
    job.start(2)
    until_seen(job, 1)
    job.pods[1].process.kill()
    until_seen(job, 2)
    job.start(1)
    until_seen(job, 3)
    job.pods[2].process.terminate()
    assert job.pods[2].end() == 143
    until_seen(job, 4)
    pause.write_text("0")
    assert [job.pods[0].end(), job.pods[3].end()] == [0, 0], job.text()
    assert sizes(job) == [2, 3, 2, 3, 2]
    members = [[member["agent"] for member in event["members"]] for event in job.events("attempt")]
    assert members == [[0, 1], [0, 1, 2], [0, 2], [0, 1, 2], [0, 1]]
    # The two that only made it larger count as no restart.
    assert [event["free"] for event in job.events("state") if event["state"] == "starting"] == [0, 1, 1, 2, 2]
    assert "attempt 5 of 5" in job.text()
    assert torch.allclose(weights_of(job), undisturbed, rtol=0, atol=1e-6)


def test_a_range_of_even_numbers_leaves_a_pod_without_ranks(make, tmp_path):
    job, pause = train_in(make, tmp_path, ranks=4, pause_s=1.0, sizes=(2, 4), max_restarts=1)
    for number in range(3):
        job.start(number)
    until_seen(job, 0)
    assert sizes(job) == [2]
    # Nobody misses the one without ranks, and it takes the place of the one that is lost.
    job.pods[1].process.kill()
    pause.write_text("0")
    assert [job.pods[0].end(), job.pods[2].end()] == [0, 0], job.text()
    assert sizes(job) == [2, 2]


def test_a_step_that_resumes_only_after_epochs_makes_the_job_larger_there(make, tmp_path):
    # An epoch takes longer than ranks have for a checkpoint that cannot wait.
    job, pause = train_in(
        make, tmp_path, ranks=2, pause_s=1.5, sizes=(1, 2), max_restarts=1, train_step=step_over_pairs
    )
    job.start(0)
    until_seen(job, 0)
    job.start(1)
    until_seen(job, 1)
    pause.write_text("0")
    assert job.end() == [0, 0], job.text()
    assert sizes(job) == [1, 2]
    assert repeated(job) <= BATCH


def test_a_training_without_checkpoints_within_epochs_says_that_it_stays_as_small_as_it_began(make, tmp_path):
    job, pause = train_in(make, tmp_path, ranks=2, sizes=(1, 2), max_restarts=1, every=1)
    job.start(0)
    until_seen(job, 0)
    job.start(1)
    job.until(lambda: "There are pods for 2 processes" in job.text())
    pause.write_text("0")
    assert job.end() == [0, 0], job.text()
    assert sizes(job) == [1]


def stored(job):
    """The job's files in its store."""
    return pathlib.Path(job.order.store, "jobs", job.order.job)


def train_with_store(make, folder, **options):
    """A training of two pods whose head is made again, too."""
    store = folder / "store"
    store.mkdir()
    return train_in(make, folder, ranks=2, pause_s=0.05, store=str(store), returns_head=True, **options)


@pytest.mark.parametrize("how", ["pod", "container"])
def test_a_head_that_was_killed_and_made_again_changes_no_bit(make, tmp_path, undisturbed, how):
    job, _ = train_with_store(make, tmp_path, max_restarts=1)
    head, relay = job.start_all().pods
    job.until((stored(job) / "checkpoint.owner").exists)
    head.process.kill()
    head.end()
    assert [job.start(0, head if how == "container" else None).end(), relay.end()] == [0, 0], job.text()
    assert any(event["epoch"] or event.get("batches") for event in job.events("resumed"))
    assert torch.equal(weights_of(job), undisturbed)


def test_a_head_that_was_lost_more_often_than_restarts_are_left_ends_its_pods_for_good(make, tmp_path):
    job, _ = train_with_store(make, tmp_path, max_restarts=1)
    head = job.start_all().pods[0]
    for lives in (1, 2):
        job.until(lambda lives=lives: len(job.events("attempt")) == lives)
        head.process.kill()
        head = job.start(0)
    assert [head.end(), job.pods[1].end()] == [1, 0], job.text()
    assert head.last_words["cause"] == FailureCause.AGENT_DIED
    assert "max_restarts" in head.last_words["reason"]


def test_restarts_for_lost_ranks_count_for_the_next_head(make, tmp_path):
    job, _ = train_with_store(make, tmp_path, max_restarts=1)
    head = job.start_all().pods[0]
    until_seen(job, 0)
    before = (stored(job) / "restarts").read_bytes()
    os.kill(head.pids()[1], signal.SIGKILL)
    until_seen(job, 1)
    job.until(lambda: (stored(job) / "restarts").read_bytes() != before)
    head.process.kill()
    assert [job.start(0).end(), job.pods[1].end()] == [1, 0], job.text()


def test_sigterm_to_a_head_loses_no_step_and_does_not_count_where_the_training_gets_on(make, tmp_path, undisturbed):
    job, _ = train_with_store(make, tmp_path, max_restarts=1)
    head = job.start_all().pods[0]
    for number in range(3):
        job.until(lambda enough=30 * (number + 1): len(seen(job)) > enough)
        head.process.terminate()
        assert head.end() == wire.EXIT_TERMINATED, job.text()
        head = job.start(0)
    assert [head.end(), job.pods[1].end()] == [0, 0], job.text()
    assert torch.equal(weights_of(job), undisturbed)


def test_sigterm_to_a_head_counts_where_nothing_is_kept(make, tmp_path):
    job, _ = train_with_store(make, tmp_path, max_restarts=1, every=1000)
    head, codes = job.start_all().pods[0], []
    while head.process.poll() is None and len(codes) < 2:
        batches = len(seen(job))
        job.until(lambda before=batches: len(seen(job)) > before)
        head.process.terminate()
        codes.append(head.end())
        head = job.start(0)
    assert [*codes, head.end()] == [wire.EXIT_TERMINATED, wire.EXIT_TERMINATED, 1], job.text()


def test_a_head_whose_store_does_not_work_says_so_and_never_comes_back(make, tmp_path):
    (tmp_path / "file").touch()
    job, _ = train_in(make, tmp_path, ranks=2, store=str(tmp_path / "file"), returns_head=True, max_restarts=1)
    assert job.start_all().end() == [1, 0], job.text()
    assert str(tmp_path / "file") in job.pods[0].last_words["reason"]
