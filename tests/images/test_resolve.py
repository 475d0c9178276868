"""From a recipe to a digest: found or made, in real registries and the real engine, and by the command line."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import uuid

import bases
import pytest
from registries import PASSWORD, USER, registry_program

from kale_dist import records
from kale_dist.blobs import FolderStore
from kale_dist.cli import main
from kale_dist.errors import BackendError, ConfigError, ImageError
from kale_dist.image import cache, catalog, media
from kale_dist.image.auth import Credentials
from kale_dist.image.registry import Registry
from kale_dist.image.resolve import look_up, resolve, resolve_in_engine, standard_recipe
from kale_dist.image.settle import keep_files
from kale_dist.recipe import ImageFile, Recipe
from kale_dist.spec import JobSpec, Topology

DIGEST = r"sha256:[0-9a-f]{64}"
MODE = Recipe(environment={"MODE": "x"})


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DOCKER_CONFIG", os.environ.get("DOCKER_CONFIG", str(tmp_path / "docker")))


class Place:
    """A part of a registry with a base in it, and what was said while images were resolved for it."""

    def __init__(self, host):
        self.host, self.team = host, f"resolve-{uuid.uuid4().hex[:8]}"
        self.registry, self.repository = f"{host}/{self.team}", f"{self.team}/kale-dist"
        self.base = f"{self.registry}/base:1"
        self.said = []

    def resolve(self, recipe, **options):
        self.said = []
        given = {"base": self.base, "registry": self.registry, "python": "3.11"} | options
        return resolve(recipe, say=self.said.append, **given)

    def tags(self):
        with Registry(self.host) as registry:
            return registry.tags(self.repository)


def raw_manifest(place, tag):
    """A manifest's bytes and media type."""
    request = urllib.request.Request(f"http://{place.host}/v2/{place.repository}/manifests/{tag}")
    request.add_header("Accept", ", ".join(media.ACCEPTED))
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read(), answer.headers["Content-Type"]


@pytest.fixture
def place(own_registry):
    made = Place(own_registry)
    with Registry(own_registry) as registry:
        bases.push(registry, f"{made.team}/base", "1", bases.plain())
    return made


# -- found or made ---------------------------------------------------------------------------------------------------


def test_an_image_is_made_once_and_found_then(place, monkeypatch, tmp_path):
    first = place.resolve(MODE)
    assert re.fullmatch(rf"{re.escape(place.registry)}/kale-dist@{DIGEST}", first.reference)
    assert (first.was_built, place.tags()) == (True, (first.tag,))
    assert place.said[0].startswith(
        f"Making the image {place.registry}/kale-dist:{first.tag} on {place.registry}/base@sha"
    )
    # From another machine, too.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    again = place.resolve(MODE)
    assert (again.reference, again.was_built, place.said) == (first.reference, False, [])


def test_it_is_made_again_if_that_is_wished(place):
    first, again = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "x"}, rebuild=True))
    assert again.was_built
    assert (again.tag, again.reference) == (first.tag, first.reference)


def test_what_would_be_made_is_named_by_its_tag_and_nothing_is_made(place):
    pull = f"nodes.example.com/{place.team}"
    before = look_up(MODE, base=place.base, registry=place.registry, pull=pull, python="3.11")
    assert before.reference == f"{pull}/kale-dist:{before.tag}"
    assert place.tags() == ()
    made = place.resolve(MODE, pull=pull)
    after = look_up(MODE, base=place.base, registry=place.registry, pull=pull, python="3.11")
    assert (after.reference, after.was_built, after.tag) == (made.reference, False, before.tag)


def test_a_base_that_was_pushed_again_makes_another_image(place):
    first = place.resolve(MODE)
    with Registry(place.host) as registry:
        bases.push(registry, f"{place.team}/base", "1", bases.plain(torch="2.7.0"))
    assert place.resolve(MODE).tag != first.tag


def test_the_recipes_own_base_beats_the_other(place):
    found = place.resolve(Recipe(base=place.base, environment={"MODE": "x"}), base="gone.example.com/x")
    assert found.tag == place.resolve(MODE).tag


