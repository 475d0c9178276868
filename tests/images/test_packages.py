import dataclasses
import pathlib
import tempfile

import pytest
from wheelhouse import Wheelhouse

from kale_dist.errors import ImageError
from kale_dist.image import packages, replacement
from kale_dist.image.installed import Distribution
from kale_dist.image.inventory import Inventory
from kale_dist.recipe import Recipe

SITE = "/usr/local/lib/python3.11/site-packages"


def installed(name, version, *requires, files=(), folder=SITE):
    metadata = f"{name}-{version}.dist-info"
    paths = tuple(f"{SITE}/{file}" for file in (*files, f"{metadata}/METADATA", f"{metadata}/RECORD"))
    return Distribution(name=name, version=version, requires=requires, folder=folder, metadata=metadata, files=paths)


BASE = Inventory(
    python="/usr/local/bin/python3",
    python_version="3.11.9",
    site_directory=SITE,
    scripts_directory="/usr/local/bin",
    prefix="/usr/local",
    site_directories=(SITE,),
    distributions=(
        installed("numpy", "1.26.4", files=("numpy/__init__.py", "numpy/old/a.py", "shared/n.py")),
        installed("scipy", "1.11.0", "numpy>=1.20,<2", files=("scipy/__init__.py", "shared/s.py")),
        installed("torch", "2.6.0+cpu", "kdnvidia>=1", "numpy>=1.20", 'kdextra; extra == "more"'),
    ),
    platform="linux/amd64",
    libc="manylinux 2.28",
)


@pytest.fixture
def house(tmp_path):
    (tmp_path / "house").mkdir()
    return Wheelhouse(tmp_path / "house")


@pytest.fixture
def resolve(house, tmp_path, monkeypatch):
    """A function that resolves requirements with the house's index; `said` is what the user was told."""
    # Of the machine, and of those who test: nothing else may give packages.
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    with house.serving() as url:

        def resolve(*requirements, inventory=BASE, index=url, **recipe):
            resolve.said = []
            recipe = Recipe(packages=requirements, index_urls=(index,), **recipe)
            (tmp_path / "cache").mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=tmp_path / "cache") as folder:
                return packages.resolve(
                    recipe,
                    inventory,
                    cache_dir=tmp_path / "cache",
                    folder=pathlib.Path(folder, "pip"),
                    say=resolve.said.append,
                )

        yield resolve


def names(wheels):
    return [f"{wheel.name} {wheel.version}" for wheel in wheels]


def test_what_the_base_has_is_not_fetched_and_torch_brings_nothing_along(house, resolve):
    house.wheel("kdmetrics", requires=["torch>=2", "numpy", "kdtools>=1"])
    house.wheel("kdtools", "1.5")
    house.wheel("torch", "3.0")
    house.wheel("numpy", "2.1.0")
    wheels = resolve("kdmetrics", "torch", "numpy>=1.20")
    assert names(wheels) == ["kdmetrics 1.0", "kdtools 1.5"]
    assert all(wheel.path.is_file() for wheel in wheels)
    assert "kdmetrics 1.0, kdtools 1.5" in resolve.said[-1]


def test_nothing_is_fetched_where_all_is_there(resolve):
    assert resolve("torch==2.6.0", "scipy") == ()
    assert "has all packages" in resolve.said[-1]
    assert resolve() == ()


def test_an_older_version_that_works_with_the_bases_torch_is_preferred(house, resolve):
    house.wheel("kdvision", "2.0", requires=["torch==2.7.0"])
    house.wheel("kdvision", "1.0", requires=["torch==2.6.0"])
    assert names(resolve("kdvision")) == ["kdvision 1.0"]


def test_torch_changes_only_if_that_is_allowed(house, resolve):
    house.wheel("kdvision", "2.0", requires=["torch==2.7.0"])
    house.wheel("torch", "2.7.0")
    with pytest.raises(
        ImageError, match=r"kdvision 2\.0 depends on torch==2\.7\.0.*torch 2\.6\.0\+cpu.*allow_torch_change=True"
    ):
        resolve("kdvision")
    assert names(resolve("kdvision", allow_torch_change=True)) == ["kdvision 2.0", "torch 2.7.0"]
    wheel = house.folder / "torch-2.7.0-py3-none-any.whl"
    with pytest.raises(ImageError, match="allow_torch_change=True"):
        resolve(f"torch @ {wheel.as_uri()}")


def test_what_torch_needs_of_the_base_stays_as_torch_needs_it(house, resolve):
    house.wheel("numpy", "1.0")
    house.wheel("kdold", requires=["numpy<1.10"])
    with pytest.raises(ImageError, match=r"numpy>=1\.20"):
        resolve("kdold")


def test_an_extra_of_a_package_in_the_base_brings_what_it_adds(house, resolve):
    house.wheel("kdextra")
    assert names(resolve("torch[more]")) == ["kdextra 1.0"]


