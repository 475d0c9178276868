"""The verbs, end to end: real agents, real ranks, real files."""

import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
import trainings
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.errors import (
    ConfigError,
    JobExistsError,
    JobFailedError,
    JobNotFoundError,
    NotSerializableError,
    ResultUnavailableError,
)
from kale_dist.job import records

pytestmark = pytest.mark.usefixtures("own_state")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def data():
    return DataLoader(trainings.labelled(), batch_size=5)


def train_step(model, data_loader, criterion, optimizer, device, args):
    values = trainings.train_step(model, data_loader, criterion, optimizer, device, args)
    if args == "fail" and kd.context().rank == 0:
        raise ValueError("after one epoch") from KeyError("cause")
    return values


def failing_second_epoch(model, data_loader, criterion, optimizer, device, args):
    if args.exists():
        raise ValueError("in the second epoch")
    values = train_step(model, data_loader, criterion, optimizer, device, None)
    torch.distributed.barrier()
    args.touch()
    return values


def objects(**options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, data(), torch.nn.CrossEntropyLoss(), optimizer


def test_training_brings_the_model_back():
    model, loader, criterion, optimizer = objects()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    layer, before = model.layer, model.layer.weight.detach().clone()
    job = kd.distribute(
        model, loader, criterion, optimizer, train_step, eval_data_loader=data(), epochs=2, number_of_processes=2,
        scheduler=scheduler, seed=1,
    )  # fmt: skip
    assert torch.equal(model.layer.weight, before)
    assert job.wait().state.value == "succeeded"
    assert job.model is model
    assert model.layer is layer
    assert not torch.equal(model.layer.weight, before)
    assert job.optimizer is optimizer
    assert "momentum_buffer" in optimizer.state[model.layer.weight]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125)
    assert scheduler.last_epoch == 2
    state = job.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    state["layer.weight"].zero_()
    assert torch.equal(job.state_dict()["layer.weight"], model.layer.weight)
    rows = [row for row in job.metrics if row["source"] == "train"]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["loss"] < rows[0]["loss"]
    assert job.result().epochs == 2
    assert any("samples, 2 ranks" in note for note in job.status.notes)


def test_weights_are_written_once_and_not_before_somebody_asks():
    model, *rest = objects()
    before = model.layer.weight.detach().clone()
    job = kd.distribute(model, *rest, number_of_processes=1)
    while not job.done():
        pass
    assert torch.equal(model.layer.weight, before)
    job.result()
    trained = model.layer.weight.detach().clone()
    assert not torch.equal(trained, before)
    with torch.no_grad():
        model.layer.weight.zero_()
    job.wait()
    assert job.model is model
    assert not model.layer.weight.any()
    assert torch.equal(job.state_dict()["layer.weight"], trained)


@pytest.mark.parametrize(
    "ask", [lambda job: job.wait(), lambda job: job.result(), lambda job: job.model], ids=["wait", "result", "model"]
)
def test_a_model_touched_meanwhile_is_warned_of_at_the_users_line(ask):
    model, *rest = objects()
    job = kd.distribute(model, *rest, number_of_processes=1)
    with torch.no_grad():
        model.layer.weight.zero_()
    with pytest.warns(UserWarning, match="changed after the job had started") as caught:
        ask(job)
    assert caught[0].filename == __file__
    assert model.layer.weight.any()


def test_a_failed_job_leaves_the_model_alone_and_keeps_its_last_checkpoint(tmp_path):
    model, *rest = objects()
    before = model.layer.weight.detach().clone()
    job = kd.distribute(
        model, *rest, failing_second_epoch, train_args=tmp_path / "flag", epochs=3, number_of_processes=2
    )
    with pytest.raises(JobFailedError, match="in the second epoch") as caught:
        _ = job.model
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(JobFailedError):
        job.state_dict()
    assert torch.equal(model.layer.weight, before)
    partial = job.state_dict(partial=True)
    assert partial.keys() == model.state_dict().keys()
    assert not torch.equal(partial["layer.weight"], before)
    assert job.status.checkpoint_epoch == 1


def test_without_a_checkpoint_there_is_no_partial_state():
    job = kd.distribute(*objects(), train_step, train_args="fail", number_of_processes=1)
    job.exception()
    with pytest.raises(ResultUnavailableError, match="no checkpoint"):
        job.state_dict(partial=True)
    assert isinstance(job.exception().__cause__.__cause__, KeyError)


def test_a_structure_that_changes_in_the_rank_gives_a_new_model():
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(model, data(), torch.nn.CrossEntropyLoss(), optimizer, number_of_processes=2)
    with pytest.warns(UserWarning, match="got its shape"):
        job.wait()
    assert job.model is not model
    assert job.model[0].weight.shape == (2, 3)
    assert torch.equal(job.state_dict()["0.weight"], job.model[0].weight)


def test_an_attached_job_is_the_one_this_process_has():
    model, *rest = objects()
    job = kd.distribute(model, *rest, number_of_processes=1, name="attached-here")
    assert kd.attach("attached-here") is job
    assert kd.attach("local://attached-here") is job
    assert job in kd.jobs()
    job.wait()


@pytest.mark.nightly
def test_elsewhere_a_model_is_built_from_the_snapshot():
    model, *rest = objects()
    job = kd.distribute(model, *rest, number_of_processes=1, name="attached-elsewhere")
    job.wait()
    code = """
        import kale_dist as kd, torch, sys
        job = kd.attach("attached-elsewhere")
        model = job.model
        assert type(model).__name__ == "Net" and job.model is model
        assert job.optimizer.param_groups[0]["params"][0] is next(model.parameters())
        assert job.result().epochs == 1
        print(model(torch.ones(1, 3)).tolist())
    """
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(kd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
    )
    assert not done.stderr
    assert done.stdout.strip() == str(model(torch.ones(1, 3)).tolist())


