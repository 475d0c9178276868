"""Other people's trainers in pods that are lost: they save before, and end as if nothing had been lost."""

import importlib.metadata
import os

import pytest
import torch
from on_cluster import make_claim, need_the_python_of_the_image, pods_in, run_kubectl, wait_for
from saving_trainers import fit, train

import kale_dist as kd

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def on(namespace):
    pytest.importorskip("transformers")
    need_the_python_of_the_image()
    make_claim(namespace, "out")
    packages = [f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "accelerate", "lightning")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KALE_DIST_REGISTRY", f"{os.environ['REGISTRY']}/kale-dist-tests")
        yield pods_in(namespace, packages=packages, volumes={"/out": "out"})


def lose(job, namespace, pod, steps):
    """Delete a pod once the training has taken so many steps."""

    def are_taken(status):
        progress = status.replicas[0].progress if status.replicas else None
        return progress is not None and max(0, progress.epoch - 1) * (progress.steps or 0) + progress.step >= steps

    wait_for(job, are_taken)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-{pod}", "--wait=false")


def text(job):
    return "\n".join(map(str, job.logs()))


@pytest.mark.parametrize("pod", ["worker-0", "master-0"])
def test_a_trainer_of_transformers_ends_with_the_weights_of_an_undisturbed_run(on, namespace, tmp_path, pod):
    job = kd.launch(train, f"/out/{pod}", 0.1, number_of_processes=2, max_restarts=1, threads=1, on=on)
    lose(job, namespace, pod, 30)
    found = job.result(400)
    assert "Saved /out/" in text(job)
    assert text(job).count("begins at checkpoint-") == 2, text(job)
    here = kd.launch(train, str(tmp_path), 0, number_of_processes=2, threads=1)
    assert all(map(torch.equal, found, here.result(120)))
    job.delete()
    here.delete()


def test_lightning_goes_on_at_its_step(on, namespace):
    job = kd.launch(fit, "/out/lightning", 0.1, number_of_processes=2, max_restarts=1, threads=1, on=on)
    lose(job, namespace, "worker-0", 70)
    assert job.result(400) == 150
    assert "Saved /out/lightning/last.ckpt" in text(job)
    assert "Lightning resumes within an epoch" in text(job)
    job.delete()
