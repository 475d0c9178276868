"""Podman's socket, which answers as Docker's does: where podman is installed, and this user may start its service."""

import contextlib
import shutil
import subprocess
import time
import uuid

import flat
import pytest
from container_work import fails_on_1, hang, user_and_bytes, writes_where_it_must

from kale_dist import places
from kale_dist.errors import BackendError, JobCancelledError, JobFailedError
from kale_dist.image import engine as engines

pytestmark = pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")


@pytest.fixture(scope="module")
def podman(engine, plain_image, tmp_path_factory):
    """The URL of Podman's service, which has the image of the Docker engine."""
    folder = tmp_path_factory.mktemp("podman")
    url = f"unix://{folder}/podman.sock"
    if subprocess.run(["podman", "image", "exists", plain_image], check=False).returncode:
        with subprocess.Popen(["docker", "save", plain_image], stdout=subprocess.PIPE) as saved:
            subprocess.run(["podman", "load", "--quiet"], stdin=saved.stdout, check=True)
    service = subprocess.Popen(["podman", "system", "service", "--time=0", url])
    try:
        _wait_for(url)
        yield url
    finally:
        service.terminate()
        service.wait()


def _wait_for(url):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(BackendError), contextlib.closing(engines.connect(url)) as found:
            assert found.is_podman
            return
        time.sleep(0.1)
    pytest.fail("Podman's service does not answer")


@pytest.fixture
def on(podman, plain_image, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", podman)
    places.get("docker").close()
    yield {"on": "docker", "image": plain_image, "name": f"test-{uuid.uuid4().hex[:8]}"}
    places.get("docker").close()


def left_on(url, job):
    with contextlib.closing(engines.connect(url)) as found:
        return found.api.containers(all=True, filters={"label": f"kale-dist.job={job}"})


def test_ranks_meet_and_bytes_come_back(on, podman):
    weights = bytes(9_000_000)
    job = flat.launch(user_and_bytes, weights, 0.0, number_of_processes=2, **on)
    assert job.results(timeout=120) == [(0, weights)] * 2
    job.delete()
    assert left_on(podman, on["name"]) == []


def test_folders_and_limits(on, tmp_path):
    job = flat.launch(
        writes_where_it_must, "/data", number_of_processes=1, volumes={"/data": str(tmp_path)},
        environment={"GREETING": "x"}, resources={"memory_gib": 1, "shm_gib": 0.5}, **on,
    )  # fmt: skip
    assert job.result(timeout=120) == ("kale-dist", 0, "x", True)
    assert (tmp_path / "from-0").read_text() == "written"
    job.delete()


def test_failures_and_cancellations_are_told(on):
    job = flat.launch(fails_on_1, number_of_processes=2, **on)
    with pytest.raises(JobFailedError, match="no such column"):
        job.result(timeout=120)
    job.delete()
    job = flat.launch(hang, number_of_processes=1, **on)
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(timeout=60)
    job.delete()
