"""Makes the sources of cells known in other processes, for tracebacks and `inspect.getsource`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import pathlib
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.errors import KaleDistError, local_variables, tracebacks
from kale_dist.errors.local_variables import FrameLocals

_labels: dict[str, str] = {}
_PASSING_ON = ("/torch/nn/modules/module.py", "/torch/nn/modules/container.py")
"""Files of torch whose frames, three a layer, are left out of tracebacks."""

_SHOWN_FRAMES = 3
"""How many frames of an error show their local variables."""

_OWN = str(pathlib.Path(__file__).parent.parent) + "/"


def is_own(filename: str) -> bool:
    """Whether a file is this library's."""
    return filename.startswith(_OWN)


def is_users(filename: str) -> bool:
    """Whether a file is the user's: a cell, a script, a local module; nothing that is installed."""
    return not is_own(filename) and not tracebacks.is_library(filename)


def label_of(filename: str) -> str:
    """A file as the user knows it: `Cell In[3]`."""
    return _labels.get(filename, filename)


def place_of(frame: types.FrameType, line: int) -> str:
    """A place in the user's code in short: `Cell In[3]:5 in step`, `train.py:12 in main`."""
    return f"{pathlib.PurePath(label_of(frame.f_code.co_filename)).name}:{line} in {frame.f_code.co_name}"


