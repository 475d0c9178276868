"""Values for a notebook's parameters, by the convention that papermill made.

A cell tagged `parameters` holds the defaults, and a cell behind it the values that were given. Kale's
`pipeline-parameters` means the same.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from nbformat import v4

from kale_dist.errors import ConfigError
from kale_dist.wording import closest, show

TAGS = ("parameters", "pipeline-parameters")
INJECTED_TAG = "injected-parameters"


def parse(text: str) -> Any:
    """A value of the command line: a Python literal, `true`, `false`, `null`, or else the text itself."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def inject(notebook: Any, values: Mapping[str, Any]) -> None:
    """Put a cell with the values behind the notebook's cell of parameters. One of an earlier run is replaced.

    Args:
        notebook: Of nbformat 4; it is changed.
        values: Name to value; what `repr` writes so that Python reads it back.

    Raises:
        ConfigError: The notebook has no such parameter, or a value cannot be written as Python.
    """
    if not values:
        return
    if not isinstance(values, Mapping):
        raise ConfigError("parameters", f"{show(values)} is not a dict", "Write it as {'learning_rate': 0.1}")
    cells = notebook.cells
    positions = [index for index, cell in enumerate(cells) if _is_code(cell) and set(TAGS) & set(_tags(cell))]
    if not positions:
        remedy = "Tag the cell that assigns their defaults with 'parameters'"
        raise ConfigError("parameters", "the notebook has no cell of parameters", remedy)
    known = [name for index in positions for name in assigned(cells[index].source)]
    for name, value in values.items():
        _check(name, value, known)
    cell = v4.new_code_cell(  # type: ignore[no-untyped-call]
        "".join(f"{name} = {value!r}\n" for name, value in values.items()).rstrip(),
        metadata={"tags": [INJECTED_TAG]},
    )
    if notebook.nbformat_minor < 5:  # noqa: PLR2004 - cells have had identifiers since 4.5
        cell.pop("id", None)
    last = positions[-1]
    notebook.cells = [
        *cells[: last + 1],
        cell,
        *(other for other in cells[last + 1 :] if INJECTED_TAG not in _tags(other)),
    ]


def assigned(source: str) -> Sequence[str]:
    """Names that a cell assigns at its top level; none if it is not plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found = []
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=targets):
                found += [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(name)
            case _:
                pass
    return found


def _check(name: Any, value: Any, known: Sequence[str]) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError("parameters", f"{show(name)} cannot be a name in Python", "Give names that the cell assigns")
    if name not in known:
        remedy = f"{closest(name, known)}Its cell assigns: {', '.join(known) or 'nothing'}"
        raise ConfigError("parameters", f"the notebook has no parameter {show(name)}", remedy)
    try:
        same = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        same = False
    if not same:
        remedy = "Give text, numbers, True, False, None, or lists and dicts of them"
        raise ConfigError("parameters", f"{show(value)} of {name} cannot be written into a cell", remedy)


def _is_code(cell: Any) -> bool:
    return bool(cell.cell_type == "code")


def _tags(cell: Any) -> Sequence[str]:
    tags = cell.metadata.get("tags", ())
    return tags if isinstance(tags, list) else ()
