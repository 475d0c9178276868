"""Where a job runs, as users write it: `kd.Kubernetes(...)`, and what all places refuse."""

import json

import pytest

import kale_dist as kd
from kale_dist.calls import request
from kale_dist.calls.request import Function
from kale_dist.errors import ConfigError
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.resources import Resources
from kale_dist.job.spec.volumes import Volume, VolumeKind

pytest.importorskip("kubernetes")


def run(machine=None, **changes):
    return checked(machine, **request.gathered({"on": "kubernetes", **changes}))


def checked(machine=None, **given):
    return request.checked(given, Function(fn=print, label="print"), machine)


def asked(**changes):
    return run(**changes).request


def refused(**changes):
    with pytest.raises(ConfigError) as caught:
        run(**changes)
    assert caught.value.remedy
    return caught.value


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
def test_processes_of_a_pod_are_a_whole_number(value):
    error = refused(processes_per_pod=value)
    assert (error.argument, repr(value) in error.problem) == ("processes_per_pod", True)


def test_a_pod_has_no_more_processes_than_the_job():
    assert refused(number_of_processes=2, processes_per_pod=4).argument == "processes_per_pod"


@pytest.mark.parametrize("name", ["Upper", "x" * 70, "é", "", "a_b"])
def test_names_are_those_of_a_cluster(name):
    assert refused(name=name).argument == "name"


def test_the_names_of_all_pods_fit():
    run(name="x" * 50, number_of_processes=9_999)
    assert "worker-" in refused(name="x" * 50, number_of_processes=200_000).problem


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("image", "train:1"), ("store", "pvc://a"), ("namespace", "a"), ("processes_per_pod", 2), ("volumes", {"/data": "claim"}),
        ("resources", {"rdma/hca": 1}),
    ],
)  # fmt: skip
def test_what_only_a_cluster_has_is_refused_on_this_machine(argument, value):
    error = refused(**{argument: value}, on="local")
    assert error.argument == argument
    assert "on=kd.Kubernetes(...)" in error.remedy


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
    ("given", "said"),
    [
        ({"memory": "2 GB"}, "'2Gi' (1024^3 bytes each) or '2G' (1000^3)"), ({"memory": "2gb"}, "'2Gi'"), ({"memory": "2g"}, "'2Gi'"),
        ({"memory": 2}, "unit"), ({"memory": "2"}, "unit"), ({"memory": "-2Gi"}, "not a quantity"), ({"memory": ""}, "not a quantity"),
        ({"memory": "٣Gi"}, "not a quantity"), ({"memory": "0Gi"}, "above 0"), ({"memory": "512m"}, "'512Mi'"),
        ({"memory_gib": "2Gi"}, "not a number above 0"), ({"memory": "2Gi", "memory_gib": 2}, "twice"),
        ({"cpu": "2 cores"}, "millicores"), ({"cpu": "-1"}, "millicores"), ({"cpus": 2}, "Did you mean 'cpu'?"), ({"gpu": 1}, "Did you mean 'gpus'?"),
        ({"gpus": "1"}, "'1'"), ({"rdma/hca": "one"}, "whole"), ({"rdma/hca": True}, "whole"), ({3: 1}, "no resource 3"), ("2 cpus", "not a dict"),
        ([], "not a dict"), ({"gpus": 0}, "0, and cuda=True"), ({"extended": 3}, "not a dict"), ({"extended": {"gpu": 1}}, "Did you mean 'gpus'?"), ({"nvidia.com/gpu": 1, "gpus": 1}, "twice"),
    ],
)  # fmt: skip
def test_resources_of_which_it_is_not_clear_what_is_meant(given, said):
    error = refused(resources=given, cuda=True)
    assert error.argument.startswith("resources")
    assert said in str(error)


def test_gpus_that_are_asked_for_are_used_and_that_is_said():
    made = run(resources={"gpus": 1})
    assert (made.request.cuda, made.warnings) == (True, ())
    assert "cuda=False" in made.notes[0]
    assert "cuda=True" in run(resources={"gpus": 1}, cuda=False).warnings[0]
    assert run(resources={"gpus": 1}, cuda=True).notes == ()


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
    ("text", "said"),
    [
        ("/home/me/data", "pods do not see it"), ("./data", "pods do not see it"), ("~/data", "pods do not see it"), ("", "empty"),
        (":ro", "empty"), ("datasets/images", "pvc://datasets/images"), ("Datasets", "lower-case"), ("é", "lower-case"),
        ("a b", "lower-case"), ("x" * 254, "lower-case"), ("pvcs://a", "Did you mean 'pvc'?"), ("s3://bucket", "Use: pvc://"),
        ("pvc://", "empty"), ("pvc://a/../b", "within the volume"), ("hostpath://mnt", "hostpath:///"), ("hostpath:///a/../b", "hostpath:///"),
        ("emptydir://10Gi", "has a source"), (3, "not text"), (None, "not text"), ("a\0", "not text"),
        ({"source": "a", "subpath": "b"}, "Did you mean 'sub_path'?"), ({"source": "a", "kind": "pvc"}, "no kind 'pvc'"),
    ],
)  # fmt: skip
def test_volumes_that_pods_cannot_have(text, said):
    error = refused(volumes={"/data": text})
    assert error.argument == "volumes"
    assert said in str(error)


