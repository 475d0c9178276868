import json
import subprocess
import sys
import uuid

import bases
import pytest
from on_cluster import IMAGE, run_kubectl
from registries import PASSWORD, USER
from wheelhouse import Wheelhouse

import kale_dist.image
from kale_dist.blobs import FolderStore
from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import inventory as inventories
from kale_dist.image import media
from kale_dist.image.auth import Credentials
from kale_dist.image.base_image import RECIPE_LABEL
from kale_dist.image.layer_builder import build
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.recipe import ImageFile, Recipe


@pytest.fixture
def registry(own_registry):
    with Registry(own_registry) as registry:
        yield registry


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of two packages, and what pip needs not to look elsewhere."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    (tmp_path / "house").mkdir()
    house = Wheelhouse(tmp_path / "house")
    house.wheel("kdthing", requires=["torch"], scripts=["kd-thing=kdthing:main"])
    house.wheel("numpy", "1.26.5")
    with house.serving() as url:
        yield url


@pytest.fixture
def make(registry, tmp_path):
    """A function that builds a recipe on `base`; gives the image and what was built. `said` is what the user was told."""
    name = f"builder/{uuid.uuid4().hex[:8]}"

    def make(recipe, *, base=f"{name}/base:1", to=registry, repository=f"{name}/made", cache="cache", **options):
        make.said, make.progress = [], []
        built = build(
            recipe,
            registry=to,
            repository=repository,
            tag="kd-1",
            base=Reference.parse(f"{registry.host}/{base}"),
            base_registry=registry,
            blobs_dir=tmp_path / "blobs",
            cache_dir=tmp_path / cache,
            labels={"who": "me"},
            say=make.said.append,
            progress=lambda done, total: make.progress.append((done, total)),
            **options,
        )
        image = to.image(repository, "kd-1")
        assert image.descriptor.digest == built.digest
        return image, built

    make.base, make.repository = f"{name}/base", f"{name}/made"
    return make


@pytest.mark.parametrize(
    ("shape", "docker"), [("plain", False), ("plain", True), ("debian", True), ("venv", False), ("conda", False)]
)
def test_a_package_goes_to_where_the_bases_python_looks(registry, index, make, shape, docker):
    layers, settings = bases.SHAPES[shape]
    bases.push(registry, make.base, "1", layers(), docker=docker, **settings)
    image, built = make(Recipe(packages=("kdthing",), index_urls=(index,)))
    before = registry.image(make.base, "1")
    inventory = inventories.Inventory.from_label(
        image.config["config"]["Labels"][inventories.LABEL], image.config["rootfs"]["diff_ids"]
    )
    files = bases.read_layer(registry, make.repository, image)
    site, info = inventory.site_directory, f"{inventory.site_directory}/kdthing-1.0.dist-info"
    script = f"{inventory.scripts_directory}/kd-thing"
    recorded = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "entry_points.txt")}
    assert set(files) == {f"{site}/kdthing/__init__.py", script, *recorded}
    assert files[script].startswith(f"#!{inventory.python}\n".encode())
    assert inventory.find("kdthing").version == "1.0"
    assert image.manifest["layers"][:-1] == before.manifest["layers"]
    assert image.manifest["mediaType"] == before.manifest["mediaType"]
    kept = ("User", "WorkingDir", "Entrypoint", "Cmd", "Env")
    assert {key: image.config["config"][key] for key in kept} == {key: before.config["config"][key] for key in kept}
    assert image.config["created"] == before.config["created"]
    assert built.sent == built.size == image.manifest["layers"][-1]["size"]


def test_the_same_recipe_gives_the_same_digest_and_sends_nothing(registry, index, make):
    bases.push(registry, make.base, "1", bases.plain())
    recipe = Recipe(packages=("kdthing",), index_urls=(index,), environment=(("LANG", "C"), ("MODE", "x")))
    image, first = make(recipe)
    _, again = make(recipe, cache="another", python="3.11")
    assert again.digest == first.digest
    assert again.sent == 0
    assert image.config["config"]["Env"] == ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C", "MODE=x"]
    labels = image.config["config"]["Labels"]
    assert (labels["maintainer"], labels["who"]) == ("me", "me")
    assert Recipe.from_json(json.loads(labels[RECIPE_LABEL])) == recipe


