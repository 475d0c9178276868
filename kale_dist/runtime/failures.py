"""Exceptions on their way to the notebook: each with its causes, notes and traceback, and a stand-in where it must be."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from typing import Any

from kale_dist.errors import RemoteError
from kale_dist.runtime import sources

_MOST = 100
"""Longer chains of causes are cut."""


def describe(error: BaseException, dump: Callable[[object], bytes]) -> dict[str, Any]:
    """A description of an exception and all it is linked to, for JSON. Never raises, however odd they are.

    Args:
        error: The exception.
        dump: Pickles a value, or raises.
    """
    chain: list[BaseException] = [error]
    described: list[dict[str, Any]] = []
    for position in range(_MOST):
        if position == len(chain):
            break
        one = chain[position]
        links = {}
        for name in ("__cause__", "__context__"):
            linked = _quietly(getattr, one, name)
            if isinstance(linked, BaseException):
                known = next((number for number, other in enumerate(chain) if other is linked), None)
                if known is None:
                    known = len(chain)
                    chain.append(linked)
                links[name] = known
        notes = _quietly(getattr, one, "__notes__")
        described.append(
            {
                "type": sources.type_name(one),
                "text": _text(one),
                "traceback": sources.format_error(one) if position == 0 else "",
                "notes": [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else [],
                "suppress": bool(_quietly(getattr, one, "__suppress_context__")),
                "links": links,
                "pickles": [base64.b64encode(data).decode() for data in _pickles(one, dump)],
            }
        )
    return {"chain": described}


def rebuild(described: dict[str, Any], load: Callable[[bytes], Any]) -> tuple[BaseException, str]:
    """The exception of a description, linked as it was.

    Args:
        described: What `describe` gave.
        load: Unpickles, or raises.

    Returns:
        The exception and its formatted traceback.
    """
    chain = described["chain"]
    text = str(chain[0]["traceback"])
    made = [_rebuild_one(one, load, text if position == 0 else one["text"]) for position, one in enumerate(chain)]
    for error, one in zip(made, chain, strict=True):
        for name, position in one["links"].items():
            if position < len(made) and made[position] is not error:
                setattr(error, name, made[position])
        error.__suppress_context__ = one["suppress"]
        if one["notes"]:
            error.__notes__ = list(one["notes"])
    return made[0], text


def _rebuild_one(one: dict[str, Any], load: Callable[[bytes], Any], traceback: str) -> BaseException:
    for data in one["pickles"]:
        with contextlib.suppress(Exception):
            error = load(base64.b64decode(data))
            if isinstance(error, BaseException):
                return error
    return RemoteError(one["type"], one["text"], traceback)


def _pickles(error: BaseException, dump: Callable[[object], bytes]) -> list[bytes]:
    """The exception pickled as it is, or else its class and arguments alone; nothing if neither can be."""
    with contextlib.suppress(Exception):
        return [dump(error)]
    with contextlib.suppress(Exception):
        return [dump(_Bare(error))]
    return []


class _Bare:
    """Pickles as an exception of the same class and arguments, without the attributes that were set on it."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self._error), self._error.args


def _text(error: BaseException) -> str:
    text = _quietly(str, error)
    return text if isinstance(text, str) else "(its text cannot be shown)"


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value, or None if it raises."""
    with contextlib.suppress(Exception):
        return function(*args)
    return None
