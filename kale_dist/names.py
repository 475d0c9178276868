"""Names of jobs: DNS-1035 labels, so that one name is valid in a folder, a URL and a cluster. Pure."""

from __future__ import annotations

import re

from kale_dist.errors import ConfigError

MAX_LENGTH = 50
"""A label may have 63 characters; the rest is kept for what backends append, such as `-worker-123`."""

_VALID = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?", re.ASCII)


def check(name: str) -> None:
    """Accept a job's name or say what is wrong with it.

    Args:
        name: Lower-case letters, digits and dashes; begins with a letter, does not end with a dash, at most
            `MAX_LENGTH` characters.

    Raises:
        ConfigError: The name is not of this form. The remedy has a name that is.
    """
    if not isinstance(name, str):
        raise ConfigError("name", f"{name!r} is not a string", "Write a name such as 'train-net'")
    if not name:
        raise ConfigError("name", "it is empty", "Write a name such as 'train-net', or leave it out")
    if len(name) > MAX_LENGTH:
        remedy = f"Shorten it, such as to {_simplify(name)!r}"
        raise ConfigError("name", f"{name!r} has {len(name)} characters, more than {MAX_LENGTH}", remedy)
    if not _VALID.fullmatch(name):
        problem = f"{name!r} is not made of lower-case letters, digits and dashes that begin with a letter"
        raise ConfigError("name", problem, f"Write {_simplify(name) or 'job'!r}, for example")


def make(label: str, suffix: str) -> str:
    """A valid name from a label for people.

    Args:
        label: Any text, such as `train Net`.
        suffix: Lower-case letters and digits that make the name unique, such as `x3k9f`.

    Returns:
        Such as `train-net-x3k9f`.
    """
    room = MAX_LENGTH - len(suffix) - 1
    return f"{_simplify(label)[:room].rstrip('-') or 'job'}-{suffix}"


def _simplify(text: str) -> str:
    """The nearest valid name; empty if no ASCII letter is in the text."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return re.sub(r"^[^a-z]+", "", dashed)[:MAX_LENGTH].rstrip("-")
