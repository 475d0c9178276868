"""How values are written in messages and by users, and which extra to install for what is missing. Pure."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from kale_dist.errors import ConfigError

_SHOWN_CHARACTERS = 40

EXTRAS = {
    "docker": ("docker<8",),
    "images": ("isal<2", "packaging", "urllib3<3", "uv<0.14"),
    "kubernetes": ("kubernetes<38",),
    "notebook": ("anywidget<0.12", "ipykernel<8", "nbclient<0.12"),
}
"""What parts of this library need, by the names of its extras; their other packages come with these."""


def install(extra: str) -> str:
    """The command that installs what a part of this library needs: `pip install 'docker<8'`."""
    return "pip install " + " ".join(f"'{package}'" if "<" in package else package for package in EXTRAS[extra])


@contextlib.contextmanager
def needing(extra: str, argument: str, what: str) -> Iterator[None]:
    """Around imports: where a package is not installed, say so and how to install what that part needs.

    Args:
        extra: The part.
        argument: What the user wrote that asks for it.
        what: The same in words.

    Raises:
        ConfigError: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "kale_dist":
            raise
        problem = f"{what} needs the package {package!r}, which is not installed in this Python"
        raise ConfigError(argument, problem, f"Install it: {install(extra)}") from None


def show(value: Any) -> str:
    """A value for a message: its text if that is short, else its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of a user's class, whose error would hide the one that is told
        text = "?" * (_SHOWN_CHARACTERS + 1)
    return text if len(text) <= _SHOWN_CHARACTERS else f"an object of type {type(value).__name__}"


def shorten(text: str) -> str:
    """A text in quotes for a message: its beginning alone if it is long."""
    return repr(text) if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def closest(word: Any, words: Iterable[str]) -> str:
    """`Did you mean ...? ` for a word that is nearly one of `words`, else nothing."""
    near = difflib.get_close_matches(str(word).lower(), tuple(words), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def parse(text: str) -> Any:
    """A value of the command line: JSON or a Python literal (`3`, `0.1`, `true`, `None`, `[1, 2]`), else the text itself."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def listing(backend: str) -> str:
    """How a user sees which jobs a backend has, for errors of a job that is not there."""
    return f"kale_dist.jobs(on={backend!r}) or `kale-dist jobs --on {backend}` lists those there are"
