import dataclasses
import json

import pytest

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import ClusterOptions, JobSpec, Policy, Resources, Topology, Volume, VolumeKind
from kale_dist.strategies import DDP


def a_spec(**changes):
    return JobSpec(
        **{
            "name": "train-net", "label": "train Net", "kind": "training", "snapshot": "ab" * 32,
            "blobs": ("ab" * 32,), "topology": Topology(number_of_processes=2), **changes,
        }
    )  # fmt: skip


def test_a_spec_survives_json():
    spec = a_spec(
        volumes=(
            Volume(mount_path="/data", source="/data"),
            Volume(mount_path="/x", kind=VolumeKind.EMPTY_DIR, size_gib=0.5, in_memory=True),
        ),
        environment=(("A", "é\n"),), seed=0, threads=2,
        strategy=DDP(bucket_mib=1.0), policy=Policy(timeout_s=1.5, detach=True),
        image="train:1", store="pvc://results/a", resources=Resources(cpu=0.5, gpus=1, extended=(("rdma/hca", "1"),)),
        cluster=ClusterOptions(
            labels=(("a", "b"),), tolerations="[]", patch='{"spec":null}', image_pull_secrets=("a", "b"), gang=True,
            secret_environment=(("A", "b", "c"),), min_available=1, run_as_user=-1, master=False, ttl_s=0,
        ),
    )  # fmt: skip
    again = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_spec().name = "other"


@pytest.mark.parametrize(("processes", "per_pod", "pods"), [(1, 1, 1), (5, 2, 3), (4, 2, 2), (3, 8, 1)])
def test_pods_hold_all_processes(processes, per_pod, pods):
    assert Topology(number_of_processes=processes, processes_per_pod=per_pod).number_of_pods == pods


@pytest.mark.parametrize("value", [0, -1.0, True, "5", float("nan")])
@pytest.mark.parametrize("field", ["timeout_s", "stall_warn_s", "stall_timeout_s"])
def test_time_limits_are_positive_seconds(field, value):
    with pytest.raises(ConfigError) as caught:
        Policy(**{field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize(("mount", "source"), [("data", "x"), ("", "x"), ("/data", "")])
def test_volumes_name_both_sides(mount, source):
    with pytest.raises(ConfigError, match="volumes"):
        Volume(mount_path=mount, source=source)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mount_path": "/a/../b"}, "'..'"), ({"mount_path": "/a\0"}, "not text"), ({"mount_path": 3}, "not text"),
        ({"source": None}, "not text"), ({"sub_path": "/a"}, "within the volume"), ({"sub_path": "../a"}, "within the volume"),
        ({"kind": VolumeKind.EMPTY_DIR}, "has a source"), ({"size_gib": 1}, "only an empty folder"),
        ({"in_memory": True}, "only an empty folder"),
        ({"kind": VolumeKind.EMPTY_DIR, "source": "", "size_gib": -1}, "volumes.size_gib"),
    ],
)  # fmt: skip
def test_volumes_lead_somewhere(fields, said):
    with pytest.raises(ConfigError, match="volumes") as caught:
        Volume(**{"mount_path": "/data", "source": "datasets", **fields})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", 0), ("cpu", -1), ("cpu", True), ("cpu", float("nan")), ("cpu", float("inf")), ("memory_gib", "2 GB"),
        ("memory_gib", "2Gi"), ("memory_gib", 0), ("gpus", -1), ("gpus", 0.5), ("gpus", True), ("shm_gib", 0), ("cpu_limit", 0),
    ],
)  # fmt: skip
def test_resources_are_numbers_above_0(field, value):
    with pytest.raises(ConfigError) as caught:
        Resources(**{field: value})
    assert caught.value.argument == f"resources.{field}"
    assert repr(value) in caught.value.problem


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cpu": 2, "cpu_limit": 1}, "less than the 2 cores"), ({"memory_gib": 1, "shm_gib": 2}, "more than the 1 GiB"),
        ({"gpu_resource": "gpu"}, "'gpu'"), ({"extended": (("rdma/hca", "1.5"),)}, "whole"),
        ({"extended": (("rdma/hca", True),)}, "whole"), ({"extended": (("rdma hca/", "1"),)}, "no resource"),
    ],
)  # fmt: skip
def test_resources_fit_each_other(fields, said):
    with pytest.raises(ConfigError, match="resources") as caught:
        Resources(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("namespace", "Team", "'Team'"), ("namespace", "a.b", "'a.b'"), ("namespace", "é", "é"), ("namespace", "a" * 64, "namespace"),
        ("labels", 3, "not a dict"), ("labels", (("a b", "c"),), "'a b'"), ("labels", (("a", "b c"),), "'b c'"),
        ("labels", (("a", 1),), "Write '1'"), ("labels", (("a", "x" * 64),), "63"), ("labels", (("é", "x"),), "é"),
        ("annotations", (("a/b/c", "x"),), "'a/b/c'"), ("node_selector", (("pool", "é"),), "é"),
        ("priority_class", "High", "'High'"), ("service_account", "a b", "'a b'"), ("image_pull_secrets", ("",), "''"),
        ("image_pull_policy", "always", "Did you mean 'Always'?"), ("image_pull_policy", "Sometimes", "'IfNotPresent'"),
        ("queue", "a b", "'a b'"), ("min_available", 0, "0"), ("min_available", 2, "`gang`"), ("ttl_s", -1, "-1"), ("ttl_s", 1.5, "1.5"),
        ("run_as_user", -2, "-2"), ("run_as_user", True, "True"), ("pending_timeout_s", 0, "0"), ("input_wait_s", -1, "-1"),
        ("collect_wait_s", "1h", "'1h'"), ("tolerations", "3", "list"), ("affinity", "[", "YAML"), ("patch", "3", "dict"),
        ("secret_environment", (("A B", "s", "k"),), "'A B'"), ("secret_environment", (("A", "S", "k"),), "'S/k'"),
        ("secret_environment", (("A", "s", "k k"),), "'s/k k'"),
    ],
)  # fmt: skip
def test_options_of_a_cluster_are_what_a_cluster_takes(field, value, said):
    with pytest.raises(ConfigError) as caught:
        ClusterOptions(**{field: value})
    assert caught.value.argument == field
    assert said in str(caught.value)
    assert caught.value.remedy


def test_a_wrong_name_is_refused():
    with pytest.raises(ConfigError) as caught:
        a_spec(name="UPPER")
    assert caught.value.argument == "name"
