"""Pods that are lost on the real cluster: deleted, evicted, out of memory, suspended; with and without another run."""

import dataclasses
import json
import time

import pytest
from on_cluster import pods_in, run_kubectl, wait_for
from rank_work import fills_memory, waits, waits_in_its_first_run

import kale_dist as kd
from kale_dist.wire import FailureCause, StateName

pytestmark = pytest.mark.usefixtures("jobs_end")


@pytest.fixture
def on(plain):
    return plain


def started(job):
    wait_for(job, lambda status: status.state is StateName.RUNNING and any("ready" in line.text for line in job.logs()))
    return job


def delete_pod(namespace, name, *options):
    run_kubectl("-n", namespace, "delete", "pod", name, "--wait=false", *options)


def suspend(job, namespace, *, value=True):
    change = {"spec": {"runPolicy": {"suspend": value}}}
    run_kubectl("-n", namespace, "patch", "pytorchjob", job.name, "--type=merge", "-p", json.dumps(change))


def names_of(namespace, kinds="pytorchjobs,pods,secrets"):
    return run_kubectl("-n", namespace, "get", kinds, "-o", "name")


def told(job):
    return [str(line) for line in job.logs()]


@pytest.mark.nightly
def test_a_worker_that_is_deleted_fails_the_job_and_is_named(on, namespace):
    job = started(kd.launch(waits, number_of_processes=2, on=on))
    delete_pod(namespace, f"{job.name}-worker-0")
    status = job.wait(120)
    assert status.state is StateName.FAILED, (status, told(job))
    # The head may have said that it is gone before the cluster says why.
    assert f"{job.name}-worker-0 " in status.reason
    assert "was deleted while it ran" in status.reason or "(rank 1) is gone" in status.reason
    job.delete()


@pytest.mark.nightly
def test_a_head_that_is_deleted_is_not_taken_for_the_one_that_the_operator_makes(on, namespace):
    job = started(kd.launch(waits, number_of_processes=1, on=on))
    delete_pod(namespace, f"{job.name}-master-0", "--force", "--grace-period=0")
    status = job.wait(120)
    assert status.state is StateName.FAILED, (status, told(job))
    job.delete()
    assert job.name not in names_of(namespace)


@pytest.mark.nightly
def test_a_job_of_workers_only_that_loses_one_resumes_in_a_run_of_its_own(on, namespace):
    on = dataclasses.replace(on, master=False)
    job = started(kd.launch(waits_in_its_first_run, number_of_processes=2, max_restarts=1, on=on))
    delete_pod(namespace, f"{job.name}-worker-1")
    assert job.results(150) == [True, True], (job.status, told(job))
    listed = names_of(namespace)
    assert f"pytorchjob.kubeflow.org/{job.name}-2" in listed
    assert f"{job.name}-input" not in listed
    assert sum("ready" in line for line in told(job)) == 4
    assert [found.name for found in kd.jobs(on="kubernetes", namespace=namespace)] == [job.name]
    job.delete()
    assert job.name not in names_of(namespace)


@pytest.mark.nightly
def test_an_evicted_pod_says_so(on, namespace):
    job = started(kd.launch(waits, number_of_processes=1, on=on))
    pod = f"{job.name}-master-0"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    run_kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))
    status = job.wait(150)
    assert status.state is StateName.FAILED, (status, told(job))
    assert "its node kd-node was drained" in status.reason
    job.delete()


@pytest.mark.nightly
def test_too_little_memory_for_the_imports_says_the_limit(namespace):
    on = pods_in(namespace, resources={"cpu": 0.1, "memory": "128Mi"})
    job = kd.launch(fills_memory, number_of_processes=1, on=on)
    status = job.wait(120)
    # The process that was killed is the one that forks ranks: it imports torch.
    assert "memory ran out (its container has a limit of 128 MiB)" in status.reason
    job.delete()


def test_a_lack_of_memory_says_the_limit_and_is_not_retried(namespace, plain_image):
    on = pods_in(namespace, image=plain_image, resources={"cpu": 0.1, "memory": "256Mi"})
    job = kd.launch(fills_memory, number_of_processes=1, max_restarts=1, on=on)
    status = job.wait(150)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.DIED), (status, told(job))
    assert "memory" in status.reason
    assert f"{job.name}-2" not in names_of(namespace)
    job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("cascade", ["foreground", "orphan"])
def test_a_job_whose_object_is_deleted_with_kubectl_is_not_started_again(on, namespace, cascade):
    job = started(kd.launch(waits, number_of_processes=1, max_restarts=1, on=on))
    run_kubectl("-n", namespace, "delete", "pytorchjob", job.name, f"--cascade={cascade}", "--wait=false")
    status = job.wait(150)
    assert status.state is StateName.CANCELLED, (status, told(job))
    assert f"The PyTorchJob {job.name} was deleted" in status.reason
    job.delete()
    assert names_of(namespace, "pytorchjobs,pods") == ""


@pytest.mark.nightly
def test_a_suspended_job_can_be_cancelled(on, namespace):
    job = started(kd.launch(waits, number_of_processes=1, on=on))
    suspend(job, namespace)
    wait_for(job, lambda status: "is suspended" in status.reason)
    job.cancel()
    assert job.wait(90).state is StateName.CANCELLED
    job.delete()


@pytest.mark.nightly
def test_a_job_under_a_full_quota_starts_as_soon_as_there_is_room(make_namespace, plain_image):
    namespace = make_namespace()
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(quota))
    on = pods_in(namespace, image=plain_image)
    first = started(kd.launch(waits, number_of_processes=1, on=on))
    with pytest.warns(kd.errors.KaleDistWarning, match="The quota q"):
        second = kd.launch(waits, number_of_processes=1, on=on)
    wait_for(second, lambda status: "the quota q" in status.reason)
    # Long enough for the operator to look at it seldom.
    time.sleep(12)
    first.delete()
    began = time.monotonic()
    started(second)
    assert time.monotonic() - began < 12
    second.delete()
