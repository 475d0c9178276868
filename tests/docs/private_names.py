"""Finds what kale_dist takes from inside other packages, and compares it with the table in docs/architecture.md.

    python tests/docs/private_names.py     exits 1 where they differ (`make lint`)

Found are, in the syntax tree of each file: attributes that begin with an underscore and that kale_dist does not define, and those of lines
marked `noqa: SLF001` (unless their comment begins with "ours"); imports of private modules and names; such names in strings; functions and
classes of others to which something is assigned (written with "=" after their name).
"""

import ast
import collections
import itertools
import pathlib
import re
import sys
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).parents[2]
PACKAGE = REPOSITORY / "kale_dist"
HEADING = "## What we take from inside others"

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_DOTTED = re.compile(r"([\w.]+\.)?_[A-Za-z]\w*(\.\w+)*")
_DOCUMENTED = re.compile(r"_repr_\w+_|_ipython_\w+_|_getframe|_current_frames|_foreach_\w+|_C")
"""Names that IPython, Python and torch document. What is private in `torch._C` has an underscore of its own."""
_ENDS = ("endswith", "removesuffix", "startswith", "removeprefix")
_SETTERS = ("setattr", "delattr", "_patch")


class Use(NamedTuple):
    """A name of another package in a function of kale_dist."""

    file: str
    function: str
    name: str

    @property
    def test(self):
        """The test of the function."""
        words = re.findall(r"\w+", f"{pathlib.Path(self.file).stem} {self.function}")
        return "test_" + "_".join(word.strip("_") for word in words).lower()


def found():
    """All uses in the tree."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = collections.Counter(name for tree in trees.values() for name in _defined(tree))
    return {use for path, tree in trees.items() for use in _File(path, tree, own).uses}


def listed():
    """The uses in the table, each with the texts of its row's other columns."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    section = text.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 5 or "`" not in line:
            continue
        package, names, where, tried, lost = cells
        file, *function = re.findall(r"`([^`]+)`", where)
        for name in re.findall(r"`([^`]+)`", names):
            rows[Use(file, "".join(function), name)] = (package, tried, lost)
    return rows


def _defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_me(node.value):
            yield node.attr


def _is_me(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class _File:
    def __init__(self, path, tree, own):
        self.file = path.relative_to(PACKAGE).as_posix()
        self.lines = path.read_text().splitlines()
        self.own = own
        self.uses = set()
        self.foreign = {alias for node in ast.walk(tree) for alias in self._aliases(node)}
        for node in tree.body:
            self._visit(node, (), is_inside=False)

    @staticmethod
    def _aliases(node):
        """Names that stand for other packages, for what is in them, and for parts of these."""
        if isinstance(node, ast.Import):
            yield from (
                (a.asname or a.name).partition(".")[0] for a in node.names if not a.name.startswith("kale_dist")
            )
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("kale_dist", "__future__")):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = ast.unparse(node.value)
            # A class of another package has a name of its own where mypy would not let it be changed.
            is_class = isinstance(node, ast.AnnAssign) and re.fullmatch(r"[\w.]+\.[A-Z]\w+", value)
            if is_class or re.fullmatch(r"sys\.modules(\.get\(|\[)'(?!__main__)[\w.]+'[)\]]", value):
                yield ast.unparse(target)

    def _visit(self, node, names, *, is_inside):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (is_function or isinstance(node, ast.ClassDef)) and not is_inside:
            # Inner functions belong to the outermost one.
            names = (*names, node.name)
        elif not names and isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            names = ("imports" if target is None else ast.unparse(target),)
        self.uses |= {Use(self.file, ".".join(names), name) for name in self._names(node)}
        is_end = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _ENDS
        for field, value in ast.iter_fields(node):
            # Annotations are never evaluated, and ends of words are no names.
            if field not in ("annotation", "returns") and not (is_end and field == "args"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                        self._visit(child, names, is_inside=is_inside or is_function)

    def _names(self, node):
        if isinstance(node, ast.Attribute):
            yield from self._of_attribute(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "") or ""
            if not module.startswith("kale_dist"):
                full = [f"{module}.{alias.name}".strip(".") for alias in node.names]
                yield from (name for name in full if re.search(r"(^|\.)_[A-Za-z]", name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DOTTED.fullmatch(node.value) and not (self.own[node.value] or _DOCUMENTED.fullmatch(node.value)):
                yield node.value
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and self._is_foreign(target.value):
                yield f"{ast.unparse(target)}="

    def _of_attribute(self, node):
        if not _PRIVATE.fullmatch(node.attr) or _DOCUMENTED.fullmatch(node.attr):
            return
        marks = " ".join(self.lines[number - 1] for number in {node.lineno, node.end_lineno})
        is_marked = "SLF001" in marks and "ours" not in marks and not _is_me(node.value)
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        if not self.own[node.attr] or is_marked or (is_super and self.own[node.attr] == 1):
            yield node.attr

    def _of_call(self, node):
        """Functions of others that `setattr` and its like replace."""
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        arguments = node.args
        if called == "callback" and arguments and ast.unparse(arguments[0]) in _SETTERS:
            called, arguments = ast.unparse(arguments[0]), arguments[1:]
        if called in _SETTERS:
            for owner, name in itertools.pairwise(arguments):
                if self._is_foreign(owner):
                    yield f"{ast.unparse(owner)}.{name.value if isinstance(name, ast.Constant) else '*'}="

    def _is_foreign(self, node):
        while isinstance(node, ast.Attribute):
            node = node.value
        # Python documents that the streams and hooks of `sys` may be replaced.
        return isinstance(node, ast.Name) and node.id in self.foreign - {"sys"}


def differences():
    """Sentences about what is in the tree and not in the table, or the other way round."""
    uses, rows = found(), listed()
    for use in sorted(uses - rows.keys()):
        yield f"kale_dist/{use.file} takes `{use.name}` in `{use.function}`, and docs/architecture.md has no row for it"
    for use in sorted(rows.keys() - uses):
        yield f"docs/architecture.md lists `{use.name}` in `{use.file}` `{use.function}`, which does not take it"


if __name__ == "__main__":
    said = list(differences())
    print("\n".join(said))
    sys.exit(bool(said))
