"""How values appear in messages. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_SHOWN_CHARACTERS = 40


def show(value: Any) -> str:
    """A value for a message: its text if that is short, else its type."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"an object of type {type(value).__name__}"


def shorten(text: str) -> str:
    """A text in quotes for a message: its beginning alone if it is long."""
    return repr(text) if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def closest(word: Any, words: Iterable[str]) -> str:
    """`Did you mean ...? ` for a word that is nearly one of `words`, else nothing."""
    near = difflib.get_close_matches(str(word).lower(), tuple(words), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""
