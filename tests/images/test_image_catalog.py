"""The images that were made: listed and shown, also by the command line."""

import json
import re

import bases
import pytest
from resolving import DIGEST, MODE, use_own_folders, with_base

from kale_dist import records
from kale_dist.blobs import FolderStore
from kale_dist.cli import main
from kale_dist.errors import ImageError
from kale_dist.image import catalog, for_job
from kale_dist.image.registry import Registry
from kale_dist.image.settle import keep_files
from kale_dist.recipe import ImageFile, Recipe
from kale_dist.spec import JobSpec, Topology


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def place(own_registry):
    return with_base(own_registry)


# -- what there is ---------------------------------------------------------------------------------------------------


def test_images_say_what_they_are_made_of(place):
    first, second = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "y"}))
    with Registry(place.host) as registry:
        bases.push(registry, place.repository, "not-ours")
        found = catalog.images(registry, place.repository)
        assert [made.tag for made in found] == sorted([second.tag, first.tag])
        made = catalog.image(registry, place.repository, first.tag)
        with pytest.raises(ImageError, match="There is no image 'not-ours'"):
            catalog.image(registry, place.repository, "not-ours")
        assert catalog.images(registry, f"{place.team}/nothing") == ()
    assert (made.recipe, made.platform) == (MODE, "linux/amd64")
    assert f"{place.registry}/kale-dist@{made.digest}" == first.reference
    assert re.fullmatch(rf"{re.escape(place.registry)}/base@{DIGEST}", made.base)
    assert made.size == sum(size for _, size in made.layers) > 0


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_wants_a_base(place, capsys, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    monkeypatch.delenv("KALE_DIST_IMAGE", raising=False)
    assert main(["image", "build", "--env", "MODE=x"]) == 2
    assert "--base: nothing is named" in capsys.readouterr().err


def test_progress_is_a_bar_from_time_to_time(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(for_job.time, "monotonic", lambda: now[0])
    progress = for_job.Progress()
    for now[0], done in ((1.0, 1 << 20), (3.0, 3 << 20), (4.0, 4 << 20), (6.0, 12 << 20)):
        progress(done, 12 << 20)
    now[0] = 9.0
    progress(2, 4)
    assert capsys.readouterr().err.splitlines() == [
        "  [######..................] 3.0 of 12.0 MiB",
        "  [########################] 12.0 of 12.0 MiB",
        "  [############............] step 2 of 4",
    ]


def test_the_command_line_makes_lists_and_shows(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    monkeypatch.setenv("KALE_DIST_REGISTRY_PULL", f"nodes.example.com/{place.team}")
    monkeypatch.setenv("KALE_DIST_IMAGE", place.base)
    (tmp_path / "x.txt").write_text("one")
    (tmp_path / "base.txt").write_bytes(bases.answer())
    build = [
        "image",
        "build",
        "--base-packages",
        str(tmp_path / "base.txt"),
        "--file",
        f"/opt/x.txt={tmp_path}/x.txt",
        "--env",
        "MODE=a=b",
    ]
    assert main(build) == 0
    made = capsys.readouterr()
    assert re.fullmatch(rf"nodes\.example\.com/{place.repository}@{DIGEST}\n", made.out)
    tag = re.search(r"Made: (kd-\w+)", made.err)[1]
    assert main(build) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (made.out, f"It was there: {tag}\n")
    assert main(["image", "list"]) == 0
    assert re.search(rf"{tag} +0 MiB +{re.escape(place.registry)}/base@\w+ +/opt/x\.txt", capsys.readouterr().out)
    assert main(["image", "show", tag]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("MODE=a=b", "/opt/x.txt", "linux/amd64", "in 2 layers", "sha256:"))
    assert main(["image", "show", tag, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    digest = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert Recipe.from_json(told["recipe"]).files == (ImageFile(path="/opt/x.txt", digest=digest),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "registry: none is configured"),
        (["show", "kd-0"], "registry: none is configured"),
        (["build", "--package", "einops"], "registry: none is configured"),
        (["build"], "nothing goes on top of the base"),
        (["build", "--env", "A"], "--env: 'A' has no '='"),
        (["build", "--file", "/opt/x=gone"], "files: 'gone' is not a file of this machine"),
        (["build", "--package", "-e ."], "'-e .' is an option of pip"),
        (["build", "--requirements", "gone.txt"], "gone.txt cannot be read"),
        (["build", "--apt", "git", "--builder", "layers"], 'builder="docker"'),
        (["list", "--registry", "https://x"], "--registry: "),
        (["build", "--env=A=b", "--base=x", "--registry=x.y/z", "--base-packages=gone.txt"], "--base-packages: gone.txt cannot be read"),
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
