"""A job saves its model, and its checkpoints, where other files are: none of them is removed."""

import functools
import os
import pathlib

import made_models
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import kale_dist as kd
from kale_dist.errors import ConfigError, JobFailedError
from kale_dist.wire.files import umask

in_parts = functools.partial(made_models.train, "local", 1, strategy="fsdp", threads=1)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder):
    (folder / "notes").mkdir(parents=True)
    (folder / "thesis-weights.pt").write_bytes(b"years")
    (folder / "notes" / "a.txt").write_text("kept")
    return folder


def of_another_program(folder):
    """A folder of parts that a script of the user's has written."""
    state_dict_saver.save({"model.weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("others", [fill, of_another_program])
def test_a_folder_that_no_job_has_made_is_refused_at_the_call(tmp_path, others):
    folder = others(tmp_path / "models")
    before = tree(folder)
    with pytest.raises(ConfigError, match="no job has made") as caught:
        in_parts(1, save_to=folder)
    assert caught.value.argument == "save_to"
    inside = kd.Docker(image="busybox", volumes={"/data": str(tmp_path)})
    with pytest.raises(ConfigError, match="no job has made"):
        made_models.train(inside, 2, 1, strategy="fsdp", save_to="/data/models")
    assert tree(folder) == before


def test_what_has_come_there_after_the_call_fails_the_job_before_it_trains(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    monkeypatch.setattr("kale_dist.worker.training.parts.foreign", lambda _: "")
    fill(folder)
    before = tree(folder)
    job = in_parts(1, save_to=folder)
    with pytest.raises(JobFailedError, match=r"cannot be saved to .*no job has made: notes, thesis-weights.pt"):
        job.result()
    assert tree(folder) == before
    assert not [row for row in job.metrics if row["source"] == "train"]
    assert not (tmp_path / "models.checkpoints").exists()


def test_what_a_job_has_saved_is_replaced_and_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "net").mkdir()
    first = in_parts(1, save_to=tmp_path / "net")
    before = first.result() and tree(tmp_path / "net")
    in_parts(2, save_to=tmp_path / "net").result()
    assert tree(tmp_path / "net").keys() == before.keys()
    assert tree(tmp_path / "net") != before
    assert {path.name for path in tmp_path.iterdir()} == {"net", "net.checkpoints"}


def test_a_job_removes_the_checkpoints_that_it_wrote_and_no_others(tmp_path):
    first = in_parts(3, save_to=tmp_path / "net", checkpoint_every=1)
    first.result()
    checkpoints = tmp_path / "net.checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "3"]
    kept = tree(checkpoints)
    in_parts(3, save_to=tmp_path / "net", checkpoint_every=1).result()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "3", "5", "6"]
    assert kept.items() <= tree(checkpoints).items()
    more = in_parts(4, save_to=tmp_path / "net", resume_from=first)
    more.result()
    assert [row["epoch"] for row in more.metrics if row["source"] == "train"] == [4]
    # The one before the last is whole, and the folder alone is enough to continue from it.
    again = in_parts(3, save_to=tmp_path / "net", resume_from=pathlib.Path(checkpoints / "2"))
    again.result()
    assert [row["epoch"] for row in again.metrics if row["source"] == "train"] == [3]


@pytest.mark.parametrize("planted", ["link to a folder", "folder of links"])
def test_what_others_plant_where_a_job_writes_leads_to_no_file_of_yours(tmp_path, planted):
    thesis = fill(tmp_path / "thesis")
    for name in ("__0_0.distcp", ".metadata"):
        (thesis / name).write_bytes(b"years")
    before = tree(thesis)
    team = tmp_path / "team"
    team.mkdir()
    if planted == "link to a folder":
        (team / ".net.part").symlink_to(thesis)
    else:
        (team / ".net.part").mkdir()
        for name in ("__0_0.distcp", ".metadata"):
            (team / ".net.part" / name).symlink_to(thesis / name)
    job = in_parts(1, save_to=team / "net")
    if planted == "link to a folder":
        with pytest.raises(JobFailedError, match=r"\.net\.part cannot be made \(File exists\)"):
            job.result()
        assert not job.metrics
    else:
        # It was removed, as what a job has left behind that was killed.
        job.result()
        assert not (team / "net").is_symlink()
    assert tree(thesis) == before


@pytest.mark.parametrize("planted", ["huge number", "huge owner", "fifo"])
def test_what_others_plant_beside_a_job_s_folder_costs_nothing(tmp_path, planted):
    checkpoints = tmp_path / "net.checkpoints"
    if planted == "huge number":
        (checkpoints / ("9" * 255)).mkdir(parents=True)
    elif planted == "huge owner":
        (checkpoints / "7").mkdir(parents=True)
        with (checkpoints / "7" / "owner").open("wb") as file:
            file.truncate(1 << 30)
    else:
        (tmp_path / "net").mkdir()
        os.mkfifo(tmp_path / "net" / ".metadata")
        with pytest.raises(ConfigError, match=r"no job has made: \.metadata .*there is no such file"):
            in_parts(1, save_to=tmp_path / "net", checkpoint_every=1)
        return
    tmp_path.chmod(0o2755)
    in_parts(1, save_to=tmp_path / "net", checkpoint_every=1).result()
    last = max(checkpoints.iterdir(), key=lambda one: one.stat().st_mtime)
    assert last.stat().st_mode & 0o777 == 0o777 & ~umask()
    # It stays a folder of its group's.
    assert (tmp_path / "net").stat().st_mode & 0o7777 == 0o2777 & ~umask()
