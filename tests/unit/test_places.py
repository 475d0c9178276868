"""Where a job runs, as users write it: `kd.Kubernetes(...)`, and what all places refuse."""

import json

import pytest

import kale_dist as kd
from kale_dist.calls import request
from kale_dist.calls.options import Options
from kale_dist.calls.request import Function
from kale_dist.errors import ConfigError
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.resources import Resources
from kale_dist.job.spec.volumes import Volume, VolumeKind

pytest.importorskip("kubernetes")


def run(machine=None, **changes):
    return checked(machine, **request.gathered({"on": "kubernetes", **changes}))


def checked(machine=None, **given):
    return request.checked(Function(fn=print, label="print"), Options(**given), machine)


def asked(**changes):
    return run(**changes).request


@pytest.fixture
def refused(refusal):
    return lambda **changes: refusal(lambda: run(**changes))


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "processes", "per_pod"),
    [
        ({}, 2, 1), ({"number_of_processes": 512}, 512, 1), ({"processes_per_pod": 4}, 4, 4), ({"cuda": True}, 2, 1),
        ({"number_of_processes": 5, "processes_per_pod": 2}, 5, 2),
    ],
)  # fmt: skip
def test_processes_on_a_cluster_are_not_bound_to_this_machine(given, processes, per_pod):
    topology = asked(**given).topology
    assert (topology.number_of_processes, topology.processes_per_pod) == (processes, per_pod)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.5])
def test_processes_of_a_pod_are_a_whole_number(value, refused):
    assert refused(processes_per_pod=value).argument == "processes_per_pod"


def test_a_pod_has_no_more_processes_than_the_job(refused):
    assert refused(number_of_processes=2, processes_per_pod=4).argument == "processes_per_pod"


@pytest.mark.parametrize("name", ["Upper", "x" * 70, "é", "", "a_b"])
def test_names_are_those_of_a_cluster(name, refused):
    assert refused(name=name).argument == "name"


def test_the_names_of_all_pods_fit(refused):
    run(name="x" * 50, number_of_processes=9_999)
    assert refused(name="x" * 50, number_of_processes=200_000).argument == "name"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("image", "train:1"), ("store", "pvc://a"), ("namespace", "a"), ("processes_per_pod", 2), ("volumes", {"/data": "claim"}),
        ("resources", {"rdma/hca": 1}),
    ],
)  # fmt: skip
def test_what_only_a_cluster_has_is_refused_on_this_machine(argument, value, refused):
    assert refused(**{argument: value}, on="local").argument == argument


@pytest.mark.parametrize("place", [kd.Docker, kd.Kubernetes])
@pytest.mark.parametrize("value", ["ten", "0 min", -1, 0, True, "10", [], float("inf")])
def test_how_long_pods_stay_is_a_time(place, value, refusal):
    assert refusal(lambda: place(keep_warm=value)).argument == "keep_warm"


def test_pods_stay_where_they_can(refusal):
    assert (kd.Docker(keep_warm="10 min").keep_warm, kd.Kubernetes(keep_warm=90).keep_warm) == (600.0, 90.0)
    assert (kd.Kubernetes().keep_warm, asked(keep_warm="1 h").keep_warm_s) == (None, 3600.0)
    for kind in ("mpi", "tf"):
        assert refusal(lambda kind=kind: kd.Kubernetes(keep_warm="1 h", kind=kind)).argument == "keep_warm"
    assert refusal(lambda: kd.Local(keep_warm="10 min")).argument == "keep_warm"


# -- resources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, Resources()), (Resources(cpu=1), Resources(cpu=1)), ({"cpu": 0.5, "memory_gib": 4}, Resources(cpu=0.5, memory_gib=4)),
        ({"memory": "2Gi"}, Resources(memory_gib=2)), ({"memory": "512Mi"}, Resources(memory_gib=0.5)), ({"cpu": "500m"}, Resources(cpu=0.5)),
        ({"cpu": "2"}, Resources(cpu=2)), ({"shm": "1024Ki", "memory": "1Gi"}, Resources(shm_gib=2**-10, memory_gib=1)),
        ({"memory": "1G"}, Resources(memory_gib=1e9 / 2**30)), ({"rdma/hca": 1, "a.b/c": "2"}, Resources(extended=(("a.b/c", "2"), ("rdma/hca", "1")))),
        ({"nvidia.com/gpu": 2}, Resources(gpus=2)), ({"gpu_resource": "amd.com/gpu", "gpus": 1}, Resources(gpu_resource="amd.com/gpu", gpus=1)),
    ],
)  # fmt: skip
def test_resources_as_users_write_them(given, made):
    assert asked(resources=given).resources == made
    assert kd.Kubernetes(resources=made).resources == made