def test_an_image_that_was_made_here_is_built_upon_without_reading_it(registry, index, make):
    bases.push(registry, make.base, "1", bases.plain())
    make(Recipe(packages=("kdthing",), index_urls=(index,)))
    recipe = Recipe(packages=("kdthing", "torch"), index_urls=(index,))
    image, _ = make(recipe, base=f"{make.repository}:kd-1", repository=f"{make.repository}/upon", cache="another")
    assert make.said[0] == "The base image has all packages that were asked for."
    assert len(image.manifest["layers"]) == len(bases.plain()) + 2


def test_a_package_of_the_base_is_replaced_whole(registry, index, make, tmp_path):
    layers = bases.plain()
    layers[2] |= {"usr/local/lib/python3.11/site-packages/scipy.py": ""}
    layers[2] |= bases.package("usr/local/lib/python3.11/site-packages", "scipy", "1.0", requires=["numpy==1.26.4"])
    bases.push(registry, make.base, "1", layers)
    make(Recipe(packages=("kdthing",), index_urls=(index,)))
    image, _ = make(Recipe(packages=("numpy==1.26.5",), index_urls=(index,)), base=f"{make.repository}:kd-1")
    assert "Replaced in the base image: numpy 1.26.4" in make.said
    assert any("scipy 1.0" in line and "gets 1.26.5" in line for line in make.said)
    files = bases.read_layer(registry, make.repository, image)
    site = "/usr/local/lib/python3.11/site-packages"
    assert f"{site}/.wh.numpy-1.26.4.dist-info" in files
    assert f"{site}/numpy/.wh.__init__.py" not in files
    # Read from the layers, not from the label.
    read = inventories.read(registry, image, make.repository, cache_dir=tmp_path, say=make.said.append, files=True)
    assert read.find("numpy").version == "1.26.5"
    assert read.find("kdthing").version == "1.0"


def test_files_of_the_recipe_go_where_the_bases_links_lead(registry, make, tmp_path):
    bases.push(registry, make.base, "1", bases.plain())
    digest = FolderStore(tmp_path / "blobs").put([b"#!/bin/sh\n"])
    files = (
        ImageFile(path="/bin/kd", digest=digest, executable=True),
        ImageFile(path="/opt/new/kd.txt", digest=digest),
    )
    image, _ = make(Recipe(files=files))
    assert set(bases.read_layer(registry, make.repository, image)) == {"/usr/bin/kd", "/opt/new/kd.txt"}
    with pytest.raises(ImageError, match=r"/bin/kd are not on this machine.*files="):
        make(Recipe(files=(ImageFile(path="/bin/kd", digest="0" * 64),)))


def test_a_change_of_a_file_leaves_the_layer_of_packages_as_it_is(registry, index, make, tmp_path):
    bases.push(registry, make.base, "1", bases.plain())
    store = FolderStore(tmp_path / "blobs")

    def recipe(text, **more):
        site = "/usr/local/lib/python3.11/site-packages"
        paths = ("/opt/kd.txt", f"{site}/kdthing/__init__.py")
        files = tuple(ImageFile(path=path, digest=store.put([text])) for path in paths)
        return Recipe(packages=("kdthing",), index_urls=(index,), files=files, **more)

    first, _ = make(recipe(b"one"))
    second, built = make(recipe(b"two"))
    assert second.manifest["layers"][:-1] == first.manifest["layers"][:-1]
    assert built.sent == second.manifest["layers"][-1]["size"]
    assert bases.read_layer(registry, make.repository, second)["/opt/kd.txt"] == b"two"
    assert "kdthing" in second.config["config"]["Labels"][inventories.LABEL]
    again, _ = make(recipe(b"two", rebuild=True))
    assert again.descriptor == second.descriptor
    elsewhere, built = make(recipe(b"two"), repository=f"{make.repository}/elsewhere")
    assert elsewhere.descriptor == second.descriptor
    assert built.sent == built.size


