"""What a call says about its image: `image=`, `packages=` and `requirements=`, as users write them."""

import subprocess
import sys

import pytest
from fake_backend import FakeBackend

import kale_dist as kd
from kale_dist import places
from kale_dist.calls import image_checks
from kale_dist.calls.image_checks import ImageWanted
from kale_dist.job.spec.recipe import ImageFile, Recipe

BASE = "registry.example.com/train:1"


class Cluster(FakeBackend):
    """Takes what pods take, and looks nothing up."""

    name = "kubernetes"


def check(image=None, packages=None, requirements=None):
    return image_checks.check(image, packages, requirements)


@pytest.fixture
def refused(refusal):
    def refused(image=None, packages=None, requirements=None):
        error = refusal(lambda: check(image, packages, requirements))
        assert "hunter2" not in str(error)
        return error

    return refused


def packages_of(**given):
    return check(**given).recipe.packages


# -- one form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ImageWanted()),
        ({"image": BASE}, ImageWanted(image=BASE)),
        ({"image": Recipe(base=BASE)}, ImageWanted(image=BASE)),
        ({"packages": []}, ImageWanted()),
        ({"requirements": "\n# nothing\n"}, ImageWanted()),
        ({"packages": "auto"}, ImageWanted(recipe=Recipe(), auto=True)),
        ({"image": BASE, "packages": ["einops"]}, ImageWanted(recipe=Recipe(base=BASE, packages=("einops",)))),
        (
            {"image": Recipe(base=BASE, packages=["b"]), "packages": ("a",), "requirements": "c\n"},
            ImageWanted(recipe=Recipe(base=BASE, packages=("a", "b", "c"))),
        ),
        (
            {"image": Recipe(packages=["b"]), "packages": "auto"},
            ImageWanted(recipe=Recipe(packages=("b",)), auto=True),
        ),
    ],
)
def test_all_ways_to_say_it_come_to_one_form(given, wanted):
    assert check(**given) == wanted


def test_requirements_have_one_spelling():
    written = [
        "PyYAML >= 6 , <7",
        "scikit.learn",
        "einops==0.8",
        "einops == 0.8",
        "A[Y,x]; python_version<'3.12'",
        "kale_dist",
    ]
    assert packages_of(packages=written) == packages_of(packages=list(reversed(written)))
    assert packages_of(packages=written) == (
        'a[Y,x]; python_version < "3.12"', "einops==0.8", "pyyaml<7,>=6", "scikit-learn",
    )  # fmt: skip


def test_a_thousand_lines_are_taken():
    lines = [f"package-{number}=={number}.0" for number in range(1000)]
    assert len(packages_of(requirements="\r\n".join(lines))) == 1000


def test_environment_and_debian_packages_are_sorted(tmp_path):
    (tmp_path / "x.sh").write_text("#!/bin/sh\n")
    (tmp_path / "x.sh").chmod(0o755)
    recipe = Recipe(
        apt=["zlib1g", "git=1:2.39.5-0+deb12u2", "zlib1g"],
        environment={"B": "2", "A": "1"},
        files={"/opt//b.txt": str(tmp_path / "x.sh"), "/a": tmp_path / "x.sh"},
    )
    found = check(recipe).recipe
    assert found.apt == ("git=1:2.39.5-0+deb12u2", "zlib1g")
    assert found.environment == (("A", "1"), ("B", "2"))
    source = str(tmp_path / "x.sh")
    assert found.files == tuple(ImageFile(path=path, source=source, executable=True) for path in ("/a", "/opt/b.txt"))


# -- a requirements file ---------------------------------------------------------------------------------------------


def test_a_file_its_path_as_text_and_its_text_say_the_same(tmp_path, monkeypatch):
    text = "\ufeff# made by hand\neinops==0.8  # tensors\n\nrich \\\n  >=13\n--index-url https://x.example.com/simple\n"
    file = tmp_path / "requirements.txt"
    file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    expected = Recipe(packages=("einops==0.8", "rich>=13"), index_urls=("https://x.example.com/simple",))
    for given in (file, str(file), "requirements.txt", text.removeprefix("\ufeff")):
        assert check(requirements=given).recipe == expected


