"""The page about the architecture names files and packages; they have to be there, and all of the root have to be named."""

import pathlib
import re
import subprocess

import private_names
import pytest

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ROOT / "kale_dist"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_it_names_is_there():
    there = [path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py\b", PAGE))
    absent = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert [name for name in absent if not (ROOT / name).exists()] == []
    assert len(named) > 30


def rows():
    """The rows of "Where frequent changes go": the change, and the text about its files."""
    table = PAGE.partition("Where frequent changes go:")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE))


def test_each_name_that_a_row_of_frequent_changes_gives_is_in_its_files():
    for change, text in rows().items():
        named = re.findall(r"`([\w./]+\.(?:py|md))`", f"{change} {text}")
        paths = [
            path
            for path in (*LIBRARY.rglob("*.py"), *(ROOT / "docs").glob("*.md"))
            if any(f"/{path}".endswith(f"/{one}") for one in named)
        ]
        content = "\n".join(path.read_text() for path in paths)
        for name in re.findall(r"`(\w+)(?:\.\w+)?`(?! in `(?:image|docs))", text):
            assert name in content, (change, name)


@pytest.mark.parametrize(
    ("argument", "change", "elsewhere"),
    [
        ("stall_warn_s", "an argument of both verbs that agents read", set()),
        ("clip_norm", "an argument of `distribute` that ranks read", {"calls/signatures.py"}),
        ("runtime_class", "a setting of a place", set()),
    ],
)
def test_an_argument_stands_in_the_files_of_its_row_alone(argument, change, elsewhere):
    found = {
        path.relative_to(LIBRARY).as_posix()
        for path in LIBRARY.rglob("*.py")
        if re.search(rf"\b{argument}\b", path.read_text())
    }
    named = set(re.findall(r"`([\w/]+\.py)`", rows()[change]))
    assert {one for one in found if one.startswith(("calls/", "cli/", "job/", "wire/"))} <= named | elsewhere
    pages = [
        name for name in re.findall(r"`(docs/\w+\.md)`", rows()[change]) if f"`{argument}`" in (ROOT / name).read_text()
    ]
    assert pages


def test_its_tree_names_everything_in_the_root_of_the_library():
    tree = re.search(r"```text\nkale_dist/\n(.*?)```", PAGE, re.DOTALL)[1]
    own = {path.name for path in LIBRARY.glob("*.py")} | {
        f"{path.parent.name}/" for path in LIBRARY.glob("*/__init__.py")
    }
    assert sorted(own - {"__init__.py"} - set(re.findall(r"\w+(?:\.py|/)", tree))) == []


def test_the_top_level_of_the_repository_is_this_list():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = "images kale_dist notebooks pyproject.toml setup.cfg tests .ci .gitignore CHANGELOG.md CONTRIBUTING.md LICENSE Makefile "
    known += "README.md SECURITY.md benchmarks docs"
    assert {name.partition("/")[0] for name in listed.stdout.splitlines()} == set(known.split())


def test_it_lists_what_is_taken_from_inside_others():
    assert list(private_names.differences()) == []


def test_each_such_row_says_what_was_tried_and_has_a_test():
    tests = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/unit/test_private_names.py").read_text(), re.MULTILINE))
    rows = private_names.listed()
    assert {use.test for use in rows} == tests
    assert all(all(texts) for texts in rows.values())


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch\ndef f(x): return x._version", {"_version"}),
        ("from torch.utils import _pytree", {"torch.utils._pytree"}),
        ("import torch\ndef f(x): return getattr(x, '_cdata', 0)", {"_cdata"}),
        ("import torch\ndef f(x):\n    torch.Tensor.backward = x", {"torch.Tensor.backward="}),
        ("from multiprocessing import util\ndef f(x): setattr(util, 'spawnv_passfds', x)", {"util.spawnv_passfds="}),
        ("class A:\n    def _own(self): return self._own\ndef f(a): return a._own, '_own'", set()),
        ("class A:\n    _state = 1\ndef f(a): return a._state  # noqa: SLF001", {"_state"}),
        ("class A:\n    _state = 1\ndef f(a): return a._state  # noqa: SLF001 - ours", set()),
        ("import sys\ndef f(): return sys._getframe(1)", set()),
        ("def f(name): return name.endswith('_s')", set()),
    ],
)
def test_a_name_from_inside_another_package_is_found(tmp_path, monkeypatch, code, names):
    (tmp_path / "module.py").write_text(code)
    monkeypatch.setattr(private_names, "PACKAGE", tmp_path)
    assert {use.name for use in private_names.found()} == names
