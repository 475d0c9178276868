"""A later call continues the training of an earlier job: with its code, its number of ranks, its strategy."""

import dataclasses
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainings import labelled, train_step

import kale_dist as kd
from kale_dist.errors import ConfigError, KaleDistWarning, ResultUnavailableError
from kale_dist.job import records
from kale_dist.worker.training import checkpoint

EPOCHS = 4


def step_with_decay(model, data_loader, criterion, optimizer, device, args):
    """The usual step, after which the learning rate is 0.9 of what it was."""
    seen = [tuple(row) for inputs, _ in data_loader for row in inputs.tolist()] if args == "count" else []
    loss = train_step(model, data_loader, criterion, optimizer, device, args)
    optimizer.param_groups[0]["lr"] *= 0.9
    return {**loss, "seen": float(len(set(seen)))}


def noisy():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def smooth():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def adam(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train(epochs=EPOCHS, *, net=noisy, make=adam, schedule=None, batch_size=6, **options):
    torch.manual_seed(0)
    model = net()
    optimizer = make(model)
    options = {"number_of_processes": 2, "threads": 1, "seed": 3, **options}
    loader = DataLoader(labelled(48), batch_size, shuffle=True)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), optimizer, step_with_decay, epochs=epochs,
        eval_data_loader=DataLoader(labelled(20), 4), scheduler=None if schedule is None else schedule(optimizer), **options,
    )  # fmt: skip
    result = job.result()
    return job, job.state_dict(), result


@pytest.fixture(scope="module")
def trained():
    """Jobs of this module by how they are made, each trained once."""
    made = {}

    def make(epochs, **options):
        key = (epochs, *sorted((name, getattr(value, "__name__", str(value))) for name, value in options.items()))
        if key not in made:
            made[key] = train(epochs, **options)
        return made[key]

    yield make
    for job, _, _ in made.values():
        job.delete()


def log_of(job):
    return "\n".join(line.text for line in job.logs())


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def rows_of(job):
    measured = ("time", "collective_s", "samples_per_s", "bytes_sent")
    return [{name: value for name, value in row.items() if name not in measured} for row in job.metrics]


@pytest.mark.parametrize(
    "options", [{"schedule": cosine}, pytest.param({"strategy": "local-sgd"}, marks=pytest.mark.nightly)]
)
def test_the_same_ranks_end_as_an_undisturbed_training_bit_for_bit(trained, options):
    whole, weights, result = trained(EPOCHS, **options)
    early, _, _ = trained(2, **options)
    later, found, outcome = train(resume_from=early, seed=None, **options)
    assert furthest(found, weights) == 0
    assert str(outcome.optimizer_state) == str(result.optimizer_state)
    assert str(outcome.scheduler_state) == str(result.scheduler_state)
    assert rows_of(later) == [row for row in rows_of(whole) if row["epoch"] > 2]
    later.delete()


@pytest.mark.filterwarnings("ignore:.*More processes than cores")
def test_another_batch_is_said_and_the_learning_rate_stays(trained, capsys):
    early, _, _ = trained(2)
    later, _, result = train(resume_from=early, number_of_processes=3)
    said = "A step takes 3 x 6 = 18 samples instead of 2 x 6 = 12. The learning rate stays."
    assert said in capsys.readouterr().err
    assert said in log_of(later)
    assert result.optimizer_state["param_groups"][0]["lr"] == pytest.approx(0.01 * 0.9**EPOCHS)
    later.delete()


@pytest.mark.nightly
def test_accumulated_batches_count_as_one_and_a_folder_has_its_checkpoint(trained, capsys):
    early, _, _ = trained(2)
    later, _, _ = train(resume_from=records.files(early.name).folder, number_of_processes=1, accumulate=2)
    assert "A step takes" not in capsys.readouterr().err
    later.delete()
    later, _, _ = train(resume_from=early, accumulate=4)
    assert "A step takes 2 x 6 x 4 = 48 samples instead of 2 x 6 = 12." in capsys.readouterr().err
    later.delete()


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("local-sgd", marks=pytest.mark.nightly)])
def test_another_strategy_takes_over_weights_and_optimizer(trained, strategy, capsys):
    early, _, _ = trained(2, net=smooth)
    _, weights, _ = trained(EPOCHS, net=smooth)
    later, found, _ = train(net=smooth, resume_from=early, strategy=strategy)
    assert f"The strategy is {strategy!r}, and was 'ddp'" in capsys.readouterr().err
    assert furthest(found, weights) < (1e-6 if strategy == "fsdp" else 0.1)
    later.delete()


