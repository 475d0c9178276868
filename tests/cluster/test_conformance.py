"""The Kubernetes backend keeps what every backend keeps."""

import itertools

import pytest
from fake_backend import BackendConformance
from rank_work import exit_with_3, fail, hang, succeed

from kale_dist.job import records
from kale_dist.job.spec.job_spec import ClusterOptions, JobSpec, Resources, Topology
from kale_dist.places.following.followed_backend import FollowedBackend
from kale_dist.places.kubernetes.kubernetes_place import KubernetesPlace
from kale_dist.snapshot.capture import capture
from kale_dist.wire.blobs import FolderStore

# What other files of this folder prove of jobs with the notebook's own calls, too.
pytestmark = pytest.mark.nightly
FUNCTIONS = {"succeed": succeed, "fail": fail, "exit": exit_with_3, "hang": hang}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_backend(namespace):
    backend = FollowedBackend(KubernetesPlace())
    yield backend
    backend.close()


class TestKubernetesBackend(BackendConformance):
    timeout_s = 120.0

    @pytest.fixture
    def backend(self, shared_backend, monkeypatch, namespace):
        monkeypatch.setenv("KALE_DIST_NAMESPACE", namespace)
        return shared_backend

    @pytest.fixture
    def spec_for(self, namespace, plain_image):
        def make(behaviour):
            store = FolderStore(records.blobs_dir())
            snapshot = capture(FUNCTIONS[behaviour], (), {}, store=store, label=behaviour)
            return JobSpec(
                name=f"conformance-{behaviour}-{next(_numbers)}", label=behaviour, kind="call",
                snapshot=snapshot.digest, blobs=snapshot.blobs, snapshot_bytes=snapshot.size_bytes,
                topology=Topology(number_of_processes=2), image=plain_image,
                resources=Resources(cpu=0.1, memory_gib=1.0), cluster=ClusterOptions(namespace=namespace),
            )  # fmt: skip

        return make
