"""What a call says about its image: `image=`, `packages=` and `requirements=`, as users write them."""

import subprocess
import sys

import pytest
from fake_backend import FakeBackend

import kale_dist as kd
from kale_dist import places
from kale_dist.calls import image_checks
from kale_dist.calls.image_checks import ImageWanted
from kale_dist.errors import ConfigError
from kale_dist.job.spec.recipe import ImageFile, Recipe

BASE = "registry.example.com/train:1"


class Cluster(FakeBackend):
    """Takes what pods take, and looks nothing up."""

    name = "kubernetes"


def check(image=None, packages=None, requirements=None):
    return image_checks.check(image, packages, requirements)


def refused(image=None, packages=None, requirements=None):
    with pytest.raises(ConfigError) as caught:
        check(image, packages, requirements)
    assert caught.value.remedy
    assert "hunter2" not in str(caught.value)
    return caught.value


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


def test_other_files_are_read_from_where_they_are_named(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more.txt").write_text("rich\n-r ../last.txt\n")
    (tmp_path / "last.txt").write_text("einops\n")
    (tmp_path / "all.txt").write_text("-r inner/more.txt\ntqdm\n")
    assert packages_of(requirements=tmp_path / "all.txt") == ("einops", "rich", "tqdm")
    (tmp_path / "last.txt").write_text("einops\n--requirement=all.txt\n")
    assert "read within itself" in str(refused(requirements=tmp_path / "all.txt"))


def test_one_more_index_does_not_take_the_place_of_pypi():
    found = check(requirements="--extra-index-url https://x.example.com/simple\na").recipe
    assert found.index_urls == ("https://pypi.org/simple", "https://x.example.com/simple")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"einops\nrich==\xff", ["requirements.txt cannot be read: it is not UTF-8"]),
        (b"a\n-e .\n", ["line 2", "-e cannot be part", "are sent anyway"]),
        (b"a\n--editable=git+https://x/y#egg=z", ["line 2", "--editable"]),
        (b"-c constraints.txt", ["line 1", "-c cannot be part"]),
        (b"b\na==1 \\\n  --hash=sha256:00 \\\n  --hash=sha256:11\n", ["line 2", "option of pip", "--no-hashes"]),
        (b"a \\\n  ==1\n\n--pre\na", ["line 4", "--pre", "pip's own configuration"]),
        (b"\n\na==${VERSION}", ["line 3", "is not a requirement"]),
        (b"-i https://u:hunter2@x.example.com/simple", ["x.example.com", "password", "netrc"]),
        (b"-i ftp://x", ["'ftp://x' is not a URL of an index"]),
        (b"-r gone.txt", ["line 1", "gone.txt cannot be read: No such file"]),
    ],
)  # fmt: skip
def test_what_a_file_says_and_a_recipe_cannot_is_named(tmp_path, content, words):
    (tmp_path / "requirements.txt").write_bytes(content)
    error = refused(requirements=tmp_path / "requirements.txt")
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gone.txt", ["gone.txt cannot be read", "or give its text"]),
        ("/", ["/ cannot be read: Is a directory"]),
        (["einops"], ["is neither a path nor text", "packages="]),
        (b"einops", ["is neither a path nor text"]),
        ("poetry.lock", ["poetry.lock is not a requirements file", "uv export"]),
    ],
)
def test_what_is_no_file_of_requirements_is_named(given, words):
    error = refused(requirements=given)
    for word in words:
        assert word in str(error)


