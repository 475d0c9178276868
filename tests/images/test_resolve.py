"""From a recipe to a digest: found or made, in real registries and the real engine."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import uuid

import bases
import pytest
from registries import PASSWORD, USER
from resolving import DIGEST, MODE, Place, raw_manifest, use_own_folders, with_base

from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import cache
from kale_dist.image.auth import Credentials
from kale_dist.image.for_job import keep_files
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.image.resolve import resolve, resolve_in_engine, standard_recipe
from kale_dist.job import records
from kale_dist.job.spec.recipe import Recipe
from kale_dist.wire.blobs import FolderStore


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def place(own_registry):
    return with_base(own_registry)


# -- found or made ---------------------------------------------------------------------------------------------------


def test_an_image_is_made_once_and_found_then(place, monkeypatch, tmp_path):
    first = place.resolve(MODE)
    assert re.fullmatch(rf"{re.escape(place.registry)}/kale-dist@{DIGEST}", first.reference)
    assert (first.was_built, place.tags()) == (True, (first.tag,))
    assert place.said[0].startswith(
        f"Making the image {place.registry}/kale-dist:{first.tag} on {place.registry}/base@sha"
    )
    again = place.resolve(MODE)
    assert (again.reference, again.was_built, place.said) == (first.reference, False, [])
    # From another machine, too, where tags are shared.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    again = place.resolve(MODE, shared=True)
    assert (again.reference, again.was_built, place.said) == (first.reference, False, [])


def test_it_is_made_again_if_that_is_wished(place):
    first, again = place.resolve(MODE), place.resolve(Recipe(environment={"MODE": "x"}, rebuild=True))
    assert again.was_built
    assert (again.tag, again.reference) == (first.tag, first.reference)


def test_a_base_that_was_pushed_again_makes_another_image(place):
    first = place.resolve(MODE)
    with Registry(place.host) as registry:
        bases.push(registry, f"{place.team}/base", "1", files={"other": b""})
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
import bases
from kale_dist.image.resolve import resolve
from kale_dist.job.spec.recipe import Recipe
recipe = Recipe(environment={"MODE": "two"})
ask = lambda image: bases.answer()
found = resolve(recipe, base=sys.argv[1], registry=sys.argv[2], python="3.11", ask=ask, log=lambda line: None)
print(found.reference, found.was_built)
"""
HERE = {"PYTHONPATH": os.pathsep.join(["tests/images", os.environ.get("PYTHONPATH", "")])}


def test_two_kernels_make_it_once(place):
    command = [sys.executable, "-c", TWO, place.base, place.registry]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | HERE) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].split() for process in both]
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["False", "True"]


def test_two_machines_that_make_it_at_once_end_with_the_same(place, tmp_path):
    """Nothing holds one of them off: both may make it, and what they make is the same to the byte."""
    command = [sys.executable, "-c", TWO, place.base, place.registry]
    homes = [{"XDG_CACHE_HOME": str(tmp_path / one)} for one in ("here", "there")]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | HERE | home) for home in homes
    ]
    answers = [process.communicate(timeout=60)[0].split() for process in both]
    assert answers[0][0] == answers[1][0] == place.resolve(Recipe(environment={"MODE": "two"})).reference
    assert "True" in {answer[1] for answer in answers}


def test_who_waits_is_told_so_and_takes_what_the_other_has_made(place):
    tag = place.resolve(MODE).tag
    other = with_base(place.host)
    with Registry(place.host) as registry:
        body, kind = raw_manifest(place, tag)
        found = []
        with cache.alone(Reference.parse(f"{other.registry}/kale-dist:{tag}"), print):
            thread = threading.Thread(target=lambda: found.append(other.resolve(MODE)))
            thread.start()
            while not other.said:
                time.sleep(0.01)
            for blob in (json.loads(body)["config"], *json.loads(body)["layers"]):
                registry.mount(other.repository, blob["digest"], place.repository)
            digest = registry.put_manifest(other.repository, tag, body, kind)
        thread.join()
    assert other.said == [
        f"Another process on this machine makes the image {other.registry}/kale-dist:{tag}; waiting for it."
    ]
    assert (found[0].was_built, found[0].reference.partition("@")[2]) == (False, digest)


