"""The Kubernetes backend keeps what every backend keeps."""

import itertools

import pytest
from fake_backend import BackendConformance
from on_cluster import IMAGE
from rank_work import exit_with_3, fail, hang, succeed

from kale_dist import records
from kale_dist.backends.kubernetes.place import KubernetesPlace
from kale_dist.blobs import FolderStore
from kale_dist.following.backend import FollowedBackend
from kale_dist.snapshot.capture import capture
from kale_dist.spec import ClusterOptions, JobSpec, Resources, Topology

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
    def spec_for(self, namespace):
        def make(behaviour):
            store = FolderStore(records.blobs_dir())
            snapshot = capture(FUNCTIONS[behaviour], (), {}, store=store, label=behaviour).snapshot
            return JobSpec(
                name=f"conformance-{behaviour}-{next(_numbers)}", label=behaviour, kind="call",
                snapshot=snapshot.digest, blobs=snapshot.blobs, snapshot_bytes=snapshot.size_bytes,
                topology=Topology(number_of_processes=2), image=IMAGE,
                resources=Resources(cpu=0.1, memory_gib=1.0), cluster=ClusterOptions(namespace=namespace),
            )  # fmt: skip

        return make
