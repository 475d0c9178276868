"""Commands for one job, and `job.save`: what they print, write and refuse."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from trainings import summing

import kale_dist as kd
from kale_dist.cli import main
from kale_dist.errors import BackendError, ConfigError, ResultUnavailableError
from kale_dist.job import backend


@pytest.fixture(scope="module")
def trained():
    job = kd.distribute(*summing(32), epochs=2, number_of_processes=2, name="to-fetch")
    job.wait()
    yield job
    job.delete()


def say(words):
    for word in words:
        print(word)
    return words


@pytest.fixture
def spoken():
    job = kd.launch(say, ["one", "two"], number_of_processes=1)
    job.result()
    yield job
    job.delete()


def output(capsys, *words, code=0):
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_the_model_is_fetched_from_any_process(trained, tmp_path, capsys):
    file = tmp_path / "model.pt"
    assert output(capsys, "fetch", "to-fetch", "-o", str(file)) == f"{file}\n"
    loaded = torch.load(file, weights_only=True)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in trained.model.state_dict().items()
    }
    told = json.loads(output(capsys, "fetch", "to-fetch", "-o", str(file), "--partial", "--json", "--force"))
    assert told == {"ref": "local://to-fetch", "file": str(file), "bytes": file.stat().st_size}
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_function_returned_is_saved(spoken, tmp_path):
    assert torch.load(spoken.save(tmp_path / "words.pt"), weights_only=True) == ["one", "two"]
    nothing = kd.launch(print, number_of_processes=1)
    with pytest.raises(ResultUnavailableError, match="returned nothing that could be saved"):
        nothing.save(tmp_path / "nothing.pt")
    nothing.delete()


def test_what_a_function_returned_is_not_called_a_model(spoken, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert output(capsys, "fetch", spoken.ref) == f"{tmp_path / 'result.pt'}\n"


def test_ctrl_c_in_a_script_shows_the_users_line_and_none_of_ours(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import time\nimport kale_dist as kd\ndef work():\n    time.sleep(60)\n"
        "job = kd.launch(work, number_of_processes=1)\nprint('waits', flush=True)\njob.result()\n"
    )
    started = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.stdout.readline()
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    files = [line for line in said.splitlines() if line.startswith("  File")]
    assert [str(script) in line for line in files] == [True]
    assert "is cancelled" in said


@pytest.mark.parametrize("output", [(), ("-o", "result.pt")])
def test_fetch_replaces_a_file_only_by_force(spoken, tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("result.pt").write_text("mine")
    assert main(["fetch", spoken.ref, *output]) == 2
    assert f"{tmp_path / 'result.pt'} exists. Name another file, or have it replaced" in capsys.readouterr().err
    assert pathlib.Path("result.pt").read_text() == "mine"
    assert main(["fetch", spoken.ref, *output, "--force"]) == 0
    assert torch.load("result.pt", weights_only=True) == ["one", "two"]


def test_a_job_without_a_model_has_none_for_hasattr(spoken):
    assert not hasattr(spoken, "model")
    with pytest.raises(ResultUnavailableError, match="no model"):
        spoken.model  # noqa: B018


def test_files_that_cannot_be_written_are_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        trained.save(tmp_path / "missing" / "model.pt")
    with pytest.raises(ConfigError, match="is a folder"):
        trained.save(tmp_path)
    assert main(["fetch", "to-fetch", "-o", str(tmp_path)]) == 2


def test_a_running_job_has_nothing_to_fetch(capsys):
    job = kd.launch(time.sleep, 60, number_of_processes=1)
    assert main(["fetch", job.name]) == 1
    assert "has not ended yet" in capsys.readouterr().err
    told = json.loads(output(capsys, "cancel", job.name, "--json"))
    assert (told["ref"], told["state"]) == (job.ref, "cancelled")
    assert json.loads(output(capsys, "delete", job.name, "--json", "--yes")) == [job.ref]


def test_every_command_speaks_json(spoken, capsys):
    assert [item["state"] for item in json.loads(output(capsys, "jobs", "--json")) if item["ref"] == spoken.ref] == [
        "succeeded"
    ]
    status = json.loads(output(capsys, "status", spoken.name, "--json"))
    assert (status["state"], [replica["rank"] for replica in status["replicas"]]) == ("succeeded", [0])
    lines = [json.loads(line) for line in output(capsys, "logs", spoken.name, "--json").splitlines()]
    assert [(line["rank"], line["stream"], line["text"]) for line in lines] == [
        (0, "stdout", "one"),
        (0, "stdout", "two"),
    ]
    assert json.loads(output(capsys, "render", spoken.name, "--json"))["name"] == spoken.name
    assert json.loads(output(capsys, "events", spoken.name, "--json")) == []
    assert main(["delete", spoken.name, "--json"]) == 2


def test_a_job_is_submitted_again_from_the_command_line(spoken, capsys):
    assert main(["retry", spoken.name]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert main(["retry", spoken.name, "--detach"]) == 2
    assert "ends with this command" in capsys.readouterr().err


def test_only_a_training_that_has_not_succeeded_is_resumed(trained, spoken, capsys):
    assert main(["retry", "--resume", spoken.name]) != 0
    assert "launch()" in capsys.readouterr().err
    assert main(["retry", "--resume", trained.name]) != 0
    assert "resume_from" in capsys.readouterr().err


def test_events_of_a_cluster_are_shown(spoken, capsys, monkeypatch):
    told = backend.PlaceEvent(
        time=0.0,
        about="pod/x-worker-0\x1b[2J",
        is_warning=True,
        reason="Failed\x1b[1ASched",
        message="0/1 \x1b[31mnodes",
        count=2,
    )
    monkeypatch.setattr(type(spoken._backend), "events", lambda self, ref: [told], raising=False)
    assert "warning  pod/x-worker-0  FailedSched  0/1 nodes" in output(capsys, "events", spoken.name)

    def refuse(self, ref):
        raise BackendError("You may not list events")

    monkeypatch.setattr(type(spoken._backend), "events", refuse, raising=False)
    assert main(["events", spoken.name]) == 1