def test_a_base_in_another_registry_is_copied_once(registry, index, make, password_registry):
    bases.push(registry, make.base, "1", bases.debian())
    sizes = [layer["size"] for layer in registry.image(make.base, "1").manifest["layers"]]
    recipe = Recipe(packages=("kdthing",), index_urls=(index,))
    with Registry(password_registry, credentials=Credentials(username=USER, password=PASSWORD)) as other:
        image, built = make(recipe, to=other)
        assert built.sent == sum(sizes) + built.size
        assert [other.has_blob(make.repository, layer["digest"]) for layer in image.manifest["layers"]] == [True] * 3
        _, again = make(recipe, to=other)
        assert again.sent == 0
        assert again.digest == built.digest


BAD_BASES = [
    (lambda: [bases.SYSTEM], {}, {}, "has no Python", "Name a base image with Python and torch"),
    (
        lambda: bases.plain()[:2],
        {},
        {},
        r"has no torch for its /usr/local/bin/python3 \(Python 3\.11\.9\)",
        "add torch to",
    ),
    (bases.plain, {}, {"python": "3.12"}, r"has Python 3\.11\.9 .* this notebook has 3\.12", "with Python 3.12"),
    (bases.plain, {"architecture": "arm64"}, {}, "linux/arm64, not for linux/amd64", "Choose another"),
]


@pytest.mark.parametrize(("layers", "settings", "options", "problem", "remedy"), BAD_BASES, ids=range(4))
def test_a_base_that_does_not_fit_is_refused_before_packages_are_looked_for(
    registry, make, layers, settings, options, problem, remedy
):
    bases.push(registry, make.base, "1", layers(), **settings)
    with pytest.raises(ImageError, match=problem) as caught:
        make(Recipe(packages=("kdthing",), index_urls=("http://127.0.0.1:9/",)), **options)
    assert remedy in str(caught.value)
    assert registry.tags(make.repository) == ()


