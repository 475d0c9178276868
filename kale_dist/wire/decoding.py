"""Frozen dataclasses as JSON objects and back. What is as its default says stays out, and is filled in again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

WRITTEN = {"written": True}
"""Metadata of a field that is written out whatever its value. Give it to a field whose default changes: what an earlier version wrote
without it meant the earlier default."""


def encode(one: Any) -> dict[str, Any]:
    """The fields of a dataclass by name that differ from their defaults, as a JSON object for `decode`."""
    values = ((field, getattr(one, field.name)) for field in dataclasses.fields(one))
    return {
        field.name: _plain(value)
        for field, value in values
        if field.metadata.get("written") or value != _default(field)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass from its fields by name: with tuples for lists, and the classes and enums of its annotations.

    Raises:
        TypeError, ValueError: These are not its fields.
    """
    hints = hints_of(kind)
    return kind(**{name: _value(hints.get(name), one) for name, one in data.items()})


def fields_of(one: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """The fields of a dataclass by name, with the values as they are.

    Args:
        one: An object of it.
        kind: A base of its class, whose fields are wanted; None for all.
    """
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(kind or one)}


def learn(kind: type[Any]) -> None:
    """Resolve the annotations of a dataclass and of those in it, which the first `decode` would do."""
    for hint in hints_of(kind).values():
        made = _class_in(hint)
        if isinstance(made, type) and dataclasses.is_dataclass(made):
            learn(made)


def _value(hint: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_value(hint, one) for one in value)
    made = _class_in(hint)
    if isinstance(made, type) and dataclasses.is_dataclass(made) and isinstance(value, Mapping):
        return decode(made, value)
    return made(value) if made is not None and isinstance(value, str) else value


hints_of: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""The annotations of a class, resolved."""


@functools.cache
def _class_in(hint: Any) -> Any:
    """The class that a field's texts or objects become, also where the field has several of them or none."""
    if isinstance(hint, type):
        is_made = dataclasses.is_dataclass(hint) or issubclass(hint, enum.Enum | pathlib.PurePath)
        return hint if is_made else None
    return next(filter(None, map(_class_in, typing.get_args(hint))), None)
