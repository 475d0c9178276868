"""Other people's trainers in containers: what they save before a cancel is on this machine, whole."""

import importlib.metadata
import time
import uuid

import pytest
import torch
from saving_trainers import fit, train

import kale_dist as kd

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("work", [train, fit])
def test_a_cancelled_training_goes_on_in_other_containers(image, tmp_path, monkeypatch, work):
    pytest.importorskip("transformers")
    monkeypatch.setenv("KALE_DIST_REGISTRY", f"{image.partition('/')[0]}/kale-dist-tests")
    packages = [f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "accelerate", "lightning")]
    tmp_path.chmod(0o777)
    on = kd.Docker(image=image, packages=packages, volumes={"/out": str(tmp_path)})
    options = {"number_of_processes": 2, "threads": 1}
    job = kd.launch(work, "/out/first", 0.1, name=f"test-{uuid.uuid4().hex[:8]}", on=on, **options)
    deadline = time.monotonic() + 200
    while not (job.status.replicas and job.status.replicas[0].progress and job.status.replicas[0].progress.step > 20):
        assert time.monotonic() < deadline, job.status
        time.sleep(0.1)
    job.cancel()
    assert job.exception(60) is not None
    assert any("before the ranks are ended" in line.text for line in job.logs())
    later = kd.launch(work, "/out/first", 0, name=f"test-{uuid.uuid4().hex[:8]}", on=on, **options)
    here = kd.launch(work, str(tmp_path / "undisturbed"), 0, **options)
    found, expected = later.result(120), here.result(120)
    assert all(map(torch.equal, found, expected)) if work is train else found == expected
    for one in (job, later, here):
        one.delete()
