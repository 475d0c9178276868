"""`packages="auto"`: from what a call really imports to packages that are really installed, in a folder of the tests."""

import importlib.metadata
import json
import sys
import textwrap
import types

import numpy as np
import pytest
from fake_backend import FakeBackend

import kale_dist as kd
from kale_dist import places
from kale_dist.errors import KaleDistWarning
from kale_dist.image import auto
from kale_dist.job.spec.recipe import Recipe
from kale_dist.snapshot.capture import capture
from kale_dist.wire.blobs import MemoryStore


class Cluster(FakeBackend):
    """Takes what pods take, and looks nothing up."""

    name = "kubernetes"


class Site:
    """A folder of installed packages."""

    def __init__(self, folder):
        self.folder = folder

    def add(self, name, version, *files, **metadata):
        """Install a package; `metadata` are more files beside its METADATA."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in metadata.items():
            (info / file.replace("__", ".")).write_text(text)
        for file in files:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_text("def work():\n    return 1\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith("kdt"):
            del sys.modules[name]


def imports_of(fn, *args):
    return capture(fn, args, {}, store=MemoryStore(), label="").imports


def cell(text, **names):
    """`train` as a cell of a notebook defines it; `names` are those of other cells."""
    names |= {"__name__": "__main__", "__builtins__": __builtins__}
    exec(textwrap.dedent(text), names)
    return names["train"]


def test_imports_and_objects_of_a_notebook_are_found(site):
    site.add("KDT.Tools", "1.5", "kdttools/__init__.py")
    site.add("kdt-inner", "2.0", "kdtinner.py")

    import kdttools

    text = """
        def train(x):
            import kdtinner
            return kdttools.work() + kdtinner.work()
        """
    found = auto.find_packages(imports_of(cell(text, kdttools=kdttools), np.float64(1)))
    assert "  import kdttools: kdt-tools==1.5" in found.lines
    version = importlib.metadata.version("numpy")
    assert found.packages == ("kdt-inner==2.0", "kdt-tools==1.5", f"numpy=={version}")
    assert found.notes == ()
    assert found.lines[1] == "  import kdtinner: kdt-inner==2.0"


def test_what_the_notebooks_own_modules_import_is_found_and_they_are_not(site, tmp_path, monkeypatch):
    site.add("kdt-inner", "2.0", "kdtinner.py")
    (tmp_path / "kdtown").mkdir()
    (tmp_path / "kdtown" / "__init__.py").write_text("from kdtown.more import work\n")
    (tmp_path / "kdtown" / "more.py").write_text("import json\ndef work():\n    import kdtinner\n")
    monkeypatch.syspath_prepend(tmp_path)
    import kdtown

    imports = imports_of(kdtown.work)
    assert not any(name.startswith("kdtown") for name in imports)
    assert auto.find_packages(imports).packages == ("kdt-inner==2.0",)


def test_modules_made_by_hand_are_no_packages(monkeypatch):
    made = types.ModuleType("kdtmade")
    monkeypatch.setitem(sys.modules, "kdtmade", made)

    assert auto.find_packages(imports_of(cell("def train():\n    import kdtmade"))).notes == ()


def test_what_every_rank_has_is_left_out():
    text = """
        import torch
        def train():
            import os.path, cloudpickle, setuptools
            return torch.nn.Linear
        """
    report = auto.find_packages([*imports_of(cell(text)), "functorch", "kale_dist.worker.training.loop", "__main__"])
    assert (report.packages, report.notes) == ((), ())
    assert "found no installed package" in report.lines[0]


def test_a_local_label_is_left_out_and_said(site):
    site.add("kdt-vision", "0.22.0+cpu", "kdtvision.py")
    report = auto.find_packages(["kdtvision"])
    assert report.packages == ("kdt-vision==0.22.0",)
    assert "0.22.0+cpu here; the image gets 0.22.0" in report.notes[0]


NOT_FROM_AN_INDEX = [
    ({"url": "file:///home/me/a", "dir_info": {"editable": True}}, ["installed from file:///home/me/a"]),
    ({"url": "file:///home/me/a", "dir_info": {}}, ["installed from file:///home/me/a", "packages='here' sends it"]),
    (
        {"url": "https://me:hunter2@x.example.com/a", "vcs_info": {"vcs": "git", "commit_id": "0"}},
        ["installed from https://x.example.com/a"],
    ),
]


@pytest.mark.parametrize(("link", "words"), NOT_FROM_AN_INDEX)
def test_what_is_not_from_an_index_is_named_and_not_pinned(site, link, words):
    site.add("kdt-link", "1.0", "kdtlink.py", direct_url__json=json.dumps(link))
    report = auto.find_packages(["kdtlink.part"])
    assert report.packages == ()
    assert len(report.notes) == 1
    assert "hunter2" not in report.notes[0]
    for word in ("`import kdtlink`", *words):
        assert word in report.notes[0]


@pytest.mark.parametrize("link", ["", "[]", "{", '{"dir_info": {}}'])
def test_a_damaged_note_of_the_origin_is_passed_over(site, link):
    site.add("kdt-link", "1.0", "kdtlink.py", direct_url__json=link)
    assert auto.find_packages(["kdtlink"]).packages == ("kdt-link==1.0",)


def test_what_conda_installed_is_pinned_and_said(site):
    site.add("kdt-conda", "1.0", "kdtconda.py", INSTALLER="conda\n")
    report = auto.find_packages(["kdtconda"])
    assert report.packages == ("kdt-conda==1.0",)
    assert "kdt-conda is 1.0 from conda here" in report.notes[0]


def test_what_has_no_metadata_and_what_is_not_there_is_named(site):
    (site.folder / "kdtbare.py").touch()
    report = auto.find_packages(["kdtbare", "kdtgone.part", "kdtlost"])
    assert report.packages == ()
    assert "`import kdtbare`: no installed package says that it has this module" in report.notes[0]
    assert "not installed here, so not put into the image: kdtgone, kdtlost" in report.notes[1]


def test_a_package_that_is_one_compiled_file_is_found(site):
    site.add("kdt-fast", "1.0", "kdtfast.cpython-311-x86_64-linux-gnu.so")
    assert auto.find_packages(["kdtfast"]).packages == ("kdt-fast==1.0",)


def test_a_version_that_no_index_can_have_is_named(site):
    site.add("kdt-odd", "latest", "kdtodd.py")
    report = auto.find_packages(["kdtodd"])
    assert report.packages == ()
    assert "the version 'latest' of kdt-odd" in report.notes[0]


def test_of_packages_that_share_a_name_those_are_taken_that_have_the_part(site):
    site.add("kdt-cloud-a", "1.0", "kdtcloud/a/__init__.py")
    site.add("kdt-cloud-b", "2.0", "kdtcloud/b.py")
    site.add("kdt-cloud-c", "3.0", "kdtcloud/c.cpython-311-x86_64-linux-gnu.so", "kdtcloud/_c.py")
    assert auto.find_packages(["kdtcloud.a.deeper.name", "kdtcloud.c"]).packages == (
        "kdt-cloud-a==1.0",
        "kdt-cloud-c==3.0",
    )
    assert auto.find_packages(["kdtcloud.b.name"]).packages == ("kdt-cloud-b==2.0",)
    assert len(auto.find_packages(["kdtcloud"]).packages) == 1


def test_what_the_recipe_names_itself_stays():
    recipe = Recipe(packages=("numpy<3", "scikit-learn[x]==1.0; python_version > '3'"))
    report = ["numpy==2.0", "scikit-learn==1.5", "rich==13"]
    assert auto.with_packages(recipe, report).packages == tuple(sorted([*recipe.packages, "rich==13"]))


@pytest.fixture
def cluster(monkeypatch):
    backend = Cluster()
    monkeypatch.setattr(places, "get", lambda name: backend)


def test_a_call_gets_what_it_imports_and_the_user_is_told(site, capsys, cluster):
    site.add("kdt-inner", "2.0", "kdtinner.py")
    (site.folder / "kdtbare.py").touch()

    train = cell("def train():\n    import kdtbare, kdtinner")
    plan = kd.render(train, on=kd.Kubernetes(packages="auto", image=kd.Recipe(base="r.example.com/base:1")))
    assert plan.spec.recipe == Recipe(base="r.example.com/base:1", packages=("kdt-inner==2.0",))
    assert "import kdtinner: kdt-inner==2.0" in capsys.readouterr().err
    with pytest.warns(KaleDistWarning, match="import kdtbare"):
        kd.launch(train, on=kd.Kubernetes(packages="auto")).wait()


def test_a_call_that_imports_nothing_keeps_its_image(cluster):
    plan = kd.render(cell("def train(): return 1"), on=kd.Kubernetes(packages="auto", image="r.example.com/base:1"))
    assert (plan.spec.image, plan.spec.recipe) == ("r.example.com/base:1", None)
