"""IBM's dictionary gives the objects that the library's own call gives; mistakes in it are named."""

import pytest

import kale_dist as kd
from kale_dist.calls import request, verbs
from kale_dist.calls.options import Options
from kale_dist.calls.request import Function
from kale_dist.ibm import arguments, train_comp


def spec(options):
    return request.checked(Function(fn=print, label="print"), Options(**{"name": "x", **options})).request


def test_a_dictionary_says_what_the_own_call_says():
    theirs = arguments(
        {"distribution_type": "PyTorch", "number_of_workers": "3", "worker_cpus": "500m", "worker_memory": "2Gi"},
        base_image="registry.example.com/train:1",
        node_selector='nvidia.com/gpu.product: "Tesla-V100"',
        namespace="team",
        pvc_name="datasets",
        train_mount="/data",
    )
    cluster = kd.Kubernetes(
        kind="pytorch",
        image="registry.example.com/train:1",
        node_selector={"nvidia.com/gpu.product": "Tesla-V100"},
        namespace="team",
        volumes={"/data": "datasets"},
        resources={"cpu": 0.5, "cpu_limit": 0.5, "memory": "2Gi"},
    )
    assert spec(theirs) == spec({"number_of_processes": 3, "on": cluster, "cuda": False})
    # All can be in the dictionary, too.
    one = {"distribution_type": "PyTorch", "number_of_workers": 2, "pvc_size": "10Gi", "base_image": "x:1"}
    cluster = kd.Kubernetes(
        kind="pytorch", image="x:1", volumes=[{"mount_path": "/train", "kind": "empty_dir", "size_gib": 10}]
    )
    assert spec(arguments(one)) == spec({"number_of_processes": 2, "on": cluster, "cuda": False})


def test_without_a_distribution_it_is_an_ordinary_job_of_one_process():
    own = kd.Kubernetes(kind="job", image="x:1", resources={"cpu": 8, "cpu_limit": 8, "memory": "32Gi"})
    theirs = arguments(base_image="x:1", cpus="8", memory="32Gi")
    assert spec(theirs) == spec({"number_of_processes": 1, "on": own, "cuda": False})


def test_gpus_of_a_worker_are_one_for_each_of_its_processes():
    theirs = arguments(
        {"distribution_type": "PyTorch", "number_of_workers": 2, "worker_cpus": "8", "worker_memory": "32Gi"},
        gpus=4,
        base_image="x:1",
    )
    own = kd.Kubernetes(
        kind="pytorch",
        image="x:1",
        processes_per_pod=4,
        resources={"cpu": 2, "cpu_limit": 2, "memory": "8Gi", "gpus": 1},
    )
    assert spec(theirs) == spec({"number_of_processes": 8, "cuda": True, "on": own})


def test_another_cluster_is_named_by_a_secret():
    on = arguments(base_image="x:1", cluster_configuration_secret="power")["on"]
    assert on == kd.Kubernetes(kind="job", image="x:1", cluster_secret="power")


def test_what_the_dictionary_does_not_say_is_given_as_a_place(refusal):
    place = kd.Kubernetes(image="x:1", queue="team-queue")
    assert arguments({"distribution_type": "PyTorch"}, place=place)["on"] == kd.Kubernetes(
        kind="pytorch", image="x:1", queue="team-queue"
    )
    refusal(lambda: arguments(base_image="y:2", place=place))


@pytest.mark.parametrize(
    ("specification", "settings"),
    [
        ({"distribution_typ": "MPI"}, {}),
        ({"workers": 2}, {}),
        ({"distribution_type": "pytorchjob"}, {}),
        ({"distribution_type": "Spark"}, {}),
        ({"number_of_workers": 0}, {}),
        ({"number_of_workers": "two"}, {}),
        ({"distribution_type": "PyTorch", "launcher_cpus": "2"}, {}),
        ({"worker_memory": "32 GB"}, {}),
        ({"cpus": "1"}, {"cpus": "2"}),
        ({}, {"gpus": "many"}),
        ({}, {"node_selector": "gpu"}),
        ({}, {"remote_host": "h"}),
        ("PyTorch", {}),
    ],
)  # fmt: skip
def test_mistakes_are_named(specification, settings, refusal):
    refusal(lambda: arguments(specification, **settings))


def train(data, model, epochs, seed=0):
    return data, model, epochs, seed


def test_train_comp_calls_the_function_with_its_paths(monkeypatch):
    called = {}
    monkeypatch.setattr(verbs, "launch", lambda fn, **options: called.update(options, value=fn()))
    train_comp(
        train,
        {"data": "train_dataset_dir", "model": "model_dir", "epochs": 3, "seed": 1},
        train_dataset_dir="/train/images",
        model_dir="/train/model",
        model_name="My Model",
        distribution_specification={"distribution_type": "PyTorch", "number_of_workers": 2},
    )
    assert called["value"] == ("/train/images", "/train/model", 3, 1)
    assert called["number_of_processes"] == 2
    assert called["name"].startswith("my-model-20")


def test_train_comp_refuses_what_it_cannot_call(refusal):
    refusal(lambda: train_comp(train, {"data": 1, "model": 2, "epoch": 3}))
    refusal(lambda: train_comp("name: Train", {}))
    refusal(lambda: train_comp(train, {"data": 1, "model": "model_dir", "epochs": 3}))
