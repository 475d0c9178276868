"""Local modules travel as files, found without running them, and are imported in the rank from a folder of their own."""

import importlib
import pathlib
import sys
import sysconfig

import pytest
from played import play

from kale_dist.errors import SnapshotError
from kale_dist.snapshot import modules
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Writes modules into a folder of their own on `sys.path`, and forgets them afterwards."""
    before = set(sys.modules)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def local(files):
        write(folder, files)
        importlib.invalidate_caches()
        return folder

    yield local
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def names(found):
    return [file.path for file in found.files]


def test_what_a_module_imports_travels_too_also_inside_functions_and_by_name(local):
    trap = "raise RuntimeError('nobody may run this')\n"
    local({
        "one.py": "import two\nfrom pkg.deep import x\n",
        "two.py": "def f():\n    import three\n    from four import g\n",
        "three.py": "import importlib\nfive = importlib.import_module('five')\n",
        "four.py": trap, "five.py": trap + "import json, numpy, torch, kale_dist\n",
        "pkg/__init__.py": trap, "pkg/deep/__init__.py": "from . import other\n", "pkg/deep/other.py": "import sixth\n",
        "pkg/data/words.txt": "words", "sixth.py": "", "pkg/__pycache__/x.pyc": "", "pkg/.git/config": "", "pkg/.env": "",
        "unrelated.py": "",
    })  # fmt: skip
    found = modules.collect(["one"])
    assert names(found) == [
        "five.py", "four.py", "one.py", "pkg/__init__.py", "pkg/data/words.txt", "pkg/deep/__init__.py",
        "pkg/deep/other.py", "sixth.py", "three.py", "two.py",
    ]  # fmt: skip
    assert found.notes == ()
    assert not {"one", "two", "pkg"} & set(sys.modules)


def test_files_beside_a_module_that_its_text_names_travel(local):
    local({
        "reader.py": "from pathlib import Path\nTABLE = Path(__file__).parent / 'table.json'\nD = 'more'\nS = '/etc/passwd'\n"
        "U = '../secret'\nH = '.hidden'\n",
        "table.json": "{}", "more/a.txt": "", "more/deep/b.txt": "", "other.txt": "", ".hidden": "", "../secret": "",
        "plain.py": "T = 'table.json'\n",
    })  # fmt: skip
    assert names(modules.collect(["reader"])) == ["more/a.txt", "more/deep/b.txt", "reader.py", "table.json"]
    assert names(modules.collect(["plain"])) == ["plain.py"]


def test_installed_packages_and_the_standard_library_stay(local):
    folder = local({"site-packages/installed.py": "", "own.py": ""})
    sys.path.append(str(folder / "site-packages"))
    try:
        found = modules.collect(["os", "sys", "json", "torch.nn", "numpy", "pytest", "kale_dist.wire.blobs", "cloudpickle",
                                 "installed", "no.such.module", "", "a b", "__main__", "own"])  # fmt: skip
    finally:
        sys.path.remove(str(folder / "site-packages"))
    assert names(found) == ["own.py"]


def test_an_editable_install_counts_as_local(local, monkeypatch):
    folder = local({"elsewhere/editable_pkg/__init__.py": "", "elsewhere/editable_pkg/x.py": ""})

    class Finder:
        """What an editable install puts on `sys.meta_path`."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "editable_pkg":
                return None
            place = folder / "elsewhere" / name
            return importlib.util.spec_from_file_location(
                name, place / "__init__.py", submodule_search_locations=[str(place)]
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert names(modules.collect(["editable_pkg.x"])) == ["editable_pkg/__init__.py", "editable_pkg/x.py"]


def test_a_package_over_the_size_travels_as_code_with_a_note(local, monkeypatch):
    monkeypatch.setattr(modules, "MAX_DATA_BYTES", 1 << 20)
    local({"large/__init__.py": "", "large/x.py": "", "large/small.bin": "n", "large/big.bin": b"0" * (2 << 20)})
    found = modules.collect(["large"])
    assert names(found) == ["large/__init__.py", "large/x.py"]
    (note,) = found.notes
    assert "large comes with more than 1 MiB of other files" in note


def test_large_neighbours_of_a_module_stay_with_a_note(local, monkeypatch):
    monkeypatch.setattr(modules, "MAX_DATA_BYTES", 1 << 20)
    local({"alone.py": "HERE = __file__\nD = 'data'\n", "data/big.bin": b"0" * (2 << 20)})
    found = modules.collect(["alone"])
    assert names(found) == ["alone.py"]
    assert "data" in (folder := found.notes[0]) or "volume" in folder


def test_a_namespace_package_travels(local):
    local({"space/part/mod.py": "", "space/readme.txt": ""})
    assert names(modules.collect(["space.part.mod"])) == ["space/part/mod.py", "space/readme.txt"]


def test_a_module_that_cannot_be_parsed_still_travels(local):
    local({"broken.py": "def (:\n", "binary.py": b"\0\xff"})
    assert names(modules.collect(["broken", "binary"])) == ["binary.py", "broken.py"]


def test_a_local_c_extension_is_noted(local):
    name = f"fast{sysconfig.get_config_var('EXT_SUFFIX')}"
    local({name: b"\x7fELF"})
    found = modules.collect(["fast"])
    assert names(found) == [name]
    assert "compiled" in found.notes[0]


@pytest.mark.parametrize(
    ("after", "warned"),
    [
        ("def f(x):\n    return x + 1\nclass C:\n    def m(self):\n        return 1\n", False),
        ("def f(x):\n    return x + 2\nclass C:\n    def m(self):\n        return 1\n", True),
        ("def f(x):\n    return x + 1\nclass C:\n    def m(self):\n        return 2\n", True),
        ("# only a comment\n", True),
        ("def f(x:\n", True),
    ],
)
def test_a_module_edited_since_its_import_is_warned_of(local, after, warned):
    folder = local({"helpers.py": "def f(x):\n    return x + 1\nclass C:\n    def m(self):\n        return 1\n"})
    helpers = importlib.import_module("helpers")
    assert modules.notes_on_edits("helpers") == []
    (folder / "helpers.py").write_text(after)
    snapshot = capture(helpers.f, (), {}, store=blobs.MemoryStore(), label="f")
    assert len(snapshot.notes) == warned
    assert all("helpers" in note for note in snapshot.notes)


@pytest.mark.parametrize(("after", "warned"), [("return 1", 0), ("return 2", 1)])
@pytest.mark.parametrize(
    "before",
    [
        "import contextlib\n@contextlib.contextmanager\ndef f():\n    yield\n    return 1\n",
        "class C:\n    @property\n    def p(self):\n        return 1\n",
        "class C:\n    @classmethod\n    def p(cls):\n        return 1\n",
    ],
)
def test_an_edit_behind_a_decorator_is_warned_of(local, before, after, warned):
    folder = local({"decorated.py": before})
    importlib.import_module("decorated")
    (folder / "decorated.py").write_text(before.replace("return 1", after))
    assert len(modules.notes_on_edits("decorated")) == warned


def test_generated_code_is_not_taken_for_an_edit(local):
    local({
        "generated.py": "import dataclasses, functools, typing, enum, collections\n"
        "@dataclasses.dataclass\nclass D:\n    x: int = 0\nN = collections.namedtuple('N', 'a b')\n"
        "@functools.lru_cache\ndef f():\n    return [i for i in (lambda: range(3))()]\n"
        "class E(enum.Enum):\n    A = 1\ndef deco(g):\n    @functools.wraps(g)\n    def inner():\n        return g()\n    return inner\n"
        "@deco\ndef h():\n    return 1\nclass P:\n    @property\n    def p(self):\n        return 1\n    @staticmethod\n    def s():\n        pass\n",
    })  # fmt: skip
    importlib.import_module("generated")
    assert modules.notes_on_edits("generated") == []


def test_in_the_rank_circular_imports_inner_imports_and_neighbour_files_work(tmp_path):
    write(tmp_path, {
        "chicken.py": "import egg\nclass Chicken:\n    def lay(self):\n        return egg.Egg()\n",
        "egg.py": "import chicken\nclass Egg:\n    def hatch(self):\n        return chicken.Chicken()\n",
        "late.py": "def value():\n    import later\n    return later.VALUE\n",
        "later.py": "VALUE = 41\n",
        "table.py": "import json\nfrom pathlib import Path\ndef load():\n    return json.loads((Path(__file__).parent / 'x.json').read_text())\n",
        "x.json": '{"a": 1}',
        "tools/__init__.py": "from .deep import name\n", "tools/deep.py": "from . import data\nname = data.NAME\n",
        "tools/data.py": "NAME = 'tools'\n",
    })  # fmt: skip
    printed = play(
        tmp_path,
        "from chicken import Chicken\nimport late, table, tools",
        """
def call(bird):
    import os, sys
    from egg import Egg
    import inner_only
    assert isinstance(bird.lay(), Egg) and isinstance(bird.lay().hatch(), Chicken)
    for module in (sys.modules["egg"], table, tools, inner_only):
        assert "/modules/" in module.__file__, module.__file__
    return late.value() + inner_only.ONE, table.load(), tools.name, bird
""",
        "import pathlib\npathlib.Path('inner_only.py').write_text('ONE = 1\\n')",
        args="(Chicken(),)",
        after="value = outcome.value\nassert value[:3] == (42, {'a': 1}, 'tools'), value\nassert type(value[3]) is Chicken",
    )
    assert printed.strip() == ""


def test_nested_functions_of_a_local_module_share_its_globals_in_the_rank(tmp_path):
    write(
        tmp_path,
        {
            "counter.py": "count = 0\ndef make():\n    def up():\n        global count\n        count += 1\n        return count\n    return up\n"
        },
    )
    play(
        tmp_path,
        "import counter\nup = counter.make()\nup()",
        "def call():\n    up()\n    return counter.count",
        after="assert outcome.value == 1, outcome.value",
    )


def test_files_are_read_at_the_call(tmp_path, local):
    folder = local({"mine.py": "def f():\n    return 1\n"})
    mine = importlib.import_module("mine")
    store = blobs.FolderStore(tmp_path / "blobs")
    before = capture(mine.f, (), {}, store=store, label="f")
    (folder / "mine.py").write_text("def f():\n    return 2\n")
    from kale_dist.snapshot import loading

    loading.stage_modules(store, before.digest, tmp_path / "staged")
    assert (tmp_path / "staged" / "mine.py").read_text() == "def f():\n    return 1\n"
    assert names_in(tmp_path / "staged") == ["mine.py"]


def test_links_to_folders_are_not_followed(local):
    folder = local({"looped/__init__.py": ""})
    pathlib.Path(folder, "looped", "again").symlink_to(folder / "looped")
    assert names(modules.collect(["looped"])) == ["looped/__init__.py"]


def test_parsing_is_tried_again_where_python_mixes_up_two_threads(local, monkeypatch):
    local({"one.py": "import two\n", "two.py": ""})
    parse, left = modules.ast.parse, [3]

    def parse_now(*given):
        if left[0]:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=28, after=32)")
        return parse(*given)

    monkeypatch.setattr(modules.ast, "parse", parse_now)
    assert names(modules.collect(["one"])) == ["one.py", "two.py"]
    local({"one.py": "import two  # changed\n"})
    left[0] = -1
    with pytest.raises(SnapshotError, match=r"one\.py could not be searched for imports"):
        modules.collect(["one"])
