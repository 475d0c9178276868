"""Warm pods from the notebook's side, over a place whose pods are processes of this machine: which calls use them, how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time

import pytest
from plain_jobs import rank, speak_and_sleep, wait_a_little
from pod_jobs import free_ports

from kale_dist import wire
from kale_dist.errors import BackendError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, Place, PlacedJob
from kale_dist.job.records import FIRST_LIFE
from kale_dist.job.spec.job_spec import WARM, JobSpec, Policy, Topology
from kale_dist.places.following.followed_backend import FollowedBackend
from kale_dist.places.orders import order_of
from kale_dist.snapshot.capture import capture
from kale_dist.wire import FailureCause, InputFiles, PodVariable, Source, StateName
from kale_dist.wire.blobs import FolderStore, pack_blobs
from kale_dist.worker.pod.pod import LISTEN_VARIABLE, TERMINATION_LOG_VARIABLE


class ProcessPlace(Place):
    """Pods as processes, one for each two ranks."""

    name, noun = "docker", "pod"

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.ports, self.pods = {}, {}

    def object_name(self, job, life):
        return job if life == 1 else f"{job}.{life}"

    def order(self, spec, life):
        name = self.object_name(spec.name, life.number)
        return order_of(
            spec, object=name, used_restarts=life.used_restarts, head="127.0.0.1", port=self.ports.get(name, 0),
            source=Source.INPUT, processes_per_agent=1,
        )  # fmt: skip

    def start(self, spec, key, life=FIRST_LIFE, checkpoint=None):
        name = self.object_name(spec.name, life.number)
        self.ports[name] = free_ports()
        root = self.folder / name
        (root / "input").mkdir(parents=True)
        (root / "input" / InputFiles.KEY).write_bytes(key)
        packed = pack_blobs(FolderStore(records.blobs_dir()), spec.blobs)
        (root / "input" / InputFiles.SNAPSHOT).write_bytes(packed)
        order = wire.encode_json(self.order(spec, life))
        (root / "input" / InputFiles.ORDER).write_bytes(order)
        self.pods[name] = []
        for number in range(spec.topology.number_of_pods):
            told = {
                PodVariable.INPUT: str(root / "input"), PodVariable.WORK: str(root / f"work-{number}"), PodVariable.FIRST_POD: "0",
                PodVariable.REPLICA_INDEX: str(number), LISTEN_VARIABLE: f"127.0.0.{number + 1}",
                TERMINATION_LOG_VARIABLE: str(root / f"last-{number}"),
            }  # fmt: skip
            command = [self.python, "-P", "-m", "kale_dist.worker", "pod"]
            pod = subprocess.Popen(command, env=os.environ | told, stdout=subprocess.DEVNULL)
            self.pods[name].append(pod)
        return PlacedJob(ref=JobRef(self.name, spec.name), object=name, life=life.number, spec=spec)

    def look(self, handle):
        parts = []
        for number, pod in enumerate(self.pods.get(handle.object, ())):
            code, last = pod.poll(), self.folder / handle.object / f"last-{number}"
            message = last.read_text() if code is not None and last.exists() else ""
            parts.append(
                Part(
                    number=number, name=f"{handle.object}-{number}", uid=str(pod.pid), exit_code=code, message=message,
                    state="running" if code is None else "ended", lost="killed" if code == -signal.SIGKILL else "",
                )
            )  # fmt: skip
        return Look(parts=tuple(parts), gone=not parts)

    def connect(self, handle):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", self.ports[handle.object] + 2), 5.0)
        raise BackendError("it does not listen", retryable=True)

    @contextlib.contextmanager
    def head_output(self, handle, *, follow):
        yield iter(())

    def last_words(self, handle, part, limit):
        return b""

    def fetch(self, handle, name, target):
        return False

    def kill(self, handle, grace_s, why="", *, head_leaves=False):
        for pod in self.pods[handle.object]:
            pod.kill()

    def remove(self, handle):
        for pod in self.pods.pop(handle.object, ()):
            pod.kill()
            pod.wait()

    def survey(self, namespace, labels):
        return []

    def close(self):
        for pods in self.pods.values():
            for pod in pods:
                pod.kill()
                pod.wait()


class Calls:
    """What a notebook would do."""

    def __init__(self, folder, python):
        self.place = ProcessPlace(folder, python)
        self.backend = FollowedBackend(self.place)
        self.count = 0

    def call(self, function, *arguments, **changes):
        self.count += 1
        key, store = os.urandom(32), FolderStore(records.blobs_dir())
        found = capture(function, arguments, {}, store=store, label="x")
        values = {
            "name": f"call-{self.count}", "label": "x", "kind": "call", "topology": Topology(number_of_processes=2),
            "keep_warm_s": 60.0, "policy": Policy(stall_warn_s=None), "snapshot": found.digest, "blobs": found.blobs,
        }  # fmt: skip
        return self.backend.submit(JobSpec(**{**values, **changes}), key)

    def until(self, ref, seen, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not seen(status := self.backend.status(ref)):
            assert time.monotonic() < deadline, (status, [str(line) for line in self.backend.logs(ref)])
            time.sleep(0.05)
        return status

    def end(self, ref):
        return self.until(ref, lambda status: status.is_final)

    @property
    def sets(self):
        return [JobRef.parse(record.ref) for record in records.all_records() if record.spec.kind == WARM]


@pytest.fixture
def calls(tmp_path, bare_python, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Calls(tmp_path / "pods", bare_python)
    yield made
    made.backend.close()


def test_calls_that_fit_use_the_same_pods_and_the_note_says_why_another_does_not(calls, capsys):
    first = calls.call(rank)
    assert calls.end(first).state is StateName.SUCCEEDED
    [one] = calls.sets
    assert f"kale-dist cancel {one}" in capsys.readouterr().err
    calls.backend.delete(first)
    second = calls.call(rank, seed=7, threads=1)
    assert (calls.end(second).state, calls.sets) == (StateName.SUCCEEDED, [one])
    calls.until(one, lambda status: status.idle_s == 60.0)
    third = calls.call(rank, environment=(("A", "b"),))
    assert f"{one} does not fit: another environment" in capsys.readouterr().err
    assert (calls.end(third).state, len(calls.sets)) == (StateName.SUCCEEDED, 2)
    assert {str(one), str(second)} <= {status.ref for status in calls.backend.survey()}


def test_a_cancelled_job_leaves_its_pods_and_one_beside_another_gets_others(calls, capsys):
    running = calls.call(speak_and_sleep)
    calls.until(running, lambda status: status.state is StateName.RUNNING)
    beside = calls.call(rank)
    end = calls.end(beside)
    assert (end.state, len(calls.sets)) == (StateName.SUCCEEDED, 2), end
    assert f"does not take this job: they run {running.name}" in capsys.readouterr().err
    calls.backend.cancel(running, grace_s=0.5, save=False)
    assert calls.end(running).state is StateName.CANCELLED
    assert not any(calls.backend.status(one).is_final for one in calls.sets)
    assert calls.end(calls.call(rank)).state is StateName.SUCCEEDED
    assert len(calls.sets) == 2


@pytest.mark.nightly
def test_with_its_head_a_set_ends_and_a_job_goes_on_in_another_where_it_may(calls):
    job = calls.call(wait_a_little, 3.0, policy=Policy(max_restarts=1, stall_warn_s=None))
    calls.until(job, lambda status: status.state is StateName.RUNNING)
    [one] = calls.sets
    calls.place.pods[one.name][0].kill()
    assert calls.end(job).state is StateName.SUCCEEDED
    assert calls.end(one).state is StateName.FAILED
    assert len(calls.sets) == 2
    lost = calls.call(speak_and_sleep, policy=Policy(stall_warn_s=None))
    calls.until(lost, lambda status: status.state is StateName.RUNNING)
    calls.place.pods[calls.sets[-1].name][0].kill()
    assert (calls.end(lost).cause, len(calls.sets)) == (FailureCause.LOST, 3)


@pytest.mark.nightly
def test_a_set_with_another_key_is_left_alone(calls):
    calls.end(calls.call(rank))
    [one] = calls.sets
    records.files(one.record_name).key.write_bytes(b"x" * 32)
    assert calls.end(calls.call(rank)).state is StateName.SUCCEEDED
    assert len(calls.sets) == 2


@pytest.mark.nightly
def test_what_a_cancelled_set_ran_ends_with_it(calls):
    job = calls.call(speak_and_sleep)
    calls.until(job, lambda status: status.state is StateName.RUNNING)
    [one] = calls.sets
    calls.backend.cancel(one, grace_s=0.5, save=False)
    assert calls.end(one).state is StateName.CANCELLED
    assert calls.end(job).state in (StateName.CANCELLED, StateName.FAILED)
