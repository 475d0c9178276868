"""Training from files on a claim that the notebook does not mount: a folder of it, read-only, in two pods; the model is saved there."""

import functools
import re

import pytest
import torch
from data_work import Files, Shards, train_step, write
from made_models import assert_learned_as_one_process, continue_in_parts, make, train
from on_cluster import make_claim, pods_in
from test_stores import FileShare
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.errors import KaleDistWarning, ResultUnavailableError

pytestmark = pytest.mark.usefixtures("jobs_end")


@pytest.mark.nightly
def test_a_folder_of_a_claim_is_trained_on_by_several_pods(namespace):
    make_claim(namespace, "datasets")
    kd.launch(
        write, "/claim/numbers", 64, number_of_processes=1, on=pods_in(namespace, volumes={"/claim": "datasets"})
    ).result(180)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with pytest.warns(KaleDistWarning, match="cannot be built here"):
        loader = DataLoader(kd.dataset(functools.partial(Files, "/data")), batch_size=8, shuffle=True)
    cluster = pods_in(namespace, volumes={"/data": "pvc://datasets/numbers:ro"})
    job = kd.distribute(
        model, loader, torch.nn.MSELoss(), optimizer, train_step, epochs=10, number_of_processes=2, on=cluster,
        save_to="pvc://datasets/trained/model.pt",
    )  # fmt: skip
    assert job.wait(240).state == "succeeded", job.status.reason
    assert any("train: 64 samples, 2 ranks x 32" in line.text for line in job.logs())
    assert torch.allclose(model.weight, torch.ones(1, 3), atol=0.1)
    saved = kd.launch(
        torch.load, "/claim/trained/model.pt", weights_only=True, number_of_processes=1,
        on=pods_in(namespace, volumes={"/claim": "datasets"}),
    ).result(180)  # fmt: skip
    assert torch.equal(saved["weight"], model.weight)


@pytest.mark.nightly
def test_each_pod_reads_its_own_shards_and_the_model_is_saved_behind_a_url(namespace, tmp_path):
    folder = tmp_path / "team"
    folder.mkdir()
    for shard in range(4):
        x = torch.randn(16, 3)
        torch.save(list(zip(x, x.sum(1, keepdim=True), strict=True)), folder / f"{shard}.pt")
    share = FileShare(tmp_path)
    try:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        loader = DataLoader(Shards(f"{share.url}/*.pt"), batch_size=8)
        job = kd.distribute(
            model, loader, torch.nn.MSELoss(), optimizer, epochs=10, shard=False, number_of_processes=2,
            on=pods_in(namespace), save_to=f"{share.url}/trained/model.pt",
        )  # fmt: skip
        assert job.wait(240).state == "succeeded", job.status.reason
    finally:
        share.close()
    read = {re.sub(r" read ", " ", str(line)) for line in job.logs() if line.text.startswith("read ")}
    assert read == {"[0] 0.pt", "[0] 2.pt", "[1] 1.pt", "[1] 3.pt"}
    assert torch.allclose(model.weight, torch.ones(1, 3), atol=0.1)
    saved = torch.load(folder / "trained" / "model.pt", weights_only=True)
    assert torch.equal(saved["weight"], model.weight)


@pytest.mark.nightly
def test_a_model_that_pods_make_is_kept_in_parts_on_a_claim(namespace):
    make_claim(namespace, "models")
    place = pods_in(namespace)
    _, more = continue_in_parts(place, "pvc://models/net")
    with pytest.raises(ResultUnavailableError) as caught:
        print(more.model)
    assert more.result().parts in str(caught.value)
    # Pods that hold the whole model read the parts, and send it back as it is.
    place = pods_in(namespace, volumes={"/models": "models"})
    read = train(place, 1, 1, model=kd.pretrained(make, "/models/net"), strategy="ddp", lr=0.0)
    assert read.wait(240).state == "succeeded", read.status.reason
    assert_learned_as_one_process(read.model)
