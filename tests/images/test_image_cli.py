"""`kale-dist image`, and how long the files of a recipe are kept."""

import re

import bases
import pytest
from resolving import DIGEST, use_own_folders, with_base

from kale_dist.cli import main
from kale_dist.image import base_image, for_job
from kale_dist.image.for_job import keep_files
from kale_dist.job import records
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.job.spec.recipe import Recipe
from kale_dist.wire.blobs import FolderStore


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def place(own_registry):
    return with_base(own_registry)


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_wants_a_base(place, capsys, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    monkeypatch.delenv("KALE_DIST_IMAGE", raising=False)
    assert main(["image", "build", "--env", "MODE=x"]) == 2
    assert "--base: there is no base image" in capsys.readouterr().err


def test_progress_is_a_bar_from_time_to_time(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(for_job.time, "monotonic", lambda: now[0])
    progress = for_job.ProgressBar()
    for now[0], done in ((1.0, 1 << 20), (3.0, 3 << 20), (4.0, 4 << 20), (6.0, 12 << 20)):
        progress(done, 12 << 20)
    assert capsys.readouterr().err.splitlines() == [
        "  [######..................] 3.0 of 12.0 MiB",
        "  [########################] 12.0 of 12.0 MiB",
    ]


def test_the_command_line_makes_an_image_once(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    monkeypatch.setenv("KALE_DIST_REGISTRY_PULL", f"nodes.example.com/{place.team}")
    monkeypatch.setenv("KALE_DIST_IMAGE", place.base)
    (tmp_path / "x.txt").write_text("one")
    monkeypatch.setattr(base_image, "ask_engine", lambda *_: bases.answer(bases.LIKE_THIS))
    build = ["image", "build", "--file", f"/opt/x.txt={tmp_path}/x.txt", "--env", "MODE=a=b"]
    assert main(build) == 0
    made = capsys.readouterr()
    assert re.fullmatch(rf"nodes\.example\.com/{place.repository}@{DIGEST}\n", made.out)
    tag = re.search(r"Made: (kd-\w+)", made.err)[1]
    assert main(build) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (made.out, f"It exists already: {tag}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "--package", "einops"], "registry: none is configured"),
        (["build"], "nothing goes on top of the base"),
        (["build", "--env", "A"], "--env: 'A' has no '='"),
        (["build", "--file", "/opt/x=gone"], "files: 'gone' is not a file of this machine"),
        (["build", "--package", "-e ."], "it has an option of pip"),
        (["build", "--requirements", "gone.txt"], "gone.txt cannot be read"),
        (["build", "--env=A=b", "--base=x", "--registry", "https://x"], "--registry: "),
    ],
)  # fmt: skip
def test_a_wrong_word_on_the_command_line_is_named(words, said, capsys):
    assert main(["image", *words]) == 2
    assert said in capsys.readouterr().err


# -- a job's files ---------------------------------------------------------------------------------------------------


def test_the_files_of_a_recipe_stay_as_long_as_its_job(tmp_path):
    (tmp_path / "x.txt").write_text("kept")
    store = FolderStore(records.blobs_dir())
    recipe = keep_files(Recipe(files={"/x": tmp_path / "x.txt"}), store)
    topology = Topology(number_of_processes=1)
    spec = JobSpec(name="kept", label="x", kind="call", snapshot="0", recipe=recipe, topology=topology)
    for name in ("kept", "other"):
        records.create(name, b"0" * 32)
        record = records.Record(ref=f"local://{name}", name=name, created=0, spec=spec, kernel_pid=1, detach=False)
        if name == "kept":
            records.write(record)
    records.delete("other")
    assert store.exists(recipe.files[0].digest)
    records.delete("kept")
    assert not store.exists(recipe.files[0].digest)
