"""Frozen dataclasses as JSON objects and back, and lines of JSON. What is as its default says stays out, and is filled in again."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import pathlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        if field.metadata.get("written")
        or value != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass from its fields by name: with tuples for lists, and the classes and enums of its annotations.

    Raises:
        TypeError, ValueError: These are not its fields, or a field is not what its annotation says.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{type(data).__name__} is no {kind.__name__}")
    readers = readers_of(kind)
    return kind(**{name: readers.get(name, _tuples)(value) for name, value in data.items()})


def encode_json(record: Any) -> bytes:
    """One event, message or dataclass as one line of JSON with its newline. Inner dataclasses become objects, too.

    Numbers that JSON has no word for (inf, nan) are written as Python's json module does and reads back.
    """
    return json.dumps(record, separators=(",", ":"), default=dataclasses.asdict).encode() + b"\n"


def decode_json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The records of whole lines; a line that is not JSON (cut by a crash) is passed over."""
    for line in data.split(b"\n"):
        if line:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def fields_of(one: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """The fields of a dataclass by name, with the values as they are.

    Args:
        one: An object of it.
        kind: A base of its class, whose fields are wanted; None for all.
    """
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(kind or one)}


def _readers_of(kind: Any) -> Mapping[str, Callable[[Any], Any]]:
    return {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}


readers_of: Callable[[Any], Mapping[str, Callable[[Any], Any]]] = functools.cache(_readers_of)
"""For each field of a dataclass a function that makes its value from one of JSON. What may be slow is done once."""


_MAX_BITS = 64
_PLAIN: dict[Any, tuple[type, ...]] = {float: (float, int), **{one: (one,) for one in (int, str, bool, type(None))}}


def _reader(hint: Any) -> Callable[[Any], Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    several = inner if origin is types.UnionType else (hint,)
    if all(one in _PLAIN for one in several):
        return _plain_reader(hint, sum((_PLAIN[one] for one in several), ()))
    if origin is types.UnionType:
        return _union_reader(hint, tuple(map(_reader, several)))
    if origin in (tuple, Sequence):
        return _tuple_reader(
            hint, tuple(_reader(one) for one in inner if one is not ...), is_long=origin is Sequence or inner[-1] is ...
        )
    if origin is Mapping:
        return _mapping_reader(hint, _reader(inner[1]))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        readers_of(hint)
        return lambda value: value if isinstance(value, hint) else decode(hint, value)
    is_made = isinstance(hint, type) and issubclass(hint, enum.Enum | pathlib.PurePath)
    return hint if is_made else _tuples


def _plain_reader(hint: Any, allowed: tuple[type, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # Larger integers are no numbers of ours, and no float can hold them.
        if isinstance(value, allowed) and not (isinstance(value, int) and value.bit_length() > _MAX_BITS):
            return value
        raise TypeError(f"{type(value).__name__} is no {hint}")

    return read


def _union_reader(hint: Any, readers: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except (TypeError, ValueError):
                continue
        raise TypeError(f"{type(value).__name__} is no {hint}")

    return read


def _tuple_reader(hint: Any, readers: tuple[Callable[[Any], Any], ...], *, is_long: bool) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple) or not (is_long or len(value) == len(readers)):
            raise TypeError(f"{type(value).__name__} is no {hint}")
        return tuple(
            map(readers[0], value) if is_long else (reader(one) for reader, one in zip(readers, value, strict=True))
        )

    return read


def _mapping_reader(hint: Any, reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} is no {hint}")
        for one in value.values():
            reader(one)
        return value

    return read


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
