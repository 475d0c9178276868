"""What a job's status says where its agents are silent and the engine speaks."""

import pytest

pytest.importorskip("docker")

from kale_dist.backends.docker import states
from kale_dist.backends.docker.states import LastWords
from kale_dist.backends.docker.views import ContainerView, JobView
from kale_dist.contract import FailureCause, StateName
from kale_dist.spec import JobSpec, Topology
from kale_dist.status import JobStatus, ReplicaStatus

SPEC = JobSpec(name="job", label="job", kind="call", snapshot="00" * 32, topology=Topology(number_of_processes=2))
BASE = JobStatus(ref="docker://job", created=1.0, replicas=tuple(ReplicaStatus(rank=rank) for rank in range(2)))


def view_of(*containers, **more):
    made = tuple(
        ContainerView(id=f"id{number}", name=f"kale-dist-job-{number}", number=number, **given)
        for number, given in enumerate(containers)
    )
    return JobView(containers=made, was_seen=True, **more)


RUNNING = {"state": "running"}


def exited(code, **more):
    return {"state": "exited", "exit_code": code, **more}


@pytest.mark.parametrize(
    ("containers", "state", "said"),
    [
        (({"state": "created"}, {"state": "created"}), StateName.PENDING, "are being started"),
        ((RUNNING, {"state": "created"}), StateName.STARTING, "1 of 2 containers run"),
        ((RUNNING, RUNNING), StateName.STARTING, "2 of 2 containers run"),
        ((RUNNING, {"state": "paused"}), StateName.STARTING, "docker unpause kale-dist-job-1"),
    ],
)
def test_a_job_that_has_not_said_anything(containers, state, said):
    status = states.overlay(BASE, view_of(*containers), SPEC)
    assert (status.state, said in status.reason) == (state, True), status.reason


def test_an_engine_that_does_not_answer_is_told_with_what_was_seen_last():
    status = states.overlay(BASE, view_of(RUNNING, RUNNING, problem="It is gone."), SPEC)
    assert status.reason == "It is gone. As last seen: 2 of 2 containers run"


@pytest.mark.parametrize(
    ("containers", "words", "cause", "said"),
    [
        ((exited(137, oom_killed=True, memory_bytes=1 << 30), RUNNING), {}, FailureCause.DIED, "limit of 1.0 GiB"),
        ((exited(137, oom_killed=True), RUNNING), {}, FailureCause.DIED, "the machine's memory"),
        ((RUNNING, exited(137)), {}, FailureCause.DIED, "killed from outside (SIGKILL"),
        ((exited(1), exited(137, oom_killed=True)), {}, FailureCause.DIED, "kale-dist-job-1 was killed because"),
        (
            (exited(78), exited(78)), {"line": "kale_dist: the image's Python is 3.8"}, FailureCause.NOT_STARTED,
            "could not start its agent: the image's Python is 3.8. Name an image",
        ),
        ((exited(70), RUNNING), {"verdict": "the agent cannot begin"}, FailureCause.DIED, "the agent cannot begin"),
        ((exited(3), RUNNING), {"line": "Segmentation fault"}, FailureCause.DIED, "its last line: Segmentation fault"),
        ((exited(143), exited(143)), {}, FailureCause.DIED, "told to end (SIGTERM)"),
        ((exited(127, error="no such file"), RUNNING), {}, FailureCause.DIED, "could not run: no such file"),
        (
            (exited(1), exited(1)), {"verdict": '{"state": "failed", "cause": "stalled", "message": "No step", "rank": 1}'},
            FailureCause.STALLED, "No step",
        ),
        ((exited(1), exited(1)), {"verdict": '{"state": "failed", "cause'}, FailureCause.DIED, "exit code 1"),
    ],
)  # fmt: skip
def test_a_container_that_ended_without_a_verdict_is_explained(containers, words, cause, said):
    status = states.ended(BASE, view_of(*containers), SPEC, LastWords(**words), person="", now=9.0)
    assert (status.state, status.cause, status.ended) == (StateName.FAILED, cause, 9.0)
    assert said in status.reason


def test_removed_containers_and_cancelled_ones_are_no_failure():
    gone = states.ended(BASE, view_of(), SPEC, LastWords(), person="", now=9.0)
    assert (gone.state, "were removed on the engine" in gone.reason) == (StateName.CANCELLED, True)
    ended = states.ended(BASE, view_of(exited(137)), SPEC, LastWords(), person="ada@home", now=9.0)
    assert (ended.state, ended.reason) == (StateName.CANCELLED, "The job was cancelled by ada@home")


def test_agents_that_know_only_of_a_kill_are_helped_out():
    view = view_of(RUNNING, exited(137))
    lost = {"state": "failed", "cause": "died", "reason": "Pod 1 is gone"}
    assert states.better_reason(lost, view).endswith("was stopped. Pod 1 is gone")
    assert states.better_reason({**lost, "cause": "error"}, view) == ""
    assert states.better_reason({**lost, "state": "succeeded"}, view) == ""
