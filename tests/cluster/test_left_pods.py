"""Pods that a job has left for new ones, with a small API server: asked for what they have, told to end, freed in time."""

import contextlib
import dataclasses
import threading
import time

import pytest
from fake_api import FakeApi, status

from kale_dist import contract, transport
from kale_dist.backends.job_reader import LogReader
from kale_dist.backends.kubernetes import client, pod_logs
from kale_dist.backends.kubernetes.pod_logs import PodLogs
from kale_dist.backends.kubernetes.views import ContainerView, JobView, PodView
from kale_dist.backends.mirror import Mirror
from kale_dist.contract import JobFiles, Stream
from kale_dist.errors import BackendError
from kale_dist.spec import ClusterOptions, JobSpec, Policy, Topology
from kale_dist.transport import FrameReader

KEY = b"k" * 32
RUNS = ContainerView(name="pytorch", state="running")
PODS = "/api/v1/namespaces/team/pods"


def frames(first, count):
    texts = [b"line %d" % number for number in range(first, first + count)]
    return transport.line_frames(contract.frame_lines(first, 1_000, 0, 0, Stream.STDOUT, texts))


class Agent:
    """What can be asked of a pod's agent; it has five lines."""

    def __init__(self):
        self.said = []
        self.told_to_end = threading.Event()

    def status(self):
        return {"state": "running", "next_line": 5, "next_event": 0}

    def log(self, first):
        return FrameReader(KEY, 0).feed_block(frames(first, 5 - first)) if first < 5 else []

    def cancel(self, grace_s):
        self.said.append(("cancel", grace_s))

    def ack(self):
        self.said.append("ack")
        self.told_to_end.set()


class Place:
    """A job that goes on in `digits-r1`, and the pod that it has left: what the cluster says of both."""

    def __init__(self, mirror, logs_of):
        self.agent = Agent()
        self.is_reached = True
        self.freed = []
        self.pods = {
            "digits": PodView(uid="a", name="digits-master-0", replica_type="master", index=0, containers=(RUNS,)),
            "digits-r1": PodView(uid="b", name="digits-r1-master-0", replica_type="master", index=0),
        }
        self.mirror = mirror
        self.logs = logs_of(self)

    def view(self, name):
        return JobView(
            name=name, namespace="team", job={"spec": {}}, pods=(self.pods[name],) if name in self.pods else ()
        )

    def ask(self, _pod, _number=0):
        if not self.is_reached:
            raise BackendError("nobody answers")
        return self.agent

    def end_pod(self):
        ended = dataclasses.replace(RUNS, state="terminated", exit_code=1)
        self.pods["digits"] = dataclasses.replace(self.pods["digits"], phase="Failed", containers=(ended,))

    def look_until(self, done):
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline
            self.logs.read()
            self.logs.leave(lambda view: self.freed.append(view.name))
            time.sleep(0.05)


@pytest.fixture
def api(monkeypatch, tmp_path):
    with FakeApi().running() as made:
        monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(made.kubeconfig(tmp_path / "config")))
        pod = {"kind": "Pod", "metadata": {"name": "digits-master-0", "uid": "a"}}
        made.answer("GET", f"{PODS}/digits-master-0", 200, pod)
        yield made
        client.disconnect()


@pytest.fixture
def place(api, tmp_path):
    spec = JobSpec(
        name="digits", label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=1),
        policy=Policy(max_restarts=1), cluster=ClusterOptions(namespace="team"),
    )  # fmt: skip
    folder = tmp_path / "job"
    folder.mkdir()
    mirror = Mirror(
        JobFiles(folder), KEY, job="digits", world_size=1,
        fill=lambda uid, number, first, _: made.logs.ask(uid, number, lambda agent: agent.log(first)),
    )  # fmt: skip
    assert mirror.try_lock()
    made = Place(
        mirror, lambda place: PodLogs(client.connect(), place, spec, mirror, KEY, place.ask, lambda: None)
    )  # fmt: skip
    with contextlib.closing(mirror):
        yield made
        made.logs.stop()


def shown(tmp_path):
    return [line.text for line in LogReader(JobFiles(tmp_path / "job").log).read()]


def test_a_pod_that_runs_on_is_asked_for_what_its_stream_lacks_and_then_told_to_end(api, place, tmp_path):
    api.answer("GET", f"{PODS}/digits-master-0/log", 200, frames(0, 2))
    place.logs.turn_to(1)
    place.look_until(place.agent.told_to_end.is_set)
    assert place.agent.said == [("cancel", 0.0), "ack"]
    assert (place.freed, place.logs.has_left) == ([], False)
    place.end_pod()
    place.look_until(lambda: place.logs.has_left)
    assert place.freed == ["digits"]
    assert shown(tmp_path) == [f"line {number}" for number in range(5)]


def test_a_pod_that_nobody_can_ask_is_ended_by_the_operator_after_a_while(api, place, tmp_path, monkeypatch):
    monkeypatch.setattr(pod_logs, "END_S", 1.0)
    api.answer("GET", f"{PODS}/digits-master-0/log", 200, frames(0, 2))
    place.is_reached = False
    began = time.monotonic()
    place.logs.turn_to(1)
    place.look_until(lambda: place.freed)
    assert time.monotonic() - began > 1.0
    # What it says as it ends is read as well.
    api.answers["GET", f"{PODS}/digits-master-0/log"] = [(200, frames(0, 4), {})]
    place.end_pod()
    place.look_until(lambda: place.logs.has_left)
    assert (place.freed, shown(tmp_path)) == (["digits"], [f"line {number}" for number in range(4)])


def test_a_log_that_cannot_be_had_is_not_waited_for_without_end_and_its_loss_is_said(api, place, tmp_path, monkeypatch):
    monkeypatch.setattr(pod_logs, "QUIET_S", 2.0)
    api.answer("GET", f"{PODS}/digits-master-0/log", 200, frames(0, 2))
    place.look_until(lambda: len(shown(tmp_path)) == 2)
    api.answers["GET", f"{PODS}/digits-master-0/log"] = [(500, status(500, "the node does not answer"), {})]
    place.end_pod()
    place.logs.turn_to(1)
    place.look_until(lambda: place.logs.has_left)
    assert place.freed == ["digits"]
    (said,) = shown(tmp_path)[2:]
    assert "The log of pod 0 breaks off behind its first 2 lines" in said


def test_a_pod_that_was_gone_before_this_machine_looked_is_named(place, tmp_path):
    del place.pods["digits"]
    place.logs.turn_to(1)
    place.logs.read()
    assert "What pod 0 of digits said is lost here: gone before this machine followed the job" in shown(tmp_path)
