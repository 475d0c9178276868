"""A right that a user lacks: what degrades, seen by running a job without it. Everything else continues."""

import contextlib

import pytest
from on_cluster import pods_in, run_kubectl
from rank_work import bytes_of, hang, waits_in_its_first_run
from waiting import until

import kale_dist as kd
from kale_dist.errors import BackendError, JobCancelledError, KaleDistWarning, ResultUnavailableError, StoreError
from kale_dist.places.kubernetes import roles
from kale_dist.places.manifests import KINDS
from kale_dist.wire import StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

RIGHTS = roles.rights(KINDS["pytorch"])
LARGE = 2_000_000
"""Bytes that do not come back with the log."""

PORT_FORWARD = "create, get pods/portforward"


def words(right):
    """Such as `get pods/log`."""
    return f"{', '.join(right.verbs)} {right.resource}"


@pytest.fixture
def on(plain):
    return plain


@pytest.fixture
def become(namespace, make_user, monkeypatch):
    """A function that goes on as a user with the least Role but for some of its rights."""

    def change(*missing):
        lost = [right for right in RIGHTS if words(right) in missing]
        assert len(lost) == len(missing)
        kept = [right for right in RIGHTS if right not in lost]

        def role(identity):
            name = identity.rpartition(":")[2]
            return roles.role_yaml(namespace, identity, kept).replace("name: kale-dist", f"name: {name}")

        monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(make_user(namespace, role)))

    return change


@pytest.mark.parametrize("missing", [right for right in RIGHTS if right.is_needed], ids=words)
def test_without_these_the_call_is_refused_and_says_who_has_to_grant_what(become, on, namespace, missing):
    become(words(missing))
    with pytest.raises(BackendError) as caught:
        kd.launch(bytes_of, 1, number_of_processes=1, on=on)
    text = str(caught.value)
    assert f"may not {missing.verbs[0]}" in text
    assert missing.without in text
    assert "kind: Role\n" in text
    assert run_kubectl("-n", namespace, "get", "pytorchjobs,secrets", "-o", "name") == ""


def test_with_the_least_role_a_job_that_loses_a_pod_resumes_in_new_ones(become, on, namespace):
    become()
    job = kd.launch(waits_in_its_first_run, number_of_processes=2, max_restarts=1, on=on)
    assert any(line.text == "ready" for line in job.logs(follow=True))
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    assert job.results(150) == [True, True], (job.status, [str(line) for line in job.logs()])
    job.delete()
    assert job.name not in run_kubectl("-n", namespace, "get", "pytorchjobs,pods,secrets", "-o", "name")


@pytest.mark.nightly
def test_without_any_connection_large_results_are_lost_and_this_is_said(become, namespace, plain_image):
    become(PORT_FORWARD)
    with pytest.warns(KaleDistWarning, match="need a store"):
        job = kd.launch(
            bytes_of, LARGE, number_of_processes=1, on=pods_in(namespace, image=plain_image, collect_wait_s=1)
        )
    assert job.wait(150).state is StateName.SUCCEEDED
    with pytest.raises((BackendError, ResultUnavailableError, StoreError)):
        job.result()
    # The call may have asked before the follower has given up.
    until(lambda: any("could not be fetched" in line.text for line in job.logs()), 30)
    job.delete()


@pytest.mark.nightly
def test_without_patch_and_delete_a_running_job_can_be_cancelled_and_not_deleted(become, on):
    become("patch, delete pytorchjobs")
    with pytest.warns(KaleDistWarning, match="Jobs cannot be deleted"):
        job = kd.launch(hang, number_of_processes=1, on=on)
    assert any(line.text == "ready" for line in job.logs(follow=True))
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    with pytest.raises(BackendError, match="may not delete pytorchjobs"):
        job.delete()


def test_without_any_connection_warm_pods_and_live_ranks_are_refused(become, namespace, plain_image):
    become(PORT_FORWARD)
    for call in (
        lambda: kd.launch(
            bytes_of, 1, number_of_processes=1, on=pods_in(namespace, image=plain_image, keep_warm="1 min")
        ),
        lambda: kd.live(1, on=pods_in(namespace, image=plain_image)),
    ):
        with pytest.raises(BackendError, match=r"may not create, get pods/portforward(.|\n)*keep_warm"):
            call()


@pytest.mark.parametrize("may_connect", [True, False])
def test_results_are_in_the_pods_log_only_where_no_connection_may_bring_them(become, on, namespace, may_connect):
    become(*([] if may_connect else [PORT_FORWARD]))
    plan = kd.render(bytes_of, 1, number_of_processes=1, on=on)
    with contextlib.nullcontext() if may_connect else pytest.warns(KaleDistWarning, match="the built-in role view"):
        job = kd.launch(bytes_of, 1, number_of_processes=1, on=on)
    assert "the built-in role view" in str(plan)
    assert ("if no notebook is connected" in str(plan)) is may_connect
    assert len(job.result(240)) == 1
    log = run_kubectl("-n", namespace, "logs", f"{job.name}-master-0")
    assert any(line.startswith("*0 0 ") for line in log.splitlines()) is not may_connect