@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/usr", "/usr/lib", "/usr/lib/python3", "/usr/lib/python3.11", "/usr/local", "/usr/local/lib/python3.11/site-packages",
        "/opt/venv", "/opt", "/opt/conda/lib", "/bin", "/lib", "/lib64", "/etc", "/dev", "/dev/shm", "/proc", "/sys/fs", "/tmp", "/kale-dist",
        "/kale-dist/home/x", "/var", "/run", "/var/run/secrets", "/root", "/home/me/.venv/lib/python3.12", "/srv/site-packages/torch", "/./usr/",
        "//usr",
    ],
)  # fmt: skip
def test_volumes_must_not_hide_what_pods_need(path):
    error = refused(volumes={path: "datasets"})
    assert error.argument == "volumes"
    assert "would hide" in error.problem


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
def test_paths_that_no_pod_can_have(path):
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


def test_two_volumes_have_two_paths():
    assert "two volumes" in refused(volumes={"/data": "a", "/data/": "b"}).problem
    assert len(asked(volumes={"/data": "a", "/data/b": "a"}).volumes) == 2


# -- image, store, environment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Train:1", "Write 'train:1'"), ("docker://train:1", "Write 'train:1'"), (" train:1 ", "Write 'train:1'"), ("", "registry.example.com"),
        ("a b", "registry.example.com"), ("é", "registry.example.com"), ("x" * 600, "registry.example.com"), (3, "neither text"), ("a:b:c", "a:b:c"),
    ],
)  # fmt: skip
def test_images_are_references(value, said):
    error = refused(image=value)
    assert (error.argument, said in str(error)) == ("image", True)


def test_an_image_may_be_left_open():
    assert asked().image == ""
    assert asked(image="localhost:5000/a/b:1@sha256:" + "0" * 64).image.startswith("localhost:5000")


@pytest.mark.parametrize(
    "value", ["pvc://results", "pvc://results/a/b", "s3://bucket/a", "hdfs://me@host:9000/a", "gs://b"]
)
def test_stores_that_pods_reach(value):
    assert asked(store=value).store == value
    assert asked(store=f"{value}/").store == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("results", "pvc://"), ("/data", "pvc://"), ("file:///data", "on this machine"), ("memory://a", "on this machine"), ("pvc://", "no store"),
        ("pvc://A", "'A'"), ("pvc://a/../b", "'..'"), ("s3://", "no store"), ("://a", "no store"), (3, "not text"), ("https://[a", "not a URL"),
    ],
)  # fmt: skip
def test_stores_that_pods_do_not_reach(value, said):
    error = refused(store=value)
    assert (error.argument, said in str(error)) == ("store", True)


def test_a_password_in_a_url_is_neither_taken_nor_shown():
    error = refused(store="webdav://me:hunter2@host/a")
    assert "hunter2" not in str(error)
    assert "secret_environment" in error.remedy


def test_variables_of_pods():
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
    ("given", "argument", "said"),
    [
        ({"namespaces": "a"}, "namespaces", "Did you mean 'namespace'?"), ({"nodeSelector": {}}, "nodeSelector", "Did you mean 'node_selector'?"),
        ({"namespace": 3}, "namespace", "not text"),
        ({"namespace": "Team A"}, "namespace", "lower-case"), ({"labels": ["a"]}, "labels", "not a dict"),
        ({"labels": {"a": 1}}, "labels", "Write '1'"), ({"labels": {1: "a"}}, "labels", "1 cannot be a key"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "labels", "set by kale_dist"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "labels", "Use `queue`"),
        ({"annotations": {"kale-dist.dev/spec": "x"}}, "annotations", "set by kale_dist"),
        ({"tolerations": "["}, "tolerations", "YAML"), ({"tolerations": "gpu"}, "tolerations", "not a list"),
        ({"tolerations": ["gpu"]}, "tolerations", "list of dicts"), ({"affinity": []}, "affinity", "not a dict"),
        ({"affinity": {"a": {1, 2}}}, "affinity", "JSON"), ({"patch": 3}, "patch", "not a dict"),
        ({"patch": {"spec": {"runPolicy": float("nan")}}}, "patch", "JSON"), ({"patch": {"kind": "Pod"}}, "patch", "kind"),
        ({"patch": [{"op": "remove", "path": "/none"}]}, "patch", "not a dict"), ({"gang": "yes"}, "gang", "'yes'"),
        ({"master": 1}, "master", "1"), ({"secret_environment": {"A": "s"}}, "secret_environment", "'secret/key'"),
        ({"image_pull_secrets": 3}, "image_pull_secrets", "not a list"), ({"image_pull_secrets": [3]}, "image_pull_secrets", "3"),
        ({"ttl_s": "1d"}, "ttl_s", "'1d'"), ({"run_as_user": "root"}, "run_as_user", "'root'"),
    ],
)  # fmt: skip
def test_options_that_no_cluster_takes(given, argument, said):
    with pytest.raises(ConfigError) as caught:
        checked(on=kd.Kubernetes(**given))
    assert caught.value.argument == argument
    assert said in str(caught.value)
    assert caught.value.remedy


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
