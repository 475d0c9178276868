"""A job's position in Kueue's queue, from an API server that answers as a test tells it."""

import pytest

pytest.importorskip("kubernetes")

from fake_api import FakeApi, status

from kale_dist.places.kubernetes import client, queue
from kale_dist.places.kubernetes.views import QueuePosition
from kale_dist.places.manifests import KINDS

VISIBLE = "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/team/localqueues/gpus%2Fpendingworkloads"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"
JOB = {
    "metadata": {"name": "x", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
    "spec": {"runPolicy": {"suspend": True}},
}


@pytest.fixture
def api(monkeypatch, tmp_path):
    with FakeApi().running() as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "config")))
        monkeypatch.setattr(queue, "_known", {})
        yield made


def position(job=JOB, word="pytorch"):
    return queue.position(client.connect(), KINDS[word], job)


def workload(owner, created, *, kind="PyTorchJob", queue="gpus", priority=0, held="", active=True):
    return {
        "metadata": {"creationTimestamp": f"2026-01-31T08:00:{created:02}Z", "ownerReferences": [{"kind": kind, "name": owner}]},
        "spec": {"queueName": queue, "priority": priority, "active": active},
        "status": {"conditions": [{"type": held, "status": "True"}] if held else []},
    }  # fmt: skip


def test_the_visibility_api_counts_jobs_of_other_namespaces(api):
    items = [{"metadata": {"ownerReferences": [{"kind": "PyTorchJob", "name": "x"}]}, "positionInClusterQueue": 6}]
    api.answer("GET", VISIBLE, 200, {"items": items})
    assert position() == QueuePosition(number=7)


def test_without_it_the_namespace_s_workloads_are_put_in_order(api):
    items = [
        workload("x", 5), workload("later", 6), workload("first", 9, priority=10), workload("runs", 1, held="QuotaReserved"),
        workload("ended", 1, held="Finished"), workload("elsewhere", 1, queue="cpus"), workload("stopped", 1, active=False),
        workload("x", 1, kind="Job"),
    ]  # fmt: skip
    api.answer("GET", VISIBLE, 403, status(403, "no", "Forbidden"))
    api.answer("GET", WORKLOADS, 200, {"items": items})
    assert position() == QueuePosition(number=3, of=4)


def test_what_kueue_does_not_take_into_the_queue_has_no_position(api):
    refused = workload("x", 1)
    said = {
        "type": "QuotaReserved",
        "status": "False",
        "reason": "Inadmissible",
        "message": "LocalQueue gpus doesn't exist",
    }
    refused["status"]["conditions"] = [said]
    api.answer("GET", WORKLOADS, 200, {"items": [refused, workload("y", 5)]})
    assert position() == QueuePosition(number=None, problem="LocalQueue gpus doesn't exist")
    other = {**JOB, "metadata": {**JOB["metadata"], "name": "y"}}
    assert position(other) == QueuePosition(number=1, of=1)


def test_a_train_job_is_found_by_its_job_set(api):
    job = {**JOB, "spec": {"suspend": True}}
    api.answer("GET", WORKLOADS, 200, {"items": [workload("x", 5, kind="JobSet")]})
    assert position(job, "train") == QueuePosition(number=1, of=1)


@pytest.mark.parametrize("answer", [(403, status(403, "no", "Forbidden")), (200, {"items": None})])
def test_who_may_not_know_is_told_nothing(api, answer):
    api.answer("GET", VISIBLE, 404, status(404, "no"))
    api.answer("GET", WORKLOADS, *answer)
    assert position() is None


def test_what_does_not_wait_is_not_asked_for(api):
    assert position({**JOB, "spec": {}}) is None
    assert position({**JOB, "metadata": {**JOB["metadata"], "labels": {}}}) is None
    assert VISIBLE not in [path for _, path, _ in api.asked]


def test_one_answer_serves_all_jobs_of_a_queue_for_a_while(api):
    api.answer("GET", WORKLOADS, 200, {"items": [workload("x", 5)]})
    assert position() == position()
    assert [path for _, path, _ in api.asked].count(WORKLOADS) == 1
