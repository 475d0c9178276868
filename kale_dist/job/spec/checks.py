"""Checks of plain arguments: what a value must be, and the words that refuse another. Pure.

A class of settings declares with each field what it must be (`setting`), for `check_fields`; a `Check` itself takes a single argument.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from kale_dist.errors import ConfigError
from kale_dist.wording import closest, show

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing that an argument must be."""

    test: Callable[[Any], bool]
    """Whether a value is accepted."""
    problem: str
    """What is wrong with another; `{}` stands for the value, `{of}` for the key that it belongs to."""
    remedy: str
    """What to do instead."""
    near: tuple[str, ...] = ()
    """Words of which the nearest one is suggested."""

    def __call__(self, argument: str, value: Any, of: str = "") -> None:
        """Check a value; `of` is its key where the argument is a dict.

        Raises:
            ConfigError: It is not accepted.
        """
        if not self.test(value):
            problem = self.problem.format(f"{show(value)} of {of}" if of else show(value), of=of)
            near = closest(value, self.near) if isinstance(value, str) else ""
            raise ConfigError(argument, problem, f"{near}{self.remedy}")

    def or_(self, other: str | None) -> Check:
        """The same, but this value is accepted, too."""
        return dataclasses.replace(
            self, test=lambda value: (type(value) is type(other) and value == other) or self.test(value)
        )


# The string 'no' would count as true.
FLAG = Check(lambda value: isinstance(value, bool), "{} is neither True nor False", "Give a bool")
TEXT = Check(lambda value: isinstance(value, str), "{} is not text", "Write it in quotes")
NO_NUL = Check(lambda value: "\0" not in value, "the value of {of} has a NUL character", "Leave it out")


def text(test: Callable[[str], object], problem: str, remedy: str, near: tuple[str, ...] = ()) -> Check:
    """Accept texts of some form; the nearest one of `near` is suggested."""
    return Check(lambda value: isinstance(value, str) and bool(test(value)), problem, remedy, near)


def whole(least: int = 1, most: float = math.inf, remedy: str = "") -> Check:
    """Accept whole numbers from `least` to `most`, but neither True nor False."""
    span = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
    return Check(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        f"{{}} is not a whole number {span}",
        remedy or f"Give an int {span}",
    )


def number(what: str, remedy: str, *, may_be_0: bool = False, most: float = math.inf) -> Check:
    """Accept finite numbers above 0, or also 0, up to `most`; `what` describes them in the error."""

    def test(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and ((0 < value < math.inf and value <= most) or (may_be_0 and value == 0))

    return Check(test, f"{{}} is not {what}", remedy)


def one_of(words: Iterable[str], problem: str = "it cannot be {}", remedy: str = "") -> Check:
    """Accept some words alone, and suggest the nearest one of them."""
    words = tuple(words)
    remedy = remedy or f"Use one of: {', '.join(words)}"
    return text(words.__contains__, problem, remedy, words)


def setting(default: T, check: Check) -> T:
    """A field of a dataclass with its default and what it must be."""
    made: T = dataclasses.field(default=default, metadata={"check": check})
    return made


def check_fields(values: Any, prefix: str = "") -> None:
    """Check each `setting` of an object; `prefix` comes before its name in a refusal."""
    for field in dataclasses.fields(values):
        if "check" in field.metadata:
            field.metadata["check"](f"{prefix}{field.name}", getattr(values, field.name))


def keep(values: object, **fields: Any) -> None:
    """Set fields of a frozen object, while it is made, to what was made of its arguments."""
    for field, value in fields.items():
        object.__setattr__(values, field, value)


def texts(argument: str, given: Any, example: str) -> tuple[str, ...]:
    """Several texts, from a list or anything else that gives them; `example` shows how to write it."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(argument, f"{show(given)} is not a list", f"Write it as {example}")
    listed = tuple(given)
    for item in listed:
        if not isinstance(item, str):
            raise ConfigError(argument, f"{show(item)} in it is not text", f"Write it as {example}")
    return listed


def pairs(argument: str, given: Any, example: str, key: Check = TEXT, *values: Check) -> tuple[tuple[str, str], ...]:
    """Names and texts, from a dict or from pairs; each name has to pass `key`, each text all of `values`."""
    listed = given.items() if isinstance(given, Mapping) else given
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable):
        raise ConfigError(argument, f"{show(given)} is not a dict", f"Write it as {example}")
    listed = tuple(listed)
    for pair in listed:
        if not isinstance(pair, list | tuple) or len(pair) != 2:  # noqa: PLR2004 - a name and a value
            raise ConfigError(argument, f"{show(pair)} in it is not a name and a value", f"Write it as {example}")
        key(argument, pair[0])
        for one in (TEXT, *values):
            one(argument, pair[1], of=pair[0])
    return tuple((name, value) for name, value in listed)
