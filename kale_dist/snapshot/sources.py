"""Which sources travel: those of functions and classes that have no file a rank could import."""

from __future__ import annotations

import linecache
import types
from collections.abc import Iterable
from typing import Any

from kale_dist.runtime.sources import cell_label, files_of_class


def collect(codes: Iterable[types.CodeType], classes: Iterable[type]) -> dict[str, tuple[str, str]]:
    """Texts of the cells (or scripts) from which code travels by value.

    Args:
        codes: Code of functions.
        classes: Classes; those without methods are looked for by name.

    Returns:
        File name in the code objects, to the text and to what the user calls it ("Cell In[3]", or "").
    """
    found: dict[str, tuple[str, str]] = {}
    names = [code.co_filename for code in codes]
    names += [name for cls in classes if cls.__module__ == "__main__" for name in files_of_class(cls)]
    for name in dict.fromkeys(names):
        lines = linecache.getlines(name)
        if lines:
            found[name] = ("".join(lines), cell_label(name))
    return found


def describe_main(main: types.ModuleType) -> dict[str, Any]:
    """What a rank's `__main__` needs to be like this one: "file" and "package", null where it has none."""
    return {"file": getattr(main, "__file__", None), "package": getattr(main, "__package__", None)}
