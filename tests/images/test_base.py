"""What a base is asked, and what becomes of its answer."""

import dataclasses
import os
import subprocess
import sys
import uuid
import venv

import bases
import pytest
from resolving import MODE, use_own_folders, with_base

from kale_dist.errors import ImageError
from kale_dist.image import base_image as base
from kale_dist.job.spec.recipe import Recipe


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def place(own_registry):
    return with_base(own_registry)


def test_a_python_tells_what_it_has(tmp_path):
    venv.create(tmp_path / "own", with_pip=False)
    python = tmp_path / "own" / "bin" / "python"
    site = tmp_path / "own" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for name, version, more in (("Kd_Thing", "1.0", "Requires-Dist: numpy>=1\n"), ("bad", "", "")):
        (site / f"{name}-1.0.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(text)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('never imported')")
    (site / "torch" / "version.py").write_text("__version__ = '2.6.0a0+vendor'\n")
    environment = os.environ | base.ENVIRONMENT
    said = subprocess.run([python, *base.COMMAND[1:]], env=environment, capture_output=True, check=True).stdout
    facts = base.parse_answer(said, "x")
    assert [(one.name, one.version, one.requires) for one in facts.distributions] == [
        ("kd-thing", "1.0", ("numpy>=1",)),
        ("torch", "2.6.0a0+vendor", ()),
    ]
    assert (facts.executable, facts.site) == (str(python), str(site.resolve()))
    assert facts.minor == f"3.{sys.version_info[1]}"
    assert base.parse_answer(bases.answer(facts), "x") == facts


def test_files_lie_where_links_of_the_base_lead():
    facts = dataclasses.replace(bases.FACTS, links=(("/bin", "/usr/bin"), ("/var/run", "/run")))
    paths = ["/bin/x", "/var/run/x/y", "/binary/x", "/opt/x"]
    assert [facts.real_path(path) for path in paths] == ["/usr/bin/x", "/run/x/y", "/binary/x", "/opt/x"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b'exec: "python3": executable file not found in $PATH', "has no python3 on its PATH. Name a base image with"),
        (b"exec /usr/bin/python3: exec format error", "made for another processor.*where that processor is"),
        (b"", "it printed nothing. Check that its python3 runs"),
        (b"Traceback\nMemoryError", "could not be inspected: Traceback MemoryError"),
        (b"KALE-DIST-BASE {", "could not be inspected"),
        (b"KALE-DIST-BASE {}", "could not be inspected"),
    ],
)
def test_an_answer_that_is_none_is_a_sentence(said, words):
    with pytest.raises(ImageError, match=words):
        base.parse_answer(said, "team/base:1")


@pytest.mark.parametrize(
    ("changes", "recipe", "words"),
    [
        ({"machine": "aarch64"}, MODE, "is for aarch64, and the image is to be for linux/amd64"),
        ({"python": "3.6.9"}, MODE, "has Python 3.6.9, and kale_dist needs 3.11 or later"),
        ({"python": "3.12.1"}, MODE, r"has Python 3\.12\.1 \(/usr/local/bin/python3\), and this notebook has 3\.11"),
        ({"distributions": ()}, MODE, "has no torch for its /usr/local/bin/python3 .*add torch to `packages=`"),
        ({"distributions": ()}, Recipe(packages=("torchvision",)), "has no torch"),
    ],
)
def test_a_base_that_jobs_cannot_run_on_is_refused_before_anything_is_built(place, changes, recipe, words):
    with pytest.raises(ImageError, match=words):
        place.resolve(recipe, ask=lambda _image: bases.answer(dataclasses.replace(bases.FACTS, **changes)))
    assert place.tags() == ()


def test_a_base_is_asked_once_and_by_the_name_that_the_user_gave_it(place):
    place.resolve(MODE, pull=f"nodes.example.com/{place.team}", base=f"nodes.example.com/{place.team}/base:1")
    place.resolve(Recipe(environment={"MODE": "y"}))
    [asked] = place.asked
    assert asked.startswith(f"nodes.example.com/{place.team}/base@sha256:")


def test_without_an_engine_the_remedy_is_named(place, monkeypatch, tmp_path):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    with pytest.raises(ImageError, match=r"could not be inspected.*gone\.sock.*on='kubernetes' inspects it in a pod"):
        place.resolve(MODE, ask=None)


# -- the real engine -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_an_engine_runs_the_question(image):
    facts = base.parse_answer(base.ask_engine(image, "", print), image)
    assert facts.minor == "3.11"
    assert facts.find("torch").version.startswith("2.")
    assert facts.machine in base.MACHINES.values()


@pytest.mark.nightly
def test_an_engine_says_of_an_image_without_python_that_there_is_none(engine):
    name = f"kd-test-{uuid.uuid4().hex[:8]}"
    engine.api.import_image_from_data(bases.make_tar({"empty": b""}), repository=name, tag="1")
    try:
        said = base.ask_engine(f"{name}:1", "", print)
        with pytest.raises(ImageError, match="has no python3 on its PATH"):
            base.parse_answer(said, name)
        assert engine.api.containers(all=True, filters={"ancestor": f"{name}:1"}) == []
    finally:
        engine.api.remove_image(f"{name}:1", force=True)