def test_a_mistake_of_a_step_is_told_once_without_frames_of_ours():
    def train_step(model, data_loader, criterion, optimizer, device, args):
        return {"loss": torch.ones(3)}

    error = kd.distribute(*objects(), train_step, number_of_processes=1).exception()
    assert str(error).count("returned['loss'] has shape (3,)") == 1
    assert "File" not in str(error)


@pytest.mark.nightly
def test_without_its_snapshot_an_attached_job_has_weights_but_no_model():
    model, *rest = objects()
    kd.distribute(model, *rest, number_of_processes=1, name="snapshot-gone").wait()
    code = """
import kale_dist as kd
from kale_dist.wire.blobs import FolderStore
from kale_dist.job import records
job, store = kd.attach("snapshot-gone"), FolderStore(records.blobs_dir())
for blob in job.spec.blobs:
    store.delete(blob)
assert "layer.weight" in job.state_dict() and job.result().epochs == 1
try:
    job.model
except kd.KaleDistError as error:
    print(type(error).__name__, error)
"""
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("ResultUnavailableError The model of local://snapshot-gone cannot be built")


def test_without_the_key_a_training_can_be_waited_for_but_gives_no_model():
    kd.distribute(*objects(), number_of_processes=1, name="keyless").wait()
    records.files("keyless").key.unlink()
    job = kd.attach("keyless")
    assert job.wait().state.value == "succeeded"
    assert job.metrics
    for ask in (lambda: job.model, job.state_dict, job.result):
        with pytest.raises(ResultUnavailableError, match="local://keyless cannot be verified"):
            ask()


def unsendable():
    return {"fine": 1, "inner": [threading.Lock()]}


def nothing(*args, **kwargs):
    return args, kwargs


def test_a_result_that_cannot_be_sent_back_is_named_by_its_path():
    job = kd.launch(unsendable, number_of_processes=1)
    error = job.exception()
    assert isinstance(error, JobFailedError)
    assert isinstance(error.__cause__, NotSerializableError)
    assert "lock" in str(error)


def test_keywords_that_are_not_launchs_own_go_to_the_function():
    assert kd.launch(nothing, 1, number_of_processes=1, epochs=3).result() == ((1,), {"epochs": 3})


def test_two_jobs_of_one_name_are_refused_before_anything_starts():
    job = kd.launch(nothing, number_of_processes=1, name="twice")
    with pytest.raises(JobExistsError, match="'twice'"):
        kd.launch(nothing, number_of_processes=1, name="twice")
    job.wait()
    job.delete()
    with pytest.raises(JobNotFoundError):
        kd.attach("twice")
    kd.launch(nothing, number_of_processes=1, name="twice").wait()


def test_a_dry_run_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model, *rest = objects()
    plan = kd.render(model, *rest, number_of_processes=3, environment={"A": "b c"}, seed=7, detach=True)
    assert plan.spec.kind == "training"
    assert plan.spec.topology.number_of_processes == 3
    for said in ("train Net", "ranks: 3", "A: # sealed", "seed: 7", plan.spec.snapshot, "outlives the notebook: yes"):
        assert said in str(plan)
    assert "b c" not in str(plan)
    assert kd.render(nothing, 1, name="named").spec.name == "named"
    assert kd.render(nothing, 1, name="named").spec.kind == "call"
    assert not (tmp_path / "state").exists()


def where():
    return (
        str(pathlib.Path.cwd()),
        os.environ.get("KALE_TEST"),
        sys.argv,
        torch.get_num_threads(),
        kd.context().world_size,
    )


def test_ranks_have_the_notebooks_surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KALE_TEST", "of the notebook")
    job = kd.launch(where, number_of_processes=2, threads=3)
    assert job.result() == (str(tmp_path), "of the notebook", sys.argv, 3, 2)
    changed = kd.launch(where, number_of_processes=2, environment={"KALE_TEST": "of the call"})
    monkeypatch.setenv("KALE_TEST", "later")
    assert changed.result()[1] == "of the call"


def test_more_processes_than_cores_are_warned_of_and_run():
    cores = len(os.sched_getaffinity(0))
    with pytest.warns(UserWarning, match=f"{cores + 1} processes share {cores} cores") as caught:
        job = kd.launch(nothing, number_of_processes=cores + 1)
    assert caught[0].filename == __file__
    assert len(job.results()) == cores + 1


def test_a_warning_made_an_error_leaves_no_job_behind():
    before = kd.jobs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="share"):
            kd.launch(nothing, number_of_processes=len(os.sched_getaffinity(0)) + 1)
    assert kd.jobs() == before


def test_old_snapshots_on_a_big_disk_are_warned_of(monkeypatch):
    monkeypatch.setattr(records, "BLOBS_WARNING_BYTES", 1)
    with pytest.warns(UserWarning, match="kale-dist delete --finished"):
        kd.launch(nothing, b"x" * 100_000, number_of_processes=1).wait()


@pytest.mark.parametrize("ref", [None, 3, "", "local://", "://x", "lokal://x", "podman://x", "local://..", "docker.x"])
def test_what_is_no_reference_is_refused(ref):
    with pytest.raises(ConfigError) as caught:
        kd.attach(ref)
    assert caught.value.argument == "ref"


@pytest.mark.parametrize("ref", ["missing", "local://missing"])
def test_a_job_that_is_not_there_is_not_found(ref):
    with pytest.raises(JobNotFoundError):
        kd.attach(ref)


@pytest.mark.parametrize("ref", ["local://a/b", "local://../x"])
def test_a_path_is_no_reference(ref):
    with pytest.raises(ConfigError, match="does not name a job"):
        kd.attach(ref)
