"""`packages="here"`: what is offered, packed and laid out. Here the "image" is this Python without the folder of packages."""

import gzip
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from made_packages import EXTENSION, compiled, install

import kale_dist as kd
from kale_dist.errors import ConfigError, ContractError, SnapshotError
from kale_dist.image import here
from kale_dist.snapshot import distributions
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.pod import packages

LONG_AGO = time.time() - 1000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packages._of_image.cache_clear()
    yield tmp_path / "cache/kale-dist/distributions"
    packages._of_image.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages in front of this Python's, as long as `notebook` is True."""
    folder = tmp_path / f"notebook/lib/python3.{sys.version_info.minor}/site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "blobs")


def offered(store, *names):
    store.root.mkdir(exist_ok=True)
    return here.offer(here.find((), names), store, packs=True)[0]


def laid_out(offer, store, root, monkeypatch, *, image=()):
    """Lay an offer out where the image has the folders `image`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*map(str, image), *(one for one in sys.path if "notebook" not in one)])
        packages._of_image.cache_clear()
        return packages.lay_out(offer, store, root)


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# -- what is offered -----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_by_hand_is_offered_with_what_it_requires_and_nothing_of_kale_dists_own(site):
    install(site, "mine", {"mine.py": "x = 1"}, requires=["deep-one>=1", 'unneeded; extra == "more"'])
    install(
        site, "deep_one", {"deep_one.py": ""}, asked_for=False, requires=["deeper @ https://me:token@example.com/x"]
    )
    install(site, "deeper", {"deeper.py": ""}, asked_for=False)
    install(site, "unneeded", {"unneeded.py": ""}, asked_for=False)
    install(site, "other", {"other.py": ""}, asked_for=False)
    install(site, "triton", {"triton.py": ""})
    found = set(here.find(()))
    assert {"mine", "deep-one", "deeper"} <= found
    assert not found & {"unneeded", "other", "triton", "torch", "kale-dist", "cloudpickle", "pip"}
    # What the call imports is offered, however it was installed; names narrow it.
    assert "other" in here.find(["other.part"])
    assert set(here.find(["other"], ["Deep.One"])) == {"deep-one", "deeper"}


def test_extras_and_markers_decide_what_is_required(site, store):
    needs = ["fast[extra]", 'absent; sys_platform == "win32"', 'torch<2; python_version < "3.8"']
    install(site, "mine", {"mine.py": ""}, requires=needs)
    install(
        site, "fast", {"fast.py": ""}, asked_for=False, requires=['deep; extra == "extra"', 'other; extra == "another"']
    )
    for name in ("deep", "other", "absent"):
        install(site, name, {f"{name}.py": ""}, asked_for=False)
    assert set(here.find((), ["mine"])) == {"mine", "fast", "deep"}
    assert set(here.find((), ["fast[another]"])) == {"fast", "other"}
    assert [one.requires for one in offered(store, "mine").packages if one.name == "mine"] == [()]


def test_a_name_that_is_not_installed_is_refused_at_the_call(site):
    install(site, "scikit-mine", {"skmine.py": ""})
    with pytest.raises(
        ConfigError, match=r"packages: no package 'scikit-mien' is installed here. Did you mean 'scikit-mine'"
    ):
        kd.render(print, number_of_processes=1, on=kd.Docker(image="a/b:1", packages="here: scikit-mien"))
    with pytest.raises(ConfigError, match="'here: scikit-learn, mine', as text and not in a list"):
        kd.render(print, number_of_processes=1, on=kd.Docker(image="a/b:1", packages=["here: einops"]))
    for given, said in (
        ("here: torch", "'torch' is never sent"),
        ("here: a==1", "Give names alone"),
        ("Here: a", "Write it as 'here'"),
    ):
        with pytest.raises(ConfigError, match=said):
            kd.render(print, number_of_processes=1, on=kd.Docker(image="a/b:1", packages=given))


@pytest.mark.parametrize(
    ("specifier", "version", "is_accepted"),
    [
        ("", "2.3.5", True), (">=1.24,<3", "2.3.5", True), ("<2.3", "2.3.0", False), ("!=2.3.*", "2.3.5", False),
        ("==2.3.*", "2.3.5+cpu", True), ("~=2.3", "2.9", True), ("~=2.3.1", "2.4", False), ("==2.13", "2.13.0+cpu", True),
        ("===2", "2", True), (">1.0", "1.0.1", True), ("<=2.4", "2.4.0", True), (">=2.10", "2.9.1", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_number(specifier, version, is_accepted):
    assert distributions.accepts(specifier, version) is is_accepted


# -- packing -------------------------------------------------------------------------------------------------------------


def test_one_wheel_has_one_identity_wherever_it_is_installed(site, tmp_path):
    wheel = {"mine/__init__.py": "x = 1", "mine/data.txt": "words"}
    install(site, "mine", wheel)
    elsewhere = install(
        tmp_path / "elsewhere", "mine", {**wheel, "mine/__pycache__/__init__.pyc": "code"}, asked_for=False
    )
    changed = install(tmp_path / "changed", "mine", {**wheel, "mine/data.txt": "other"})
    first, second, third = (
        distributions.identity(importlib.metadata.Distribution.at(folder / "mine-1.0.dist-info"))
        for folder in (site, elsewhere, changed)
    )
    assert first == second != third
    assert first


@pytest.mark.parametrize("is_editable", [True, False])
def test_what_is_edited_travels_as_a_small_pack_of_its_own(site, store, tmp_path, monkeypatch, is_editable):
    code = {"mine/__init__.py": "x = 1", "mine/large.bin": os.urandom(1 << 20), "mine/old.py": ""}
    project = tmp_path / "project" if is_editable else None
    install(site, "mine", code, project=project)
    for path in site.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    [before] = offered(store, "mine").packages
    assert bool(before.identity) is not is_editable
    tree = tmp_path / "tree"
    laid_out(offered(store, "mine"), store, tree, monkeypatch)
    at, there = (project or site) / "mine", packages.library(tree) / "mine"
    (at / "__init__.py").write_text("x = 2")
    offer = offered(store, "mine")
    [after] = offer.packages
    assert (after.identity, after.blobs[0]) == ("", before.blobs[0])
    assert store.path(after.blobs[1]).stat().st_size < 64 << 10
    laid_out(offer, store, tree, monkeypatch)
    assert (there / "__init__.py").read_text() == "x = 2"
    # A file that is gone has the whole packed again.
    (at / "old.py").unlink()
    [again] = offered(store, "mine").packages
    assert len(again.blobs) == 1
    laid_out(offered(store, "mine"), store, tree, monkeypatch)
    assert sorted(path.name for path in there.iterdir()) == ["__init__.py", "large.bin"]


def test_packs_are_made_once_outlive_the_jobs_blobs_and_are_limited(site, store, cache, monkeypatch):
    install(site, "mine", {"mine.bin": os.urandom(1000)})
    [package] = offered(store, "mine").packages
    pack = cache / package.blobs[0]
    # The bytes are there once, under two names.
    assert pack.stat().st_ino == store.path(package.blobs[0]).stat().st_ino
    store.delete(package.blobs[0])
    made = pack.stat().st_ino
    assert offered(store, "mine").packages == (package,)
    assert pack.stat().st_ino == made
    monkeypatch.setattr(here, "PACKS_LIMIT_BYTES", 500)
    offered(store, "mine")
    assert not pack.exists()
    assert store.exists(package.blobs[0])


def test_no_token_of_an_installation_is_in_an_offer_or_a_pack(site, store, tmp_path, monkeypatch):
    install(site, "mine", {"mine.py": ""}, requires=["torch @ https://me:token@example.com/torch.whl"])
    (site / "mine-1.0.dist-info/direct_url.json").write_text('{"url": "https://me:token@example.com/mine.whl"}')
    record = site / "mine-1.0.dist-info/RECORD"
    record.write_text(record.read_text() + "mine-1.0.dist-info/direct_url.json,,\n")
    offer = offered(store, "mine")
    assert "token" not in repr(offer)
    laid_out(offer, store, tmp_path / "tree", monkeypatch)
    assert not [path for path in files(tmp_path / "tree") if path.endswith("direct_url.json")]


def test_an_editable_project_is_sent_without_its_tests_and_data_that_is_large(
    site, store, tmp_path, monkeypatch, capsys
):
    project = tmp_path / "project"
    code = {
        "mine/__init__.py": "x = 1",
        "mine/words.txt": "a",
        "tests/test_it.py": "",
        ".git/config": "token",
        "single.py": "",
    }
    install(site, "mine", code, project=project)
    tree = tmp_path / "tree"
    laid_out(offered(store, "mine"), store, tree, monkeypatch)
    there = {path.partition("site-packages/")[2] for path in files(tree) if "dist-info" not in path}
    assert there == {"mine/__init__.py", "mine/words.txt", "single.py", ""}
    monkeypatch.setattr(here.modules, "MAX_DATA_BYTES", 0)
    (project / "mine/more.txt").write_text("b")
    laid_out(offered(store, "mine"), store, tree, monkeypatch)
    assert "mine has more than 0 MiB of files that are no code: none of them is sent" in "".join(capsys.readouterr())
    assert not [path for path in files(tree) if path.endswith(".txt")]


def test_an_editable_project_with_a_namespace_and_single_modules(site, store, tmp_path, monkeypatch):
    install(
        site,
        "linked",
        {"corp/deep/__init__.py": "", "corp/notes.txt": "a", "tests/x.py": ""},
        project=tmp_path / "linked",
    )
    install(site, "mapped", {"place/mod.py": ""}, project=tmp_path / "mapped")
    (site / "__editable__.mapped.pth").unlink()
    finder, info = site / "__editable___mapped_finder.py", site / "mapped-1.0.dist-info/RECORD"
    finder.write_text(f"MAPPING: dict[str, str] = {{'corp.mod': '{tmp_path}/mapped/place/mod'}}\n")
    info.write_text(info.read_text().replace("__editable__.mapped.pth", finder.name))
    laid_out(offered(store, "linked", "mapped"), store, tmp_path / "tree", monkeypatch)
    there = {path.partition("site-packages/")[2] for path in files(tmp_path / "tree") if "dist-info" not in path} - {""}
    assert there == {"corp/deep/__init__.py", "corp/notes.txt", "corp/mod.py"}


def test_what_a_record_names_outside_of_its_installation_is_not_read(site, store):
    install(site, "mine", {"mine.py": "", "../../../../secret": "hunter2", "../../../share/x.txt": ""})
    [package] = offered(store, "mine").packages
    assert b"hunter2" not in gzip.decompress(store.open(package.blobs[0]))
    assert b"share/x.txt" in gzip.decompress(store.open(package.blobs[0]))


@pytest.mark.parametrize("how", ["an old time", "a file is gone", "no hashes"])
def test_a_wheel_that_differs_from_its_record_has_no_identity(site, store, how):
    install(site, "mine", {"mine/__init__.py": "x = 1", "mine/more.py": ""})
    if how == "an old time":
        (site / "mine/__init__.py").write_text("x = 10")
        os.utime(site / "mine/__init__.py", (LONG_AGO, LONG_AGO))
    elif how == "no hashes":
        record = site / "mine-1.0.dist-info/RECORD"
        record.write_text(re.sub(r",sha256=[^,]*", ",", record.read_text()))
    else:
        (site / "mine/more.py").unlink()
    assert [package.identity for package in offered(store, "mine").packages] == [""]


def test_a_file_that_cannot_be_read_is_named(site, store, monkeypatch):
    install(site, "mine", {"mine.py": ""})
    read = pathlib.Path.read_bytes

    def refuses(path):
        if path.name == "mine.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuses)
    with pytest.raises(
        SnapshotError, match=r"packages: .*/mine.py cannot be read \(Permission denied\). Make it readable"
    ):
        offered(store, "mine")


def test_a_package_without_files_is_named(site, store):
    (site / "ghost-1.0.egg-info").mkdir()
    (site / "ghost-1.0.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    offer, notes = here.offer(here.find((), ["ghost"]), store, packs=True)
    assert offer.packages == ()
    assert notes[0].startswith(
        "packages: ghost is not sent, because no list of its files was found. Install it with pip"
    )


# -- in the pod ----------------------------------------------------------------------------------------------------------


def test_a_tree_is_what_an_installation_would_be(site, store, tmp_path, monkeypatch):
    points = "[console_scripts]\nmine-hello = mine:hello\n"
    code = {
        "mine/__init__.py": "def hello(): print('hello')\n", "mine/data/words.txt": "alpha beta", f"mine/{EXTENSION}": compiled(tmp_path),
        "../../../bin/mine-hello": f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\nfrom mine import hello\nhello()\n", "../../../share/mine/x.txt": "1",
    }  # fmt: skip
    install(site, "mine", code, points=points, pure=False)
    (site.parents[2] / "bin/mine-hello").chmod(0o755)
    tree = tmp_path / "tree"
    said = laid_out(offered(store, "mine"), store, tree, monkeypatch)
    assert said.startswith("A package of the notebook, which the image lacks or has otherwise: mine 1.0; 0.0 MB in ")
    assert (tree / "share/mine/x.txt").exists()
    asks = (
        "import importlib.metadata as m, importlib.resources as r, mine, mine._fast as f\n"
        "print(m.version('mine'), r.files('mine').joinpath('data/words.txt').read_text(), f.times(21), m.files('mine') is not None)"
    )
    environment = {"PYTHONUSERBASE": str(tree), "PATH": f"{tree}/bin:{os.environ['PATH']}"}
    base = pathlib.Path(sys.base_prefix, "bin/python3")
    told = subprocess.run([base, "-c", asks], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "1.0 alpha beta 42 True\n"
    assert (tree / "bin/mine-hello").read_text().startswith(f"#!{sys.executable}\n")


def test_what_the_image_has_is_not_asked_for(site, store, tmp_path, monkeypatch):
    install(site, "mine", {"mine.py": "x = 1"})
    install(site, "yours", {"yours.py": "x = 1"})
    image = install(tmp_path / "image", "mine", {"mine.py": "x = 1"}, asked_for=False)
    offer = offered(store, "mine", "yours")
    assert " yours 1.0; " in laid_out(offer, store, tmp_path / "tree", monkeypatch, image=[image])
    install(image, "yours", {"yours.py": "x = 1"})
    # What an earlier job has laid out goes with what differs.
    assert laid_out(offer, store, tmp_path / "tree", monkeypatch, image=[image]) == ""
    assert [*(tmp_path / "tree").rglob("*")] == []


def test_what_two_packages_share_stays_with_the_one_that_stays(site, store, tmp_path, monkeypatch):
    shared = {"ns/__init__.py": "x = 1"}
    install(site, "one", {**shared, "ns/one.py": ""})
    install(site, "two", {**shared, "ns/two.py": ""})
    tree = tmp_path / "tree"
    laid_out(offered(store, "one", "two"), store, tree, monkeypatch)
    laid_out(offered(store, "two"), store, tree, monkeypatch)
    assert sorted(path.name for path in (packages.library(tree) / "ns").iterdir()) == ["__init__.py", "two.py"]


def test_a_tree_that_was_cut_short_is_laid_out_again(site, store, tmp_path, monkeypatch):
    install(site, "mine", {"mine/__init__.py": "", "mine/other.py": "x = 1"})
    offer, tree = offered(store, "mine"), tmp_path / "tree"
    laid_out(offer, store, tree, monkeypatch)
    assert "for an earlier job" in laid_out(offer, store, tree, monkeypatch)
    (tree / packages._LAID).unlink()
    (packages.library(tree) / "mine/other.py").write_text("half")
    laid_out(offer, store, tree, monkeypatch)
    assert (packages.library(tree) / "mine/other.py").read_text() == "x = 1"


def test_what_a_fork_server_imports_is_known():
    asks = """