def test_what_markers_ask_is_answered_for_the_image(house, resolve):
    house.wheel(
        "kdmarked",
        requires=[
            'kdarm; platform_machine == "aarch64"',
            'kdnew; python_full_version >= "3.11.20"',
            'kdold; python_version < "3.10"',
        ],
    )
    house.wheel("kdarm", tag="cp311-cp311-manylinux_2_17_aarch64")
    house.wheel("kdnew")
    house.wheel("kdold")
    assert names(resolve("kdmarked")) == ["kdmarked 1.0"]
    arm = dataclasses.replace(BASE, platform="linux/arm64", python_version="3.11.21")
    assert names(resolve("kdmarked", inventory=arm)) == ["kdarm 1.0", "kdmarked 1.0", "kdnew 1.0"]


@pytest.mark.parametrize(
    ("libc", "wanted"),
    [("manylinux 2.28", "2.0"), ("manylinux 2.17", "1.0"), ("manylinux 2.36", "3.0"), ("musllinux 1.2", "4.0")],
)
def test_wheels_are_chosen_for_the_bases_c_library(house, resolve, libc, wanted):
    house.wheel("kdnative", "1.0", tag="cp311-cp311-manylinux2014_x86_64")
    house.wheel("kdnative", "2.0", tag="cp311-abi3-manylinux_2_28_x86_64")
    house.wheel("kdnative", "3.0", tag="cp311-cp311-manylinux_2_34_x86_64")
    house.wheel("kdnative", "4.0", tag="cp311-cp311-musllinux_1_1_x86_64")
    house.wheel("kdnative", "5.0", tag="cp312-cp312-manylinux_2_17_x86_64")
    house.wheel("kdnative", "6.0", tag="cp311-cp311-macosx_11_0_arm64")
    assert names(resolve("kdnative", inventory=dataclasses.replace(BASE, libc=libc))) == [f"kdnative {wanted}"]


def test_source_that_is_pure_python_becomes_a_wheel_here(house, resolve):
    house.source("kdsource", "1.2")
    house.wheel("kdneeds", requires=["kdsource>=1"])
    wheels = resolve("kdneeds")
    assert names(wheels) == ["kdneeds 1.0", "kdsource 1.2"]
    assert any("kdsource" in line and "source only" in line for line in resolve.said)
    archive = house.folder / "kdsource-1.2.tar.gz"
    assert names(resolve(f"kdsource @ {archive.as_uri()}")) == ["kdsource 1.2"]


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("kdabsent", ["No package is called 'kdabsent'", "spelling", "index_urls="]),
        ("kdthere==9", ["no kdthere==9", "1.0, 2.0", "Python 3.11, manylinux 2.28, linux/amd64"]),
        ("kdforeign", ["kdforeign has wheels, but none for Python 3.11", "linux/amd64", "no source"]),
        ("kdcompiled", ["kdcompiled", "compiled", 'builder="docker"', "apt="]),
        ("kdfailing", ["kdfailing exists as source only", "no such header here", 'builder="docker"']),
        ("kdfighting", ["conflict", "kdfighting 1.0 depends on kdthere==1.0", "kdthere==2.0"]),
        ("kdthere @ file:///absent/kdthere-1.0-py3-none-any.whl", ["/absent/kdthere"]),
        ("kdbroken", ["kdbroken"]),
    ],
)
def test_packages_that_cannot_be_had_are_explained_with_a_remedy(house, resolve, requirement, words):
    house.wheel("kdthere", "1.0")
    house.wheel("kdthere", "2.0")
    house.wheel("kdforeign", tag="cp312-cp312-win_amd64")
    house.source("kdcompiled", tag="cp311-cp311-linux_x86_64")
    house.source("kdfailing", failing="raise RuntimeError('error: no such header here')")
    house.wheel("kdfighting", requires=["kdthere==1.0", "kdother"])
    house.wheel("kdother", requires=["kdthere==2.0"])
    (house.folder / "kdbroken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(ImageError) as caught:
        resolve(requirement)
    for word in words:
        assert word in str(caught.value)


def test_an_index_that_is_down_is_not_taken_for_a_package_that_is_absent(resolve):
    with pytest.raises(ImageError, match="index could not be reached") as caught:
        resolve("kdthing", index="http://ada:correct-horse@127.0.0.1:9/simple/")
    assert caught.value.retryable
    assert "correct-horse" not in str(caught.value)


def test_the_same_packages_on_the_same_base_are_not_asked_for_again(house, resolve):
    house.wheel("kdthing")
    first = resolve("kdthing")
    house.wheel("kdthing", "2.0")
    del house.asked[:]
    assert resolve("kdthing") == first
    assert not house.asked
    assert names(resolve("kdthing", rebuild=True)) == ["kdthing 2.0"]
    first[0].path.unlink()
    assert names(resolve("kdthing")) == ["kdthing 2.0"]


def test_a_users_own_settings_of_pip_do_not_send_packages_elsewhere(house, resolve, monkeypatch, tmp_path):
    house.wheel("kdthing")
    for name, value in {
        "USER": "1",
        "TARGET": str(tmp_path / "x"),
        "NO_BINARY": ":all:",
        "REQUIRE_VIRTUALENV": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert names(resolve("kdthing")) == ["kdthing 1.0"]
    assert not (tmp_path / "x").exists()


def test_a_wheel_is_unpacked_for_the_images_interpreter(house, tmp_path):
    path = house.wheel(
        "kdthing",
        files={"kdthing/__init__.py": "", "kdthing/__pycache__/__init__.cpython-311.pyc": "stale"},
        scripts=["kd-run=kdthing:main"],
        programs={
            "scripts/kd-old": "#!python\nprint()\n",
            "scripts/kd-sh": "#!/bin/sh\n",
            "data/share/kd/data.txt": "data",
            "headers/kd.h": "",
        },
    )
    wheel = packages.Wheel(name="kdthing", version="1.0", path=path)
    unpacked = packages.unpack([wheel], BASE, tmp_path / "root")
    entries = {entry.path: entry for entry in unpacked.entries}
    info = f"{SITE}/kdthing-1.0.dist-info"
    assert set(entries) == {
        f"{SITE}/kdthing/__init__.py",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "entry_points.txt")),
        "/usr/local/bin/kd-run",
        "/usr/local/bin/kd-old",
        "/usr/local/bin/kd-sh",
        "/usr/local/share/kd/data.txt",
        "/usr/local/include/python3.11/kdthing/kd.h",
    }
    for program, first in {
        "kd-run": "#!/usr/local/bin/python3",
        "kd-old": "#!/usr/local/bin/python3",
        "kd-sh": "#!/bin/sh",
    }.items():
        assert entries[f"/usr/local/bin/{program}"].content.read_text().splitlines()[0] == first
    assert entries["/usr/local/bin/kd-run"].executable
    assert not entries[f"{SITE}/kdthing/__init__.py"].executable
    record = entries[f"{info}/RECORD"].content.read_text()
    assert "../../../bin/kd-run,sha256=" in record
    assert "__pycache__" not in record
    assert unpacked.distributions[0].metadata == "kdthing-1.0.dist-info"


