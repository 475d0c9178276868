"""A job on the cluster whose image is made for it, without a daemon, and pinned by its digest."""

import uuid

import flat
import pytest
import rank_work
from on_cluster import IMAGE


@pytest.fixture
def repository(kubeconfig, monkeypatch):
    """Where images of this test go; what the configuration says."""
    name = f"{IMAGE.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("KALE_DIST_REGISTRY", name)
    monkeypatch.setenv("KALE_DIST_IMAGE", IMAGE)
    return name


def test_packages_are_in_the_pods(repository, namespace):
    arguments = {
        "number_of_processes": 2, "on": "kubernetes", "packages": ["einops==0.8.0"],
        "cluster": {"namespace": namespace}, "resources": {"cpu": 0.1, "memory_gib": 1},
    }  # fmt: skip
    plan = str(flat.render(rank_work.einops_version, **arguments))
    assert f"# The image is made first: {IMAGE} with einops==0.8.0." in plan
    job = flat.launch(rank_work.einops_version, **arguments)
    try:
        assert job.spec.image.startswith(f"{repository}/kale-dist@sha256:")
        assert job.results(150) == ["0.8.0"] * 2
    finally:
        job.delete()
