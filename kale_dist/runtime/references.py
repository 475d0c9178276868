"""Numbers for the functions and classes that are sent by value, the same on both sides.

A function of a cell has no module from which a rank could import it, so the rank makes a second one from its code.
Were that second one sent back by value, the notebook would get a third, with globals of its own. Its number is sent
back instead, and means the notebook's own object there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class References:
    """A two-way table of numbers and objects. Objects are held, so that an address means one object only."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._indices: dict[int, int] = {}

    def add(self, index: int, value: object) -> None:
        """Give an object its number."""
        self._objects[index] = value
        self._indices[id(value)] = index

    def index_of(self, value: object) -> int | None:
        """The number of this very object, or None."""
        return self._indices.get(id(value))

    def resolve(self, index: int) -> Any:
        """The object of a number.

        Raises:
            LookupError: No object has it.
        """
        try:
            return self._objects[index]
        except KeyError:
            raise LookupError(f"no function or class of the snapshot has the number {index}") from None

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._objects.values())
