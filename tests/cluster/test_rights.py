"""A right that a user lacks: what degrades, seen by running a job without it. Everything else goes on."""

import time

import flat
import pytest
from on_cluster import call_in, run_kubectl
from rank_work import bytes_of, hang
from slow_steps import waits_for_its_second_attempt

from kale_dist.backends.kubernetes import roles
from kale_dist.contract import StateName
from kale_dist.errors import BackendError, JobCancelledError, KaleDistWarning, ResultUnavailableError

pytestmark = pytest.mark.usefixtures("jobs_end")

LARGE = 300_000
"""Bytes that do not fit into a pod's log as an outcome."""


@pytest.fixture
def call(namespace):
    """Arguments that send a call to two small pods."""
    return call_in(namespace)


@pytest.fixture
def become(namespace, make_user, monkeypatch):
    """A function that goes on as a user with the least Role but for some of its rights."""

    def change(*missing):
        lost = [right for right in roles.RIGHTS if str(right) in missing]
        assert len(lost) == len(missing)
        kept = [right for right in roles.RIGHTS if right not in lost]

        def role(identity):
            name = identity.rpartition(":")[2]
            return roles.role_yaml(namespace, identity, kept).replace("name: kale-dist", f"name: {name}")

        monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(make_user(namespace, role)))

    return change


def check_whole(job, size):
    assert job.results(150) == [bytes(size)] * 2, job.status
    assert {line.text for line in job.logs()} >= {"rank 0 is here", "rank 1 is here"}


def lose_a_pod(job, namespace):
    deadline = time.monotonic() + 120
    while job.status.state is not StateName.RUNNING:
        assert time.monotonic() < deadline, job.status
        time.sleep(0.2)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")


@pytest.mark.parametrize("missing", roles.NEEDED, ids=str)
def test_without_these_the_call_is_refused_and_says_who_has_to_grant_what(become, call, namespace, missing):
    become(str(missing))
    with pytest.raises(BackendError) as caught:
        flat.launch(bytes_of, 1, **call)
    text = str(caught.value)
    assert f"may not {missing.verbs[0]}" in text
    assert missing.without in text
    assert "kind: Role\n" in text
    assert run_kubectl("-n", namespace, "get", "pytorchjobs,secrets", "-o", "name") == ""


def test_without_logs_the_agents_are_asked(become, call):
    become("get pods/log")
    with pytest.warns(KaleDistWarning, match="Logs come from the agents in the pods"):
        job = flat.launch(bytes_of, 1, **call)
    assert job.results(150) == [bytes(1)] * 2
    assert "rank 0 is here" in {line.text for line in job.logs()}


def test_without_port_forward_bytes_go_through_exec(become, call):
    become("create, get pods/portforward")
    with pytest.warns(KaleDistWarning, match="go through exec"):
        job = flat.launch(bytes_of, LARGE, **call)
    check_whole(job, LARGE)


def test_without_exec_nothing_is_lost_but_the_second_way(become, call):
    become("create, get pods/exec")
    with pytest.warns(KaleDistWarning, match="no second way"):
        job = flat.launch(bytes_of, LARGE, **call)
    check_whole(job, LARGE)


def test_without_both_ways_small_results_still_come_in_the_log(become, call):
    become("create, get pods/portforward", "create, get pods/exec")
    with pytest.warns(KaleDistWarning, match="need a store"):
        job = flat.launch(bytes_of, 1, **call)
    check_whole(job, 1)


def test_without_both_ways_large_results_are_lost_and_the_log_says_so(become, call):
    become("create, get pods/portforward", "create, get pods/exec")
    options = {**call["cluster"], "collect_wait_s": 1}
    with pytest.warns(KaleDistWarning, match="need a store"):
        job = flat.launch(bytes_of, LARGE, **{**call, "cluster": options})
    assert job.wait(150).state is StateName.SUCCEEDED
    with pytest.raises(ResultUnavailableError):
        job.result()
    assert any("were not fetched within 1 s and are lost" in line.text for line in job.logs())


@pytest.mark.parametrize(
    "missing",
    [
        "get, list, watch events", "get persistentvolumeclaims", "list resourcequotas", "list limitranges",
        "get namespaces",
    ],
)  # fmt: skip
def test_without_these_less_is_known_beforehand_and_the_job_runs(become, call, missing):
    become(missing)
    without = next(right.without for right in roles.RIGHTS if str(right) == missing)
    with pytest.warns(KaleDistWarning) as caught:
        job = flat.launch(bytes_of, 1, **{**call, "number_of_processes": 1})
    assert any(without in str(warning.message) for warning in caught)
    assert job.result(150) == bytes(1)


def test_without_patch_and_delete_a_running_job_can_be_cancelled_and_not_deleted(become, call):
    become("patch, delete pytorchjobs")
    with pytest.warns(KaleDistWarning, match="Jobs cannot be deleted"):
        job = flat.launch(hang, **call)
    assert any(line.text == "ready" for line in job.logs(follow=True))
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    with pytest.raises(BackendError, match="may not delete pytorchjobs"):
        job.delete()


def test_without_reading_secrets_results_are_the_submitter_s_alone(become, call):
    become("get, patch, delete secrets")
    with pytest.warns(KaleDistWarning, match="Results cannot be read from another machine"):
        job = flat.launch(bytes_of, 1, **call)
    check_whole(job, 1)


def test_with_the_least_role_a_job_that_loses_a_pod_goes_on_in_new_ones(become, call, namespace):
    become()
    job = flat.launch(waits_for_its_second_attempt, **call, max_restarts=1)
    lose_a_pod(job, namespace)
    assert job.results(150) == [1, 1], (job.status, [str(line) for line in job.logs()])
    assert any(f"{job.name}-worker-0 was deleted" in line.text for line in job.logs() if line.rank is None)
    job.delete()
    left = run_kubectl("-n", namespace, "get", "pytorchjobs,pods,secrets", "-o", "name")
    assert job.name not in left


def test_without_reading_secrets_a_job_that_loses_a_pod_fails_and_says_who_has_to_grant_what(become, call, namespace):
    become("get, patch, delete secrets")
    with pytest.warns(KaleDistWarning, match="a job that loses a pod does not go on in new ones"):
        job = flat.launch(waits_for_its_second_attempt, **call, max_restarts=1)
    lose_a_pod(job, namespace)
    status = job.wait(150)
    assert status.state is StateName.FAILED
    assert f"{job.name}-worker-0 was deleted" in status.reason
    assert "New pods could not be had" in status.reason
    assert "may not get secrets" in status.reason
