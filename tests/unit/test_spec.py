import dataclasses
import json

import pytest

from kale_dist.errors import ConfigError
from kale_dist.spec import JobSpec, Policy, Topology, Volume
from kale_dist.strategies import AllReduce


def a_spec(**changes):
    return JobSpec(
        **{
            "name": "train-net", "label": "train Net", "kind": "training", "snapshot": "ab" * 32,
            "blobs": ("ab" * 32,), "topology": Topology(number_of_processes=2), **changes,
        }
    )  # fmt: skip


def test_a_spec_survives_json():
    spec = a_spec(
        volumes=(Volume(mount_path="/data", source="/data"),), environment=(("A", "é\n"),), seed=0, threads=2,
        strategy=AllReduce(bucket_mib=1.0), policy=Policy(timeout_s=1.5, detach=True),
    )  # fmt: skip
    again = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_spec().name = "other"


@pytest.mark.parametrize("value", [0, -1, True, "2", 2.0, None])
@pytest.mark.parametrize("field", ["number_of_processes", "processes_per_pod"])
def test_counts_are_whole_and_positive(field, value):
    with pytest.raises(ConfigError) as caught:
        Topology(**{"number_of_processes": 2, field: value})
    assert caught.value.argument == field
    assert repr(value) in str(caught.value)


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


@pytest.mark.parametrize("change", [{"name": "UPPER"}, {"seed": True}, {"seed": "1"}, {"threads": 0}, {"threads": "2"}])
def test_the_first_wrong_field_is_named(change):
    with pytest.raises(ConfigError) as caught:
        a_spec(**change)
    assert caught.value.argument == next(iter(change))