import importlib.metadata, sys
from kale_dist.worker.rank import forkserver
for module in (*forkserver.PRELOADED, "numpy", "torch._dynamo"):
    importlib.import_module(module)
owners = importlib.metadata.packages_distributions()
print(*{owner for name in set(sys.modules) for owner in owners.get(name.partition(".")[0], ())})
"""
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    unknown = {distributions.canonical(name) for name in told.stdout.split()} - distributions.PRELOADED
    assert [name for name in sorted(unknown) if not here._NEVER.fullmatch(name)] == []


def test_the_images_numpy_stays_where_what_travels_accepts_it(site, store, tmp_path, monkeypatch):
    install(site, "numpy", {"numpy.py": ""}, version="2.4")
    install(site, "mine", {"mine.py": ""}, requires=["numpy>=2"])
    image = install(tmp_path / "image", "numpy", {"numpy.py": ""}, version="2.3.5")
    assert "numpy" not in laid_out(offered(store, "mine"), store, tmp_path / "tree", monkeypatch, image=[image])
    install(site, "picky", {"picky.py": ""}, requires=["NumPy>=2.4"])
    offer = offered(store, "mine", "picky")
    assert "numpy 2.4" in laid_out(offer, store, tmp_path / "tree", monkeypatch, image=[image])


@pytest.mark.parametrize("library", ["mine"])
def test_a_library_that_the_image_lacks_is_named_before_anything_is_written(
    site, store, tmp_path, monkeypatch, library
):
    install(site, "linked", {"linked/__init__.py": "", f"linked/{EXTENSION}": compiled(tmp_path, library)}, pure=False)
    with pytest.raises(
        ContractError, match=rf"linked 1.0 \(linked/{EXTENSION}\) needs libmine.so.1, which the image lacks"
    ) as caught:
        laid_out(offered(store, "linked"), store, tmp_path / "tree", monkeypatch)
    assert "packages='here: name, name'" in str(caught.value)
    assert not (tmp_path / "tree").exists()


def test_what_was_compiled_for_another_system_is_refused_only_where_the_image_lacks_it(
    site, store, tmp_path, monkeypatch
):
    install(site, "fast", {"fast.py": "", "_fast.so": b"Mach-O"}, version="1.5", pure=False)
    install(site, "plain", {"plain.py": ""})
    with monkeypatch.context() as patch:
        patch.setattr(distributions, "this_platform", lambda: "darwin arm64")
        offer = offered(store, "fast", "plain")
    with pytest.raises(
        ContractError, match=r'fast have compiled parts of darwin arm64, which .* packages=\["fast==1.5"\] adds them'
    ):
        laid_out(offer, store, tmp_path / "tree", monkeypatch)
    image = install(tmp_path / "image", "fast", {"fast.py": ""}, version="1.4")
    assert ": plain 1.0; " in laid_out(offer, store, tmp_path / "tree", monkeypatch, image=[image])


def test_another_torch_is_refused_only_for_what_needs_this_one(site, store, tmp_path, monkeypatch):
    install(site, "picky", {"picky.py": ""}, requires=["torch<2.5"])
    install(site, "plain", {"plain.py": ""}, requires=["torch"])
    assert ": plain 1.0; " in laid_out(offered(store, "plain"), store, tmp_path / "tree", monkeypatch)
    with pytest.raises(ContractError, match=r"picky 1.0 requires torch<2.5, and the image has 2\."):
        laid_out(offered(store, "picky", "plain"), store, tmp_path / "tree", monkeypatch)


def test_a_disk_without_room_is_named_with_what_is_needed(site, store, tmp_path, monkeypatch):
    install(site, "mine", {"mine.bin": bytes(2_000_000)})
    offer = offered(store, "mine")
    full = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ContractError, match=r"packages of the notebook take 2 MB in .*, and 0 MB are free"):
        laid_out(offer, store, tmp_path / "tree", monkeypatch)


# -- what is said --------------------------------------------------------------------------------------------------------


def test_the_call_says_what_will_travel_once_a_pod_has_told(site, store):
    install(site, "mine", {"mine.py": "x = 1"})
    install(site, "yours", {"yours.py": "x = 1"})
    offer = offered(store, "mine", "yours")
    assert here.describe("a/b:1", offer).startswith('packages="here": what the image lacks of 2 packages, 0.0 MB,')
    here.remember("a/b:1", offer.packages, offer.packages[0].blobs)
    assert here.describe("a/b:1", offer).startswith(
        'packages="here": at most 0.0 MB will be sent (mine), by what the image had at '
    )
    assert "what the image lacks" in here.describe("another:1", offer)
