"""A job whose Secret cannot be created takes back its own object, and nothing of other jobs."""

import secrets
from types import SimpleNamespace

import pytest

pytest.importorskip("kubernetes")

from kubernetes.client import ApiException

from kale_dist.errors import BackendError
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.kubernetes import submit


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
