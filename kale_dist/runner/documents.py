"""Reads and writes notebooks, and injects papermill's parameters."""

from __future__ import annotations

import ast
import json
import keyword
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import nbformat
from nbformat import v4

from kale_dist.errors import ConfigError
from kale_dist.wire.blobs import fresh
from kale_dist.wording import closest, show

_PARAMETERS_TAGS = ("parameters", "pipeline-parameters")
"""Papermill's tag, and Kale's, of the cell with the defaults."""

_INJECTED_TAG = "injected-parameters"
_PYTHON = ("python", "ipython")


def read_notebook(path: pathlib.Path) -> Any:
    """Read a notebook of any version of the format, and convert it to version 4.

    Args:
        path: The notebook's file.

    Raises:
        ConfigError: The file cannot be read, is not a notebook, or is not in Python.
    """
    remedy = "Give the path of an .ipynb file"
    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"))
        if isinstance(found, dict) and isinstance(found.get("cells"), list):
            _complete(found)
        notebook = nbformat.reads(json.dumps(found), as_version=4)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError("notebook", f"{path} cannot be read ({error.strerror})", remedy) from error
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        problem = f"{path} is not a notebook ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise ConfigError("notebook", problem, remedy) from error
    spec, info = notebook.metadata.get("kernelspec"), notebook.metadata.get("language_info")
    for language in (isinstance(spec, dict) and spec.get("language"), isinstance(info, dict) and info.get("name")):
        if isinstance(language, str) and language and language.lower() not in _PYTHON:
            raise ConfigError("notebook", f"{path} is written in {language}", "Only Python notebooks can be run")
    return notebook


def _complete(notebook: dict[str, Any]) -> None:
    """Add fields that some tools leave out or write as null."""
    notebook["metadata"] = metadata = notebook.get("metadata") or {}
    for key in ("kernelspec", "language_info"):
        if not isinstance(metadata.get(key), dict) or not isinstance(metadata[key].get("name"), str):
            metadata.pop(key, None)
    if "kernelspec" in metadata:
        metadata["kernelspec"].setdefault("display_name", metadata["kernelspec"]["name"])
    for cell in notebook["cells"]:
        cell["metadata"], cell["source"] = cell.get("metadata") or {}, cell.get("source") or ""
        if not isinstance(cell["metadata"].get("tags", []), list):
            del cell["metadata"]["tags"]
        if cell.get("cell_type") == "code":
            cell["outputs"] = cell.get("outputs") or []
            cell.setdefault("execution_count", None)


def inject(notebook: Any, values: Mapping[str, Any]) -> None:
    """Insert a cell with values after the cell tagged `parameters`, as papermill does. It replaces an earlier such cell.

    Args:
        notebook: The notebook, in version 4 of the format; changed in place.
        values: The value of each name: text, numbers, booleans, None, and lists and dicts of them.

    Raises:
        ConfigError: The notebook has no such parameter, or a value cannot be written as Python.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("parameters", f"{show(values)} is not a dict", "Write it as {'epochs': 1}")
    if not values:
        return
    tagged = [
        i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and set(_PARAMETERS_TAGS) & tags(cell)
    ]
    if not tagged:
        remedy = "Tag the cell that assigns their defaults with 'parameters'"
        raise ConfigError("parameters", "the notebook has no cell of parameters", remedy)
    known = [name for index in tagged for name in _assigned(notebook.cells[index].source)]
    for name, value in values.items():
        _check(name, value, known)
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cell = v4.new_code_cell(source, metadata={"tags": [_INJECTED_TAG]})  # type: ignore[no-untyped-call]
    if notebook.nbformat_minor < 5:  # noqa: PLR2004 - cells have had identifiers since 4.5
        cell.pop("id", None)
    after = [other for other in notebook.cells[tagged[-1] + 1 :] if _INJECTED_TAG not in tags(other)]
    notebook.cells = [*notebook.cells[: tagged[-1] + 1], cell, *after]


def tags(cell: Any) -> set[str]:
    """A cell's tags."""
    return set(cell.metadata.get("tags") or ())


def _assigned(source: str) -> Sequence[str]:
    """The names that a cell assigns at its top level; empty if it is not plain Python."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return ()
    targets = [
        target
        for statement in statements
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


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


def check_target(option: str, file: pathlib.Path, source: pathlib.Path) -> None:
    """Check before anything runs that a file can be written, and create its folder.

    Args:
        option: The option that names the file, for messages.
        file: The file to be written.
        source: The notebook, which must not be overwritten.

    Raises:
        ConfigError: The file cannot be written.
    """
    remedy = "Choose another file"
    if file.is_dir():
        raise ConfigError(option, f"{file} is a folder", remedy)
    if file.exists() and file.samefile(source):
        raise ConfigError(option, f"{file} is the notebook itself, which is left as it is", remedy)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Some file systems refuse what the modes allow.
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(option, f"{file} cannot be written ({error.strerror})", remedy) from error


def encode(notebook: Any) -> bytes:
    """A notebook as the bytes of its file."""
    text: str = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    # Half of a surrogate pair is not UTF-8; escaped it is JSON.
    return text.encode("utf-8", "backslashreplace")


def write(file: pathlib.Path, content: bytes) -> None:
    """Write a file atomically."""
    with fresh(file) as part:
        part.write_bytes(content)
