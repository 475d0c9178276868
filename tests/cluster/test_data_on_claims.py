"""Training from files on a claim that the notebook does not mount: a folder of it, read-only, in two pods; the model is saved there."""

import functools

import pytest
import torch
from data_work import Files, train_step, write
from on_cluster import make_claim, pods_in
from torch.utils.data import DataLoader

import kale_dist as kd
from kale_dist.errors import KaleDistWarning

pytestmark = pytest.mark.usefixtures("jobs_end")


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
