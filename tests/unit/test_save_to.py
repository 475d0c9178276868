"""`save_to`: what a call refuses before it reads or writes anything, and what rank 0 writes."""

import pytest
import torch
from trainings import classifying

import kale_dist as kd
from kale_dist.calls import request, save_to
from kale_dist.errors import JobFailedError, KaleDistWarning
from kale_dist.job.spec.volumes import of_containers, of_pods
from kale_dist.worker.training import model_file

pytestmark = pytest.mark.usefixtures("own_state")


def test_the_job_writes_the_weights_that_the_notebook_gets(tmp_path):
    target = tmp_path / "model.pt"
    target.write_bytes(b"of an earlier job")
    job = kd.distribute(*classifying(), number_of_processes=2, save_to=target)
    weights = job.result() and job.state_dict()
    saved = torch.load(target, weights_only=True)
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in saved)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert f"[0] The model was saved to {target}" in map(str, job.logs())
    target.unlink()
    with pytest.warns(KaleDistWarning, match="after this job had started"):
        job.retry().result()
    assert target.exists()


def test_a_relative_path_is_that_of_the_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kd.distribute(*classifying(), number_of_processes=1, save_to="model.pt").result()
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}


def test_a_place_that_cannot_be_written_fails_the_job_before_it_trains(tmp_path):
    def train_step(*_):
        print("trained")

    blocker = tmp_path / "file"
    blocker.write_text("")
    model, loader, criterion, optimizer = classifying()
    # What the rank sees may differ from what the call saw.
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "model.pt"
    started = request.checked

    def replaced(*given, **named):
        found = started(*given, **named)
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").symlink_to(blocker)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "checked", replaced)
        job = kd.distribute(model, loader, criterion, optimizer, train_step, number_of_processes=1, save_to=target)
    with pytest.raises(JobFailedError, match="The model cannot be saved to"):
        job.result()
    assert not any("trained" in line.text for line in job.logs())


def test_a_url_is_written_whole_under_its_name(tmp_path):
    url = f"file://{tmp_path}/new/model.pt"
    model_file.check(url)
    assert list((tmp_path / "new").iterdir()) == []
    model_file.save(url, {"weight": torch.ones(3)})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.pt"]
    assert torch.equal(torch.load(tmp_path / "new/model.pt", weights_only=True)["weight"], torch.ones(3))


@pytest.mark.parametrize(
    "value",
    [
        "", 3, "a\0b", "/no/such/folder/model.pt",
        "/tmp", "/tmp/", "pvc://claim/model.pt",
        "s4://bucket/model.pt", "memory://model.pt", "s3://",
        "https://user:word@host/model.pt", "https://host/model.pt?token=word",
        "s3://bucket", "hdfs+x y://a/b",
    ],
)  # fmt: skip
def test_wrong_places_are_refused_on_this_machine(value, refusal):
    before = len(kd.jobs())
    error = refusal(lambda: kd.distribute(*classifying(), number_of_processes=1, save_to=value))
    assert error.argument == "save_to"
    assert "word" not in str(error).replace("password", "")
    assert len(kd.jobs()) == before


@pytest.mark.parametrize(
    "value",
    [
        "model.pt", "/data/../model.pt", "/out/model.pt",
        "/scratch/model.pt", "/data/model.pt", "/models",
        "pvc://Claim/model.pt", "pvc://claim", "pvc://claim/",
        "pvc://claim/../model.pt", "file:///models/model.pt",
        "pvc://claim/folder/",
    ],
)  # fmt: skip
def test_wrong_places_are_refused_on_a_cluster(value, refusal):
    volumes = {"/data": "datasets:ro", "/models": "models", "/scratch": "emptydir://"}
    on = kd.Kubernetes(image="x", volumes=volumes)
    assert refusal(lambda: kd.render(*classifying(), on=on, save_to=value)).argument == "save_to"


def test_pods_see_a_claim_that_only_save_to_names():
    plan = kd.render(*classifying(), on=kd.Kubernetes(image="x"), save_to="pvc://models/net/model.pt")
    assert {"claimName": "models"} in [
        volume.get("persistentVolumeClaim") for volume in _pods(plan)[0]["spec"]["volumes"]
    ]
    for pod in _pods(plan):
        mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert save_to.MOUNT in mounts


def _pods(plan):
    import yaml

    resource = next(one for one in yaml.safe_load_all(str(plan)) if one["kind"] != "Secret")
    return [replica["template"] for replica in resource["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize(
    ("volumes", "value", "path"),
    [
        ({"/models": "models"}, "pvc://models/net/model.pt", "/models/net/model.pt"),
        ({"/models": "pvc://models/net"}, "pvc://models/net/model.pt", "/models/model.pt"),
        ({"/models": "pvc://models/net"}, "pvc://models/other/model.pt", f"{save_to.MOUNT}/other/model.pt"),
        ({"/models": "models:ro"}, "pvc://models/model.pt", f"{save_to.MOUNT}/model.pt"),
        ({"/models": "models"}, "/models/a/b.pt", "/models/a/b.pt"),
        ({"/models": "m:ro", "/models/own": "n"}, "/models/own/b.pt", "/models/own/b.pt"),
        ({}, "ftp://host/folder/model.pt", "ftp://host/folder/model.pt"),
    ],
)
def test_where_rank_0_writes_in_pods(volumes, value, path):
    target, mounted = save_to.find(value, of_pods(volumes), "kubernetes")
    assert target == path
    assert (save_to.MOUNT in [volume.mount_path for volume in mounted]) == path.startswith(save_to.MOUNT)


def test_a_container_keeps_what_a_folder_of_this_machine_covers(tmp_path, refusal):
    volumes = of_containers({"/models": str(tmp_path)})
    assert save_to.find("/models/model.pt", volumes, "docker") == ("/models/model.pt", volumes)
    assert refusal(lambda: save_to.find("/tmp/model.pt", volumes, "docker")).argument == "save_to"
