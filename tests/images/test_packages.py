"""Packages on top of what a base has, from an index on this machine."""

import dataclasses
import subprocess
import sys
import venv

import bases
import pytest
from bases import FACTS, LIKE_THIS, SITE, installed
from wheelhouse import Wheelhouse

from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import base_image, packages
from kale_dist.job.spec.recipe import Recipe

FOLDER = "/opt/kale-dist/site-packages"
ODD = (installed("kdodd", "unknown"), installed("kdbad", "1.0", "not a requirement!"))


@pytest.fixture
def house(tmp_path):
    (tmp_path / "house").mkdir()
    return Wheelhouse(tmp_path / "house")


@pytest.fixture
def install(house, tmp_path, monkeypatch):
    """A function that installs requirements from the house's index; `said` is what the user was told."""
    # Of the machine, and of those who test: nothing else may give packages.
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    tries = []
    with house.serving() as url:

        def install(*requirements, facts=FACTS, index=url, **recipe):
            install.said = []
            tries.append(requirements)
            folder = tmp_path / f"try-{len(tries)}"
            folder.mkdir()
            given = {"index_urls": (index,) if index else ()} | recipe
            return packages.install(Recipe(packages=requirements, **given), facts, folder, log=install.said.append)

        yield install


def names(made):
    new = set(made.facts.distributions) - {*FACTS.distributions, *ODD}
    return [f"{one.name} {one.version}" for one in sorted(new, key=lambda one: one.name)]


def texts(made):
    """Path to bytes of all files."""
    files = [entry for entry in made.entries if entry.content is not None]
    return {
        entry.path: entry.content if isinstance(entry.content, bytes) else entry.content.read_bytes() for entry in files
    }


@pytest.mark.newest
def test_what_the_base_has_is_not_fetched_and_torch_brings_nothing_along(house, install):
    house.wheel("kdmetrics", requires=["torch>=2", "numpy", "kdtools>=1"])
    house.wheel("kdtools", "1.5")
    house.wheel("torch", "3.0")
    house.wheel("numpy", "2.1.0")
    made = install("kdmetrics", "torch", "numpy>=1.20")
    assert names(made) == ["kdmetrics 1.0", "kdtools 1.5"]
    assert install.said[-1] == "Packages for the image: kdmetrics 1.0, kdtools 1.5"
    assert {one.name for one in made.facts.distributions} == {"kdmetrics", "kdtools", "numpy", "scipy", "torch"}
    # What the base has was only told to uv: nothing of it is in the layer.
    assert not [path for path in texts(made) if "torch" in path or "numpy" in path]


def test_a_version_that_was_published_a_moment_ago_is_found(house, install):
    house.wheel("kdthing")
    install("kdthing")
    house.wheel("kdthing", "2.0")
    assert names(install("kdthing==2.0")) == ["kdthing 2.0"]
    assert names(install("kdthing", rebuild=True)) == ["kdthing 2.0"]


def test_nothing_is_put_in_where_all_is_there(install):
    assert install("torch==2.6.0", "scipy") is None
    assert "has all packages" in install.said[-1]


def test_an_older_version_that_works_with_the_bases_torch_is_preferred(house, install):
    house.wheel("kdvision", "2.0", requires=["torch==2.7.0"])
    house.wheel("kdvision", "1.0", requires=["torch==2.6.0"])
    assert names(install("kdvision")) == ["kdvision 1.0"]


def test_torch_changes_only_if_that_is_allowed(house, install):
    house.wheel("kdvision", "2.0", requires=["torch==2.7.0"])
    house.wheel("torch", "2.7.0")
    with pytest.raises(ImageError, match=r"torch==2\.7\.0.*torch 2\.6\.0\+cpu is kept.*allow_torch_change=True"):
        install("kdvision")
    made = install("kdvision", allow_torch_change=True)
    assert names(made) == ["kdvision 2.0", "torch 2.7.0"]
    assert "They come before those of the base image: torch 2.6.0+cpu by 2.7.0." in install.said


def test_a_package_of_the_base_that_loses_what_it_asks_for_is_named(house, install):
    house.wheel("numpy", "2.1.0")
    made = install("numpy==2.1.0")
    assert install.said[-1] == "scipy 1.11.0 of the base image asks for numpy<2,>=1.20, and gets 2.1.0."
    assert made.facts.find("numpy").version == "2.1.0"


def test_an_extra_of_a_package_in_the_base_brings_what_it_adds(house, install):
    house.wheel("kdextra")
    assert names(install("torch[more]")) == ["kdextra 1.0"]


def test_what_markers_ask_is_answered_for_the_image(house, install):
    arm_only, new_only = 'kdarm; platform_machine == "aarch64"', 'kdnew; python_full_version >= "3.12"'
    house.wheel("kdmarked", requires=[arm_only, new_only])
    house.wheel("kdarm", tag="cp312-cp312-manylinux_2_17_aarch64")
    house.wheel("kdnew")
    assert names(install("kdmarked")) == ["kdmarked 1.0"]
    arm = dataclasses.replace(FACTS, machine="aarch64", python="3.12.1")
    assert names(install("kdmarked", facts=arm)) == ["kdarm 1.0", "kdmarked 1.0", "kdnew 1.0"]


