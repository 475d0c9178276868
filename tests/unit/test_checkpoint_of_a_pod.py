"""The checkpoint that a head begins from: one in the store, or the one that the notebook has given it."""

from __future__ import annotations

import itertools
import types

import pytest

from kale_dist.wire import InputFiles, JobFiles, Offer
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.pod import transfers

_numbers = itertools.count()


@pytest.fixture
def head(tmp_path):
    def make(name="job", key=b"k", given=None):
        """A head's pod: of an object, with or without a checkpoint that the notebook has sent."""
        own = tmp_path / f"pod-{next(_numbers)}"
        for folder in (own / "input", own / "job", tmp_path / "store"):
            folder.mkdir(parents=True, exist_ok=True)
        if given is not None:
            (own / "input" / InputFiles.CHECKPOINT).write_text(given)
        order = types.SimpleNamespace(
            store=str(tmp_path / "store"), job="job", object=name, checkpoint="", resume="", blobs=()
        )
        place = types.SimpleNamespace(input=own / "input", pod=0)
        store = FolderStore(own / "blobs")
        return types.SimpleNamespace(order=order, place=place, files=JobFiles(own / "job"), key=key, store=store)

    return make


def write(pod, text):
    pod.files.checkpoint.write_text(text)
    transfers.put_checkpoint_into_store(pod)


def begins_from(pod):
    transfers.bring_checkpoint(pod)
    return pod.files.checkpoint.read_text() if pod.files.checkpoint.exists() else None


def test_a_head_that_is_made_again_takes_what_it_has_left_itself(head):
    write(head(given="epoch 1"), "epoch 2")
    assert begins_from(head(given="epoch 1")) == "epoch 2"


def test_a_new_object_takes_what_the_notebook_has_fetched_since(head):
    write(head(), "epoch 2")
    assert begins_from(head("job-2", given="epoch 3")) == "epoch 3"
    assert begins_from(head("job-2")) == "epoch 2"


def test_another_job_of_the_name_takes_nothing(head):
    write(head(), "epoch 2")
    assert begins_from(head(key=b"other")) is None
    assert begins_from(head(key=b"other", given="its own")) == "its own"


def test_one_that_came_with_the_snapshot_goes_to_the_head_alone(head):
    pod = head()
    pod.order.store, pod.order.checkpoint = "", pod.store.put([b"epoch 4"])
    pod.order.blobs = ("a" * 64, pod.order.checkpoint)
    assert begins_from(pod) == "epoch 4"
    pod.store.delete(pod.order.checkpoint)
    pod.order.offer = Offer()
    assert transfers.missing(pod) == list(pod.order.blobs)
    pod.place.pod = 1
    assert transfers.missing(pod) == ["a" * 64]