def test_a_base_without_torch_will_do_if_the_packages_bring_it(registry, make, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    bases.push(registry, make.base, "1", bases.plain()[:2])
    house = Wheelhouse(tmp_path)
    house.wheel("torch", "2.6.0")
    with house.serving() as url:
        image, _ = make(Recipe(packages=("torch==2.6.0",), index_urls=(url,)))
    assert "/usr/local/lib/python3.11/site-packages/torch/__init__.py" in bases.read_layer(
        registry, make.repository, image
    )


def test_a_base_that_is_named_by_its_digest_is_read_once(registry, make, tmp_path):
    bases.push(registry, make.base, "1", bases.plain())
    digest = registry.head(make.base, "1").digest
    recipe = Recipe(environment=(("MODE", "x"),))
    _, first = make(recipe, base=f"{make.base}@{digest}")
    registry.delete(make.base, digest)
    _, again = make(recipe, base=f"{make.base}@{digest}")
    assert again.digest == first.digest
    for path in (tmp_path / "cache" / "manifests").iterdir():
        path.write_bytes(path.read_bytes().replace(b"linux", b"other"))
        if path.name == digest.partition(":")[2]:
            path.write_bytes(b"{}")
    with pytest.raises(ImageError, match="404"):
        make(recipe, base=f"{make.base}@{digest}")


def test_packages_without_what_unpacks_them_name_what_to_install_and_files_do_without(
    registry, index, make, tmp_path, monkeypatch
):
    bases.push(registry, make.base, "1", bases.plain())
    monkeypatch.setitem(sys.modules, "installer", None)
    monkeypatch.delitem(sys.modules, "kale_dist.image.packages", raising=False)
    monkeypatch.delattr(kale_dist.image, "packages", raising=False)
    with pytest.raises(ConfigError, match=r"package installer.*kale-dist\[images\]"):
        make(Recipe(packages=("kdthing",), index_urls=(index,)))
    digest = FolderStore(tmp_path / "blobs").put([b"text"])
    image, _ = make(Recipe(files=(ImageFile(path="/opt/kd.txt", digest=digest),)))
    assert set(bases.read_layer(registry, make.repository, image)) == {"/opt/kd.txt"}


def test_debian_packages_need_another_builder(registry, make):
    with pytest.raises(ImageError, match=r'git, vim.*`builder="docker"`'):
        make(Recipe(apt=("git", "vim")))


def test_zstd_by_option_is_an_oci_image_that_can_be_built_upon(registry, index, make):
    pytest.importorskip("zstandard")
    bases.push(registry, make.base, "1", bases.plain(), docker=True)
    recipe = Recipe(packages=("kdthing",), index_urls=(index,), compression="zstd")
    image, built = make(recipe)
    assert not any(media.is_docker(one["mediaType"]) for one in (image.manifest, *image.manifest["layers"]))
    assert image.manifest["layers"][-1]["mediaType"].endswith("tar+zstd")
    assert bases.read_layer(registry, make.repository, image).keys() > {f"{bases.SITE}/kdthing/__init__.py"}
    again, same = make(recipe, cache="another")
    assert same.digest == built.digest
    packed, _ = make(Recipe(packages=("kdthing",), index_urls=(index,)))
    assert packed.config["rootfs"]["diff_ids"] == again.config["rootfs"]["diff_ids"]
    assert packed.manifest["layers"][-1]["mediaType"].endswith("tar.gzip")


def test_zstd_without_its_library_is_told_before_anything_is_fetched(registry, make, monkeypatch):
    bases.push(registry, make.base, "1", bases.plain())
    for module in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="pip install zstandard, or leave `compression` out"):
        make(Recipe(packages=("never-asked-for",), compression="zstd"))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_an_image_on_the_real_base_runs_in_docker_and_in_a_pod(
    registry_host, tmp_path, monkeypatch, make_namespace, compression
):
    if compression == "zstd":
        pytest.importorskip("zstandard")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    (tmp_path / "house").mkdir()
    house = Wheelhouse(tmp_path / "house")
    house.wheel(
        "kdthing", requires=["torch", "numpy>=1"], scripts=["kd-thing=kdthing:main"], files={"kdthing.py": _PROGRAM}
    )
    house.wheel("networkx", "3.0", files={"networkx/__init__.py": "__version__ = 'ours'\n"})
    base = Reference.parse(IMAGE)
    expected = ["2.13.0+cpu", "ours", "3.0", "False"]
    repository, tag = f"kale-dist/test-{uuid.uuid4().hex[:8]}", "kd-1"
    said = []
    with house.serving() as url, Registry(registry_host) as registry:
        recipe = Recipe(
            packages=("kdthing", "networkx==3.0"), index_urls=(url,), allow_torch_change=True, compression=compression
        )
        built = build(
            recipe,
            registry=registry,
            repository=repository,
            tag=tag,
            base=base,
            base_registry=registry,
            blobs_dir=tmp_path / "blobs",
            cache_dir=tmp_path / "cache",
            labels={},
            say=said.append,
            python="3.11",
        )
    assert built.sent == built.size < 100_000
    reference = f"{registry_host}/{repository}@{built.digest}"
    try:
        if compression == "gzip":
            # Docker reads zstd from version 23 on, and the one here may be older.
            assert _run("docker", "run", "--rm", reference, "kd-thing").split() == expected
        namespace = make_namespace()
        pod = {"containers": [{"name": "main", "image": reference, "command": ["kd-thing"]}], "restartPolicy": "Never"}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"}, "spec": pod}
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(manifest))
        run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/try", "--timeout=90s")
        assert run_kubectl("-n", namespace, "logs", "try").split() == expected
    finally:
        subprocess.run(["docker", "image", "rm", reference], capture_output=True, check=False)
        with Registry(registry_host) as registry:
            registry.delete(repository, built.digest)


_PROGRAM = """
def main():
    import importlib.metadata, importlib.util, networkx, torch
    old = importlib.util.find_spec("networkx.algorithms") is not None
    print(torch.__version__, networkx.__version__, importlib.metadata.version("networkx"), old)
"""


def _run(*command):
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