def test_a_dataclass_takes_what_a_dict_does():
    assert Resources(memory="2Gi", cpu="500m", **{"rdma/hca": 1}) == Resources(
        memory_gib=2, cpu=0.5, extended={"rdma/hca": "1"}
    )


@pytest.mark.parametrize(
    "given",
    [
        {"memory": "2 GB"}, {"memory": "2gb"}, {"memory": "2g"},
        {"memory": 2}, {"memory": "2"}, {"memory": "-2Gi"}, {"memory": ""},
        {"memory": "٣Gi"}, {"memory": "0Gi"}, {"memory": "512m"},
        {"memory_gib": "2Gi"}, {"memory": "2Gi", "memory_gib": 2},
        {"cpu": "2 cores"}, {"cpu": "-1"}, {"cpus": 2}, {"gpu": 1},
        {"gpus": "1"}, {"rdma/hca": "one"}, {"rdma/hca": True}, {3: 1}, "2 cpus",
        [], {"gpus": 0}, {"extended": 3}, {"extended": {"gpu": 1}}, {"nvidia.com/gpu": 1, "gpus": 1},
    ],
)  # fmt: skip
def test_resources_of_which_it_is_not_clear_what_is_meant(given, refused):
    error = refused(resources=given, cuda=True)
    assert error.argument.startswith("resources")


def test_gpus_that_are_asked_for_are_used_and_that_is_said():
    made = run(resources={"gpus": 1}, processes_per_pod=1)
    assert (made.request.cuda, made.warnings) == (True, ())
    assert "processes_per_pod" in run(resources={"gpus": 1}).warnings[0]
    assert "cuda=False" in made.notes[0]
    assert "cuda=True" in run(resources={"gpus": 1}, cuda=False).warnings[0]
    assert run(resources={"gpus": 1}, cuda=True).notes == ()


def test_a_container_has_all_processes():
    made = checked(number_of_processes=4, cuda=True, on=kd.Docker(image="x/y:1"))
    assert (made.request.topology.number_of_pods, made.warnings) == (1, ())


# -- volumes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "source", "sub_path", "read_only"),
    [
        ("datasets", VolumeKind.CLAIM, "datasets", "", False), ("datasets:ro", VolumeKind.CLAIM, "datasets", "", True),
        ("pvc://datasets", VolumeKind.CLAIM, "datasets", "", False), ("pvc://datasets/a/b/:ro", VolumeKind.CLAIM, "datasets", "a/b", True),
        ("hostpath:///mnt/data", VolumeKind.HOST_PATH, "/mnt/data", "", False), ("configmap://settings", VolumeKind.CONFIG_MAP, "settings", "", False),
        ("secret://token/key", VolumeKind.SECRET, "token", "key", False), ("emptydir://", VolumeKind.EMPTY_DIR, "", "", False),
    ],
)  # fmt: skip
def test_volumes_as_users_write_them(text, kind, source, sub_path, read_only):
    (made,) = asked(volumes={"/data/": text}).volumes
    expected = Volume(mount_path="/data", kind=kind, source=source, sub_path=sub_path, read_only=read_only)
    assert made == expected
    assert asked(volumes=[expected]).volumes == (expected,)


@pytest.mark.parametrize(
    "text",
    [
        "/home/me/data", "./data", "~/data", "",
        ":ro", "datasets/images", "Datasets", "é",
        "a b", "x" * 254, "pvcs://a", "s3://bucket",
        "pvc://", "pvc://a/../b", "hostpath://mnt", "hostpath:///a/../b",
        "emptydir://10Gi", 3, None, "a\0",
        {"source": "a", "subpath": "b"}, {"source": "a", "kind": "pvc"},
    ],
)  # fmt: skip
def test_volumes_that_pods_cannot_have(text, refused):
    error = refused(volumes={"/data": text})
    assert error.argument == "volumes"


