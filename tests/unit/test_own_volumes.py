"""Which volumes of a notebook's own pod its jobs mount, as an API server describes that pod."""

import dataclasses

import pytest

pytest.importorskip("kubernetes")

import golden_jobs
from fake_api import FakeApi
from golden_jobs import a_spec

from kale_dist.job.spec.volumes import Volume, VolumeKind
from kale_dist.places.kubernetes import client, self_pod
from kale_dist.places.manifests import KINDS

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
    assert self_pod.own_volumes((), own, "team") == (
        Volume(mount_path="/home/me", source="home-claim", kind=VolumeKind.CLAIM, sub_path="me"),
        Volume(mount_path="/data", source="data-claim", kind=VolumeKind.CLAIM, read_only=True),
    )


def test_a_volume_of_the_call_at_that_path_goes_first(own):
    given = Volume(mount_path="/home/me", kind=VolumeKind.EMPTY_DIR)
    (added,) = self_pod.own_volumes((given,), own, "team")
    assert added.mount_path == "/data"


DISK = Volume(mount_path="/disk", source="disk-claim", kind=VolumeKind.CLAIM)


def prepared(own, volumes=(), **on):
    """The job as it is submitted, and what the log says of claims."""
    given = a_spec(volumes=volumes, cluster=dataclasses.replace(a_spec().cluster, namespace="team", **on))
    mounted = (*volumes, *self_pod.own_volumes(volumes, own, "team"))
    affinity = self_pod.affinity_of(given.cluster, mounted, own)
    settled = a_spec(volumes=mounted, cluster=dataclasses.replace(given.cluster, affinity=affinity))
    return settled, self_pod.about_claims(given, settled, own)


def test_a_claim_of_one_node_is_left_out_and_the_log_says_how_to_mount_it(own):
    spec, lines = prepared(own)
    assert DISK not in spec.volumes
    assert "matchFields" not in spec.cluster.affinity
    assert lines == [
        "The pods mount pvc://home-claim/me at /home/me, as this notebook's own pod does. volumes={'/home/me': 'emptydir://'} leaves it out",
        "The pods mount pvc://data-claim at /data, as this notebook's own pod does. volumes={'/data': 'emptydir://'} leaves it out",
        "The claim disk-claim of this notebook is ReadWriteOnce and not mounted. volumes={'/disk': 'disk-claim'} mounts it, and then all pods run on this node",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/disk", "/elsewhere"])
def test_pods_that_mount_a_claim_of_one_node_by_name_are_held_to_it(own, path):
    spec, lines = prepared(own, (dataclasses.replace(DISK, mount_path=path),))
    assert lines[2:] == ["All pods run on this notebook's node node-7, as the claim disk-claim is ReadWriteOnce"]
    made = KINDS["pytorch"].make(spec, golden_jobs.SETTINGS)
    for group in KINDS["pytorch"].pod_groups(made):
        required = group.template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        field = {"key": "metadata.name", "operator": "In", "values": ["node-7"]}
        assert required == {"nodeSelectorTerms": [{"matchFields": [field]}]}


@pytest.mark.parametrize(
    "on",
    [
        {"node_selector": {"pool": "gpu"}}, {"affinity": {"podAntiAffinity": {}}}, {"queue": "team"},
        {"patch": {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"nodeName": "a"}}}}}}},
    ],
)  # fmt: skip
def test_a_call_that_chooses_nodes_keeps_them(own, on):
    spec, lines = prepared(own, (DISK,), **on)
    assert "matchFields" not in spec.cluster.affinity
    assert not any("node-7" in line for line in lines)
    _, lines = prepared(own, **on)
    assert lines[-1].endswith("volumes={'/disk': 'disk-claim'} mounts it")


def test_a_patch_of_something_else_chooses_no_nodes(own):
    spec, _ = prepared(own, (DISK,), patch={"metadata": {"labels": {"team": "a"}}})
    assert "node-7" in spec.cluster.affinity


def test_a_claim_of_one_node_that_the_call_covers_is_not_spoken_of(own):
    _, lines = prepared(own, (Volume(mount_path="/disk", kind=VolumeKind.EMPTY_DIR),))
    assert not any("disk-claim" in line for line in lines)


def test_nothing_is_mounted_elsewhere(own):
    assert self_pod.own_volumes((), own, "another") == ()
    assert self_pod.own_volumes((), None, "team") == ()
    assert self_pod.own_volumes((), dataclasses.replace(own, claims=()), "team") == ()
