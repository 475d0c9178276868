"""Notebooks as files: read from whatever tool wrote them, and written whole or not at all."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import nbformat

from kale_dist.errors import ConfigError

_FORMAT = 4
"""Of a notebook's file."""

_DESCRIBED = {"kernelspec": ("name", "display_name"), "language_info": ("name",)}
"""What a notebook's metadata say of its kernel, and what each of them has to say."""


def output_of(path: pathlib.Path, output: str | pathlib.Path | None) -> pathlib.Path:
    """Where the executed notebook goes.

    Args:
        path: The notebook.
        output: What the user says; None for nothing.
    """
    return pathlib.Path(output) if output is not None else pathlib.Path(f"{path.stem}.executed.ipynb")


def check_output(path: pathlib.Path, output: pathlib.Path) -> None:
    """See that an executed notebook can be written; its folder is made.

    Args:
        path: The notebook.
        output: Where it will go.

    Raises:
        ConfigError: It cannot.
    """
    remedy = "Choose another file with -o"
    if output.is_dir():
        raise ConfigError("output", f"{output} is a folder", remedy)
    if output.exists() and output.samefile(path):
        raise ConfigError("output", f"{output} is the notebook itself, which is left as it is", remedy)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{output.parent} cannot be made ({error.strerror})", remedy) from error
    fresh = _fresh(output)
    try:
        # Asking for the right is not enough: some file systems refuse what the modes allow.
        fresh.touch()
        fresh.unlink()
    except OSError as error:
        raise ConfigError("output", f"{output} cannot be written ({error.strerror})", remedy) from error


def read(path: pathlib.Path) -> Any:
    """Read a notebook, of whatever format, as one of format 4.

    Args:
        path: Where it is.

    Raises:
        ConfigError: It cannot be read, is no notebook, or is written in another language than Python.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        notebook = nbformat.reads(_completed(text), as_version=4)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(
            "notebook", f"{path} cannot be read ({error.strerror})", "Give the path of an .ipynb file"
        ) from error
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        problem = (
            f"{path} is not a notebook ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        raise ConfigError("notebook", problem, "Give the path of an .ipynb file") from error
    for key in ("kernelspec", "language_info"):
        described = notebook.metadata.get(key)
        # A kernel's name is not its language's; what a kernel said of itself has the language's name.
        language = described.get("language" if key == "kernelspec" else "name") if isinstance(described, dict) else None
        if isinstance(language, str) and language and language.lower() not in ("python", "ipython"):
            raise ConfigError("notebook", f"{path} is written in {language}", "Only Python notebooks can be run")
    return notebook


def _completed(text: str) -> str:
    """A notebook's text with what some tools leave out, or write as null, put in: it says nothing."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("nbformat") != _FORMAT or not isinstance(found.get("cells"), list):
        return text
    changed = not isinstance(found.get("metadata"), dict)
    metadata = found["metadata"] = {} if changed else found["metadata"]
    for key, needed in _DESCRIBED.items():
        described = metadata.get(key)
        if isinstance(described, dict) and isinstance(described.get("name"), str):
            changed |= any(field not in described for field in needed)
            metadata[key] = dict.fromkeys(needed, described["name"]) | described
        elif key in metadata:
            del metadata[key]
            changed = True
    for cell in found["cells"]:
        empty = {"metadata": {}, "source": ""}
        if cell.get("cell_type") == "code":
            empty |= {"outputs": []}
            changed |= "execution_count" not in cell
            cell.setdefault("execution_count", None)
        for key, nothing in empty.items():
            if cell.get(key) is None:
                cell[key], changed = nothing, True
        if not isinstance(cell["metadata"].get("tags", []), list):
            del cell["metadata"]["tags"]
            changed = True
    return json.dumps(found) if changed else text


def encode(notebook: Any) -> bytes:
    """A notebook as its file has it.

    Args:
        notebook: Of nbformat 4.
    """
    text: str = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    # Half a character that stands alone is no UTF-8; so written it is JSON.
    return text.encode("utf-8", "backslashreplace")


def write(output: pathlib.Path, notebook: bytes) -> None:
    """Write the executed notebook, so that it is there whole or not at all.

    Args:
        output: Where to.
        notebook: Its bytes.
    """
    fresh = _fresh(output)
    fresh.write_bytes(notebook)
    fresh.replace(output)


def _fresh(output: pathlib.Path) -> pathlib.Path:
    """Where a notebook is written before it takes its place."""
    return output.with_name(f".{output.name}.new")