@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/usr", "/usr/lib", "/usr/lib/python3", "/usr/lib/python3.11", "/usr/local", "/usr/local/lib/python3.11/site-packages",
        "/opt/venv", "/opt", "/opt/conda/lib", "/bin", "/lib", "/lib64", "/etc", "/dev", "/dev/shm", "/proc", "/sys/fs", "/tmp", "/kale-dist",
        "/kale-dist/home/x", "/var", "/run", "/var/run/secrets", "/root", "/home/me/.venv/lib/python3.12", "/srv/site-packages/torch", "/./usr/",
        "//usr",
    ],
)  # fmt: skip
def test_volumes_must_not_hide_what_pods_need(path, refused):
    assert refused(volumes={path: "datasets"}).argument == "volumes"


@pytest.mark.parametrize(
    "path",
    [
        "/data",
        "/mnt",
        "/home/jovyan",
        "/tmp/cache",
        "/etc/settings",
        "/usr/share/data",
        "/workspace",
        "/x/lib/pythonic",
    ],
)
def test_other_paths_are_free(path):
    assert asked(volumes={path: "datasets"}).volumes[0].mount_path == path


@pytest.mark.parametrize("path", ["data", "", "/a:b", "/a\nb", "/a/../b", "\0", 3])
def test_paths_that_no_pod_can_have(path, refused):
    assert refused(volumes={path: "datasets"}).argument == "volumes"


def test_volumes_are_written_as_text_as_dicts_or_as_objects():
    (text,) = asked(volumes={"/data": "pvc://datasets/a:ro"}).volumes
    for same in (
        {"/data": {"source": "datasets", "kind": "claim", "sub_path": "a", "read_only": True}},
        [{"mount_path": "/data", "source": "pvc://datasets/a:ro"}],
        [Volume(mount_path="/data", source="pvc://datasets/a:ro")],
        [Volume(mount_path="/data", source="datasets", sub_path="a", read_only=True)],
    ):
        assert asked(volumes=same).volumes == (text,)


def test_two_volumes_have_two_paths(refused):
    assert refused(volumes={"/data": "a", "/data/": "b"}).argument == "volumes"
    assert len(asked(volumes={"/data": "a", "/data/b": "a"}).volumes) == 2


# -- image, store, environment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "Train:1", "docker://train:1", " train:1 ", "",
        "a b", "é", "x" * 600, 3, "a:b:c",
    ],
)  # fmt: skip
def test_images_are_references(value, refused):
    error = refused(image=value)
    assert error.argument == "image"


def test_an_image_may_be_left_open():
    assert asked().image == ""
    assert asked(image="localhost:5000/a/b:1@sha256:" + "0" * 64).image.startswith("localhost:5000")


@pytest.mark.parametrize(
    "value", ["pvc://results", "pvc://results/a/b", "s3://bucket/a", "hdfs://me@host:9000/a", "hdfs:///a", "gs://b"]
)
def test_stores_that_pods_reach(value):
    assert asked(store=value).store == value
    assert asked(store=f"{value}/").store == value


@pytest.mark.parametrize(
    "value",
    [
        "results", "/data", "file:///data", "memory://a", "pvc://",
        "pvc://A", "pvc://a/../b", "s3://", "://a", 3, "https://[a",
        "s3:///jobs", "s3://...", "gs:// /a",
    ],
)  # fmt: skip
def test_stores_that_pods_do_not_reach(value, refused):
    error = refused(store=value)
    assert error.argument == "store"


def test_a_password_in_a_url_is_neither_taken_nor_shown(refused):
    error = refused(store="webdav://me:hunter2@host/a")
    assert "hunter2" not in str(error)