def test_other_files_are_read_from_where_they_are_named(tmp_path, refused):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more.txt").write_text("rich\n-r ../last.txt\n")
    (tmp_path / "last.txt").write_text("einops\n")
    (tmp_path / "all.txt").write_text("-r inner/more.txt\ntqdm\n")
    assert packages_of(requirements=tmp_path / "all.txt") == ("einops", "rich", "tqdm")
    (tmp_path / "last.txt").write_text("einops\n--requirement=all.txt\n")
    assert refused(requirements=tmp_path / "all.txt").argument.endswith("last.txt, line 2")


def test_one_more_index_comes_before_pypi_and_does_not_take_its_place():
    found = check(requirements="--extra-index-url https://x.example.com/simple\na").recipe
    assert found.index_urls == ("https://x.example.com/simple", "https://pypi.org/simple")


@pytest.mark.parametrize(
    "content",
    [
        b"einops\nrich==\xff",
        b"a\n-e .\n",
        b"a\n--editable=git+https://x/y#egg=z",
        b"-c constraints.txt",
        b"b\na==1 \\\n  --hash=sha256:00 \\\n  --hash=sha256:11\n",
        b"a \\\n  ==1\n\n--pre\na",
        b"\n\na==${VERSION}",
        b"-i https://u:hunter2@x.example.com/simple",
        b"-i ftp://x",
        b"-r gone.txt",
    ],
)  # fmt: skip
def test_what_a_file_says_and_a_recipe_cannot_is_named(tmp_path, content, refused):
    (tmp_path / "requirements.txt").write_bytes(content)
    assert "requirements" in refused(requirements=tmp_path / "requirements.txt").argument


@pytest.mark.parametrize(
    "given",
    [
        "gone.txt",
        "/",
        ["einops"],
        b"einops",
        "poetry.lock",
    ],
)
def test_what_is_no_file_of_requirements_is_named(given, refused):
    assert refused(requirements=given).argument == "requirements"


# -- hostile packages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    [
        "",
        "   ",
        "ünïcode",
        "a b",
        "a\nb",
        "a\0b",
        "a; import os",
        "a==1 && rm -rf /",
        "$(touch x)",
        "x" * 5000 + "!",
        "-e .",
        "--index-url=https://u:hunter2@x",
        "-rrequirements.txt",
        "a --pre",
        ".",
        "./a",
        "../a",
        "/home/me/a",
        "~/a",
        "C:\\a",
        "a-1.0-py3-none-any.whl",
        "file:///home/me/a.whl",
        "a @ file:///home/me/a.whl",
        "a @ git+file:///home/me/a",
        "https://x.example.com/a.whl",
        "git+https://me:hunter2@x.example.com/a",
        "a @ https://me:hunter2@x.example.com/a.whl",
        "a @ git+https://hunter2@x.example.com/a",
    ],
)  # fmt: skip
def test_what_is_no_package_for_an_image_is_refused(package, refused):
    error = refused(packages=["einops", package])
    assert error.argument == "packages"


@pytest.mark.parametrize("package", ["a @ https://x.example.com/a.whl", "a@ git+ssh://git@x.example.com/a@v1"])
def test_packages_from_elsewhere_are_taken(package):
    assert packages_of(packages=[package])[0].startswith("a @ ")


@pytest.mark.parametrize(
    "value",
    [
        "einops",
        "AUTO",
        "requirements.txt",
        "a\nb",
        3,
        {"einops": "0.8"},
        [None],
        True,
    ],
)
def test_packages_are_a_list(value, refused):
    error = refused(packages=value)
    assert error.argument == "packages"


