"""Which volumes of a notebook's own pod its jobs mount, as an API server describes that pod."""

import dataclasses

import pytest

pytest.importorskip("kubernetes")

from fake_api import FakeApi
from golden_jobs import a_spec

from kale_dist.backends.kubernetes import client, prepare, self_pod
from kale_dist.volumes import Volume, VolumeKind

CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
MOUNTS = {
    "/home/me": {"name": "home", "subPath": "me"}, "/data": {"name": "data", "readOnly": True}, "/disk": {"name": "disk"},
    "/opt/conda": {"name": "home"}, "/unknown": {"name": "unknown"}, "/cache": {"name": "cache"},
}  # fmt: skip


@pytest.fixture
def own(monkeypatch, tmp_path):
    """This process's pod: claims that may be shared, one that may not, one that cannot be read, and no claim."""
    claims = ("home", "data", "disk", "unknown")
    pod = {
        "metadata": {"name": "notebook", "namespace": "team", "uid": "u"},
        "spec": {
            "containers": [
                {
                    "name": "main", "image": "x:1",
                    "volumeMounts": [{**mount, "mountPath": path} for path, mount in MOUNTS.items()],
                }
            ],
            "volumes": [
                *({"name": name, "persistentVolumeClaim": {"claimName": f"{name}-claim"}} for name in claims),
                {"name": "cache", "emptyDir": {}},
            ],
        },
        "status": {},
    }  # fmt: skip
    with FakeApi().running() as api:
        api.answer("GET", "/api/v1/namespaces/team/pods/notebook", 200, pod)
        for name, mode in (("home", "ReadWriteMany"), ("data", "ReadWriteMany"), ("disk", "ReadWriteOnce")):
            claim = {"metadata": {"name": name}, "spec": {"accessModes": [mode]}, "status": {"accessModes": [mode]}}
            api.answer("GET", f"{CLAIMS}/{name}-claim", 200, claim)
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setattr(self_pod, "own_namespace", lambda: "team")
        monkeypatch.setattr(self_pod, "_own_name", lambda: "notebook")
        yield self_pod.find(client.connect())


def test_claims_that_several_nodes_may_write_are_mounted_at_the_same_path(own):
    assert prepare.own_volumes(a_spec(), own, "team") == (
        Volume(mount_path="/home/me", source="home-claim", kind=VolumeKind.CLAIM, sub_path="me"),
        Volume(mount_path="/data", source="data-claim", kind=VolumeKind.CLAIM, read_only=True),
    )


def test_a_volume_of_the_call_at_that_path_goes_first(own):
    given = Volume(mount_path="/home/me", kind=VolumeKind.EMPTY_DIR)
    (added,) = prepare.own_volumes(a_spec(volumes=(given,)), own, "team")
    assert added.mount_path == "/data"


def test_nothing_is_mounted_elsewhere(own):
    assert prepare.own_volumes(a_spec(), own, "another") == ()
    assert prepare.own_volumes(a_spec(), None, "team") == ()
    assert prepare.own_volumes(a_spec(), dataclasses.replace(own, claims=()), "team") == ()