@pytest.mark.parametrize(
    ("libc", "wanted"),
    [("glibc 2.28", "2.0"), ("glibc 2.17", "1.0"), ("glibc 2.99", "3.0"), ("glibc 2.27", "1.0"), ("musl 1.2", "4.0")],
)
def test_wheels_are_chosen_for_the_bases_c_library(house, install, libc, wanted):
    house.wheel("kdnative", "1.0", tag="cp311-cp311-manylinux2014_x86_64")
    house.wheel("kdnative", "2.0", tag="cp311-abi3-manylinux_2_28_x86_64")
    house.wheel("kdnative", "3.0", tag="cp311-cp311-manylinux_2_34_x86_64")
    house.wheel("kdnative", "4.0", tag="cp311-cp311-musllinux_1_1_x86_64")
    house.wheel("kdnative", "5.0", tag="cp312-cp312-manylinux_2_17_x86_64")
    assert names(install("kdnative", facts=dataclasses.replace(FACTS, libc=libc))) == [f"kdnative {wanted}"]


@pytest.mark.newest
def test_source_that_is_pure_python_is_built_for_an_image_like_this_machine(house, install):
    house.source("kdsource", "1.2")
    assert names(install("kdsource", facts=LIKE_THIS)) == ["kdsource 1.2"]
    with pytest.raises(ImageError, match=r"built from source.*Dockerfile of your own"):
        install("kdsource", facts=dataclasses.replace(FACTS, machine="aarch64"))


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("kdabsent", ["kdabsent was not found", "spelling", "index_urls="]),
        ("kdthere==9", ["no version of kdthere==9", f"Python {LIKE_THIS.minor}, glibc 2.28, x86_64"]),
        ("kdforeign", ["kdforeign", f"Python {LIKE_THIS.minor}"]),
        (
            "kdcompiled",
            ["kdcompiled 1.0 has no wheel for x86_64-manylinux_2_28", "compiled", "a Dockerfile of your own"],
        ),
        ("kdfailing", ["kdfailing", "no such header here", "Dockerfile of your own"]),
        ("kdfighting", ["kdthere==1.0", "kdthere==2.0"]),
    ],
)
def test_packages_that_cannot_be_had_are_explained_with_a_remedy(house, install, requirement, words):
    house.wheel("kdthere", "1.0")
    house.wheel("kdthere", "2.0")
    house.wheel("kdforeign", tag="cp312-cp312-win_amd64")
    this = f"cp{LIKE_THIS.minor.replace('.', '')}"
    house.source("kdcompiled", tag=f"{this}-{this}-linux_x86_64")
    house.source("kdfailing", failing="raise RuntimeError('error: no such header here')")
    house.wheel("kdfighting", requires=["kdthere==1.0", "kdother"])
    house.wheel("kdother", requires=["kdthere==2.0"])
    with pytest.raises(ImageError) as caught:
        install(requirement, facts=LIKE_THIS)
    for word in words:
        assert word in str(caught.value)


def test_an_index_that_is_down_is_not_taken_for_a_package_that_is_absent(install):
    with pytest.raises(ImageError, match="Look at the network") as caught:
        install("kdthing", index="http://ada:correct-horse@127.0.0.1:9/simple/")
    assert caught.value.retryable
    assert "correct-horse" not in str(caught.value)