def test_a_registry_without_tls_can_be_named_so(place):
    found = place.resolve(MODE, registry=f"http://{place.registry}")
    assert found.reference == place.resolve(MODE).reference
    with Registry(place.host) as registry:
        bases.push(registry, f"{place.team}/base", "2", files={"other": b""})
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


def test_credentials_are_those_of_docker_or_of_pull_secrets(password_registry, monkeypatch, tmp_path):
    place, known = Place(password_registry), Credentials(username=USER, password=PASSWORD)
    with Registry(place.host, credentials=known) as registry:
        bases.push(registry, f"{place.team}/base", "1")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with pytest.raises(ImageError, match="docker login"):
        place.resolve(MODE)
    secret = json.dumps({"auths": {place.host: {"username": USER, "password": PASSWORD}}})
    first = place.resolve(MODE, pull_secret_jsons=(secret,))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(secret)
    assert place.resolve(MODE).reference == first.reference


INDEX = "https://download.pytorch.org/whl"


@pytest.mark.parametrize(
    ("given", "torch", "cuda", "packages", "urls"),
    [
        ({}, "2.13.0", False, ("torch==2.13.0",), ()),
        ({}, "2.13.0+cpu", False, ("torch==2.13.0",), ("https://pypi.org/simple", f"{INDEX}/cpu")),
        ({}, "2.13.0+cpu", True, ("torch==2.13.0",), ()),
        ({}, "2.13.0+cu126", True, ("torch==2.13.0",), ("https://pypi.org/simple", f"{INDEX}/cu126")),
        ({"packages": ("torch>=2",)}, "2.13.0+cpu", False, ("torch>=2",), ()),
        (
            {"packages": ("torchmetrics", "a"), "index_urls": ("https://x/s",)}, "2.13.0+cpu", False,
            ("a", "torch==2.13.0", "torchmetrics"), ("https://x/s", f"{INDEX}/cpu"),
        ),
    ],
)  # fmt: skip
def test_who_has_no_image_gets_one_with_this_torch(given, torch, cuda, packages, urls):
    recipe = standard_recipe(Recipe(**given), python="3.11", torch=torch, cuda=cuda)
    assert recipe.base == "docker.io/library/python:3.11-slim-bookworm"
    assert (recipe.packages, recipe.index_urls) == (packages, urls)


# -- in Docker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_base(engine, image):
    """An image with Python and torch that only the engine has, by a name of its own."""
    name = f"kd-test-{uuid.uuid4().hex[:8]}"
    container = engine.api.create_container(image, ["true"], labels={"of": name})
    engine.api.commit(container["Id"], repository=name, tag="1")
    engine.api.remove_container(container["Id"])
    yield f"{name}:1"
    assert engine.api.containers(all=True, filters={"ancestor": f"{name}:1"}) == []
    for made in engine.api.images(all=True):
        for tag in made["RepoTags"] or ():
            if tag.startswith((name, "kale-dist:")) and name in str(made["Labels"]):
                engine.api.remove_image(tag, force=True)


@pytest.mark.nightly
def test_without_a_registry_the_engine_keeps_the_image(engine, engine_base, tmp_path):
    (tmp_path / "x.txt").write_text("one")
    said = []
    files = {"/bin/kd-x.txt": tmp_path / "x.txt"}
    recipe = Recipe(environment={"MODE": uuid.uuid4().hex}, packages=("einops==0.8.0",), files=files)
    recipe = keep_files(recipe, FolderStore(records.blobs_dir()))
    first = resolve_in_engine(recipe, base=engine_base, python="3.11", log=said.append)
    again = resolve_in_engine(recipe, base=engine_base, python="3.11", log=said.append)
    assert re.fullmatch(DIGEST, first.reference)
    assert (first.was_built, again.was_built, again.reference) == (True, False, first.reference)
    program = (
        "import einops, os, torch; print(einops.__version__, os.environ['MODE'], open('/usr/bin/kd-x.txt').read())"
    )
    told = engine.client.containers.run(first.reference, ["python3", "-c", program], remove=True)
    assert told.decode().split() == ["0.8.0", recipe.environment[0][1], "one"]


