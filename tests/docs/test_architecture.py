"""The page about the architecture names files and packages; they have to be there, and all of the root have to be named."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ROOT / "kale_dist"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_it_names_is_there():
    there = [path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py\b", PAGE))
    absent = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]
    assert [name for name in absent if not (ROOT / name).exists()] == []
    assert len(named) > 30


def test_its_tree_names_everything_in_the_root_of_the_library():
    tree = re.search(r"```text\nkale_dist/\n(.*?)```", PAGE, re.DOTALL)[1]
    own = {path.name for path in LIBRARY.glob("*.py")} | {
        f"{path.parent.name}/" for path in LIBRARY.glob("*/__init__.py")
    }
    assert sorted(own - {"__init__.py"} - set(re.findall(r"\w+(?:\.py|/)", tree))) == []