@pytest.mark.parametrize("way", ["variable", "file"])
def test_pips_own_settings_count_where_the_recipe_names_no_index(house, install, monkeypatch, tmp_path, way):
    house.wheel("kdthing")
    (tmp_path / "nowhere").mkdir()
    with house.serving() as url:
        monkeypatch.setenv("PIP_TARGET", str(tmp_path / "x"))
        if way == "variable":
            monkeypatch.setenv("PIP_INDEX_URL", url)
        else:
            (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {url}\nfind-links = /absent\n")
            monkeypatch.delenv("PIP_INDEX_URL", raising=False)
            monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        assert names(install("kdthing", index=None)) == ["kdthing 1.0"]
    assert not (tmp_path / "x").exists()


def test_settings_of_uv_that_send_packages_elsewhere_do_not_count(house, install, monkeypatch):
    house.wheel("kdthing")
    monkeypatch.setenv("UV_NO_BINARY", "1")
    monkeypatch.setenv("UV_CONSTRAINT", "/absent")
    monkeypatch.setenv("UV_PYTHON", "/absent")
    assert names(install("kdthing")) == ["kdthing 1.0"]


def test_without_uv_the_remedy_is_named(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/absent")
    with pytest.raises(ConfigError, match=r"uv, which is not installed.*pip install 'isal<2' packaging"):
        install("kdthing")


@pytest.mark.newest
def test_files_lie_below_one_folder_and_scripts_name_the_bases_python(house, install):
    house.wheel(
        "kdthing",
        scripts=["kd-run=kdthing:main"],
        programs={"scripts/kd-old": "#!python\nprint()\n", "scripts/kd-sh": "#!/bin/sh\n", "scripts/pip": "#!python\n"},
    )
    made = install("kdthing")
    found = texts(made)
    info = f"{FOLDER}/kdthing-1.0.dist-info"
    scripts = {path for path in found if path.startswith("/opt/kale-dist/bin/")}
    assert scripts == {f"/opt/kale-dist/bin/{name}" for name in ("kd-run", "kd-old", "kd-sh")}
    assert set(found) - scripts - {path for path in found if path.startswith(info)} == {
        f"{FOLDER}/kdthing/__init__.py",
        f"{SITE}/kale_dist.pth",
    }
    for name, first in {
        "kd-run": b"/usr/local/bin/python3",
        "kd-old": b"/usr/local/bin/python3",
        "kd-sh": b"/bin/sh",
    }.items():
        assert found[f"/opt/kale-dist/bin/{name}"].splitlines()[0] == b"#!" + first
    record = found[f"{info}/RECORD"].decode()
    assert "../bin/kd-run,sha256=" in record
    assert "pip" not in record
    folders = {entry.path for entry in made.entries if entry.content is None}
    assert {"/opt/kale-dist", "/opt/kale-dist/bin", FOLDER, f"{FOLDER}/kdthing"} <= folders
    assert not any(SITE.startswith(folder) for folder in folders)


def test_the_same_packages_have_the_same_key_and_others_another(house, install):
    house.wheel("kdthing")
    house.wheel("kdother")
    keys = [install(name).key for name in ("kdthing", "kdthing", "kdother")]
    assert keys[0] == keys[1] != keys[2]


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A Python of its own with numpy and a `pathlib`, in the place of an image's; gives its facts, and how it runs."""
    venv.create(tmp_path / "image", with_pip=False)
    python = tmp_path / "image" / "bin" / "python"
    site = tmp_path / "image" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (site / "numpy").mkdir()
    (site / "numpy" / "__init__.py").write_text("version = 'of the base'\n")
    (site / "kdbase.py").write_text("version = 'of the base'\n")
    monkeypatch.setattr(packages, "FOLDER", str(tmp_path / "opt"))
    monkeypatch.setattr(packages, "SCRIPTS", str(tmp_path / "opt" / "bin"))
    said = subprocess.run([python, *base_image.COMMAND[1:]], capture_output=True, check=True).stdout
    facts = dataclasses.replace(base_image.parse_answer(said, "x"), distributions=(installed("numpy", "1.26.4"),))

    def put(made):
        for entry in made.entries:
            path = tmp_path.joinpath(entry.path)
            (path if entry.content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if entry.content is not None:
                path.write_bytes(entry.content if isinstance(entry.content, bytes) else entry.content.read_bytes())

    def run(*command):
        return subprocess.run(
            [python, *command], capture_output=True, check=True, text=True, cwd=tmp_path
        ).stdout.split("|")

    return facts, put, run


IMPORTS = """
import pathlib, numpy, kdbase, kdpth, sys
print(numpy.version, kdbase.version, kdpth.__file__.split("/")[-1], hasattr(pathlib, "Path"), sep="|", end="")
"""


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-P", "-E"), ("-s",)], ids=" ".join)
def test_packages_come_after_the_standard_library_and_before_those_of_the_base(house, install, image, flags):
    facts, put, run = image
    house.wheel("numpy", "2.0", files={"numpy/__init__.py": "version = 'of the layer'\n"})
    house.wheel("pathlib", files={"pathlib.py": "raise RuntimeError('a backport from 2014')\n"})
    house.wheel("kdpth", files={"kd.pth": "elsewhere\n", "elsewhere/kdpth.py": ""})
    put(install("numpy==2.0", "pathlib", "kdpth", facts=facts))
    assert run(*flags, "-c", IMPORTS) == ["of the layer", "of the base", "kdpth.py", "True"]
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORTS!r}], check=True)"
    assert run(*flags, "-c", inner) == ["of the layer", "of the base", "kdpth.py", "True"]


def test_a_later_layer_comes_before_an_earlier_one(house, install, image):
    facts, put, run = image
    for version in ("1.0", "2.0"):
        house.wheel("kdthing", version, files={"kdthing.py": f"version = '{version}'\n"})
    house.wheel("kdother")
    first = install("kdthing==1.0", "kdother", facts=facts)
    put(first)
    second = install("kdthing==2.0", facts=first.facts)
    put(second)
    assert second.facts.folders == ("site-packages", "site-packages-2")
    program = (
        "import kdthing, kdother; from importlib.metadata import version as v; print(kdthing.version, v('kdthing'))"
    )
    assert run("-I", "-c", program) == ["2.0 2.0\n"]


def test_a_base_whose_versions_are_none_does_not_stop_uv(house, install):
    house.wheel("kdthing")
    facts = dataclasses.replace(FACTS, distributions=(*FACTS.distributions, *ODD))
    assert names(install("kdthing", facts=facts)) == ["kdthing 1.0"]


def test_answers_of_bases_are_examples_of_what_the_program_prints():
    assert base_image.parse_answer(bases.answer(), "x") == FACTS