# -- hostile recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [
        ({"apt": ["git; rm -rf /"]}, "apt"),
        ({"apt": ["--allow-unauthenticated"]}, "apt"),
        ({"apt": ["Git"]}, "apt"),
        ({"apt": ["git\nENV X=1"]}, "apt"),
        ({"platform": "windows/amd64", "apt": ["git"]}, "platform"),
        ({"base": "Not An Image", "apt": ["git"]}, "image"),
        ({"index_urls": ["x"], "packages": ["a"]}, "index_urls"),
        ({"index_urls": ["https://me:hunter2@x/s"], "packages": ["a"]}, "index_urls"),
        ({"environment": {"A=B": "1"}}, "environment"),
        ({"environment": {"": "1"}}, "environment"),
        ({"environment": {"A": "\0"}}, "environment"),
        ({"environment": {"KALE_DIST_X": "1"}}, "environment"),
        ({"environment": [("A", "1"), ("A", "2")]}, "environment"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_recipe_is_named(recipe, argument, refused):
    error = refused(Recipe(**recipe))
    assert error.argument == argument


@pytest.mark.parametrize(
    "path", ["x", "", "/", "/opt/", "/../x", "/opt/../../x", "/a\nb", "/a\0", "/proc/x", "/dev", "//"]
)
def test_files_have_a_path_in_the_image(path, tmp_path, refused):
    (tmp_path / "x").write_text("x")
    assert refused(Recipe(files={path: tmp_path / "x"})).argument == "files"


@pytest.mark.parametrize(
    "files",
    [
        {"/a": "gone"},
        {"/a": ""},
        {"/a": "a\0b"},
        {"/a": "."},
        {"/a": "x", "//a": "x"},
        {"/a": "x", "/a/b": "x"},
        (ImageFile(path="/a", digest="0"),),
    ],
)
def test_files_are_files_of_this_machine(files, tmp_path, monkeypatch, refused):
    (tmp_path / "x").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert refused(Recipe(files=files)).argument == "files"


@pytest.mark.parametrize("image", [3, b"x", ["x"], "Not An Image", "https://x/y"])
def test_an_image_is_text_or_a_recipe(image, refused):
    assert refused(image).argument == "image"
    assert refused(image, packages=["einops"]).argument == "image"


# -- without the packages that images are made with --------------------------------------------------------------------

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"packaging", "urllib3"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from kale_dist import cli
from kale_dist.calls import image_checks
from kale_dist.errors import ConfigError
for packages, requirements in ((["a"], None), ("auto", None), (None, "a")):
    try:
        image_checks.check(None, packages, requirements)
    except ConfigError as error:
        print(error)
print(image_checks.check("train:1", None, None).image)
sys.exit(cli.main(["image", "build", "--base=x", "--env=A=b"]))
"""


def test_what_is_not_installed_is_named():
    ended = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, timeout=60, check=False)
    told = ended.stdout.splitlines()
    assert len(told) == 4
    for line in told[:3]:
        assert (
            "needs the package 'packaging', which is not installed in this Python. Install it: pip install '.[images]' in the clone"
            in line
        )
    assert told[3] == "train:1"
    assert ended.returncode == 2
    assert "is not installed in this Python. Install it: pip install '.[images]' in the clone" in ended.stderr


# -- in a call -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(places, "get", lambda name: Cluster())


@pytest.mark.parametrize("argument", ["packages", "requirements", "image"])
def test_on_this_machine_there_are_no_images(argument, refusal):
    error = refusal(lambda: kd.Local(**{argument: "einops"}))
    assert error.argument == argument


def test_a_job_carries_its_recipe_and_the_bytes_of_its_files(tmp_path, cluster):
    (tmp_path / "x.txt").write_text("one")
    (tmp_path / "empty").touch()
    recipe = kd.Recipe(packages=["einops==0.8"], files={"/opt/x.txt": tmp_path / "x.txt", "/opt/e": tmp_path / "empty"})
    plan = kd.render(print, on=kd.Kubernetes(image=recipe, packages=["rich"]))
    assert plan.spec.image == ""
    assert plan.spec.recipe.packages == ("einops==0.8", "rich")
    digests = {
        "/opt/e": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "/opt/x.txt": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    }
    assert plan.spec.recipe.files == tuple(ImageFile(path=path, digest=digest) for path, digest in digests.items())
    assert type(plan.spec).from_json(plan.spec.to_json()) == plan.spec


def test_a_job_without_a_recipe_has_its_image(cluster):
    plan = kd.render(print, on=kd.Kubernetes(image=BASE))
    assert (plan.spec.image, plan.spec.recipe) == (BASE, None)
