"""What a run's Secret holds; a job whose Secret cannot be created takes back its own object, and nothing of other jobs."""

import base64
import json
import math
import secrets
from types import SimpleNamespace

import pytest

pytest.importorskip("kubernetes")

from kubernetes.client import ApiException

from kale_dist import wire
from kale_dist.errors import BackendError
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.kubernetes import submit
from kale_dist.wire import Order


def test_the_secret_of_another_users_job_of_the_same_name_stays():
    deleted = []

    def refuse(_namespace, _body):
        raise ApiException(status=409, reason="AlreadyExists")

    cluster = SimpleNamespace(
        identity="bob",
        server="https://cluster",
        namespace="team",
        custom=SimpleNamespace(
            create_namespaced_custom_object=lambda *given: {
                **given[-1],
                "metadata": {**given[-1]["metadata"], "uid": "1"},
            },
            delete_namespaced_custom_object=lambda *where, **_: deleted.append(where[-2:]),
        ),
        core=SimpleNamespace(
            create_namespaced_secret=refuse,
            create_namespaced_service=lambda *_: None,
            delete_namespaced_secret=lambda *_: deleted.append("a secret"),
            delete_namespaced_service=lambda *_: deleted.append("a service"),
        ),
    )
    spec = JobSpec(
        name="a", label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=2), image="reg/x:1",
        cluster=ClusterOptions(namespace="team", kind="job"),
    )  # fmt: skip
    with pytest.raises(BackendError, match="a-input"):
        submit.create(cluster, spec, secrets.token_bytes(32))
    assert deleted == [("jobs", "a")]


@pytest.mark.parametrize(("pending_timeout_s", "wait_s"), [(60.0, 60.0), (None, math.inf)])
def test_agents_wait_for_each_other_as_long_as_the_job_may_wait_for_its_pods(pending_timeout_s, wait_s):
    created = []
    cluster = SimpleNamespace(
        identity="bob",
        custom=SimpleNamespace(create_namespaced_custom_object=lambda *given: {**given[-1], "metadata": {**given[-1]["metadata"], "uid": "1"}}),
        core=SimpleNamespace(
            create_namespaced_secret=lambda _namespace, body: created.append(body),
            create_namespaced_service=lambda *_: None,
        ),
    )  # fmt: skip
    spec = JobSpec(
        name="a", label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=2), image="reg/x:1",
        cluster=ClusterOptions(namespace="team", kind="job", pending_timeout_s=pending_timeout_s),
    )  # fmt: skip
    submit.create(cluster, spec, secrets.token_bytes(32))
    order = json.loads(base64.b64decode(created[0]["data"]["order.json"]))
    assert wire.decode(Order, order).start_wait_s == wait_s
