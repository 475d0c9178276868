"""Recipes built in the real engine by BuildKit."""

import base64
import contextlib
import io
import os
import pathlib
import random
import re
import signal
import subprocess
import tarfile
import threading
import time
import urllib.request
import uuid

import pytest
from docker_parts import PLAYED, gateway_of, make_wheel, remove_with_children, serving
from registries import PASSWORD, USER

from kale_dist.blobs import FolderStore
from kale_dist.errors import BackendError, BackendUnavailableError, ConfigError, ImageError
from kale_dist.image.auth import Credentials
from kale_dist.recipe import ImageFile, Recipe

docker = pytest.importorskip("docker")

from kale_dist import engine as engines  # noqa: E402 - needs docker
from kale_dist.image import dockerfile  # noqa: E402 - needs docker

PYTHON = "python:3.11-slim-bookworm"


def _lacking(what):
    if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
        pytest.fail(f"{what}, and KALE_DIST_REQUIRE_CLUSTER is set")
    pytest.skip(what)


@pytest.fixture(scope="module")
def engine():
    """A connection to the engine, which has the base image; skips where there is none."""
    try:
        found = engines.connect()
    except BackendUnavailableError as error:
        _lacking(f"no engine answers: {error}")
    with contextlib.closing(found):
        try:
            found.client.images.get(PYTHON)
        except docker.errors.ImageNotFound:
            _lacking(f"the engine has no {PYTHON}")
        yield found


@pytest.fixture(autouse=True)
def buildkit():
    """Each test needs it."""
    if dockerfile.find() is None:
        _lacking("docker's command line has no BuildKit")


@pytest.fixture(scope="module")
def tags(engine, registry_host):
    """A function that gives names for images, which are removed from the engine in the end."""
    made = []

    def name(host=registry_host):
        made.append(f"{host}/test-{uuid.uuid4().hex[:8]}/image:1")
        return made[-1]

    yield name
    # Those that others are built on were made first.
    for tag in reversed(made):
        remove_with_children(engine, tag)


@pytest.fixture(scope="module")
def played(engine, tags):
    """A base whose `python3 -m pip install` does what the name of the package says. It runs as user 1234.

    Another run of the tests on the same engine has another one, and its cache.
    """
    script = base64.b64encode(f"{PLAYED}# {uuid.uuid4().hex}\n".encode()).decode()
    text = f"FROM {PYTHON}\nRUN mkdir /played && echo {script} | base64 -d > /played/python3 && chmod a+x /played/python3\n"
    text += "ENV PATH=/played:$PATH\nUSER 1234\n"
    tag = tags()
    engine.client.images.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True)
    return tag


@pytest.fixture(scope="module")
def own_python(engine, tags):
    """A Python that only this run of the tests builds on."""
    tag = tags()
    text = f"FROM {PYTHON}\nLABEL of={tag}\n"
    engine.client.images.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True)
    return tag


@pytest.fixture(scope="module")
def tiny(engine, tags):
    """A base of one small file, which nothing can be run in."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    tag = tags()
    repository, _, name = tag.rpartition(":")
    engine.api.import_image_from_data(stream.getvalue(), repository=repository, tag=name)
    return tag


@pytest.fixture
def index(engine, tmp_path, monkeypatch):
    """A package index that only this machine's pip settings know, with a password; gives the requests it saw."""
    folder = tmp_path / "simple"
    folder.mkdir()
    for name, version, *requires in (
        ("small_thing", "1.0"),
        ("small_thing", "2.0"),
        ("wants_first", "1.0", "small-thing==1.0"),
        ("wants_other_torch", "1.0", "torch==9.9"),
        ("torch", "9.8"),
        ("torch", "9.9"),
    ):
        (folder / name.replace("_", "-")).mkdir(exist_ok=True)
        make_wheel(folder / name.replace("_", "-"), name, version, *requires)
    seen = []
    gateway = gateway_of(engine)
    with serving(tmp_path, gateway, seen) as port:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{gateway}:{port}/simple")
        monkeypatch.setenv("PIP_TRUSTED_HOST", gateway)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        yield seen


