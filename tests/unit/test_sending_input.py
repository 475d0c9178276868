"""Who sends a snapshot to a job's first pod."""

import pytest

pytest.importorskip("kubernetes")

from kale_dist.job import records
from kale_dist.job.backend import JobRef, PlacedJob
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.places.kubernetes import kubernetes_place as places
from kale_dist.wire.blobs import FolderStore


@pytest.mark.parametrize("source", ["stream", "input"])
def test_a_machine_that_only_attached_sends_what_it_has(monkeypatch, source):
    store = FolderStore(records.blobs_dir())
    ours, sent = store.put([b"ours"]), []

    class Head:
        def __init__(self, *_):
            pass

        def missing(self):
            return ["ab" * 32, ours]

        def upload(self, store, digests, on_progress):
            sent.extend(digests)

    monkeypatch.setattr(places, "HeadClient", Head)
    spec = JobSpec(name="x", label="x", kind="call", snapshot="none", topology=Topology(number_of_processes=1))
    handle = PlacedJob(
        ref=JobRef("kubernetes", "team/x"), object="x", spec=spec, place=(("source", source),)
    )  # fmt: skip
    # What it lacks the submitter sends: a failure here would end the job.
    places.KubernetesPlace().send_input(handle, b"k" * 32, lambda _: None)
    assert sent == ([ours] if source == "stream" else [])
