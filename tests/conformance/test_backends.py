"""Every backend keeps the same promises: the public suite, run on each."""

import itertools
import os

import pytest
from fake_backend import BackendConformance, FakeBackend

import kale_dist
from kale_dist.job import records
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.places.local import LocalBackend
from kale_dist.snapshot.capture import capture
from kale_dist.wire import FailureCause, RankStateName, StateName
from kale_dist.wire.blobs import FolderStore

_numbers = itertools.count()


def succeed():
    print(f"rank {kale_dist.context().rank} of 2")


def fail():
    if kale_dist.context().rank == 1:
        raise ValueError("boom")


def exit_with_3():
    if kale_dist.context().rank == 1:
        os._exit(3)


def hang():
    import time

    print("ready", flush=True)
    time.sleep(600)


FUNCTIONS = {"succeed": succeed, "fail": fail, "exit": exit_with_3, "hang": hang}


def fake_succeed(run):
    for rank in range(2):
        run.line(rank, f"rank {rank} of 2")


def fake_fail(run):
    run.raises(1, ValueError("boom"))


def fake_exit(run):
    for attempt in range(run.spec.policy.max_restarts + 1):
        run.event("rank", rank=1, state=RankStateName.FAILED, exit_code=3, attempt=attempt)
    ended = {"state": StateName.FAILED, "reason": "Rank 1 ended with 3", "cause": FailureCause.DIED}
    run.event("state", **ended, attempt=attempt)


def fake_hang(run):
    run.line(0, "ready")
    run.cancelled.wait(60)


def spec_of(behaviour, snapshot="00" * 32, blobs=()):
    return JobSpec(
        name=f"conformance-{behaviour}-{next(_numbers)}", label=behaviour, kind="call", snapshot=snapshot, blobs=blobs,
        topology=Topology(number_of_processes=2),
    )  # fmt: skip


class TestFakeBackend(BackendConformance):
    @pytest.fixture
    def backend(self):
        scripts = {"succeed": fake_succeed, "fail": fake_fail, "exit": fake_exit, "hang": fake_hang}
        return FakeBackend(scripts=scripts)

    @pytest.fixture
    def spec_for(self):
        return spec_of


@pytest.fixture(scope="module")
def local_backend():
    backend = LocalBackend()
    yield backend
    for ref in backend.list():
        backend.delete(ref)
    backend.close()


class TestLocalBackend(BackendConformance):
    @pytest.fixture
    def backend(self, local_backend):
        return local_backend

    @pytest.fixture
    def spec_for(self):
        def make(behaviour):
            captured = capture(FUNCTIONS[behaviour], (), {}, store=FolderStore(records.blobs_dir()), label=behaviour)
            return spec_of(behaviour, captured.digest, captured.blobs)

        return make
