"""What `make lint` counts: lines of code against their budget, lines that stand twice, definitions that nothing uses.

A line of code holds a token other than a comment or a docstring; docstrings of fields are docstrings. The budget is in pyproject.toml. It
goes down with each landing that takes something out, and up only by what an issue grants, in a commit that names it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT, TESTS = "kale_dist", "tests"
WINDOW = 8
"""Equal lines of code in a row that count as written twice."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


_CALLED_BY_OTHERS = {
    "allocate": "torch's FSDP",
    "lightning_pytorch": "Lightning, by an entry point",
    "load_ipython_extension": "IPython",
    "makefile": "http.client",
    "set_buffer": "torch, of a future",
}
"""Definitions that only other packages use, which have no base of theirs."""


def files_of(folder: str) -> list[Path]:
    """The Python files below a folder of the repository, without what git does not know."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def code_lines(source: str) -> list[int]:
    """Numbers of the lines that hold code, ascending; the first is 1."""
    if not source:
        return []
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                documented.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return sorted(found - documented)


def over_budget(budget: dict[str, int]) -> Iterator[str]:
    """Sentences about what has more lines of code, or more lines that the formatter leaves alone, than the budget allows."""
    skips = 0
    for folder in (PRODUCT, TESTS):
        texts = [path.read_text() for path in files_of(folder)]
        count = sum(len(code_lines(text)) for text in texts)
        skips += sum(text.count("# fmt: skip") for text in texts) if folder == PRODUCT else 0
        print(f"{folder}: {count} lines of code of {budget[folder]}")
        if count > budget[folder]:
            yield f"{folder} has {count - budget[folder]} lines of code too many: take something out first"
    if skips > budget["fmt-skip"]:
        yield f"{skips} lines with `fmt: skip`, where {budget['fmt-skip']} are allowed"


def written_twice() -> Iterator[str]:
    """Sentences about windows of equal lines in the product, the first of each run."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    for path in files_of(PRODUCT):
        text = path.read_text()
        lines = text.splitlines()
        numbers = sorted(set(code_lines(text)) - _declared(text))
        last = -WINDOW
        for at in range(len(numbers) - WINDOW + 1):
            window = tuple(lines[number - 1].strip() for number in numbers[at : at + WINDOW])
            first = seen.setdefault(window, (path, numbers[at]))
            if first != (path, numbers[at]) and at - last >= WINDOW:
                last = at
                where = f"{first[0].relative_to(ROOT)}:{first[1]}"
                yield f"{path.relative_to(ROOT)}:{numbers[at]}: the next {WINDOW} lines stand in {where}, too"


def _declared(source: str) -> set[int]:
    """Numbers of the lines of imports and signatures, which may be alike."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(range(node.lineno, node.body[0].lineno))
    return found


def unused() -> Iterator[str]:
    """Sentences about definitions of the product whose name stands once in it, and on no page; those that override a base of another package's are called by it."""
    texts = {path: path.read_text() for path in files_of(PRODUCT)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    others = [
        *(ROOT / PRODUCT).rglob("*.js"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "pyproject.toml",
    ]
    words = Counter(re.findall(r"\w+", "\n".join([*texts.values(), *(path.read_text() for path in others)])))
    own = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for path, tree in trees.items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for holder in (tree, *(one for one in classes if {ast.unparse(base) for base in one.bases} <= own)):
            for name, line in _defined(holder.body):
                if words[name] == 1 and not name.startswith("__") and name not in _CALLED_BY_OTHERS:
                    yield f"{path.relative_to(ROOT)}:{line}: nothing uses {name}"


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node.lineno) for target in targets if isinstance(target, ast.Name))


def main() -> int:
    """Print what is wrong; the exit code."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        budget = tomllib.load(file)["tool"]["kale-dist"]["lines"]
    wrong = [*over_budget(budget), *written_twice(), *unused()]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
