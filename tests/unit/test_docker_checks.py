"""Arguments of a call with on="docker", as users write them. Nothing is asked of an engine."""

import json

import pytest
import trainings

import kale_dist as kd
from kale_dist.calls import request, verbs
from kale_dist.errors import BackendError, ConfigError
from kale_dist.job.spec.volumes import Volume, VolumeKind, of_containers

pytestmark = pytest.mark.newest

pytest.importorskip("docker")


def work():
    return 1


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")


def refused(**given):
    with pytest.raises(ConfigError) as caught:
        kd.launch(work, **request.gathered({"on": "docker", "image": "x/y:1", **given}))
    return caught.value


def test_an_engine_that_does_not_answer_is_no_empty_list(monkeypatch, tmp_path):
    # Jobs of other tests would be listed without asking the engine.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(BackendError, match="/no/such/socket"):
        kd.jobs(on="docker")


@pytest.mark.parametrize(
    ("given", "argument", "said"),
    [
        ({"namespace": "a"}, "namespace", "Docker has no argument"),
        ({"store": "pvc://claim"}, "store", "Docker has no argument"),
        ({"resources": {"rdma/hca": 1}}, "resources", "rdma/hca"),
        ({"resources": {"gpus": 0}, "cuda": True}, "resources.gpus", "needs one"),
        ({"processes_per_pod": 3, "number_of_processes": 2}, "processes_per_pod", "more than the 2"),
        ({"environment": {"A B": "x"}}, "environment", "'A B'"),
        ({"volumes": ["/data"]}, "volumes", "is not a dict"),
        ({"volumes": {"/data": "pvc://claim"}}, "volumes", "a volume of a cluster"),
        ({"volumes": {"/data": "../x y/../z\0"}}, "volumes", "is not text"),
        ({"volumes": {"/data": "data sets"}}, "volumes", "cannot be the name of a volume"),
        ({"volumes": {"/usr": "/data"}}, "volumes", "would hide programs"),
        ({"volumes": {"/kale-dist/work": "/data"}}, "volumes", "the job's own folders"),
        ({"volumes": {"/a": "x1", "/a/": "x2"}}, "volumes", "two volumes"),
        ({"volumes": (Volume(mount_path="/a", kind=VolumeKind.EMPTY_DIR),)}, "volumes", "no volume of kind"),
        ({"volumes": (Volume(mount_path="/a", source="v1", sub_path="b"),)}, "volumes", "Mount the whole volume"),
        ({"image": "UPPER"}, "image", "'upper'"),
    ],
)
def test_what_an_engine_has_nothing_of_is_refused_before_anything_is_asked(given, argument, said):
    error = refused(**given)
    assert error.argument == argument
    assert said in str(error)


@pytest.mark.parametrize("place", [kd.Docker, kd.Kubernetes])
def test_a_training_with_too_little_memory_for_torch_is_refused_with_the_figure(place):
    on = place(image="team/torch:2.13", resources={"memory": "50Mi"})
    with pytest.raises(ConfigError, match="300 MiB") as caught:
        verbs.check(*trainings.classifying(), on=on)
    assert caught.value.argument == "resources.memory"
    verbs.check(work, on=on)


def test_without_an_image_both_ways_to_name_one_are_said(monkeypatch):
    monkeypatch.delenv("KALE_DIST_IMAGE", raising=False)
    error = refused(image=None)
    assert error.argument == "image"
    assert "KALE_DIST_IMAGE" in error.remedy


def test_folders_and_volumes_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = of_containers({"/a": "./x", "/b": "datasets:ro", "/c": str(tmp_path), "/d": "~/y:ro", "/e": tmp_path})
    assert [(volume.kind, volume.read_only) for volume in made] == [
        (VolumeKind.FOLDER, False), (VolumeKind.CLAIM, True), (VolumeKind.FOLDER, False), (VolumeKind.FOLDER, True),
        (VolumeKind.FOLDER, False),
    ]  # fmt: skip
    assert made[0].source == str(tmp_path / "x")
    assert made[1].source == "datasets"
    assert made[3].source.startswith("/")


def test_the_same_specification_makes_the_same_containers():
    """What is asked of the engine, without an engine: pods' resources times their ranks, and each GPU once."""
    from kale_dist.places.docker import containers
    from kale_dist.places.docker.containers import Facts

    plan = kd.render(
        work, name="job", number_of_processes=5, cuda=True, environment={"NCCL_DEBUG": "INFO", "A": "b c"}, grace_s=90,
        on=kd.Docker(image="x/y:1", processes_per_pod=2, resources={"cpu": 1.5, "memory_gib": 2}),
    )  # fmt: skip
    assert [containers.ranks_of(plan.spec, number) for number in range(3)] == [range(2), range(2, 4), range(4, 5)]
    bodies = [containers.container(plan.spec, 1, number, Facts(user="7:8", cores=16)) for number in range(3)]
    assert bodies == [containers.container(plan.spec, 1, number, Facts(user="7:8", cores=16)) for number in range(3)]
    hosts = [body["HostConfig"] for body in bodies]
    assert [host["NanoCpus"] for host in hosts] == [3_000_000_000, 3_000_000_000, 1_500_000_000]
    assert [host["Memory"] for host in hosts] == [4 << 30, 4 << 30, 2 << 30]
    assert [host["DeviceRequests"][0]["DeviceIDs"] for host in hosts] == [["0", "1"], ["2", "3"], ["4"]]
    assert [body["Labels"][containers.GPUS_LABEL] for body in bodies] == ["0,1", "2,3", "4"]
    others = Facts(gpus=(1, 4, 5, 6, 8))
    chosen = [containers.container(plan.spec, 1, number, others)["HostConfig"]["DeviceRequests"] for number in range(3)]
    assert [request["DeviceIDs"] for (request,) in chosen] == [["1", "4"], ["5", "6"], ["8"]]
    assert {body["StopTimeout"] for body in bodies} == {125}
    assert all(host["LogConfig"]["Type"] == "json-file" for host in hosts)
    variables = dict(text.split("=", 1) for text in bodies[1]["Env"])
    assert (variables["NCCL_DEBUG"], variables["KALE_DIST_REPLICA_INDEX"]) == ("INFO", "1")
    assert "b c" not in str(bodies) + str(plan)
    assert variables["KALE_DIST_CPU_REQUEST"] == "3000"
    assert json.loads(bodies[0]["Labels"][containers.SPEC_LABEL])["name"] == "job"
    assert plan.text.count("docker create") == 3