def last_line(error: BaseException) -> str:
    """Where in the user's code an exception was raised, as `place_of` names it, and that line below it; empty without one."""
    frames = [one for one in traceback.walk_tb(error.__traceback__) if is_users(one[0].f_code.co_filename)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return f"{place_of(frame, line)}\n{linecache.getline(frame.f_code.co_filename, line).strip()}".strip()


def install(sources: Mapping[str, tuple[str, str]]) -> None:
    """Make the sources known to this process.

    Args:
        sources: File name of the code objects to the text, and to the cell's label ("Cell In[3]", or "").
    """
    for filename, (text, label) in sources.items():
        # Without a time, linecache never looks for the file again.
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        if label:
            _labels[filename] = label
    if not hasattr(inspect.getfile, "kale_dist"):
        inspect.getfile = _find_classes(inspect.getfile)


def _find_classes(getfile: Any) -> Any:
    """Wrap `inspect.getfile`, which takes all classes of `__main__` to be from one file, to find a class's own cell."""

    @functools.wraps(getfile)
    def find(value: Any) -> Any:
        if isinstance(value, type) and value.__module__ == "__main__":
            for name in files_of_class(value):
                if name in linecache.cache:
                    return name
        return getfile(value)

    find.kale_dist = True  # type: ignore[attr-defined]
    return find


def files_of_class(cls: type) -> Iterator[str]:
    """Yield the files that may define a class: those of its methods, then any source that defines its name."""
    for value in vars(cls).values():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_qualname.startswith(cls.__qualname__ + "."):
            yield code.co_filename
    defined = re.compile(rf"^[ \t]*class[ \t]+{re.escape(cls.__name__)}\b", re.MULTILINE)
    for filename, entry in reversed(list(linecache.cache.items())):
        # Entries without a time are cells; files on disk were found by the class's methods.
        if len(entry) == 4 and (entry[1] is None or filename in _labels) and defined.search("".join(entry[2])):  # noqa: PLR2004 - linecache's full entries
            yield filename


def locals_of(error: BaseException, *, show: str) -> dict[int, FrameLocals]:
    """The local variables of an exception's last three frames in the user's code, by their places in its traceback.

    Never raises, whatever the objects do.

    Args:
        error: The exception.
        show: `Debugging.show_locals`.
    """
    found: dict[int, FrameLocals] = {}
    if show == "none":
        return found
    # A failure of what is only shown must not hide the error itself.
    with contextlib.suppress(Exception), local_variables.short_tensors():
        frames = list(enumerate(traceback.walk_tb(error.__traceback__)))
        shown = [one for one in frames if is_users(one[1][0].f_code.co_filename)][-_SHOWN_FRAMES:]
        left = local_variables.MAX_BYTES
        for place, (frame, line) in reversed(shown):
            where = place_of(frame, line)
            limit = left - len(f"{where}\n".encode("utf-8", "replace"))
            values = local_variables.of_frame(frame, line, limit=limit, full=show == "full")
            if values:
                one = found[place] = FrameLocals(where=where, values=values)
                left -= len(f"{one}\n".encode("utf-8", "replace"))
    return dict(sorted(found.items()))


def format_error(error: BaseException, shown: Mapping[int, FrameLocals] | None = None) -> str:
    """An exception's traceback as Python prints it, without the frames of kale_dist, cells named as the user knows them.

    Never raises, even if the exception's own methods do.

    Args:
        error: The exception.
        shown: Local variables by places in its traceback: they follow the lines of their frames.
    """
    try:
        described = traceback.TracebackException.from_exception(error)
        for place, one in (shown or {}).items():
            described.stack[place].locals = dict(one.values)
        _clean(described, error, set())
        return "".join(described.format())
    except Exception as problem:  # noqa: BLE001 - the user's __str__, __cause__ or the like may do anything
        lines = ["Traceback (most recent call last):\n"]
        with contextlib.suppress(Exception):
            lines += traceback.format_tb(error.__traceback__)
        return "".join([*lines, f"{type_name(error)}: (its text cannot be shown: {type(problem).__name__})\n"])


def type_name(value: object) -> str:
    """Qualified name of an object's class, or of a class itself, as tracebacks show it: "_io.TextIOWrapper"."""
    cls = value if isinstance(value, type) else type(value)
    return cls.__qualname__ if cls.__module__ in {"builtins", "__main__"} else f"{cls.__module__}.{cls.__qualname__}"


def _clean(described: traceback.TracebackException, error: BaseException | None, seen: set[int]) -> None:
    """Remove our own frames and rename cells, in the exception and in its causes."""
    if id(described) in seen:
        return
    seen.add(id(described))
    kept = [frame for frame in described.stack if not frame.filename.startswith(_OWN)]
    kept = [frame for frame in kept[:-1] if not frame.filename.endswith(_PASSING_ON)] + kept[-1:]
    # A bug in our own code has no other frames and keeps them; our own errors name what to do without.
    described.stack[:] = kept or ([] if isinstance(error, KaleDistError) else list(described.stack))
    for frame in described.stack:
        frame.line  # noqa: B018 - read while the file name is the one that linecache knows
        frame.filename = _labels.get(frame.filename, frame.filename)
    linked = [described.__cause__, described.__context__, *(described.exceptions or ())]
    for other in linked:
        if other is not None:
            _clean(other, None, seen)


def cell_label(filename: str) -> str:
    """What a person calls the cell with this file name: IPython's label, marimo's place; "" if it is not a cell of this process."""
    if "__marimo__cell_" in filename:
        return _marimo_label(filename)
    shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if shell is None or not shell.initialized():
        return ""
    numbers = getattr(shell.instance().compile, "_filename_map", {})
    return f"Cell In[{numbers[filename]}]" if filename in numbers else ""


def _marimo_label(filename: str) -> str:
    """`cell 3`, by the place of its code in the notebook's file; `a cell` where that is not saved, or stands in two cells."""
    source = "".join(linecache.getlines(filename)).strip()
    with contextlib.suppress(AttributeError, OSError, TypeError, UnicodeError):
        saved = pathlib.Path(sys.modules["__main__"].__file__).read_text(encoding="utf-8")  # type: ignore[arg-type]
        # A cell is the body of a function or `with`, or a function or class of its own.
        forms = f"\n{textwrap.indent(source, '    ')}\n", f"\n{source}\n"
        cells = re.split(r"(?m)^(?=@app[.]|with app[.])", saved)
        found = [number for number, cell in enumerate(cells) if source and any(form in cell for form in forms)]
        return f"cell {found[0]}" if len(found) == 1 else "a cell"
    return "a cell"
