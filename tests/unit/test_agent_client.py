"""Fingerprints, private folders, and clients whose agent is not there."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import pytest

from kale_dist.errors import BackendUnavailableError
from kale_dist.places.agent_client import AgentClient, Fingerprint, agent_environment, cancel_message, send
from kale_dist.snapshot import loading
from kale_dist.wire import Order
from kale_dist.worker.agent import processes


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "GLOO_SOCKET_IFNAME", "TORCH_LOGS"]
)
def test_a_variable_that_is_read_at_load_changes_the_fingerprint(name):
    before, after = Fingerprint.now({"HOME": "/"}), Fingerprint.now({"HOME": "/", name: "secret"})
    assert before.changes(after) == (f"{name} was set",)
    assert after.changes(before) == (f"{name} was removed",)
    changed = Fingerprint.now({name: "other"})
    assert after.changes(changed) == (f"{name} was changed",)


@pytest.mark.parametrize("name", ["HOME", "MY_OMP_NUM_THREADS", "PATH", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"])
def test_other_variables_do_not(name):
    assert Fingerprint.now({}).changes(Fingerprint.now({name: "x"})) == ()


def test_another_interpreter_or_torch_is_a_change(monkeypatch):
    before = Fingerprint.now()
    assert before.torch_version
    assert before.changes(Fingerprint.now()) == ()
    monkeypatch.setattr(sys, "executable", "/usr/bin/other")
    assert before.changes(Fingerprint.now()) == ("the interpreter is now /usr/bin/other",)
    monkeypatch.undo()
    monkeypatch.setattr(loading, "installed_torch", lambda: ("99.0", "elsewhere"))
    assert before.changes(Fingerprint.now()) == (f"torch {before.torch_version} became 99.0",)


def order():
    return Order(
        job="one",
        object="one",
        number_of_processes=1,
        processes_per_agent=1,
        folder="",
        store="",
        snapshot="",
        key="00",
    )


def test_a_client_without_an_agent_says_so():
    client = AgentClient()
    assert not client.alive
    with pytest.raises(BackendUnavailableError) as caught:
        client.take(order())
    assert caught.value.retryable
    client.close()


@pytest.mark.parametrize("address", ["nobody", "", "x" * 200])
def test_sending_to_nobody_is_no_error(address):
    assert send(address, cancel_message("one")) is False


def test_an_agent_that_is_killed_is_noticed():
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


def test_an_idle_agent_ends_when_it_is_left():
    client = AgentClient()
    client.start()
    assert os.getsid(client.pid) == client.pid != os.getsid(0)
    client.close()
    assert not processes.is_running(client.pid, client.start_time)


def test_the_agent_can_import_what_it_needs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    folders = agent_environment()["PYTHONPATH"].split(os.pathsep)
    assert folders[-1] == "/mine"
    assert all(pathlib.Path(folder, "kale_dist").is_dir() for folder in folders[:1])