@pytest.fixture
def debian_base(engine, engine_base):
    """The same with a played apt-get, a command and a user without rights."""
    script = b"""#!/bin/sh
[ "$1" = update ] && exit 0
case "$*" in *absent*) echo "E: Unable to locate package absent"; exit 100;; esac
echo "$(id -u) $DEBIAN_FRONTEND $*" > /etc/installed
"""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        header = tarfile.TarInfo("usr/bin/apt-get")
        header.size, header.mode = len(script), 0o755
        packed.addfile(header, io.BytesIO(script))
    container = engine.api.create_container(engine_base, ["true"])["Id"]
    engine.api.put_archive(container, "/", archive.getvalue())
    engine.api.commit(container, repository=engine_base[:-2], tag="debian", conf={"Cmd": ["work"], "User": "1000"})
    engine.api.remove_container(container)
    yield f"{engine_base[:-2]}:debian"
    engine.api.remove_image(f"{engine_base[:-2]}:debian", force=True)


@pytest.mark.nightly
def test_debian_packages_are_installed_by_root_and_the_bases_settings_stay(engine, debian_base):
    said = []
    recipe = Recipe(apt=("git", "libsndfile1=1.2"), environment=(("MODE", uuid.uuid4().hex),))
    made = resolve_in_engine(recipe, base=debian_base, python="3.11", log=said.append)
    told = engine.client.containers.run(made.reference, ["cat", "/etc/installed"], remove=True).decode()
    assert told == "0 noninteractive install --yes --no-install-recommends git libsndfile1=1.2\n"
    config = engine.api.inspect_image(made.reference)["Config"]
    assert (config["Cmd"], config["Entrypoint"] or [], config["User"]) == (["work"], [], "1000")
    assert f"MODE={recipe.environment[0][1]}" in config["Env"]
    assert not any("DEBIAN" in line for line in config["Env"])
    with pytest.raises(ImageError, match=r"apt-get's last lines:\n  E: Unable to locate package absent"):
        resolve_in_engine(Recipe(apt=("absent",)), base=debian_base, python="3.11", log=said.append)


@pytest.mark.nightly
def test_an_image_with_debian_packages_is_pushed(debian_base, engine, registry_host):
    repository = f"{registry_host}/test-{uuid.uuid4().hex[:8]}"
    engine.api.tag(debian_base, f"{repository}/base", "1")
    recipe = Recipe(apt=("git",), environment=(("MODE", uuid.uuid4().hex),))
    try:
        made = resolve(recipe, base=f"{repository}/base:1", registry=repository, python="3.11", log=lambda _: None)
        again = resolve(recipe, base=f"{repository}/base:1", registry=repository, python="3.11", log=lambda _: None)
        assert re.fullmatch(rf"{re.escape(repository)}/kale-dist@{DIGEST}", made.reference)
        assert (made.was_built, again.was_built, again.reference) == (True, False, made.reference)
    finally:
        engine.api.remove_image(f"{repository}/base:1", force=True)
        engine.api.remove_image(f"{repository}/kale-dist:{made.tag}", force=True)


@pytest.mark.usefixtures("no_docker")
def test_debian_packages_without_docker_say_what_would_help(place):
    with pytest.raises(
        ImageError, match=r"Debian packages \(git\) are installed by .* Docker.*pip install .*Or name a base"
    ):
        place.resolve(Recipe(apt=["git"]))


def test_debian_packages_without_an_engine_say_what_would_help(place, monkeypatch, tmp_path):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    with pytest.raises(ImageError, match=r"Debian packages \(git\) are installed by .*gone\.sock.* Or name a base"):
        place.resolve(Recipe(apt=["git"]))