def make(recipe, base, tag, tmp_path, lines=None, **options):
    lines = [] if lines is None else lines
    options = {"labels": {}, "say": lines.append} | options
    return dockerfile.build(recipe, base=base, tag=tag, blobs_dir=tmp_path, **options)


def run(tag, *command):
    ended = subprocess.run(["docker", "run", "--rm", tag, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def digest_in_registry(tag):
    host, _, rest = tag.partition("/")
    repository, _, name = rest.rpartition(":")
    accepted = {
        "Accept": "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"
    }
    request = urllib.request.Request(f"http://{host}/v2/{repository}/manifests/{name}", headers=accepted, method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Docker-Content-Digest"]


def test_a_recipe_becomes_an_image_in_the_registry(engine, index, tags, tmp_path):
    path = '/opt/a folder/it\'s $HOME \\ "here" é.sh'
    value = "a \"b\" 'c' $HOME \\ é"
    blob = FolderStore(tmp_path).put([b"#!/bin/sh\necho it runs\n"])
    recipe = Recipe(
        packages=("small-thing==1.0",),
        apt=("tree",),
        files=(ImageFile(path=path, digest=blob, executable=True),),
        environment=(("GREETING", value),),
        rebuild=True,
    )
    tag, lines = tags(), []
    labels = {"dev.kale-dist.recipe": '{"packages": ["small-thing==1.0"], "price": "$1"}'}
    built = make(recipe, PYTHON, tag, tmp_path, lines, labels=labels)
    assert built.digest == digest_in_registry(tag)
    assert engine.client.images.get(tag).id == built.image_id
    assert engine.client.images.get(tag).labels == labels
    assert run(tag, path) == "it runs\n"
    assert run(tag, "printenv", "GREETING") == f"{value}\n"
    assert run(tag, "python3", "-c", "import small_thing; print(small_thing.VERSION)") == "1.0\n"
    assert run(tag, "tree", "--version").startswith("tree v")
    # Nothing of the build stays behind: settings, caches, folders that were mounted on.
    places = "/tmp /run/kale-dist /dev/shm /root/.cache /var/lib/apt/lists /var/cache/apt/archives"
    assert run(tag, "sh", "-c", f"find {places} -mindepth 1 -type f -size +0 2>/dev/null; true") == ""
    assert any("Successfully installed small-thing-1.0" in line for line in lines)


@pytest.mark.usefixtures("index")
def test_torch_of_the_base_is_kept_unless_it_may_change(tags, tmp_path):
    base, tag, version = tags(), tags(), ("python3", "-c", "import torch; print(torch.VERSION)")
    make(Recipe(packages=("torch==9.8",), allow_torch_change=True), PYTHON, base, tmp_path, push=False)
    with pytest.raises(ImageError, match=r"another torch than the base has.*allow_torch_change=True"):
        make(Recipe(packages=("wants-other-torch",)), base, tag, tmp_path, push=False)
    make(Recipe(packages=("small-thing", "torch")), base, tag, tmp_path, push=False)
    assert run(tag, *version) == "9.8\n"
    make(Recipe(packages=("wants-other-torch",), allow_torch_change=True), base, tag, tmp_path, push=False)
    assert run(tag, *version) == "9.9\n"


def test_a_password_of_the_index_reaches_buildkit_and_no_image(engine, index, monkeypatch, tags, tmp_path):
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["PIP_INDEX_URL"].replace("http://", "http://ada:s3cret@"))
    tag, lines = tags(), []
    make(Recipe(packages=("small-thing==1.0",), rebuild=True), PYTHON, tag, tmp_path, lines, push=False)
    assert any(shown.startswith("Basic ") for _, shown in index)
    assert "s3cret" not in str(engine.api.history(tag)) + str(engine.api.inspect_image(tag)) + str(lines)
    assert (
        run(tag, "python3", "-c", "import os; print(any('pip.conf' in f for _, _, f in os.walk('/tmp')))") == "False\n"
    )


@pytest.mark.parametrize(
    ("packages", "apt", "words"),
    [
        (("there-is-no-such-thing==1",), (), r"there is no there-is-no-such-thing==1 for.*Check name and version"),
        (("small-thing==2.0", "wants-first"), (), r"contradict each other.*\n[\s\S]*wants-first 1.0 depends on small-thing==1.0"),
        ((), ("there-is-no-such-thing",), "apt knows no package there-is-no-such-thing"),
    ],
)  # fmt: skip
def test_packages_that_cannot_be_installed(index, own_python, tags, tmp_path, packages, apt, words):
    with pytest.raises(ImageError, match=words):
        make(Recipe(packages=packages, apt=apt), own_python, tags(), tmp_path)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("fills-the-disk", r"the engine's disk is full. `docker system df`"),
        ("cannot-resolve", r"cannot reach the network.*DNS"),
        ("compiles", r"has to be compiled, and that failed \(gcc\).*apt="),
    ],
)
def test_a_step_that_fails_is_explained(played, tags, tmp_path, package, words):
    with pytest.raises(ImageError, match=words):
        make(Recipe(packages=(package,)), played, tags(), tmp_path)


