"""Jobs whose image is made for them: in a registry without a daemon, in the engine where there is no registry."""

import os
import uuid

import flat
import pytest
from container_work import einops_version

import kale_dist as kd
from kale_dist.errors import ConfigError, ImageError, JobNotFoundError

PACKAGE = "einops==0.8.0"


@pytest.fixture
def settings(monkeypatch, image):
    """An image that lacks the package is configured, and no registry."""
    monkeypatch.setenv("KALE_DIST_IMAGE", image)
    monkeypatch.delenv("KALE_DIST_REGISTRY", raising=False)
    return monkeypatch


def run(**arguments):
    job = flat.launch(einops_version, number_of_processes=2, on="docker", **arguments)
    try:
        return job.spec.image, job.results(120)
    finally:
        job.delete()


@pytest.mark.nightly
def test_an_image_is_made_once_in_the_registry_and_pinned_by_its_digest(settings, image, capfd):
    repository = f"{image.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}"
    settings.setenv("KALE_DIST_REGISTRY", repository)
    first, results = run(packages=[PACKAGE])
    assert results == ["0.8.0"] * 2
    assert first.startswith(f"{repository}/kale-dist@sha256:")
    assert "Making the image" in capfd.readouterr().err
    again, results = run(packages=["einops == 0.8.0"])
    assert (again, results) == (first, ["0.8.0"] * 2)
    assert "Making the image" not in capfd.readouterr().err


def test_without_a_registry_it_is_built_in_the_engine(settings):
    made, results = run(packages=[PACKAGE])
    assert made.startswith("sha256:")
    assert results == ["0.8.0"] * 2


@pytest.mark.nightly
def test_a_job_that_is_submitted_again_has_the_image_that_was_made(settings, image, capfd):
    settings.setenv("KALE_DIST_REGISTRY", f"{image.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}")
    first = flat.launch(einops_version, number_of_processes=1, on="docker", packages=[PACKAGE])
    first.result(120)
    capfd.readouterr()
    again = first.retry()
    try:
        assert (again.result(120), again.spec.image) == ("0.8.0", first.spec.image)
        assert "Making the image" not in capfd.readouterr().err
    finally:
        first.delete()
        again.delete()


def test_a_plan_makes_nothing_and_says_what_would_be_made(settings):
    text = str(flat.render(einops_version, number_of_processes=2, on="docker", packages=[PACKAGE]))
    assert f"The image is made first: {os.environ['KALE_DIST_IMAGE']} with {PACKAGE}" in text


def test_a_package_that_does_not_exist_leaves_no_job(settings, image):
    settings.setenv("KALE_DIST_REGISTRY", f"{image.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}")
    name = f"test-{uuid.uuid4().hex[:8]}"
    with pytest.raises(ImageError, match="kale-dist-no-such-package"):
        run(packages=["kale-dist-no-such-package==1"], name=name)
    with pytest.raises(JobNotFoundError):
        kd.attach(f"docker://{name}")
    assert f"docker://{name}" not in [job.ref for job in kd.jobs("docker")]


def test_without_any_image_the_error_says_both_ways(settings):
    settings.delenv("KALE_DIST_IMAGE")
    with pytest.raises(ConfigError, match=r"KALE_DIST_IMAGE.*KALE_DIST_REGISTRY"):
        run()
