import secrets
import threading
import time

import pytest
from fake_backend import FakeBackend
from waiting import until

from kale_dist.errors import JobNotFoundError, WaitTimeoutError
from kale_dist.job import job_watch
from kale_dist.job.job_watch import Watcher, watcher
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.wire import StateName


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


class Waking(FakeBackend):
    """A fake that tells when it changed, as the local backend does."""

    def __init__(self, script):
        super().__init__(script)
        self.listener = None

    def listen(self, callback):
        self.listener = callback


def submit(backend, name="job"):
    spec = JobSpec(name=name, label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=1))
    return backend.submit(spec, secrets.token_bytes(32))


def until_cancelled(run):
    run.cancelled.wait(30)


def test_a_subscriber_sees_the_present_and_then_every_change_up_to_the_end():
    go = threading.Event()

    def script(run):
        go.wait(30)
        run.event("note", text="one")

    backend = FakeBackend(script)
    ref = submit(backend)
    seen, ended = [], threading.Event()

    def callback(status):
        seen.append(status)
        if len(seen) == 1:
            go.set()
        if status.is_final:
            ended.set()

    Watcher(backend).subscribe(ref, callback)
    assert ended.wait(10)
    assert not seen[0].is_final
    assert seen[-1].state is StateName.SUCCEEDED
    assert seen[-1].notes == ("one",)
    assert len({id(status) for status in seen}) == len(seen)


def test_waiting_returns_the_final_status_and_times_out_with_the_job_running_on():
    backend = FakeBackend(until_cancelled)
    ref = submit(backend)
    watching = Watcher(backend)
    with pytest.raises(WaitTimeoutError, match=r"0.05 s; it is running"):
        watching.wait(ref, 0.05)
    with pytest.raises(WaitTimeoutError):
        watching.wait(ref, 0)
    assert not backend.status(ref).is_final
    threading.Timer(0.1, backend.cancel, (ref,)).start()
    assert watching.wait(ref).state is StateName.CANCELLED
    assert watching.wait(ref, 0).state is StateName.CANCELLED


def test_a_job_deleted_meanwhile_ends_the_wait():
    backend = FakeBackend(until_cancelled)
    ref = submit(backend)
    threading.Timer(0.1, backend.delete, (ref,)).start()
    with pytest.raises(JobNotFoundError):
        Watcher(backend).wait(ref, 30)


def test_a_callback_that_raises_or_ends_itself_harms_nobody():
    go = threading.Event()
    backend = FakeBackend(lambda run: go.wait(30))
    ref = submit(backend)
    watching, ended = Watcher(backend), threading.Event()

    def broken(status):
        raise RuntimeError("in a callback")

    calls = []
    stop = watching.subscribe(ref, lambda status: (calls.append(status), stop()))
    watching.subscribe(ref, broken)
    watching.subscribe(ref, lambda status: ended.set() if status.is_final else None)
    while not calls:
        time.sleep(0.01)
    go.set()
    assert ended.wait(10)
    assert len(calls) == 1
    stop()


def test_a_wake_is_quicker_than_the_clock(monkeypatch):
    monkeypatch.setattr(job_watch, "_LOOK_S", 100.0)
    go = threading.Event()
    backend = Waking(lambda run: go.wait(30))
    ref = submit(backend)
    watching, ended = Watcher(backend), threading.Event()
    watching.subscribe(ref, lambda status: ended.set() if status.is_final else None)
    # By then it has looked once, and will not look again for long.
    time.sleep(1)
    go.set()
    while not backend.status(ref).is_final:
        time.sleep(0.001)
    backend.listener(ref)
    assert ended.wait(50)


def test_the_thread_ends_with_the_last_job_and_starts_again():
    for name in ("one", "two"):
        backend = FakeBackend(until_cancelled)
        ref = submit(backend, name)
        watching = Watcher(backend)
        stop = watching.subscribe(ref, lambda status: None)
        assert "kale_dist watch fake" in {thread.name for thread in threading.enumerate()}
        stop()
        until(lambda: "kale_dist watch fake" not in {thread.name for thread in threading.enumerate()}, 10)
        backend.cancel(ref)


def test_a_backend_has_one_watcher():
    backend, other = FakeBackend(), FakeBackend()
    assert watcher(backend) is watcher(backend)
    assert watcher(backend) is not watcher(other)
