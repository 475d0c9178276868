"""Fingerprints, private folders, and clients whose agent is not there."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile
import time

import pytest

from kale_dist.backends import agent_client
from kale_dist.backends.agent_client import AgentClient, Fingerprint, agent_environment, cancel_message, send
from kale_dist.contract import Order
from kale_dist.errors import BackendUnavailableError
from kale_dist.runtime import processes


@pytest.fixture
def runtime_folder(monkeypatch):
    # Short: the path of a socket has 107 bytes.
    folder = tempfile.mkdtemp(prefix="kd")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield pathlib.Path(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS"]
)
def test_a_variable_that_is_read_at_load_changes_the_fingerprint(name):
    before, after = Fingerprint.now({"HOME": "/"}), Fingerprint.now({"HOME": "/", name: "secret"})
    assert before.changes(after) == (f"{name} was set",)
    assert after.changes(before) == (f"{name} was removed",)
    changed = Fingerprint.now({name: "other"})
    assert after.changes(changed) == (f"{name} was changed",)


@pytest.mark.parametrize("name", ["HOME", "MY_OMP_NUM_THREADS", "PATH"])
def test_other_variables_do_not(name):
    assert Fingerprint.now({}).changes(Fingerprint.now({name: "x"})) == ()


def test_another_interpreter_or_torch_is_a_change(monkeypatch):
    before = Fingerprint.now()
    assert before.torch_version
    assert before.changes(Fingerprint.now()) == ()
    monkeypatch.setattr(sys, "executable", "/usr/bin/other")
    assert before.changes(Fingerprint.now()) == ("the interpreter is now /usr/bin/other",)
    monkeypatch.undo()
    monkeypatch.setattr(processes, "installed_torch", lambda: ("99.0", "elsewhere"))
    assert before.changes(Fingerprint.now()) == (f"torch {before.torch_version} became 99.0",)


def test_the_folder_is_private_and_short(runtime_folder):
    folder = agent_client._create_folder()
    assert folder.parent == runtime_folder / "kale-dist"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/at/all", "/tmp/" + "x" * 100])
def test_an_unusable_runtime_folder_is_passed_over(monkeypatch, value):
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    folder = agent_client._create_folder()
    assert folder.parent == pathlib.Path(f"/tmp/kale-dist-{os.geteuid()}")
    folder.rmdir()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_can_enter_is_refused(runtime_folder, mode):
    (runtime_folder / "kale-dist").mkdir()
    (runtime_folder / "kale-dist").chmod(mode)
    with pytest.raises(BackendUnavailableError, match="XDG_RUNTIME_DIR"):
        agent_client._create_folder()


def test_a_link_in_its_place_is_refused(runtime_folder, tmp_path):
    (runtime_folder / "kale-dist").symlink_to(tmp_path)
    with pytest.raises(BackendUnavailableError):
        agent_client._create_folder()


def test_folders_of_killed_agents_are_removed_and_live_ones_kept(runtime_folder):
    dead, live, young = (agent_client._create_folder() for _ in range(3))
    (dead / "process").write_text("1 1")
    (live / "process").write_text(f"{os.getpid()} {processes.start_time(os.getpid())}")
    for folder in (dead, live):
        os.utime(folder, (time.time() - 3600,) * 2)
    agent_client._create_folder()
    assert not dead.exists()
    assert live.exists()
    assert young.exists()


def order():
    return Order(job="one", world_size=1, processes_per_agent=1, folder="", store="", snapshot="", key="00")


def test_a_client_without_an_agent_says_so():
    client = AgentClient()
    assert not client.alive
    with pytest.raises(BackendUnavailableError) as caught:
        client.take(order())
    assert caught.value.retryable
    assert client.untaken == ()
    client.close()


@pytest.mark.parametrize("path", ["/nowhere", "", "/tmp/" + "x" * 200])
def test_sending_to_nobody_is_no_error(path):
    assert send(path, cancel_message("one")) is False


def test_an_agent_that_is_killed_is_noticed_and_its_folder_removed(runtime_folder):
    ended = []
    client = AgentClient(on_end=lambda: ended.append(True))
    client.start()
    assert client.alive
    os.kill(client.pid, 9)
    deadline = time.monotonic() + 5
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [True]
    assert not client.alive
    with pytest.raises(BackendUnavailableError):
        client.take(order())
    assert list((runtime_folder / "kale-dist").iterdir()) == []


def test_an_idle_agent_ends_when_it_is_left(runtime_folder):
    client = AgentClient()
    client.start()
    assert os.getsid(client.pid) == client.pid != os.getsid(0)
    client.close()
    assert not processes.is_running(client.pid, client.start_time)
    assert list((runtime_folder / "kale-dist").iterdir()) == []


def test_the_agent_can_import_what_it_needs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    folders = agent_environment()["PYTHONPATH"].split(os.pathsep)
    assert folders[-1] == "/mine"
    assert all(pathlib.Path(folder, "kale_dist").is_dir() for folder in folders[:1])
