"""Somebody may push to your team's registry, or upload to a public index: neither chooses what runs in your jobs."""

import json
import pathlib
import sys

import pytest

pytest.importorskip("uv")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "images"))

import bases
import registries
import resolving
from resolving import MODE
from wheelhouse import Wheelhouse

from kale_dist.image import packages
from kale_dist.image.registry import Registry
from kale_dist.job.spec.recipe import Recipe


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    if registries.PROGRAM is None:
        pytest.skip("the program docker-registry is not installed")
    with registries.registry_program(tmp_path_factory.mktemp("registries") / "own") as host:
        yield host


@pytest.fixture
def place(host, tmp_path, monkeypatch):
    resolving.use_own_folders(tmp_path, monkeypatch)
    return resolving.with_base(host)


def replace(place, tag):
    """Mallory pushes another image under a tag; gives its digest."""
    with Registry(place.host) as registry:
        bases.push(registry, place.repository, tag, files={"evil": b"1"})
        return registry.head(place.repository, tag)


def test_an_image_under_a_foreseen_tag_is_not_used(place, monkeypatch, tmp_path):
    tag = place.resolve(MODE).tag
    evil = replace(place, tag)
    # Of somebody who has not made this image so far.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    found = place.resolve(MODE)
    assert found.was_built
    assert evil not in found.reference
    assert any("registry_tags = 'shared'" in line for line in place.said)


def test_a_tag_that_was_moved_moves_none_of_your_jobs(place):
    first = place.resolve(MODE)
    assert replace(place, first.tag) not in first.reference
    again = place.resolve(MODE)
    assert (again.reference, again.was_built) == (first.reference, False)


def test_who_shares_tags_takes_what_is_there(place, monkeypatch, tmp_path):
    first = place.resolve(MODE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert place.resolve(MODE, shared=True).reference == first.reference
    # That it was used makes it nobody's own.
    assert place.resolve(MODE).was_built


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def indexes(tmp_path, monkeypatch):
    """A team's index with its package, and a public one to which somebody has uploaded a newer one of that name."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    houses = []
    for name in ("team", "public"):
        (tmp_path / name).mkdir()
        houses.append(Wheelhouse(tmp_path / name))
    team, public = houses
    team.wheel("kdsecret", "1.0")
    public.wheel("kdsecret", "99.0")
    public.wheel("kdknown", "2.0")
    with team.serving() as ours, public.serving() as theirs:
        yield ours, theirs


FACTS = bases.FACTS


def installed(tmp_path, *names, **recipe):
    folder = tmp_path / f"try-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    made = packages.install(Recipe(packages=names, **recipe), FACTS, folder, log=lambda _: None)
    return {one.name: one.version for one in made.facts.distributions if one.name.startswith("kd")}


def test_a_name_of_your_index_is_not_taken_by_a_newer_one_of_a_public_index(indexes, tmp_path):
    found = installed(tmp_path, "kdsecret", "kdknown", index_urls=indexes)
    assert found == {"kdsecret": "1.0", "kdknown": "2.0"}


def test_pip_s_own_extra_index_counts_as_with_pip(indexes, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", indexes[0])
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", indexes[1])
    assert installed(tmp_path, "kdsecret", "kdknown") == {"kdsecret": "99.0", "kdknown": "2.0"}


def test_your_own_settings_of_uv_count_and_those_of_a_folder_do_not(indexes, tmp_path, monkeypatch):
    ours, _ = indexes
    (tmp_path / "config" / "uv").mkdir(parents=True)
    (tmp_path / "config" / "uv" / "uv.toml").write_text(f"[[index]]\nurl = {json.dumps(ours)}\ndefault = true\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "uv.toml").write_text('[[index]]\nurl = "http://127.0.0.1:9/simple"\ndefault = true\n')
    monkeypatch.chdir(project)
    assert installed(tmp_path, "kdsecret") == {"kdsecret": "1.0"}