def test_nodes_pull_by_their_own_name_and_bases_of_that_name_are_found(place):
    pull = f"nodes.example.com:5000/{place.team}"
    found = place.resolve(MODE, pull=pull, base=f"{pull}/base:1")
    assert re.fullmatch(rf"{re.escape(pull)}/kale-dist@{DIGEST}", found.reference)
    mirrored = place.resolve(
        MODE, pull="nodes.example.com:5000/mirror/of", base="nodes.example.com:5000/mirror/of/base:1"
    )
    assert mirrored.tag == found.tag
    same_host = place.resolve(MODE, pull="nodes.example.com/x", base=f"nodes.example.com/{place.team}/base:1")
    assert same_host.tag == found.tag


def test_files_and_environment_are_in_the_image(place, tmp_path):
    (tmp_path / "x.txt").write_text("one")
    recipe = keep_files(Recipe(files={"/opt/x.txt": tmp_path / "x.txt"}), FolderStore(records.blobs_dir()))
    reference = place.resolve(recipe).reference
    with Registry(place.host) as registry:
        image = registry.image(place.repository, reference.partition("@")[2])
        assert bases.read_layer(registry, place.repository, image) == {"/opt/x.txt": b"one"}


def test_a_base_with_another_python_is_refused(place):
    with pytest.raises(ImageError, match=r"has Python 3\.11\.9 .* this notebook has 3\.12"):
        place.resolve(MODE, python="3.12")
    assert place.tags() == ()


# -- two at once -----------------------------------------------------------------------------------------------------

TWO = """
import sys
from kale_dist.image.resolve import resolve
from kale_dist.recipe import Recipe
recipe = Recipe(environment={"MODE": "two"})
found = resolve(recipe, base=sys.argv[1], registry=sys.argv[2], python="3.11", say=lambda line: None)
print(found.reference, found.was_built)
"""


def test_two_kernels_make_it_once(place):
    command = [sys.executable, "-c", TWO, place.base, place.registry]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].split() for process in both]
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["False", "True"]


def test_who_waits_is_told_so_and_takes_what_the_other_has_made(place):
    tag = place.resolve(MODE).tag
    with Registry(place.host) as registry:
        body, kind = raw_manifest(place, tag)
        registry.delete(place.repository, registry.head(place.repository, tag).digest)
        found = []
        with cache.alone(tag, lambda: None):
            thread = threading.Thread(target=lambda: found.append(place.resolve(MODE)))
            thread.start()
            while not place.said:
                time.sleep(0.01)
            digest = registry.put_manifest(place.repository, tag, body, kind)
        thread.join()
    assert place.said == [
        f"Another process on this machine makes the image {place.registry}/kale-dist:{tag}; waiting for it."
    ]
    assert (found[0].was_built, found[0].reference.partition("@")[2]) == (False, digest)


def test_a_registry_without_tls_can_be_named_so(place):
    found = place.resolve(MODE, registry=f"http://{place.registry}")
    assert found.reference == place.resolve(MODE).reference
    with Registry(place.host) as registry:
        bases.push(registry, f"{place.team}/base", "2", bases.plain(torch="2.7.0"))
    other = f"http://127.0.0.1:{place.host.partition(':')[2]}/{place.team}"
    assert place.resolve(MODE, registry=other, base=f"{other.removeprefix('http://')}/base:2").was_built


# -- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "argument", "words"),
    [
        ({"registry": ""}, "registry", ["KALE_DIST_REGISTRY", "by image="]),
        ({"base": ""}, "base", ["names no image that it is built on", "Recipe(base="]),
        ({"base": "Not An Image"}, "image", ["upper-case"]),
        ({"registry": "Localhost:5000/A B"}, "registry", ["registry.example.com/team"]),
        ({"pull": "x y"}, "registry_pull", ["registry.example.com/team"]),
    ],
)
def test_what_is_missing_is_said(place, options, argument, words):
    with pytest.raises(ConfigError) as caught:
        place.resolve(MODE, **options)
    assert caught.value.argument == argument
    for word in words:
        assert word in str(caught.value)


def test_a_base_that_is_not_there_is_named(place):
    with pytest.raises(ImageError, match=r"base image .*/gone:1 is not in the registry localhost:\d+\. Correct"):
        place.resolve(MODE, base=f"{place.registry}/gone:1")


