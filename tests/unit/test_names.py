import pathlib
import re
import tomllib

import pytest

from kale_dist import wording
from kale_dist.job.spec import names

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize("name", ["a", "train-net", "a1", "x" * 50, "a-1-b"])
def test_labels_are_accepted(name):
    names.check(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "Train",
        "1a",
        "-a",
        "a-",
        "a_b",
        "a.b",
        "a/b",
        "../a",
        "a b",
        "ä",
        "a\n",
        "x" * 51,
        "٣",
        "a\0",
        "\uff41",
    ],
)
def test_what_is_no_label_is_refused_with_a_label_that_is(name, refusal):
    error = refusal(lambda: names.check(name))
    assert error.argument == "name"
    proposed = re.search(r"'([^']+)'", error.remedy)
    names.check(proposed.group(1))


@pytest.mark.parametrize("name", [None, 3, b"a", ["a"]])
def test_what_is_no_text_is_refused(name, refusal):
    assert refusal(lambda: names.check(name)).argument == "name"


@pytest.mark.parametrize(
    ("label", "made"),
    [
        ("train Net", "train-net-x3k9f"),
        ("<lambda>", "lambda-x3k9f"),
        ("", "job-x3k9f"),
        ("日本語", "job-x3k9f"),
        ("123 go", "go-x3k9f"),
        ("outer.<locals>.inner", "outer-locals-inner-x3k9f"),
        ("Net" * 40, None),
        ("a" + "-" * 80, "a-x3k9f"),
    ],
)
def test_names_made_of_any_label_are_valid_and_keep_their_suffix(label, made):
    name = names.make(label, "x3k9f")
    names.check(name)
    assert name.endswith("-x3k9f")
    assert DNS_1035.fullmatch(name)
    assert made is None or name == made


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (names.is_label, ["a", "1-a", "x" * 63], ["", "A", "a.b", "-a", "x" * 64, "a\n", "é"]),
        (names.is_object_name, ["a", "a.b-c", "1"], ["", "a..b", ".a", "A", "a_b", "x" * 254, "a\n", "a/b"]),
        (
            names.is_qualified_name,
            ["a", "A_b.c", "x.io/Y", "a.b/" + "x" * 63],
            ["", "/a", "a/", "a/b/c", "X.io/y", "a b", "a/é"],
        ),
        (names.is_label_value, ["", "A", "a_b.c-d", "x" * 63], ["-a", "a b", "x" * 64, "é", "a\n", "a/b"]),
        (names.VARIABLE.test, ["A", "_a", "a.b-c"], ["", "1A", "A B", "A=B", "é", "A\n"]),
        (names.is_data_key, ["a", "A.b_c-d", "..a"], ["", ".", "..", "a/b", "a b", "x" * 254]),
        (
            names.is_image,
            [
                "a",
                "python:3.11-slim",
                "localhost:5000/a/b:1",
                "r.io/a__b@sha256:" + "0" * 64,
                "a:1@sha256:" + "0" * 64,
                "[::1]:5000/a",
            ],
            [
                "",
                "A",
                "a b",
                "a:",
                "a//b",
                "https://r.io/a",
                "a@sha256:0",
                "r.io/Team/a",
                "a:b:c",
                "-a",
                "a\n",
                "a:" + "x" * 129,
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_names_in_a_cluster(check, good, bad):
    assert [text for text in good if not check(text)] == []
    assert [text for text in bad if check(text)] == []


def test_what_to_install_are_packages_of_the_extras():
    extras = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra, packages in wording.EXTRAS.items():
        declared = {re.split(r"[<>]", entry)[0] for entry in extras["optional-dependencies"][extra]}
        assert {package.partition("<")[0] for package in packages} <= declared
    assert "pip install 'kubernetes<38'" in wording.install("kubernetes")


@pytest.mark.parametrize("extra", ["docker", "kubernetes", "notebook"])
def test_what_to_install_is_said_as_in_the_readme(extra):
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    assert wording.install(extra).partition(" in ")[0] in readme