# -- hostile packages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("", ["it is empty"]),
        ("   ", ["it is empty"]),
        ("ünïcode", ["'ünïcode' is not a requirement"]),
        ("a b", ["'a b' is not a requirement"]),
        ("a\nb", ["is not a requirement"]),
        ("a\0b", ["is not a requirement"]),
        ("a; import os", ["is not a requirement"]),
        ("a==1 && rm -rf /", ["is not a requirement"]),
        ("$(touch x)", ["is not a requirement"]),
        ("x" * 5000 + "!", ["is not a requirement"]),
        ("-e .", ["'-e .' is not a requirement (it has an option of pip)", "are sent anyway"]),
        ("--index-url=https://u:hunter2@x", ["option of pip"]),
        ("-rrequirements.txt", ["option of pip"]),
        ("a --pre", ["option of pip"]),
        (".", ["it is on this machine"]),
        ("./a", ["it is on this machine"]),
        ("../a", ["is on this machine"]),
        ("/home/me/a", ["is on this machine"]),
        ("~/a", ["is on this machine"]),
        ("C:\\a", ["is on this machine"]),
        ("a-1.0-py3-none-any.whl", ["is on this machine"]),
        ("file:///home/me/a.whl", ["is on this machine"]),
        ("a @ file:///home/me/a.whl", ["is on this machine"]),
        ("a @ git+file:///home/me/a", ["is on this machine"]),
        ("https://x.example.com/a.whl", ["is not a requirement", "name @ https://"]),
        ("git+https://me:hunter2@x.example.com/a", ["***@x.example.com", "is not a requirement"]),
        ("a @ https://me:hunter2@x.example.com/a.whl", ["the URL of a holds a user name or a password", "netrc"]),
        ("a @ git+https://hunter2@x.example.com/a", ["the URL of a holds"]),
    ],
)  # fmt: skip
def test_what_is_no_package_for_an_image_is_refused(package, words):
    error = refused(packages=["einops", package])
    assert error.argument == "packages"
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("package", ["a @ https://x.example.com/a.whl", "a@ git+ssh://git@x.example.com/a@v1"])
def test_packages_from_elsewhere_are_taken(package):
    assert packages_of(packages=[package])[0].startswith("a @ ")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("einops", ["'einops' is text, not a list", "Write it as ['einops'], or 'auto'"]),
        ("AUTO", ["Write it as 'auto'"]),
        ("requirements.txt", ["requirements="]),
        ("a\nb", ["requirements="]),
        (3, ["3 is not a list"]),
        ({"einops": "0.8"}, ["is not a list"]),
        ([None], ["None in it is not text"]),
        (True, ["True is not a list"]),
    ],
)
def test_packages_are_a_list(value, words):
    error = refused(packages=value)
    assert error.argument == "packages"
    for word in words:
        assert word in str(error)


# -- hostile recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "argument", "words"),
    [
        ({"apt": ["git; rm -rf /"]}, "apt", ["cannot be the name of a Debian package"]),
        ({"apt": ["--allow-unauthenticated"]}, "apt", ["cannot be the name"]),
        ({"apt": ["Git"]}, "apt", ["cannot be the name"]),
        ({"apt": ["git\nENV X=1"]}, "apt", ["cannot be the name"]),
        ({"platform": "windows/amd64", "apt": ["git"]}, "platform", ["'windows/amd64' is not a platform"]),
        ({"base": "Not An Image", "apt": ["git"]}, "image", ["is not an image's reference"]),
        ({"index_urls": ["x"], "packages": ["a"]}, "index_urls", ["'x' is not a URL"]),
        ({"index_urls": ["https://me:hunter2@x/s"], "packages": ["a"]}, "index_urls", ["the URL of x holds"]),
        ({"environment": {"A=B": "1"}}, "environment", ["'A=B' cannot be"]),
        ({"environment": {"": "1"}}, "environment", ["'' cannot be"]),
        ({"environment": {"A": "\0"}}, "environment", ["NUL"]),
        ({"environment": {"KALE_DIST_X": "1"}}, "environment", ["set in each rank by kale_dist"]),
        ({"environment": [("A", "1"), ("A", "2")]}, "environment", ["A is given twice"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_recipe_is_named(recipe, argument, words):
    error = refused(Recipe(**recipe))
    assert error.argument == argument
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    "path", ["x", "", "/", "/opt/", "/../x", "/opt/../../x", "/a\nb", "/a\0", "/proc/x", "/dev", "//"]
)
def test_files_have_a_path_in_the_image(path, tmp_path):
    (tmp_path / "x").write_text("x")
    assert refused(Recipe(files={path: tmp_path / "x"})).argument == "files"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"/a": "gone"}, ["gone' is not a file of this machine"]),
        ({"/a": ""}, ["has neither a file of this machine"]),
        ({"/a": "a\0b"}, ["is not a file of this machine"]),
        ({"/a": "."}, ["is a folder", "volume"]),
        ({"/a": "x", "//a": "x"}, ["'/a' is given twice"]),
        ({"/a": "x", "/a/b": "x"}, ["'/a' is a file, and '/a/b' lies in it"]),
        ((ImageFile(path="/a", digest="0"),), ["nor the digest of one"]),
    ],
)
def test_files_are_files_of_this_machine(files, words, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("x")
    monkeypatch.chdir(tmp_path)
    error = refused(Recipe(files=files))
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("image", [3, b"x", ["x"], {"packages": ["a"]}, "Not An Image", "https://x/y"])
def test_an_image_is_text_or_a_recipe(image):
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
            "needs the package 'packaging', which is not installed in this Python. Install it: pip install 'isal<2' packaging"
            in line
        )
    assert told[3] == "train:1"
    assert ended.returncode == 2
    assert "is not installed in this Python. Install it: pip install 'isal<2'" in ended.stderr


# -- in a call -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(places, "get", lambda name: Cluster())


@pytest.mark.parametrize("argument", ["packages", "requirements", "image"])
def test_on_this_machine_there_are_no_images(argument):
    with pytest.raises(ConfigError, match="processes on this machine use its packages") as caught:
        kd.Local(**{argument: "einops"})
    assert caught.value.argument == argument


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
