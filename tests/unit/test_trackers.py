"""Trackers over real jobs, read back with the trackers' own readers: TensorBoard here, MLflow and W&B at night."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from trainings import classifying

import kale_dist as kd
from kale_dist.errors import ConfigError
from kale_dist.trackers import MLflow, TensorBoard, WandB


@pytest.fixture(autouse=True)
def no_jobs_are_left():
    yield
    for job in kd.jobs():
        job.delete()


def train(track, epochs=3):
    given = classifying(40, 4, batch_size=10, lr=0.25)
    return kd.distribute(*given, eval_data_loader=given[1], epochs=epochs, number_of_processes=2, track=track)


def count_down(steps, pause_s):
    for step in range(steps):
        kd.report(left=steps - step, step=step)
        time.sleep(pause_s)


def scalars(folder):
    """All series of an event folder, as TensorBoard itself reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if not folder.exists():
        return {}
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(job):
    """The job's metrics by series, as they should be in a tracker."""
    found = {}
    for row in job.status.metrics:
        for name, value in row.values:
            found.setdefault(f"{row.source}/{name}", []).append((row.epoch, pytest.approx(value, rel=1e-6)))
    for moment in job.status.history:
        second = round(moment.time - job.status.history[0].time)
        for row in moment.rows():
            for name, value in row.values:
                series = f"usage/{name}{f'/rank {row.rank}' if row.rank else ''}"
                found.setdefault(series, []).append((second, pytest.approx(value, rel=1e-6)))
    return found


@pytest.mark.newest
def test_tensorboard_has_every_metric_when_wait_returns(tmp_path):
    job = train(TensorBoard(folder=str(tmp_path)))
    job.wait(120)
    found = scalars(tmp_path / job.name)
    assert found == expected(job)
    assert {"train/loss", "eval/loss"} <= set(found)
    assert found["pace/lr"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert all(rate > 0 for _, rate in found["pace/samples_per_s"])


@pytest.mark.nightly
def test_event_files_grow_while_the_job_runs(tmp_path):
    job = kd.launch(count_down, 400, 0.05, number_of_processes=2, track=TensorBoard(folder=str(tmp_path)))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = scalars(tmp_path / job.name)
        if len(found.get("report/left", [])) >= 3 and "usage/memory_gib/rank 1" in found:
            break
        time.sleep(0.2)
    assert not job.done()
    assert found["report/left"][:3] == [(0, 400.0), (1, 399.0), (2, 398.0)]
    assert {"report/left/rank 1", "usage/memory_gib", "usage/memory_gib/rank 1"} <= set(found)
    job.cancel()
    job.wait(60)


def test_a_tracker_that_fails_is_named_in_one_line_and_the_job_succeeds(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    job = train(TensorBoard(folder=str(blocked)), epochs=1)
    assert job.wait(120).state.value == "succeeded"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tensorboard" in line]
    assert "The job is not affected" in line


def test_tracking_continues_where_it_stopped_and_begins_late(tmp_path):
    late = TensorBoard(folder=str(tmp_path))
    job = train(None)
    job.wait(120)
    job.track(late)
    job.wait(60)
    assert scalars(tmp_path / job.name) == expected(job)
    job.track(late)
    job.wait(60)
    assert scalars(tmp_path / job.name) == expected(job)


@pytest.mark.parametrize(
    ("track", "problem"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        (3, "there is no tracker 3"),
        (["tensorboard", TensorBoard()], "names tensorboard twice"),
    ],
)
def test_a_wrong_tracker_is_refused_at_the_call(track, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        kd.launch(count_down, 1, 0.0, track=track)
    assert caught.value.argument == "track"


@pytest.mark.parametrize(
    ("tracker", "argument", "value"),
    [
        (TensorBoard, "folder", 3),
        (TensorBoard, "folder", ""),
        (MLflow, "uri", 5000),
        (MLflow, "experiment", None),
        (MLflow, "model", "yes"),
        (WandB, "project", ["mine"]),
        (WandB, "folder", None),
        (WandB, "model", 1),
    ],
)
def test_settings_of_wrong_types_are_refused(tracker, argument, value):
    with pytest.raises(ConfigError) as caught:
        tracker(**{argument: value})
    assert caught.value.argument == argument


def test_a_tracker_whose_package_is_missing_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        kd.launch(count_down, 1, 0.0, track="mlflow")


@pytest.fixture
def mlflow_server(tmp_path):
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.5)
        else:
            pytest.fail("the server has not started within two minutes")
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


@pytest.mark.nightly
def test_a_real_mlflow_server_has_metrics_parameters_and_the_model(mlflow_server, tmp_path):
    from mlflow import MlflowClient

    job = train(MLflow(uri=mlflow_server, experiment="tests"))
    job.wait(120)
    client = MlflowClient(tracking_uri=mlflow_server)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.25"
    assert run.data.params["batch_size"] == "10"
    assert run.data.tags["snapshot"] == job.spec.snapshot
    for name, values in expected(job).items():
        history = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        assert sorted(history) == values
    weights = torch.load(client.download_artifacts(run.info.run_id, "model.pt", str(tmp_path)))
    assert all(torch.equal(weights[name], value) for name, value in job.state_dict().items())


def logged(data):
    """The records of W&B's file: LevelDB's log format (blocks of 32 KiB; checksum, length, type), after 7 bytes of its own."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (1 << 15) - place % (1 << 15) < 7:
            place += (1 << 15) - place % (1 << 15)
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.nightly
def test_a_weights_and_biases_folder_has_metrics_and_the_model(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    job = train(WandB(mode="offline", folder=str(tmp_path)))
    job.wait(120)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    weights = torch.load(folder / "files" / "model.pt")
    assert all(torch.equal(weights[name], value) for name, value in job.state_dict().items())
    found, kinds = {}, []
    for data in logged(next(folder.glob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kinds.append(record.WhichOneof("record_type"))
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name, text in items.items():
                if name.startswith(("train/", "eval/", "pace/", "strategy/")):
                    found.setdefault(name, []).append((int(items["epoch"]), float(text)))
    wanted = {name: values for name, values in expected(job).items() if not name.startswith("usage/")}
    assert found == wanted, (kinds, sorted(path.name for path in folder.rglob("*")))
