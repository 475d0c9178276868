"""Whether a module's file is still the one that was imported: the notebook runs the old code, the ranks would run the new."""

from __future__ import annotations

import importlib.machinery
import inspect
import pathlib
import sys
import types
from collections.abc import Iterator


def notes(name: str) -> list[str]:
    """A warning if a module of this process was edited since its import, else nothing."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    # Other loaders (pytest's) compile something else than what the file says.
    if (
        not isinstance(module, types.ModuleType)
        or type(getattr(spec, "loader", None)) is not importlib.machinery.SourceFileLoader
    ):
        return []
    try:
        text = pathlib.Path(str(module.__file__)).read_bytes()
        written = dict(_codes(compile(text, str(module.__file__), "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError) as error:
        return [f"{module.__file__} cannot be compiled any more ({error}): the ranks' import of {name} will fail."]
    for code in _live(module):
        if written.get(code.co_qualname) != code:
            note = (
                f"{module.__file__} was edited since {name} was imported: the ranks run the file as it is now, the "
                f"notebook what it was. To have both alike: importlib.reload({name}), or restart the kernel."
            )
            return [note]
    return []


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    """All functions in a compiled file by qualified name; the last one of a name counts, as when it is run."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _live(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Code of the functions and methods that a module defines at its top level."""
    for value in list(vars(module).values()):
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else (value,)
        for member in members:
            unwrapped = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            try:
                function = inspect.unwrap(unwrapped)
            except (ValueError, AttributeError):
                continue
            # Generated functions (dataclasses, named tuples) have code of no file.
            if isinstance(function, types.FunctionType) and function.__code__.co_filename == module.__file__:
                yield function.__code__
