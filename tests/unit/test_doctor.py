"""`doctor` on this machine, and on ones that lack something."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kale_dist.cli import doctor_command


@pytest.fixture(scope="module")
def found():
    return {check.name: check for check in doctor_command.examine()}


def test_this_machine_can_run_jobs(found):
    assert [check.name for check in found.values() if check.verdict is doctor_command.Grade.FAILED] == []
    assert found["Python"].sentence.startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}")
    assert "imported in" in found["torch"].sentence
    assert str(len(os.sched_getaffinity(0))) in found["cores"].sentence


def test_what_is_not_well_has_a_remedy(found):
    for check in found.values():
        assert check.sentence
        assert bool(check.remedy) == (check.verdict is not doctor_command.Grade.OK)


def test_how_to_look_at_the_engine_is_said(found):
    assert found["docker"].verdict is doctor_command.Grade.OK
    assert "kale-dist doctor --on docker" in found["docker"].sentence


def test_without_the_package_nothing_can_be_said_of_an_engine(monkeypatch, no_docker):
    for name in [name for name in sys.modules if name.startswith("kale_dist.places.docker")]:
        monkeypatch.delitem(sys.modules, name)
    last = doctor_command.examine("docker")[-1]
    assert last.verdict is doctor_command.Grade.FAILED
    assert "pip install 'docker<8'" in last.remedy


def test_an_engine_that_does_not_answer_is_named(monkeypatch):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    last = doctor_command.examine("docker")[-1]
    assert last.verdict is doctor_command.Grade.FAILED
    assert "tcp://127.0.0.1:1" in last.sentence
    assert last.remedy


def test_how_to_look_at_the_cluster_is_said(found):
    assert found["cluster"].verdict is doctor_command.Grade.OK
    assert "kale-dist doctor --on kubernetes" in found["cluster"].sentence


def test_without_the_package_nothing_can_be_said_of_a_cluster(monkeypatch, no_kubernetes):
    for name in [name for name in sys.modules if name.startswith("kale_dist.places.kubernetes")]:
        monkeypatch.delitem(sys.modules, name)
    last = doctor_command.examine("kubernetes")[-1]
    assert last.verdict is doctor_command.Grade.FAILED
    assert "pip install 'kubernetes<38'" in last.remedy


def test_a_kubeconfig_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    last = doctor_command.examine("kubernetes")[-1]
    assert last.verdict is doctor_command.Grade.FAILED
    assert f"there is no file {tmp_path / 'nowhere'}" in last.sentence


def test_a_kubeconfig_is_found(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert str(tmp_path / "config") in doctor_command._cluster().sentence


def test_a_machine_without_interpreter_or_home_is_examined_to_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/one:{'a' * 5000}")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = {check.name: check for check in doctor_command.examine()}
    assert found["torch"].verdict is doctor_command.Grade.FAILED
    assert "/nonexistent/python cannot be run" in found["torch"].sentence
    assert f"not found: {tmp_path}/one" in found["cluster"].sentence


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libtorch is broken')", "libtorch is broken"),
        pytest.param("import os; os._exit(3)", "import torch fails", marks=pytest.mark.nightly),
        pytest.param("print('noise'); __version__ = '1.9.1+cpu'", "import torch fails", marks=pytest.mark.nightly),
    ],
)
def test_a_broken_torch_is_a_failure_and_the_exit_code_says_so(tmp_path, source, words):
    (tmp_path / "torch.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(pathlib.Path.cwd())])}
    command = [sys.executable, "-m", "kale_dist.cli", "doctor", "--json"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    torch = next(check for check in json.loads(asked.stdout) if check["name"] == "torch")
    assert torch["verdict"] == "failed"
    assert words in torch["sentence"]
    assert torch["remedy"]


def test_no_file_of_the_folder_that_it_is_called_in_runs(tmp_path):
    for name in ("json", "random", "queue", "torch"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    command = [str(pathlib.Path(sys.executable).parent / "kale-dist"), "doctor", "--json"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert b"torch 2" in asked.stdout
    assert not list(tmp_path.glob("*.ran"))


def test_a_state_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    check = doctor_command._state_folder()
    assert check.verdict is doctor_command.Grade.FAILED
    assert "XDG_STATE_HOME" in check.remedy