def test_an_option_that_the_call_sets_otherwise_wins(trained, capsys):
    early, _, _ = trained(2)
    later, _, result = train(make=lambda model: adam(model, 0.5), resume_from=early)
    group = result.optimizer_state["param_groups"][0]
    assert group["lr"] == pytest.approx(0.5 * 0.9**2)
    assert "lr is 0.5 instead of 0.0081" in capsys.readouterr().err
    later.delete()


def test_a_scheduler_of_the_same_class_continues_with_the_settings_of_the_call(trained, capsys):
    early, _, _ = trained(2, schedule=cosine)
    later, _, result = train(
        6, make=lambda model: adam(model, 0.5), schedule=lambda one: lr_scheduler.CosineAnnealingLR(one, 6), resume_from=early
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "The scheduler's T_max is 6 instead of 4" in said
    assert "0.5 of this call is not used" in said
    assert (result.scheduler_state["last_epoch"], result.scheduler_state["T_max"]) == (6, 6)
    assert result.scheduler_state["base_lrs"] == [0.01]
    # Compared by what it continues with, and by the settings that are the call's own.
    head, _first, second, _ = repr(kd.compare(early.name, later.name)).splitlines()
    shown = dict(zip(head.split()[2:], second.split()[3:], strict=False))
    assert shown["resume_from"] == early.ref
    assert shown["scheduler.T_max"] == "6"
    assert "0.5" not in shown.values()
    later.delete()


@pytest.mark.nightly
def test_objects_of_other_classes_begin_from_their_start(trained, capsys):
    early, _, _ = trained(2, schedule=cosine)
    later, _, result = train(make=sgd, schedule=lambda one: lr_scheduler.StepLR(one, 1, 0.5), resume_from=early)
    said = capsys.readouterr().err
    assert "optimizer: SGD here, and AdamW in the checkpoint" in said
    assert "scheduler: StepLR here, and CosineAnnealingLR in the checkpoint" in said
    assert result.scheduler_state["last_epoch"] == EPOCHS - 2
    assert result.optimizer_state["param_groups"][0]["initial_lr"] == 0.1
    later.delete()


@pytest.mark.nightly
def test_a_training_that_was_stopped_early_is_continued(trained):
    stop = kd.callbacks.EarlyStopping("eval/loss", mode="max", patience=1)
    early, _, result = train(net=smooth, callbacks=[stop])
    assert result.stopped_early
    later, _, result = train(net=smooth, resume_from=early)
    assert (result.epochs, result.stopped_early) == (EPOCHS, False)
    for job in (early, later):
        job.delete()


@pytest.mark.nightly
def test_the_frozen_part_is_that_of_the_call_where_it_differs(trained):
    def frozen():
        model = smooth()
        model[0].requires_grad_(requires_grad=False)
        return model

    early, before, _ = trained(2, net=smooth)
    later, found, _ = train(net=frozen, resume_from=early)
    assert torch.equal(found["0.weight"], before["0.weight"])
    assert not torch.equal(found["2.weight"], before["2.weight"])
    later.delete()


IN_ANOTHER_PROCESS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import kale_dist as kd
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
loader = DataLoader(TensorDataset(torch.randn(12, 3), torch.ones(12).long()), 6)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for named in sys.argv[1:]:
    result = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), optimizer, epochs=3, number_of_processes=1, resume_from=named
    ).result()
    print(result.epochs, int(result.optimizer_state["state"][0]["step"]))