def _running(*command):
    """Processes of this machine that were started so."""
    wanted, found = "".join(f"{word}\0" for word in command).encode(), []
    for folder in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes() == wanted:
                found.append(folder.name)
    return found


def test_an_interrupt_ends_the_build(engine, played, tags, tmp_path):
    asleep, seconds = threading.Event(), str(random.SystemRandom().randrange(10**6, 10**9))

    def say(line):
        if "asleep" in line:
            deadline = time.monotonic() + 10
            while not _running("sleep", seconds) and time.monotonic() < deadline:
                time.sleep(0.01)
            if _running("sleep", seconds):
                asleep.set()
            signal.raise_signal(signal.SIGINT)

    def left():
        """Processes of the step, and containers of the classic builder on the test's own base."""
        return _running("sleep", seconds), engine.api.containers(all=True, filters={"ancestor": played})

    with pytest.raises(KeyboardInterrupt):
        make(Recipe(packages=(f"sleeps-{seconds}",)), played, tags(), tmp_path, say=say)
    assert asleep.is_set()
    deadline = time.monotonic() + 10
    while left() != ([], []) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == ([], [])


@pytest.mark.parametrize("argument", ["files", "environment"])
def test_what_no_dockerfile_can_say(argument, tiny, tags, tmp_path):
    blob = FolderStore(tmp_path).put([b""])
    recipes = {
        "files": Recipe(files=(ImageFile(path="/a\nRUN rm -rf /", digest=blob),)),
        "environment": Recipe(environment=(("A", "a\nRUN rm -rf /"),)),
    }
    with pytest.raises(ConfigError, match=rf'{argument}: .*line break.*builder="layers"'):
        make(recipes[argument], tiny, tags(), tmp_path)


def test_a_base_that_is_not_there(engine, registry_host, tags, tmp_path):
    base = f"{registry_host}/nobody/has-this:1"
    with pytest.raises(BackendError, match=f"pulling {re.escape(base)}: there is no such image"):
        make(Recipe(environment=(("A", "b"),)), base, tags(), tmp_path)


def test_a_registry_with_accounts(monkeypatch, password_registry, tiny, tags, tmp_path):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    tag, recipe = tags(password_registry), Recipe(environment=(("A", "b"),))
    for wrong in (None, Credentials(username=USER, password="wr0ng")):
        with pytest.raises(ImageError, match=r"pushing .* credentials.*docker login") as refused:
            make(recipe, tiny, tag, tmp_path, credentials=wrong)
        assert "wr0ng" not in str(refused.value)
    assert make(recipe, tiny, tag, tmp_path, credentials=Credentials(username=USER, password=PASSWORD)).digest


def test_without_buildkit_the_remedy_is_named(monkeypatch, tiny, tags, tmp_path):
    monkeypatch.setattr(dockerfile, "find", lambda: None)
    with pytest.raises(
        ConfigError,
        match=r"builder: Debian packages.*built by BuildKit, and docker's command line here has none.*buildx plugin",
    ):
        make(Recipe(apt=("git",)), tiny, tags(), tmp_path)
