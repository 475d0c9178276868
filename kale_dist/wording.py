"""Formats values for messages, parses values of the command line, and names the extra of a missing package. Pure."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kale_dist.errors import ConfigError

_SHOWN_CHARACTERS = 40

_MEANT = {"k8s": "kubernetes", "list": "jobs", "loss": "metrics", "run": "launch", "train": "distribute"}
_MEANT |= {"cluster": "kubernetes", "history": "metrics", "kill": "cancel", "stop": "cancel"}
"""What other libraries call what has another name here."""

EXTRAS = {
    "docker": ("docker<8",),
    "images": ("isal<2", "packaging", "urllib3<3", "uv<0.14"),
    "kubernetes": ("kubernetes<38",),
    "mcp": ("mcp<3",),
    "notebook": ("anywidget<0.12", "ipykernel<8", "nbclient<0.12"),
}
"""The packages that parts of this library need, by the names of its extras; further ones are dependencies of these."""

GET_WIDGETS = "install anywidget in the environment that JupyterLab itself runs in (the kernel has it)"
"""What a person does who sees no widgets."""


def install(extra: str) -> str:
    """Return how to install an extra, as in the docs, and its packages beside a library installed without a clone."""
    packages = " ".join(f"'{package}'" if "<" in package else package for package in EXTRAS[extra])
    return f"pip install '.[{extra}]' in the clone of kale_dist; without one, pip install {packages}"


@contextlib.contextmanager
def needing(extra: str, argument: str, what: str) -> Iterator[None]:
    """Turn an import error of the block into one that explains how to install the missing packages.

    Args:
        extra: The extra with the packages.
        argument: The user's argument that needs them, for the message.
        what: What the user wants to do, in words.

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


def listed(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def show(value: Any) -> str:
    """A value for a message: its text if that is short, else its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an error of a user's class would hide the one that is to be reported
        text = "?" * (_SHOWN_CHARACTERS + 1)
    return text if len(text) <= _SHOWN_CHARACTERS else f"an object of type {type(value).__name__}"


def shorten(text: str) -> str:
    """A text in quotes for a message: its beginning alone if it is long."""
    return repr(text) if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def closest(word: Any, words: Iterable[str]) -> str:
    """`Did you mean ...? ` for a word that is nearly one of `words`, or means one elsewhere; else nothing."""
    known, text = tuple(words), str(word)
    near = [_MEANT[text.lower()]] if _MEANT.get(text.lower()) in known else difflib.get_close_matches(text, known, n=1)
    near = near or difflib.get_close_matches(text.lower(), known, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def no_attribute(what: str, name: str, words: Iterable[str]) -> AttributeError:
    """The error of an attribute that something does not have, with the one that was probably meant."""
    near = "" if name.startswith("_") else closest(name, words)
    return AttributeError(f"{what} has no attribute {name!r}. {near}".strip(), name=name)


def parse(text: str) -> Any:
    """A value of the command line: JSON or a Python literal (`3`, `0.1`, `true`, `None`, `[1, 2]`), else the text itself."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return {"true": True, "false": False, "null": None, "none": None}.get(text.lower(), text)


def listing(backend: str) -> str:
    """How to list a backend's jobs, for errors about a missing job."""
    return f"kale_dist.jobs(on={backend!r}) or `kale-dist jobs --on {backend}` lists those there are"


def untrusted(ref: object) -> str:
    """Why no results are loaded of a job that this user may not have submitted, and how to load them all the same."""
    return (
        f"The key of {ref} is not on this machine. You see its status and log, and no results: to load one can run code of "
        f"the person who submitted it. If you trust that person, write kale_dist.attach({str(ref)!r}, trust=True)"
    )


_TIMES = {"s": 1.0, "min": 60.0, "h": 3600.0}


def seconds(value: object) -> float | None:
    """Read a time: a number of seconds, or text such as `10 min`, `30s` or `1.5 h`. None for anything else."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", value)
        return None if found is None else float(found[1]) * _TIMES[found[2]]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def interval(value: str) -> tuple[str, float] | None:
    """Read how often something is done: `("auto", 0)`, `("steps", 500)` for `500 steps`, `("s", 600)` for `10 min`; else None."""
    if value == "auto":
        return "auto", 0.0
    if found := re.fullmatch(r"\s*(\d+)\s*steps?\s*", value):
        unit, amount = "steps", float(found[1])
    else:
        unit, amount = "s", seconds(value) or 0.0
    return (unit, amount) if amount > 0 else None
