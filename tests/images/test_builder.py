"""Images made of layers, in real registries, and run where jobs run."""

import dataclasses
import importlib.util
import json
import os
import subprocess

import bases
import pytest
from registries import registry_program
from resolving import MODE, Place, use_own_folders, with_base
from wheelhouse import Wheelhouse

from kale_dist import config
from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import for_job
from kale_dist.image.for_job import keep_files
from kale_dist.image.registry import Registry
from kale_dist.job import records
from kale_dist.job.spec.recipe import ImageFile, Recipe
from kale_dist.snapshot import loading
from kale_dist.wire.blobs import FolderStore

from on_cluster import IMAGE, run_kubectl  # isort: skip

PTH = f"{bases.SITE}/kale_dist.pth"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    use_own_folders(tmp_path, monkeypatch)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def place(own_registry):
    return with_base(own_registry)


@pytest.fixture
def house(tmp_path):
    (tmp_path / "house").mkdir()
    return Wheelhouse(tmp_path / "house")


def image_of(place, reference):
    with Registry(place.host) as registry:
        return registry.image(place.repository, reference.partition("@")[2])


def layers_of(place, reference):
    """Path to bytes of the files of each new layer."""
    image = image_of(place, reference)
    with Registry(place.host) as registry:
        return [
            bases.read_layer(registry, place.repository, image, number)
            for number in range(1, len(image.manifest["layers"]))
        ]


def with_file(tmp_path, text, **recipe):
    (tmp_path / "x.txt").write_text(text)
    made = Recipe(files={"/bin/x.txt": tmp_path / "x.txt"}, **recipe)
    return keep_files(made, FolderStore(records.blobs_dir()))


def test_packages_and_files_are_a_layer_each_and_the_base_stays_as_it_is(place, house, tmp_path):
    house.wheel("kdthing", scripts=["kd-run=kdthing:main"])
    with house.serving() as url:
        recipe = with_file(tmp_path, "one", packages=("kdthing",), index_urls=(url,), environment={"LANG": "de"})
        reference = place.resolve(recipe).reference
    packages, files = layers_of(place, reference)
    assert files == {"/usr/bin/x.txt": b"one"}
    assert {"/opt/kale-dist/site-packages/kdthing/__init__.py", "/opt/kale-dist/bin/kd-run", PTH} <= set(packages)
    settings = image_of(place, reference).config["config"]
    assert settings["Env"] == ["PATH=/usr/local/bin:/usr/bin:/bin:/opt/kale-dist/bin", "LANG=de"]
    kept = ("User", "WorkingDir", "Entrypoint", "Cmd")
    assert {name: settings[name] for name in kept} == {name: bases.CONFIG["config"][name] for name in kept}
    assert settings["Labels"]["maintainer"] == "me"


def test_a_recipe_gives_the_same_digest_wherever_it_is_made(place, house, tmp_path, monkeypatch):
    house.wheel("kdthing")
    with house.serving() as url:
        recipe = with_file(tmp_path, "one", packages=("kdthing",), index_urls=(url,))
        first = place.resolve(recipe).reference
        blobs = FolderStore(records.blobs_dir())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "another-uv"))
        again = place.resolve(Recipe(files=recipe.files, packages=recipe.packages, index_urls=(url,), rebuild=True))
    assert again.was_built
    assert again.reference == first
    assert blobs.exists(recipe.files[0].digest)


def test_a_change_of_a_file_sends_that_file_alone(place, house, tmp_path):
    house.wheel("kdthing", files={"kdthing/data.bin": os.urandom(3 << 20).hex()})
    with house.serving() as url:
        given = {"packages": ("kdthing",), "index_urls": (url,)}
        first = place.resolve(with_file(tmp_path, "one", **given)).reference
        assert any(line.startswith("Pushing a layer of ") for line in place.said)
        second = place.resolve(with_file(tmp_path, "two", **given)).reference
    assert not [line for line in place.said if line.startswith("Pushing")]
    kept, changed = (image_of(place, reference).manifest["layers"] for reference in (first, second))
    assert kept[:-1] == changed[:-1]
    assert kept[-1] != changed[-1]


