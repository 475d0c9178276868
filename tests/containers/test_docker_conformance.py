"""The Docker backend keeps what every backend keeps."""

import uuid

import pytest
from container_work import exit_with_3, fail, hang, succeed
from fake_backend import BackendConformance

from kale_dist.job import records
from kale_dist.job.spec.job_spec import JobSpec, Resources, Topology
from kale_dist.places.docker.docker_place import DockerPlace
from kale_dist.places.following.followed_backend import FollowedBackend
from kale_dist.snapshot.capture import capture
from kale_dist.wire.blobs import FolderStore

FUNCTIONS = {"succeed": succeed, "fail": fail, "exit": exit_with_3, "hang": hang}
PREFIX = f"test-{uuid.uuid4().hex[:6]}"


@pytest.fixture(scope="module")
def docker_backend(engine):
    backend = FollowedBackend(DockerPlace())
    yield backend
    # Of this run alone: others may test on the same engine.
    for ref in backend.list():
        if ref.name.startswith(PREFIX):
            backend.delete(ref)
    backend.close()


class TestDockerBackend(BackendConformance):
    timeout_s = 120.0

    @pytest.fixture
    def backend(self, docker_backend):
        return docker_backend

    @pytest.fixture
    def spec_for(self, plain_image):
        def make(behaviour):
            store = FolderStore(records.blobs_dir())
            snapshot = capture(FUNCTIONS[behaviour], (), {}, store=store, label=behaviour)
            return JobSpec(
                name=f"{PREFIX}-{behaviour}-{uuid.uuid4().hex[:6]}", label=behaviour, kind="call",
                snapshot=snapshot.digest, blobs=snapshot.blobs, snapshot_bytes=snapshot.size_bytes,
                topology=Topology(number_of_processes=2, processes_per_pod=2), image=plain_image, resources=Resources(memory_gib=1.0),
            )  # fmt: skip

        return make
