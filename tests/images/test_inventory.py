import gzip
import json

import bases
import pytest
from bases import link

from kale_dist.errors import ImageError
from kale_dist.image import inventory as inventories
from kale_dist.image.inventory import Inventory
from kale_dist.image.registry import Registry

SITE = "usr/local/lib/python3.11/site-packages"


@pytest.fixture
def registry(own_registry):
    with Registry(own_registry) as registry:
        yield registry


@pytest.fixture
def read(registry, tmp_path, request):
    """A function that pushes an image of these layers and reads what it has; `said` is what the user was told."""
    repository = f"inventory/{abs(hash(request.node.name))}"

    def read(layers, *, files=False, again=False, **settings):
        if not again:
            bases.push(registry, repository, "1", layers, **settings)
        image = registry.image(repository, "1", f"linux/{settings.get('architecture', 'amd64')}")
        read.said, read.progress = [], []
        return inventories.read(
            registry,
            image,
            repository,
            cache_dir=tmp_path / "cache",
            say=read.said.append,
            progress=lambda done, total: read.progress.append((done, total)),
            files=files,
        )

    return read


def versions(inventory):
    return {one.name: one.version for one in inventory.distributions}


WHERE = {
    "plain": ("/usr/local/bin/python3", "3.11.9", "/usr/local", "site-packages"),
    "debian": ("/usr/bin/python3", "3.11.2", "/usr/local", "dist-packages"),
    "venv": ("/opt/venv/bin/python3", "3.11.9", "/opt/venv", "site-packages"),
    "conda": ("/opt/conda/bin/python3", "3.11.7", "/opt/conda", "site-packages"),
}


@pytest.mark.parametrize("shape", WHERE)
def test_the_first_python_on_the_path_is_found_with_its_packages(read, shape):
    make, settings = bases.SHAPES[shape]
    found = read(make(), **settings)
    python, version, prefix, kind = WHERE[shape]
    assert (found.python, found.python_version, found.python_minor) == (python, version, "3.11")
    assert found.site_directory == f"{prefix}/lib/python3.11/{kind}"
    assert (found.scripts_directory, found.prefix) == (f"{prefix}/bin", prefix)
    assert found.find("Torch").version == "2.6.0"
    assert found.find("numpy").folder == found.site_directory
    assert found.platform == "linux/amd64"
    assert found.libc == "manylinux 2.36"
    assert (found.user, found.workdir) == ("1000", "/home/me")
    assert found.place("/bin/x") == "/usr/bin/x"


def test_debians_own_packages_count_and_come_after_pips(read):
    found = read(bases.debian())
    assert versions(found) == {"torch": "2.6.0", "numpy": "1.26.4", "six": "1.16.0", "old": "1.0"}
    assert found.site_directories == ("/usr/local/lib/python3.11/dist-packages", "/usr/lib/python3/dist-packages")


def test_a_packages_requirements_and_files_are_known(read):
    torch = read(bases.plain(), files=True).find("torch")
    assert torch.requires == tuple(bases.TORCH["requires"])
    assert torch.metadata == "torch-2.6.0.dist-info"
    assert set(torch.files) == {
        f"/{SITE}/torch/__init__.py",
        f"/{SITE}/torch-2.6.0.dist-info/METADATA",
        f"/{SITE}/torch-2.6.0.dist-info/RECORD",
    }


def test_upper_layers_replace_remove_and_hide_what_lower_ones_have(read):
    layers = [
        *bases.plain(),
        {
            f"{SITE}/.wh.numpy-1.26.4.dist-info": "",
            **bases.package(SITE, "numpy", "2.1.0"),
            **bases.package(SITE, "einops", "0.8.0"),
        },
        {f"{SITE}/einops-0.8.0.dist-info/.wh..wh..opq": "", f"{SITE}/einops-0.8.0.dist-info/RECORD": ""},
    ]
    assert versions(read(layers)) == {"torch": "2.6.0", "numpy": "2.1.0"}


def test_a_directory_in_the_place_of_a_link_and_a_link_in_the_place_of_a_directory(read):
    moved = {"usr/local": link("/opt/python"), "opt/python/bin/python3": "x", "opt/python/lib/python3.11/os.py": ""}
    found = read(
        [*bases.plain(), {**moved, **bases.package("opt/python/lib/python3.11/site-packages", "torch", "2.7.0")}]
    )
    assert found.python == "/usr/local/bin/python3"
    assert found.site_directory == "/opt/python/lib/python3.11/site-packages"
    assert versions(found) == {"torch": "2.7.0"}
    found = read([*bases.plain(), {"bin": None, "bin/x": ""}])
    assert found.place("/bin/x") == "/bin/x"


def test_an_environment_that_sees_the_system_has_its_packages_too(read):
    layers = bases.venv()
    layers[-1]["opt/venv/pyvenv.cfg"] = "home = /usr/local/bin\ninclude-system-site-packages = true\n"
    layers[1] |= bases.package(SITE, "einops", "0.8.0") | bases.package(SITE, "numpy", "1.0")
    found = read(layers, Env=["PATH=/opt/venv/bin"])
    assert versions(found) == {"torch": "2.6.0", "numpy": "1.26.4", "einops": "0.8.0"}


