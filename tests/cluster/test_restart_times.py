"""Time limits of jobs that go on in new pods, where the notebook's clock is wrong by hours."""

import base64
import datetime as dt
import json
import time

import pytest
from fake_api import FakeApi

from kale_dist.backends.kubernetes import client, restarts
from kale_dist.backends.kubernetes.restarts import Run
from kale_dist.errors import BackendError
from kale_dist.manifests.settings import ATTEMPT_ANNOTATION
from kale_dist.spec import ClusterOptions, JobSpec, Policy, Topology

BEGIN = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC).timestamp()
JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
SECRETS = "/api/v1/namespaces/team/secrets"


@pytest.fixture(params=[-7200.0, 0.0, 7200.0], ids=["slow", "right", "fast"])
def wrong_clock(request, monkeypatch):
    """The notebook's clock, by so many seconds off the cluster's."""
    monkeypatch.setattr(time, "time", lambda: BEGIN + 600 + request.param)


@pytest.fixture
def api(monkeypatch, tmp_path, wrong_clock):
    with FakeApi().running() as made:
        made.now = BEGIN + 600
        monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(made.kubeconfig(tmp_path / "config")))
        yield made
        client.disconnect()


def shown(after_s):
    return dt.datetime.fromtimestamp(BEGIN + after_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(name, after_s, owner=None, **status):
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": {}, "creationTimestamp": shown(after_s)}
    if owner is not None:
        number = int(name.rpartition("-r")[2])
        meta |= {
            "labels": {restarts.RESTART_LABEL: str(number)}, "ownerReferences": [{"uid": f"uid-{owner}"}],
            "annotations": {ATTEMPT_ANNOTATION: str(number)},
        }  # fmt: skip
    spec = {"runPolicy": {"ttlSecondsAfterFinished": 60}, "pytorchReplicaSpecs": {}}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": meta, "spec": spec, "status": status,
    }  # fmt: skip


def secret(api, name, timeout_s):
    order = json.dumps({"head": f"{name}-master-0.{name}", "attempt": 0, "timeout_s": timeout_s}).encode()
    data = {"order.json": base64.b64encode(order).decode(), "key": base64.b64encode(b"k").decode()}
    api.answer("GET", f"{SECRETS}/{name}-input", 200, {"kind": "Secret", "data": data})
    api.answer("POST", SECRETS, 201, {})


def order_of_new_pods(api):
    (body,) = [body for method, path, body in api.asked if (method, path) == ("POST", SECRETS)]
    return json.loads(base64.b64decode(json.loads(body)["data"]["order.json"]))


def spec(timeout_s):
    return JobSpec(
        name="digits", label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=1),
        policy=Policy(timeout_s=timeout_s, max_restarts=3), cluster=ClusterOptions(namespace="team", ttl_s=60),
    )  # fmt: skip


def test_new_pods_get_the_time_that_is_left_by_the_cluster_s_clock(api):
    api.answer("GET", f"{JOBS}/digits", 200, job("digits", 0))
    api.answer("POST", JOBS, 201, job("digits-r1", 400, "digits"))
    secret(api, "digits", 1000.0)
    # Its ranks have run since 100 s after the call; so 300 s have gone.
    api.answer("PATCH", f"{JOBS}/digits", 200, {})
    assert restarts.begin(client.connect(), spec(1000.0), Run(), 1, BEGIN + 100) == Run(1, 1)
    order = order_of_new_pods(api)
    assert (order["timeout_s"], order["attempt"]) == (700.0, 1)


def test_who_makes_the_input_for_another_gives_the_same_time(api):
    api.answer("GET", f"{JOBS}/digits-r1", 200, job("digits-r1", 400, "digits"))
    api.answer("GET", f"{JOBS}/digits-r2", 200, job("digits-r2", 550, "digits"))
    secret(api, "digits-r1", 700.0)
    restarts.complete(client.connect(), spec(1000.0), Run(2, 2), BEGIN + 100)
    # What those pods had was 700 s, of which all but 550 s are left.
    assert order_of_new_pods(api)["timeout_s"] == 550.0


@pytest.mark.parametrize(("timeout_s", "started"), [(1000.0, None), (None, BEGIN + 100)])
def test_without_a_rank_or_a_limit_nothing_has_gone(api, timeout_s, started):
    api.answer("GET", f"{JOBS}/digits", 200, job("digits", 0))
    api.answer("GET", f"{JOBS}/digits-r1", 200, job("digits-r1", 400, "digits"))
    secret(api, "digits", timeout_s)
    restarts.complete(client.connect(), spec(timeout_s), Run(1, 1), started)
    assert order_of_new_pods(api)["timeout_s"] == timeout_s


def test_what_a_job_was_suspended_for_is_not_taken_off(api):
    api.answer("GET", f"{JOBS}/digits", 200, job("digits", 0, startTime=shown(350)))
    api.answer("GET", f"{JOBS}/digits-r1", 200, job("digits-r1", 400, "digits"))
    secret(api, "digits", 1000.0)
    restarts.complete(client.connect(), spec(1000.0), Run(1, 1), BEGIN + 100)
    # It was resumed 50 s before.
    assert order_of_new_pods(api)["timeout_s"] == 950.0


def test_a_suspended_job_gets_no_pods_in_the_place_of_lost_ones(api):
    suspended = job("digits", 0)
    suspended["spec"]["runPolicy"]["suspend"] = True
    api.answer("GET", f"{JOBS}/digits", 200, suspended)
    with pytest.raises(BackendError, match="begins again when it is resumed") as refused:
        restarts.begin(client.connect(), spec(None), Run(), 1, None)
    assert refused.value.retryable
    assert ("POST", JOBS) not in [(method, path) for method, path, _ in api.asked]


def test_a_job_that_has_ended_stays_for_its_time(api):
    api.answer("GET", f"{JOBS}/digits", 200, job("digits", 0, completionTime=shown(500)))
    api.answer("PATCH", f"{JOBS}/digits", 200, {})
    restarts.release(client.connect(), spec(None))
    (body,) = [body for method, _, body in api.asked if method == "PATCH"]
    # The operator counts from 500 s on, and 600 s have gone.
    assert json.loads(body)["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 160
