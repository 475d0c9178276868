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


def test_a_job_is_one_container_with_all_ranks_and_the_same_each_time():
    """What is asked of the engine, without an engine: each process's resources, together."""
    from kale_dist.places.docker import containers
    from kale_dist.places.docker.containers import MachineFacts

    plan = kd.render(
        work, name="job", number_of_processes=5, cuda=True, environment={"NCCL_DEBUG": "INFO", "A": "b c"}, grace_s=90,
        on=kd.Docker(image="x/y:1", resources={"cpu": 1.5, "memory_gib": 2}, volumes={"/data": "datasets:ro"}),
    )  # fmt: skip
    body, again, small, chosen = (
        containers.container(plan.spec, 1, MachineFacts(user="7:8", **changes))
        for changes in ({"cores": 16}, {"cores": 16}, {"cores": 4}, {"gpus": (1, 4, 5, 6, 8)})
    )
    assert body == again
    assert (body["HostConfig"]["NanoCpus"], small["HostConfig"]["NanoCpus"]) == (7_500_000_000, 4_000_000_000)
    assert body["HostConfig"]["Memory"] == 10 << 30
    for made, gpus in ((body, "01234"), (chosen, "14568")):
        assert made["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == list(gpus)
        assert made["Labels"][containers.GPUS_LABEL] == ",".join(gpus)
    assert (body["StopTimeout"], body["HostConfig"]["LogConfig"]["Type"]) == (125, "json-file")
    variables = dict(text.split("=", 1) for text in body["Env"])
    assert (variables["NCCL_DEBUG"], variables["KALE_DIST_REPLICA_INDEX"]) == ("INFO", "0")
    assert "b c" not in str(body) + str(plan)
    assert json.loads(body["Labels"][containers.SPEC_LABEL])["name"] == "job"
    for part in (
        "docker network create kale-dist\n", "docker create --name kale-dist-job ", "--cpus 7.5",
        "--mount type=volume,source=datasets,target=/data,readonly", "docker start kale-dist-job\n",
    ):  # fmt: skip
        assert part in plan.text