def test_a_layer_is_read_once_and_images_that_share_it_share_the_reading(read):
    read(bases.plain())
    assert "3 of its 3 layers" in read.said[0]
    assert read.progress[-1][0] == read.progress[-1][1] > 0
    more = read([*bases.plain(), bases.package(SITE, "einops", "0.8.0")])
    assert "1 of its 4 layers" in read.said[0]
    assert more == read([], again=True)
    assert not read.said


@pytest.mark.parametrize("damage", ["", "no JSON", "[]", '[1, {"other": {}}]', '[99, {"texts": {}}]', None])
def test_what_was_kept_of_a_layer_and_of_the_whole_is_read_again_if_it_is_damaged(read, tmp_path, damage):
    found = read(bases.plain())
    for path in (tmp_path / "cache" / "layers").iterdir():
        path.write_bytes(path.read_bytes()[:-9] if damage is None else gzip.compress(damage.encode()))
    for path in (tmp_path / "cache" / "inventories").iterdir():
        path.write_bytes(path.read_bytes()[:-9] if damage is None else damage.encode())
    assert read([], again=True) == found


def test_a_label_is_believed_only_in_the_image_that_it_was_written_for(read):
    found = read(bases.plain())
    diff_ids = [bases.digest_of(bases.make_tar(layer)) for layer in bases.plain()]
    text = found.to_label(diff_ids)
    labelled = read(bases.plain(), Labels={inventories.LABEL: text})
    assert not read.said
    assert versions(labelled) == versions(found)
    assert not any(one.files for one in labelled.distributions)
    assert labelled.find("torch").requires == found.find("torch").requires
    built_upon = read([*bases.plain(), bases.package(SITE, "einops", "0.8.0")], Labels={inventories.LABEL: text})
    assert built_upon.find("einops").version == "0.8.0"
    assert all(one.files for one in read(bases.plain(), Labels={inventories.LABEL: text}, files=True).distributions)


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", "null", '{"layers": 1, "inventory": {}}'])
def test_a_label_that_is_none_of_ours_does_not_count(text):
    assert Inventory.from_label(text, []) is None
    right = json.loads(label_of_nothing()) | {"inventory": {"distributions": [{}], "links": [], "site_directories": []}}
    assert Inventory.from_label(json.dumps(right), []) is None


def label_of_nothing():
    fields = ("python", "python_version", "site_directory", "scripts_directory", "prefix", "platform", "libc")
    return Inventory(**dict.fromkeys(fields, ""), site_directories=(), distributions=()).to_label([])


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([bases.SYSTEM], "no Python: there is no `python3` on its PATH"),
        ([bases.SYSTEM, {"usr/bin/python3": link("python3.11")}], "no Python"),
        ([bases.SYSTEM, {"usr/bin/python3": link("python3")}], "no Python"),
        ([bases.SYSTEM, {"usr/bin/python3": "x"}], "no standard library"),
    ],
)
def test_a_base_without_a_python_that_runs_is_refused_with_a_remedy(read, layers, problem):
    with pytest.raises(ImageError, match=problem) as caught:
        read(layers)
    assert "Name a base image" in str(caught.value)


@pytest.mark.parametrize("path", ["../../etc/python3", "/usr/local/bin/../bin/python3", "./usr/local/bin/python3"])
def test_names_in_a_layer_stay_in_the_image(read, path):
    layers = bases.plain()
    layers[1][path] = "x"
    layers[2][f"{SITE}/torch-2.6.0.dist-info/RECORD"] = "../../../../../../../../etc/passwd,,\ntorch/__init__.py,,\n"
    found = read(layers, files=True)
    assert found.python == "/usr/local/bin/python3"
    assert found.find("torch").files[0] == "/etc/passwd"


@pytest.mark.parametrize(
    "pack", [bytes, lambda tar: gzip.compress(tar[:5000]) + gzip.compress(tar[5000:]) + b"\0" * 99]
)
def test_layers_are_told_apart_by_their_bytes(read, pack):
    assert versions(read(bases.plain(), pack=pack)) == {"torch": "2.6.0", "numpy": "1.26.4"}


@pytest.mark.parametrize(
    ("pack", "problem"),
    [
        (lambda _: b"\x28\xb5\x2f\xfd rest", "zstd.*pip install zstandard|cannot be read as a tar"),
        (lambda _: b"\x1f\x8b rest", "cannot be read as a tar"),
        (lambda _: gzip.compress(b"no tar" * 999), "cannot be read as a tar"),
        (lambda tar: gzip.compress(tar[:1200]), "cannot be read as a tar"),
    ],
)
def test_a_layer_that_cannot_be_read_is_named(read, pack, problem):
    with pytest.raises(ImageError, match=problem) as caught:
        read(bases.plain(), pack=pack)
    assert "Layer sha256:" in str(caught.value)


@pytest.mark.parametrize(
    ("files", "libc"),
    [
        ({"lib/apk/db/installed": "P:busybox\nV:1.36\n\nP:musl\nA:x86_64\nV:1.2.5-r0\n\n"}, "musllinux 1.2"),
        (
            {"lib64/libc-2.28.so": b"\x7fELF stable release version 2.28.\n", "lib64/libc.so.6": link("libc-2.28.so")},
            "manylinux 2.28",
        ),
        ({}, "manylinux 2.17"),
    ],
)
def test_the_c_library_is_found_where_distributions_put_it(read, files, libc):
    assert read([files, *bases.plain()[1:]]).libc == libc