def test_an_image_on_an_image_of_ours_has_both(place, house):
    house.wheel("kdthing")
    house.wheel("kdother", requires=["kdthing"])
    with house.serving() as url:
        first = place.resolve(Recipe(packages=("kdthing",), index_urls=(url,))).reference
        had = dataclasses.replace(
            bases.FACTS,
            folders=("site-packages",),
            distributions=(bases.installed("kdthing", "1.0"), *bases.FACTS.distributions),
        )
        recipe = Recipe(packages=("kdother",), index_urls=(url,))
        second = place.resolve(recipe, base=first, ask=lambda _: bases.answer(had)).reference
    *_, layer = layers_of(place, second)
    assert "/opt/kale-dist/site-packages-2/kdother/__init__.py" in layer
    assert not [path for path in layer if "kdthing" in path]
    assert b"site-packages-2', '/opt/kale-dist/site-packages'" in layer[PTH]


def test_a_base_of_another_registry_is_copied_and_one_of_the_same_is_not(place, registry_folder):
    with registry_program(registry_folder / "theirs") as host:
        theirs = with_base(host)
        reference = place.resolve(MODE, base=theirs.base).reference
        assert any(line.startswith("Copying a layer of the base") for line in place.said)
        place.resolve(MODE)
        assert not [line for line in place.said if line.startswith("Copying")]
    assert image_of(place, reference).config["config"]["Env"][-1] == "MODE=x"


def test_a_job_asks_by_the_function_of_its_backend(place, monkeypatch):
    monkeypatch.setenv("KALE_DIST_REGISTRY", place.registry)
    facts = dataclasses.replace(bases.FACTS, python=f"{loading.python_version()}.0")
    asked = []

    def ask(image):
        asked.append(image)
        return bases.answer(facts)

    made = for_job.make(MODE, image=place.base, settings=config.load(), cuda=False, in_engine=False, ask=ask)
    assert made.startswith(f"{place.registry}/kale-dist@sha256:")
    assert len(asked) == 1


def test_a_base_for_another_platform_is_refused(own_registry):
    place = Place(own_registry)
    with Registry(own_registry) as registry:
        bases.push(registry, f"{place.team}/base", "1", architecture="arm64")
    with pytest.raises(ImageError, match="is for linux/arm64, not for linux/amd64"):
        place.resolve(MODE)


def test_files_whose_bytes_are_gone_are_named(place):
    recipe = Recipe(files=(ImageFile(path="/opt/x.txt", digest="0" * 64),))
    with pytest.raises(ImageError, match=r"bytes of /opt/x\.txt are no longer on this machine"):
        place.resolve(recipe)


def test_a_folder_for_caches_that_cannot_be_written_is_named(place, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Exception, match=r"could not be written.*XDG_CACHE_HOME"):
        place.resolve(MODE)


def test_a_failed_build_leaves_nothing_behind(place, tmp_path):
    with pytest.raises((ImageError, ConfigError)):
        place.resolve(Recipe(packages=("kdabsent",), index_urls=("http://127.0.0.1:9/",)))
    assert not list((tmp_path / "cache" / "kale-dist").glob("building-*"))
    assert place.tags() == ()


PROGRAM = """
def main():
    import importlib.metadata, networkx, torch
    print(torch.__version__, networkx.__version__, importlib.metadata.version("networkx"))
"""


@pytest.mark.skipif(importlib.util.find_spec("docker") is None, reason="needs the docker package")
def test_docker_and_a_cluster_run_what_was_made(registry_host, house, engine, image, make_namespace):
    house.wheel(
        "kdthing", requires=["torch", "numpy>=1"], scripts=["kd-thing=kdthing:main"], files={"kdthing.py": PROGRAM}
    )
    house.wheel("networkx", "3.0", files={"networkx/__init__.py": "__version__ = 'ours'\n"})
    place = Place(registry_host)
    with house.serving() as url:
        recipe = Recipe(packages=("kdthing", "networkx==3.0"), index_urls=(url,))
        reference = place.resolve(recipe, base=IMAGE, ask=None).reference
    try:
        command = ["docker", "run", "--rm", "--user", "1000", reference, "kd-thing"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert said[1:] == ["ours", "3.0"]
        namespace = make_namespace()
        pod = {"containers": [{"name": "main", "image": reference, "command": ["kd-thing"]}], "restartPolicy": "Never"}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"}, "spec": pod}
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(manifest))
        run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/try", "--timeout=90s")
        assert run_kubectl("-n", namespace, "logs", "try").split() == said
    finally:
        subprocess.run(["docker", "image", "rm", reference], capture_output=True, check=False)
