"""The images that were made: listed, shown and removed, also by the command line."""

import json
import os
import re
import time

import bases
import pytest
from registries import registry_program
from resolving import DIGEST, MODE, Place, raw_manifest, use_own_folders, with_base

from kale_dist import records
from kale_dist.blobs import FolderStore
from kale_dist.cli import main
from kale_dist.errors import ImageError
from kale_dist.image import cache, catalog, for_job
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


def long_ago(place, tag):
    path = next((cache.folder() / "used").rglob(tag))
    os.utime(path, (1e9, 1e9))


def prune(place, *, unused_s=3600.0, unknown=False):
    with Registry(place.host) as registry:
        return catalog.prune(registry, place.repository, unused_s=unused_s, unknown=unknown, say=place.said.append)


def test_images_say_what_they_are_made_of(place):
    first, second = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "y"}))
    long_ago(place, first.tag)
    with Registry(place.host) as registry:
        bases.push(registry, place.repository, "not-ours", bases.plain())
        found = catalog.images(registry, place.repository)
        assert [made.tag for made in found] == [second.tag, first.tag]
        made = catalog.image(registry, place.repository, first.tag)
        with pytest.raises(ImageError, match="There is no image 'not-ours'"):
            catalog.image(registry, place.repository, "not-ours")
        assert catalog.images(registry, f"{place.team}/nothing") == ()
    assert (made.recipe, made.platform, made.last_use_s) == (MODE, "linux/amd64", 1e9)
    assert f"{place.registry}/kale-dist@{made.digest}" == first.reference
    assert re.fullmatch(rf"{re.escape(place.registry)}/base@{DIGEST}", made.base)
    assert made.size == sum(size for _, size in made.layers) > 0


def test_what_was_not_used_for_long_goes(place):
    old, new = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "y"}))
    long_ago(place, old.tag)
    pruned = prune(place)
    assert ([made.tag for made in pruned.deleted], pruned.kept) == ([old.tag], ())
    assert place.tags() == (new.tag,)
    assert place.resolve(MODE).reference == old.reference


def test_what_others_may_use_stays_unless_that_is_wished(place, monkeypatch, tmp_path):
    tag = place.resolve(MODE).tag
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    pruned = prune(place)
    assert (pruned.deleted, pruned.kept[0][0].tag) == ((), tag)
    assert "no call on this machine has used it" in pruned.kept[0][1]
    assert [made.tag for made in prune(place, unknown=True).deleted] == [tag]


def test_what_a_job_or_another_tag_needs_stays(place):
    job, tagged = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "y"}))
    for tag in (job.tag, tagged.tag):
        long_ago(place, tag)
    spec = JobSpec(
        name="job", label="x", kind="call", snapshot="0", image=job.reference, topology=Topology(number_of_processes=1)
    )
    records.create("job", b"0" * 32)
    records.write(
        records.Record(ref="kubernetes://a/job", name="job", created=0, spec=spec, kernel_pid=1, detach=False)
    )
    with Registry(place.host) as registry:
        registry.put_manifest(place.repository, "release", *raw_manifest(place, tagged.tag))
    reasons = {made.tag: reason for made, reason in prune(place).kept}
    assert reasons[job.tag] == "the job kubernetes://a/job was submitted with it"
    assert reasons[tagged.tag] == "it is also tagged release"


def test_a_registry_that_does_not_delete_is_named(registry_folder, monkeypatch):
    monkeypatch.setenv("REGISTRY_STORAGE_DELETE_ENABLED", "false")
    with registry_program(registry_folder / "keeps") as host:
        place = Place(host)
        with Registry(host) as registry:
            bases.push(registry, f"{place.team}/base", "1", bases.plain())
        long_ago(place, place.resolve(MODE).tag)
        with pytest.raises(ImageError, match=r"does not let images be deleted \(HTTP 405\).*DELETE_ENABLED=true"):
            prune(place)


def test_what_builds_have_kept_is_removed_by_age(place):
    place.resolve(MODE)
    kept = [path for path in cache.folder().rglob("*") if path.is_file()]
    inventories = [path for path in kept if "layers" in path.parts]
    assert inventories
    for name, age_s in (("building-killed", 1e9), ("building-now", 0.0)):
        (cache.folder() / name / "root").mkdir(parents=True)
        os.utime(cache.folder() / name, (time.time() - age_s,) * 2)
    assert cache.clean(3600.0) == 0
    assert [path.name for path in cache.folder().glob("building-*")] == ["building-now"]
    for path in inventories:
        os.utime(path, (1e9, 1e9))
    assert cache.clean(3600.0) > 0
    assert not any(path.exists() for path in inventories)
    assert cache.last_use(f"{place.registry}/kale-dist", place.tags()[0]) is not None


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


def test_the_command_line_makes_lists_shows_and_prunes(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    monkeypatch.setenv("KALE_DIST_REGISTRY_PULL", f"nodes.example.com/{place.team}")
    monkeypatch.setenv("KALE_DIST_IMAGE", place.base)
    (tmp_path / "x.txt").write_text("one")
    build = ["image", "build", "--file", f"/opt/x.txt={tmp_path}/x.txt", "--env", "MODE=a=b"]
    assert main(build) == 0
    made = capsys.readouterr()
    assert re.fullmatch(rf"nodes\.example\.com/{place.repository}@{DIGEST}\n", made.out)
    tag = re.search(r"Made: (kd-\w+)", made.err)[1]
    assert main(build) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (made.out, f"It was there: {tag}\n")
    assert main(["image", "list"]) == 0
    assert re.search(
        rf"{tag} +0 MiB +20\d\d-.* {re.escape(place.registry)}/base@\w+ +/opt/x\.txt", capsys.readouterr().out
    )
    assert main(["image", "show", tag]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("MODE=a=b", "/opt/x.txt", "linux/amd64", "in 4 layers", "sha256:"))
    assert main(["image", "show", tag, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    digest = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert Recipe.from_json(told["recipe"]).files == (ImageFile(path="/opt/x.txt", digest=digest),)
    assert main(["image", "prune", "--days", "0"]) == 0
    assert f"{tag} deleted" in capsys.readouterr().out
    assert main(["image", "list"]) == 0
    assert capsys.readouterr().out == f"There are no images in {place.registry}/kale-dist.\n"


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
        (["prune", "--days", "-1"], "--days: -1.0"),
        (["prune", "--days", "nan"], "--days: nan"),
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
