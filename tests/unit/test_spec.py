import dataclasses
import json

import pytest

from kale_dist.calls.options import Options
from kale_dist.job.spec.job_spec import (
    ClusterOptions,
    JobSpec,
    Policy,
    Resources,
    Settled,
    Topology,
    Volume,
    VolumeKind,
)
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


def test_a_record_has_only_what_is_set():
    plain = a_spec(policy=Policy(timeout_s=1.5))
    assert plain.to_json().keys() == {
        "name", "label", "kind", "topology", "policy", "strategy", "snapshot", "blobs", "version"
    }  # fmt: skip
    assert plain.to_json()["policy"] == {"timeout_s": 1.5}
    assert plain.to_json()["topology"] == {"number_of_processes": 2}
    kept = a_spec(policy=Policy(stall_warn_s=None), saves=False).to_json()
    assert (kept["policy"], kept["saves"]) == ({"stall_warn_s": None}, False)


def test_secrets_are_sealed_with_the_key_of_their_job():
    settled = Settled(
        name="a",
        label="f",
        kind="call",
        topology=Topology(number_of_processes=1),
        secrets=(("A", "s3cret"), ("B", "é")),
    )
    key, other = b"k" * 32, b"o" * 32
    assert "s3cret" not in repr(settled) + json.dumps(settled.to_json())
    spec = JobSpec.complete(settled, key, snapshot="ab")
    assert spec.secrets == (("A", ""), ("B", ""))
    assert "s3cret" not in repr(spec) + json.dumps(spec.to_json())
    again = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.opened(key).secrets == settled.secrets
    assert spec.sealed != JobSpec.complete(settled, other, snapshot="ab").sealed
    for wrong in (other, b""):
        with pytest.raises(ValueError, match="not sealed with this key"):
            again.opened(wrong)
    for at in range(0, len(spec.sealed), 9):
        changed = f"{spec.sealed[:at]}{int(spec.sealed[at], 16) ^ 1:x}{spec.sealed[at + 1 :]}"
        with pytest.raises(ValueError, match="not sealed with this key"):
            dataclasses.replace(spec, sealed=changed).opened(key)
    plan = JobSpec.complete(settled, None, snapshot="ab")
    assert (plan.secrets, plan.sealed) == (spec.secrets, "")


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_spec().name = "other"


@pytest.mark.parametrize(("processes", "per_pod", "pods"), [(1, 1, 1), (5, 2, 3), (4, 2, 2), (3, 8, 1)])
def test_pods_hold_all_processes(processes, per_pod, pods):
    assert Topology(number_of_processes=processes, processes_per_pod=per_pod).number_of_pods == pods


@pytest.mark.parametrize("value", [0, -1.0, True, "5", float("nan")])
@pytest.mark.parametrize("field", ["timeout_s", "stall_warn_s", "stall_timeout_s"])
def test_time_limits_are_positive_seconds(field, value, refusal):
    error = refusal(lambda: Options(**{field: value}))
    assert error.argument == field


@pytest.mark.parametrize(("mount", "source"), [("data", "x"), ("", "x"), ("/data", "")])
def test_volumes_name_both_sides(mount, source, refusal):
    assert refusal(lambda: Volume(mount_path=mount, source=source)).argument == "volumes"


@pytest.mark.parametrize(
    "fields",
    [
        {"mount_path": "/a/../b"}, {"mount_path": "/a\0"}, {"mount_path": 3},
        {"source": None}, {"sub_path": "/a"}, {"sub_path": "../a"},
        {"kind": VolumeKind.EMPTY_DIR}, {"size_gib": 1},
        {"in_memory": True},
        {"kind": VolumeKind.EMPTY_DIR, "source": "", "size_gib": -1},
    ],
)  # fmt: skip
def test_volumes_lead_somewhere(fields, refusal):
    error = refusal(lambda: Volume(**{"mount_path": "/data", "source": "datasets", **fields}))
    assert error.argument.startswith("volumes")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", 0), ("cpu", -1), ("cpu", True), ("cpu", float("nan")), ("cpu", float("inf")), ("memory_gib", "2 GB"),
        ("memory_gib", "2Gi"), ("memory_gib", 0), ("gpus", -1), ("gpus", 0.5), ("gpus", True), ("shm_gib", 0), ("cpu_limit", 0),
    ],
)  # fmt: skip
def test_resources_are_numbers_above_0(field, value, refusal):
    error = refusal(lambda: Resources(**{field: value}))
    assert error.argument == f"resources.{field}"


@pytest.mark.parametrize(
    "fields",
    [
        {"cpu": 2, "cpu_limit": 1}, {"memory_gib": 1, "shm_gib": 2},
        {"gpu_resource": "gpu"}, {"extended": (("rdma/hca", "1.5"),)},
        {"extended": (("rdma/hca", True),)}, {"extended": (("rdma hca/", "1"),)},
    ],
)  # fmt: skip
def test_resources_fit_each_other(fields, refusal):
    assert refusal(lambda: Resources(**fields)).argument.startswith("resources")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", "Team"), ("namespace", "a.b"), ("namespace", "é"), ("namespace", "a" * 64),
        ("labels", 3), ("labels", (("a b", "c"),)), ("labels", (("a", "b c"),)),
        ("labels", (("a", 1),)), ("labels", (("a", "x" * 64),)), ("labels", (("é", "x"),)),
        ("annotations", (("a/b/c", "x"),)), ("node_selector", (("pool", "é"),)),
        ("priority_class", "High"), ("service_account", "a b"), ("image_pull_secrets", ("",)),
        ("image_pull_policy", "always"), ("image_pull_policy", "Sometimes"),
        ("queue", "a b"), ("min_available", 0), ("min_available", 2), ("ttl_s", -1), ("ttl_s", 1.5),
        ("run_as_user", -2), ("run_as_user", True), ("pending_timeout_s", 0), ("input_wait_s", -1),
        ("collect_wait_s", "1h"), ("tolerations", "3"), ("affinity", "["), ("patch", "3"),
        ("secret_environment", (("A B", "s", "k"),)), ("secret_environment", (("A", "S", "k"),)),
        ("secret_environment", (("A", "s", "k k"),)),
    ],
)  # fmt: skip
def test_options_of_a_cluster_are_what_a_cluster_takes(field, value, refusal):
    error = refusal(lambda: ClusterOptions(**{field: value}))
    assert error.argument == field


def test_a_wrong_name_is_refused(refusal):
    error = refusal(lambda: a_spec(name="UPPER"))
    assert error.argument == "name"
