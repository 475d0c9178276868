"""Prints the tests nearest to what has changed, for `make near`: a first answer within five minutes, with no promise to find everything.

Near is a file of tests/unit or tests/agent that imports a changed module, itself or through few others. Changed files of tests come first. Last
come trainings that equal one process, and what backends keep, processes as pods too. `SINCE` names the commit from which changes count.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 12
"""Files of tests: ten seconds each with three at once, and three times that where others compute on the same two cores."""

NEAR = ("tests/unit", "tests/agent")
ALWAYS = ("tests/conformance", "tests/strategies/test_equality.py")


def git(*words: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    command = ["git", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def changed() -> set[Path]:
    """Python files that differ from where the branch began, or from the last commit where nothing else is known."""
    bases = [os.environ["SINCE"]] if os.environ.get("SINCE") else ["origin/HEAD", "main", "HEAD"]
    since = next((found[0] for base in bases if (found := git("merge-base", base, "HEAD"))), "HEAD")
    names = [*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")]
    return {ROOT / name for name in names if name.endswith(".py") and (ROOT / name).exists()}


def module_of(path: Path) -> str:
    """A module's name as tests import it: those of tests have their folder on the path."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) if parts[0] == "kale_dist" else parts[-1]


def imported(tree: ast.Module, homes: dict[str, str]) -> Iterator[str]:
    """Names of modules that a file imports, wherever in it, and of those behind the package's public names."""
    nodes = list(ast.walk(tree))
    aliases = {"kale_dist"}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            aliases |= {alias.asname for alias in node.names if alias.name == "kale_dist" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            if node.module == "kale_dist":
                yield from (homes[alias.name] for alias in node.names if alias.name in homes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield homes.get(node.attr, f"kale_dist.{node.attr}")


def homes_in(tree: ast.Module) -> dict[str, str]:
    """Public name to module, from `_HOMES`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {name: f"kale_dist.{home or name}" for name, home in ast.literal_eval(node.value).items()}
    raise LookupError("_HOMES")


def users() -> dict[str, set[Path]]:
    """Name of a module to the files that import it."""
    paths = [path for folder in ("kale_dist", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    homes = homes_in(ast.parse((ROOT / "kale_dist" / "__init__.py").read_text()))
    found: dict[str, set[Path]] = {}
    for path in paths:
        for name in imported(ast.parse(path.read_text()), homes):
            found.setdefault(name, set()).add(path)
    return found


def near(changes: set[Path], users: dict[str, set[Path]]) -> list[Path]:
    """Files of tests, the nearest first."""
    found = sorted(path for path in changes if path.name.startswith("test_"))
    seen, ring = set(changes), changes
    while ring and len(found) < MOST:
        ring = {user for path in ring for user in users.get(module_of(path), ())} - seen
        seen |= ring
        for folder in NEAR:
            found += sorted(path for path in ring if path.match("test_*.py") and ROOT / folder in path.parents)
    return found[:MOST]


if __name__ == "__main__":
    found = [str(path.relative_to(ROOT)) for path in near(changed(), users())]
    print(f"{len(found)} files of tests are near", file=sys.stderr)
    print(*found, *(name for name in ALWAYS if name not in found), sep="\n")