"""


@pytest.mark.nightly
def test_another_process_names_the_job_its_reference_or_a_file(trained, tmp_path):
    early, _, _ = trained(2, net=smooth)
    copy = tmp_path / "run.pt"
    copy.write_bytes(records.files(early.name).checkpoint.read_bytes())
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, early.name, early.ref, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # 4 steps an epoch on two ranks, then 2 of one rank.
    assert done.stdout.split("\n")[:3] == ["3 10"] * 3, done.stderr


def failing(model, loader, criterion, optimizer, device, args):
    if kd.context().attempt == 0 and args.exists() and optimizer.state:
        raise ValueError("not yet")
    return train_step(model, loader, criterion, optimizer, device, args)


def test_retry_resumes_the_same_call(tmp_path):
    blocker = tmp_path / "blocker"
    blocker.touch()
    torch.manual_seed(0)
    model = smooth()
    job = kd.distribute(
        model, DataLoader(labelled(12), 6), nn.CrossEntropyLoss(), adam(model), failing, epochs=3, number_of_processes=1,
        train_args=blocker, checkpoint_every=1,
    )  # fmt: skip
    assert job.exception() is not None
    blocker.unlink()
    again = job.retry(resume=True)
    assert again.result().epochs == 3
    assert [row["epoch"] for row in again.metrics if row["source"] == "train"] == [2, 3]
    with pytest.raises(ResultUnavailableError, match="nothing left"):
        again.retry(resume=True)
    # Submitted again, it is still the call that resumes, and has the checkpoint as its own.
    job.delete()
    third = again.retry()
    with pytest.warns(KaleDistWarning, match="although"):
        third.result()
    assert [row["epoch"] for row in third.metrics if row["source"] == "train"] == [2, 3]
    for one in (again, third):
        one.delete()


# -- within an epoch -----------------------------------------------------------------------------------------------------

BATCH = 5


class Numbered(Dataset):
    """Samples that say which they are."""

    def __init__(self, size):
        self.x = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.x[index].sum() > 0), index


class Streamed(IterableDataset):
    """The same samples, whose number is not known."""

    def __iter__(self):
        yield from map(Numbered(96).__getitem__, range(96))


def breaking_step(model, data_loader, criterion, optimizer, device, args):
    """Print which samples come; with `args`, fail in the second epoch after `BATCH` batches, once these are in a checkpoint."""
    total, seen, left = 0.0, [], 0 if isinstance(data_loader.dataset, IterableDataset) else len(data_loader)
    for number, (inputs, targets, indices) in enumerate(data_loader):
        path = kd.context().files.checkpoint
        while args and number == BATCH:
            found = checkpoint.read(path) if path.exists() else None
            if found is None or not found.epoch:
                break
            if (position := found.resume.position) is not None and position.batches == BATCH:
                raise ValueError("broken")
            time.sleep(0.05)
        seen += indices.tolist()
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print("seen", *seen)
    return {"loss": total, "left": left, "batches": number + 1}


def train_numbered(*, size=96, batch_size=12, net=smooth, breaks=False, workers=0, data=None, **options):
    torch.manual_seed(0)
    model = net()
    loader = DataLoader(Numbered(size), batch_size, shuffle=True, num_workers=workers)
    loader = loader if data is None else DataLoader(data, batch_size)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), adam(model), breaking_step, epochs=3, train_args=breaks,
        **{"number_of_processes": 2, "threads": 1, "split_batches": True, "checkpoint_every": "1 steps", **options},
    )  # fmt: skip
    job.exception()
    return job


def seen_by(job, epoch):
    """The samples of an epoch, of all ranks together."""
    lines = [(line.rank, line.text.split()[1:]) for line in job.logs() if line.text.startswith("seen")]
    ranks = {rank for rank, _ in lines}
    return sorted(int(index) for rank in ranks for index in [texts for one, texts in lines if one == rank][epoch])


@pytest.fixture(scope="module")
def broken():
    """A job that has ended after `BATCH` batches of its second epoch, and the undisturbed one, by the net that they train."""
    made = {}

    def make(net=smooth, **options):
        if (key := (net.__name__, *options.items())) not in made:
            made[key] = tuple(train_numbered(net=net, breaks=breaks, seed=3, **options) for breaks in (True, False))
        return made[key]

    yield make
    for job in (job for pair in made.values() for job in pair):
        job.delete()


def continued(job, **options):
    later = train_numbered(resume_from=job, **options)
    result = later.result()
    assert result.epochs == 3
    return later


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_same_call_continues_within_the_epoch_bit_for_bit(broken, workers, capsys):
    job, whole = broken(noisy, workers=workers)
    later = continued(job, net=noisy, workers=workers)
    assert f"continues in epoch 2, after {BATCH} batches" in capsys.readouterr().err
    assert furthest(later.state_dict(), whole.state_dict()) == 0
    resumed, *rest = rows_of(later)
    assert (resumed["epoch"], resumed["from_batch"]) == (2, BATCH + 1)
    assert rest == [row for row in rows_of(whole) if row["epoch"] > 2]
    later.delete()


@pytest.mark.filterwarnings("ignore:.*More processes than cores")
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        pytest.param({"number_of_processes": 1}, 1e-6, marks=pytest.mark.nightly),
        ({"number_of_processes": 3}, 1e-6),
        pytest.param({"strategy": "fsdp"}, 1e-6, marks=pytest.mark.nightly),
        pytest.param({"number_of_processes": 3, "split_batches": False, "batch_size": 5}, 1, marks=pytest.mark.nightly),
    ],
)
def test_other_ranks_see_each_sample_of_the_epoch_once(broken, options, bound):
    job, whole = broken()
    later = continued(job, **options)
    rest = set(seen_by(later, 0))
    assert len(seen_by(later, 0)) == len(rest) == 96 - 12 * BATCH
    assert "its own variables begin again" in log_of(later)
    assert ("instead of" in log_of(later)) == (bound == 1)
    (row,) = [row for row in rows_of(later) if row["epoch"] == 2]
    assert row["left"] == row["batches"]
    assert furthest(later.state_dict(), whole.state_dict()) <= bound
    assert seen_by(later, 1) == list(range(96))
    later.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("size", [60, 40])
def test_other_data_begins_the_epoch_again_and_says_so(broken, size):
    job, _ = broken()
    later = continued(job, size=size)
    assert "the epoch begins again from its start" in log_of(later)
    assert seen_by(later, 0) == list(range(size))
    (row,) = [row for row in rows_of(later) if row["epoch"] == 2]
    assert "from_batch" not in row
    assert row["left"] == row["batches"]
    later.delete()


@pytest.mark.nightly
def test_data_that_is_not_divided_any_more_begins_the_epoch_again(broken):
    job, _ = broken()
    later = continued(job, shard=False, split_batches=False)
    assert "the epoch begins again from its start" in log_of(later)
    assert seen_by(later, 0) == sorted([*range(96), *range(96)])
    later.delete()


@pytest.mark.nightly
def test_a_stream_in_batches_of_another_size_begins_the_epoch_again(broken):
    options = {"data": Streamed(), "split_batches": False}
    job, _ = broken(batch_size=6, **options)
    later = continued(job, batch_size=4, **options)
    assert "the epoch begins again from its start" in log_of(later)
    assert seen_by(later, 0) == list(range(96))
    later.delete()


def with_a_mask():
    net = smooth()
    net[1].register_buffer("mask", torch.ones(3), persistent=False)
    return net


def with_another_mask():
    net = smooth()
    net[1].register_buffer("mask", torch.ones(5), persistent=False)
    return net


@pytest.mark.nightly
def test_a_buffer_that_is_in_no_state_dict_may_be_another_one(broken):
    job, _ = broken(with_a_mask)
    later = continued(job, net=with_another_mask)
    later.delete()


# -- refused at the call -------------------------------------------------------------------------------------------------


def wider():
    return nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))


def deeper():
    return nn.Sequential(smooth(), nn.Linear(2, 2))


def of_a_part(model):
    return torch.optim.AdamW(model[0].parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"net": wider}, "0.weight of the model has the shape (9, 3), and (8, 3) in the checkpoint"),
        ({"net": deeper}, "0.0.bias of the model is not in the checkpoint"),
        ({"make": of_a_part}, "the optimizer has other parameters: 2, and 4 in the checkpoint"),
        ({"epochs": 2}, "Give epochs= more than 2"),
    ],
)
def test_objects_that_do_not_fit_are_refused_before_anything_is_written(trained, options, named):
    early, _, _ = trained(2, net=smooth)
    before = {record.name for record in records.all_records()}
    with pytest.raises(ConfigError) as caught:
        train(**{"net": smooth, **options}, resume_from=early)
    assert caught.value.argument == "resume_from"
    assert named in str(caught.value)
    assert {record.name for record in records.all_records()} == before


def test_what_has_no_checkpoint_is_refused_with_the_reason(tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save(smooth().state_dict(), weights)
    none, _, _ = train(1, net=smooth, checkpoint_every=None)
    function = kd.launch(print, "done", number_of_processes=1)
    for given, reason in [
        (none, "checkpoint_every=None"), (none.name, "checkpoint_every=None"), (function, "launch()"),
        (weights, "not a checkpoint"), (tmp_path / "gone.pt", "no file"), ("no-such-job", "no job"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match="resume_from") as caught:
            train(net=smooth, resume_from=given)
        assert reason in str(caught.value)
    with pytest.raises(ResultUnavailableError, match="launch"):
        function.wait() and function.retry(resume=True)
    for job in (none, function):
        job.delete()


@pytest.mark.nightly
def test_a_range_of_processes_does_not_change_what_continues(trained):
    early, _, _ = trained(2, net=smooth)
    assert dataclasses.replace(early.spec.topology, sizes=()) == early.spec.topology
    later, _, result = train(net=smooth, resume_from=early, number_of_processes=(1, 2))
    assert result.epochs == EPOCHS
    assert later.spec.policy.max_restarts == 10
    later.delete()