def test_variables_of_pods(refused):
    assert asked(environment={"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}).environment[0] == ("NCCL_DEBUG", "INFO")
    for name in ("RANK", "KALE_DIST_WORK", "1A", "A B", "é"):
        assert refused(environment={name: "x"}).argument == "environment"
    twice = refused(environment={"A": "1"}, secret_environment={"A": "s/k"})
    assert twice.argument == "secret_environment"


# -- cluster ---------------------------------------------------------------------------------------------------------


def test_options_of_a_cluster_as_users_write_them():
    toleration = {"key": "gpu", "operator": "Exists"}
    made = asked(
        namespace="team-a", labels={"b": "2", "a": "1"}, tolerations=[toleration], affinity="nodeAffinity: {}",
        secret_environment={"TOKEN": "tokens/hub"}, image_pull_secrets="registry", queue=None, gang=True,
        patch={"metadata": {"labels": {"x": "y"}}},
    ).cluster  # fmt: skip
    assert made == ClusterOptions(
        namespace="team-a", labels=(("a", "1"), ("b", "2")), tolerations=json.dumps([toleration], separators=(",", ":")),
        affinity='{"nodeAffinity":{}}', secret_environment=(("TOKEN", "tokens", "hub"),), image_pull_secrets=("registry",), gang=True,
        patch='{"metadata":{"labels":{"x":"y"}}}',
    )  # fmt: skip
    assert kd.Kubernetes(labels=made.labels, affinity=made.affinity).labels == made.labels
    for same in (toleration, "[{key: gpu, operator: Exists}]", "key: gpu\noperator: Exists"):
        assert asked(tolerations=same).cluster.tolerations == made.tolerations


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"namespaces": "a"}, "namespaces"), ({"nodeSelector": {}}, "nodeSelector"), ({"cpu": 1}, "cpu"), ({"xyzzy": 1}, "xyzzy"),
        ({"namespace": 3}, "namespace"),
        ({"namespace": "Team A"}, "namespace"), ({"labels": ["a"]}, "labels"),
        ({"labels": {"a": 1}}, "labels"), ({"labels": {1: "a"}}, "labels"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "labels"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "labels"),
        ({"annotations": {"kale-dist.dev/spec": "x"}}, "annotations"),
        ({"tolerations": "["}, "tolerations"), ({"tolerations": "gpu"}, "tolerations"),
        ({"tolerations": ["gpu"]}, "tolerations"), ({"affinity": []}, "affinity"),
        ({"affinity": {"a": {1, 2}}}, "affinity"), ({"patch": 3}, "patch"),
        ({"patch": {"spec": {"runPolicy": {1, 2}}}}, "patch"), ({"patch": {"kind": "Pod"}}, "patch"),
        ({"patch": [{"op": "remove", "path": "/none"}]}, "patch"), ({"gang": "yes"}, "gang"),
        ({"master": 1}, "master"), ({"secret_environment": {"A": "s"}}, "secret_environment"),
        ({"image_pull_secrets": 3}, "image_pull_secrets"), ({"image_pull_secrets": [3]}, "image_pull_secrets"),
        ({"ttl_s": "1d"}, "ttl_s"), ({"run_as_user": "root"}, "run_as_user"),
    ],
)  # fmt: skip
def test_options_that_no_cluster_takes(given, argument, refusal):
    error = refusal(lambda: checked(on=kd.Kubernetes(**given)))
    assert error.argument == argument


def test_a_patch_with_a_number_that_json_lacks_is_refused():
    # What is said of it depends on Python's version.
    with pytest.raises(ConfigError, match="patch: it cannot be written as JSON"):
        checked(on=kd.Kubernetes(patch={"spec": {"runPolicy": float("nan")}}))


def test_the_other_labels_of_kueue_are_the_user_s():
    priority = {"kueue.x-k8s.io/priority-class": "high"}
    assert kd.Kubernetes(labels=priority).labels == tuple(priority.items())


def test_a_place_shows_what_is_set_of_it():
    assert repr(kd.Kubernetes(namespace="a", queue=None)) == "Kubernetes(namespace='a')"
    assert repr(kd.Local()) == "Local()"


def test_what_is_configured_fills_what_a_place_leaves_open(monkeypatch):
    monkeypatch.setenv("KALE_DIST_ON", "kubernetes")
    monkeypatch.setenv("KALE_DIST_KUBERNETES", '{"resources": {"cpu": 3}, "queue": "gpus", "processes_per_pod": 4}')
    made = checked()
    assert (made.backend.name, made.request.resources.cpu, made.request.cluster.queue) == ("kubernetes", 3, "gpus")
    mine = checked(on=kd.Kubernetes(queue="cpus"))
    assert (mine.request.resources.cpu, mine.request.cluster.queue, mine.request.topology.processes_per_pod) == (
        3,
        "cpus",
        4,
    )
    assert checked(on="local").backend.name == "local"