def test_credentials_are_those_of_docker_of_pull_secrets_or_of_the_call(password_registry, monkeypatch, tmp_path):
    place, known = Place(password_registry), Credentials(username=USER, password=PASSWORD)
    with Registry(place.host, credentials=known) as registry:
        bases.push(registry, f"{place.team}/base", "1", bases.plain())
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with pytest.raises(ImageError, match="docker login"):
        place.resolve(MODE)
    secret = json.dumps({"auths": {place.host: {"username": USER, "password": PASSWORD}}})
    first = place.resolve(MODE, pull_secret_jsons=(secret,))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(secret)
    assert place.resolve(MODE).reference == first.reference
    (tmp_path / "docker" / "config.json").unlink()
    assert place.resolve(MODE, credentials=known).reference == first.reference


def test_an_image_for_those_who_have_none_names_this_torch():
    recipe = standard_recipe("3.11", "2.13.0+cpu")
    assert (recipe.base, recipe.packages) == ("docker.io/library/python:3.11-slim-bookworm", ("torch==2.13.0",))
    assert recipe.index_urls == ("https://download.pytorch.org/whl/cpu", "https://pypi.org/simple")
    assert standard_recipe("3.12", "2.13.0").index_urls == ()


# -- in Docker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_base():
    """A base of one file that only the engine has; skips where there is no engine."""
    docker = pytest.importorskip("docker")
    from kale_dist import engine as engines

    try:
        engine = engines.connect()
    except BackendError as error:
        if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
            pytest.fail(f"no engine answers, and KALE_DIST_REQUIRE_CLUSTER is set: {error}")
        pytest.skip(f"no engine answers: {error}")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    name = f"kd-test-{uuid.uuid4().hex[:8]}"
    with contextlib.closing(engine):
        before = {image.id for image in engine.client.images.list(all=True)}
        engine.api.import_image_from_data(stream.getvalue(), repository=name, tag="1")
        yield f"{name}:1"
        for image in engine.client.images.list(all=True):
            ours = name in str(image.attrs.get("RepoTags")) or name in str(image.labels)
            if image.id not in before and ours:
                with contextlib.suppress(docker.errors.APIError):
                    engine.client.images.remove(image.id, force=True)


def test_docker_builds_on_what_only_its_engine_has_and_pushes(engine_base, registry_host):
    place = Place(registry_host)
    recipe = Recipe(environment={"MODE": "x"}, builder="docker")
    first = place.resolve(recipe, base=engine_base)
    again = place.resolve(recipe, base=engine_base)
    assert (first.was_built, again.was_built, again.reference) == (True, False, first.reference)
    with Registry(place.host) as registry:
        made = catalog.image(registry, place.repository, first.tag)
        assert made.recipe == recipe
        assert made.base == f"docker.io/library/{engine_base}"


def test_without_a_registry_docker_keeps_it(engine_base):
    said = []
    recipe = Recipe(environment={"MODE": uuid.uuid4().hex})
    first = resolve_in_engine(recipe, base=engine_base, say=said.append)
    again = resolve_in_engine(recipe, base=engine_base, say=said.append)
    assert re.fullmatch(DIGEST, first.reference)
    assert (first.was_built, again.was_built, again.reference) == (True, False, first.reference)
    with pytest.raises(ConfigError, match=r'registry: none is configured.*Leave out builder="layers"'):
        resolve_in_engine(Recipe(environment={"A": "1"}, builder="layers"), base=engine_base, say=said.append)


def test_debian_packages_without_docker_say_what_would_help(place, no_docker):
    with pytest.raises(
        ImageError, match=r"Debian packages \(git\) need a builder .* Docker.*pip install .*Or name a base"
    ):
        place.resolve(Recipe(apt=["git"]))


def test_debian_packages_without_an_engine_say_what_would_help(place, monkeypatch, tmp_path):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    with pytest.raises(ImageError, match=r"Debian packages \(git\) need a builder .*gone\.sock.* Or name a base"):
        place.resolve(Recipe(apt=["git"]))
    with pytest.raises(BackendError, match=r"gone\.sock"):
        place.resolve(Recipe(environment={"A": "1"}, builder="docker"))


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
    assert cache.clean(3600.0) == 0
    for path in inventories:
        os.utime(path, (1e9, 1e9))
    assert cache.clean(3600.0) > 0
    assert not any(path.exists() for path in inventories)
    assert cache.last_use(f"{place.registry}/kale-dist", place.tags()[0]) is not None


# -- the command line ------------------------------------------------------------------------------------------------


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