@pytest.mark.parametrize("path", ["../../../../../etc/evil", "/etc/evil", "kdthing/../../evil"])
def test_a_wheel_that_reaches_outside_is_refused_by_name(house, tmp_path, path):
    wheel = packages.Wheel(name="kdthing", version="1.0", path=house.wheel("kdthing", files={path: "evil"}))
    with pytest.raises(ImageError, match=r"kdthing-1\.0-py3-none-any\.whl cannot be unpacked"):
        packages.unpack([wheel], BASE, tmp_path / "root")
    assert not [file for file in pathlib.Path(tmp_path).rglob("*evil*") if file.is_file()]


def test_what_a_replaced_package_had_goes_and_what_others_have_stays():
    gone = replacement.replaced(BASE, ["numpy", "kdnew"])
    assert [one.name for one in gone] == ["numpy"]
    added = [f"{SITE}/numpy/__init__.py", f"{SITE}/numpy-2.1.0.dist-info/METADATA"]
    hidden = [entry.path for entry in replacement.removals(BASE, gone, added)]
    assert hidden == [f"{SITE}/.wh.numpy-1.26.4.dist-info", f"{SITE}/numpy/.wh.old", f"{SITE}/shared/.wh.n.py"]


def test_files_that_a_record_names_outside_of_python_are_left_alone():
    hostile = installed("kdthing", "1.0", files=("kdthing.py",))
    hostile = dataclasses.replace(hostile, files=("/etc/passwd", "/usr/localhost", *hostile.files))
    base = dataclasses.replace(BASE, distributions=(hostile,))
    hidden = [entry.path for entry in replacement.removals(base, (hostile,), [])]
    assert hidden == [f"{SITE}/.wh.kdthing-1.0.dist-info", f"{SITE}/.wh.kdthing.py"]


def test_packages_of_the_system_are_covered_and_not_removed():
    six = installed("six", "1.16.0", folder="/usr/lib/python3/dist-packages")
    assert replacement.replaced(dataclasses.replace(BASE, distributions=(six,)), ["six"]) == ()


def test_a_package_of_the_base_that_loses_what_it_asks_for_is_named():
    new = Distribution(name="numpy", version="2.1.0", folder=SITE, metadata="numpy-2.1.0.dist-info")
    [sentence] = replacement.broken(BASE, [new])
    assert "scipy 1.11.0" in sentence
    assert "numpy<2,>=1.20" in sentence
    assert replacement.with_installed(BASE, [new]).find("numpy") == new
