"""Which volumes of a notebook's own pod its jobs mount, as an API server describes that pod."""

import dataclasses

import pytest

pytest.importorskip("kubernetes")

import golden_jobs
from fake_api import FakeApi
from golden_jobs import a_spec

from kale_dist.backends.kubernetes import client, prepare, self_pod
from kale_dist.manifests import KINDS
from kale_dist.spec import Resources
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
    pod["spec"]["nodeName"] = "node-7"
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


def beside(own, **changes):
    options = dataclasses.replace(a_spec().cluster, namespace="team", kind="pytorch", **changes.pop("on", {}))
    return prepare.beside_notebook(a_spec(cluster=options, **changes), own, KINDS["pytorch"])


def test_a_claim_of_one_node_is_mounted_by_pods_that_are_held_to_it(own):
    spec = beside(own, resources=Resources(cpu=0.1, memory_gib=0.1))
    assert spec.volumes == (Volume(mount_path="/disk", source="disk-claim", kind=VolumeKind.CLAIM),)
    made = KINDS["pytorch"].make(spec, golden_jobs.SETTINGS)
    for group in KINDS["pytorch"].pod_groups(made):
        required = group.template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        field = {"key": "metadata.name", "operator": "In", "values": ["node-7"]}
        assert required == {"nodeSelectorTerms": [{"matchFields": [field]}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"on": {"node_selector": (("pool", "gpu"),)}}, {"on": {"affinity": '{"podAntiAffinity": {}}'}}, {"cuda": True},
        {"resources": Resources(cpu=10_000.0)}, {"resources": Resources(memory_gib=1e6)},
    ],
)  # fmt: skip
def test_pods_that_belong_elsewhere_or_do_not_fit_are_not_held_to_the_notebooks_node(own, changes):
    spec = beside(own, **changes)
    assert spec.volumes == ()
    assert "matchFields" not in spec.cluster.affinity


def test_nothing_is_mounted_elsewhere(own):
    assert prepare.own_volumes(a_spec(), own, "another") == ()
    assert prepare.own_volumes(a_spec(), None, "team") == ()
    assert prepare.own_volumes(a_spec(), dataclasses.replace(own, claims=()), "team") == ()
