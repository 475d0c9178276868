"""Images that a job cannot run in, on the real cluster: each is one clear sentence, and nothing waits."""

import contextlib
import json
import os
import sys
import uuid

import flat
import pytest
from on_cluster import IMAGE, call_in, run_kubectl
from rank_work import summed

from kale_dist.contract import FailureCause, StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

SLIM = "python:3.11-slim-bookworm"

# No other Python is to be had here: this one says that it is.
ANOTHER = """
import collections, sys
Version = collections.namedtuple("version_info", "major minor micro releaselevel serial")
sys.version_info = Version({version}, 1, "final", 0)
"""


@pytest.fixture
def on(namespace):
    return call_in(namespace)


@pytest.fixture
def slim(kubeconfig):
    """An image with Python and nothing else, in the registry."""
    docker = pytest.importorskip("docker")
    if not os.environ.get("DOCKER_HOST"):
        pytest.skip("needs a Docker engine (DOCKER_HOST) that has " + SLIM)
    name = f"{IMAGE.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}"
    with contextlib.closing(docker.from_env()) as engine:
        engine.images.get(SLIM).tag(name, "1")
        try:
            said = engine.images.push(name, "1")
            assert '"error"' not in said, said
            yield f"{name}:1"
        finally:
            engine.images.remove(f"{name}:1")


def end_of(job):
    status = job.wait(150)
    job.delete()
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED), status
    return status.reason


def test_an_image_without_torch(on, slim):
    reason = end_of(flat.launch(summed, 1, **{**on, "image": slim}))
    assert reason == "The image has no torch. Give one that has, with image="


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "3, 12",
            "The image does not fit the notebook: python is {ours} in the notebook and 3.12 in the image. Give an image ",
        ),
        (
            "3, 9",
            f"the Python of the image {IMAGE} is 3.9.1, and 3.11 or later is needed. Name an image with the notebook's ",
        ),
    ],
)
def test_an_image_with_another_python(on, namespace, version, said):
    name = f"python-{version.replace(', ', '-')}"
    made = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name},
        "data": {"sitecustomize.py": ANOTHER.format(version=version)},
    }  # fmt: skip
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    job = flat.launch(
        summed, 1, **on, volumes={"/another": f"configmap://{name}"}, environment={"PYTHONPATH": "/another"}
    )
    reason = end_of(job)
    assert said.format(ours="{}.{}".format(*sys.version_info)) in reason
    assert "image=" in reason
