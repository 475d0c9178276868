"""What jobs leave on the real cluster that ended while a pod of theirs waited: nothing that runs or may start."""

import json
import time

import pytest
from on_cluster import pods_in, run_kubectl, wait_for
from rank_work import waits

import kale_dist as kd
from kale_dist.places.kubernetes import objects
from kale_dist.places.manifests import KINDS
from kale_dist.wire import StateName

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("jobs_end"),
    pytest.mark.filterwarnings("ignore::kale_dist.errors.KaleDistWarning"),
]

ELSEWHERE = {"nodeSelector": {"kale-dist.dev/test": "no-node-has-this"}}


ANSWERS_S = 10.0
"""After this long the agent of a pod that runs answers: a job whose head does not is ended by the cluster, with all pods."""


def pods_of(namespace, job):
    """Phases of the job's pods by their names; that of a pod which is being removed says so."""
    selector = f"kale-dist.dev/object={job.name}"
    pods = json.loads(run_kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]: "Removed" if "deletionTimestamp" in pod["metadata"] else pod["status"]["phase"]
        for pod in pods
    }


def until(namespace, job, seen, timeout_s=150):
    wait_for(job, lambda _: seen(pods_of(namespace, job)), timeout_s)
    return pods_of(namespace, job)


def has_ended(phases):
    return not {"Pending", "Running"} & set(phases.values())


def with_waiting(namespace, replica, image, **other):
    """Where jobs go whose master or worker finds no node."""
    replicas = {replica: {"template": {"spec": ELSEWHERE}}, **other}
    return pods_in(
        namespace, image=image, wait_for_nodes=True, patch={"spec": {"pytorchReplicaSpecs": replicas}}, kind="pytorch"
    )


def test_a_cancelled_job_keeps_the_log_of_its_head_and_not_the_pod_that_waited(namespace, plain_image):
    job = kd.launch(waits, number_of_processes=2, on=with_waiting(namespace, "Worker", plain_image))
    master, worker = f"{job.name}-master-0", f"{job.name}-worker-0"
    until(namespace, job, lambda phases: phases == {master: "Running", worker: "Pending"})
    time.sleep(ANSWERS_S)
    job.cancel()
    status = job.wait(60)
    assert status.state is StateName.CANCELLED
    assert any(worker in note for note in status.notes), status.notes
    assert until(namespace, job, has_ended) == {master: "Failed"}
    assert "Traceback" not in run_kubectl("-n", namespace, "logs", master)
    job.delete()


@pytest.mark.parametrize("word", [word for word in KINDS if word != "pytorch"])
def test_a_cancelled_job_of_any_kind_leaves_no_pod_that_may_start(word, namespace, cluster, plain_image):
    if not objects.is_served(cluster, KINDS[word]):
        pytest.skip(f"the cluster has no {KINDS[word].name}")
    image = "localhost:5000/kale-dist/mpi-cpu:1" if word == "mpi" else plain_image
    # Each pod has room on the node of two cores, and not both.
    on = pods_in(namespace, kind=word, image=image, resources={"cpu": 1.2, "memory": "512Mi"}, wait_for_nodes=True)
    job = kd.launch(waits, number_of_processes=2, on=on)
    until(namespace, job, lambda phases: sorted(phases.values()) == ["Pending", "Running"])
    time.sleep(ANSWERS_S)
    job.cancel()
    assert job.wait(60).state is StateName.CANCELLED
    until(namespace, job, has_ended)
    job.delete()
