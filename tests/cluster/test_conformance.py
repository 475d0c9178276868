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

    # What other files of this folder prove of jobs with the notebook's own calls, too.
    @pytest.mark.nightly
    def test_a_job_goes_from_submit_to_success(self, backend, spec_for):
        super().test_a_job_goes_from_submit_to_success(backend, spec_for)

    @pytest.mark.nightly
    def test_logs_hold_every_rank_and_end_with_the_job(self, backend, spec_for):
        super().test_logs_hold_every_rank_and_end_with_the_job(backend, spec_for)

    @pytest.mark.nightly
    def test_cancelling_twice_is_fine_and_after_the_end_too(self, backend, spec_for):
        super().test_cancelling_twice_is_fine_and_after_the_end_too(backend, spec_for)

    @pytest.mark.nightly
    def test_a_name_is_taken_until_its_job_is_deleted(self, backend, spec_for):
        super().test_a_name_is_taken_until_its_job_is_deleted(backend, spec_for)

    @pytest.mark.nightly
    def test_jobs_are_listed_oldest_first(self, backend, spec_for):
        super().test_jobs_are_listed_oldest_first(backend, spec_for)
