"""Shortens tracebacks of this library's errors in notebooks to the user's own lines. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = frozenset(("site-packages", "dist-packages"))


def for_notebook(error: BaseException) -> list[str]:
    """An error's traceback as IPython's own formatter writes it, in its colours and mode, of the user's lines alone.

    Left out are frames of this library and of what it calls, and causes that have no others. `%xmode --show`, which
    has IPython show what is hidden, brings them back.

    Args:
        error: The error; it is changed while IPython formats it, and then restored.

    Returns:
        The parts of the text for IPython; without IPython the whole traceback.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return traceback.format_exception(error)
    formatter = shell.InteractiveTB
    parts: list[str]
    if not formatter.skip_hidden:
        parts = formatter.structured_traceback(type(error), error, error.__traceback__)
        return parts
    with _reduced(error):
        # The offset would leave out IPython's own frames, which are removed already.
        parts = formatter.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
    return parts


@contextlib.contextmanager
def _reduced(error: BaseException) -> Iterator[None]:
    """Within the block, reduce the error and its causes to the user's frames, and remove causes without any."""
    links = _chain(error)
    before = [(one, one.__traceback__, one.__cause__, one.__context__, one.__suppress_context__) for one in links]
    try:
        shown = [error]
        error.__traceback__ = _of_user(error.__traceback__, called=False)
        for link in links[1:]:
            link.__traceback__ = _of_user(link.__traceback__, called=True)
            # An exception of a rank has no frames: the error that it is the cause of has its text with them.
            if link.__traceback__ is not None:
                shown.append(link)
        for link, following in itertools.zip_longest(shown, shown[1:]):
            if _next(link) is not following:
                link.__cause__ = following
        yield
    finally:
        for link, frames, cause, context, suppressed in before:
            link.__traceback__, link.__cause__, link.__context__ = frames, cause, context
            link.__suppress_context__ = suppressed


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, in the order of a traceback."""
    links: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in links:
        links.append(following)
        following = _next(following)
    return links


def _next(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _of_user(frames: types.TracebackType | None, *, called: bool) -> types.TracebackType | None:
    """The frames without those of this library, of IPython, and of libraries that this one called."""
    kept = []
    while frames is not None:
        package = str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        called = called or package == "kale_dist"
        if package not in ("kale_dist", "IPython") and not (called and is_library(frames.tb_frame.f_code.co_filename)):
            kept.append(frames)
        frames = frames.tb_next
    following = None
    for one in reversed(kept):
        following = types.TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    path = pathlib.PurePath(filename)
    return (
        filename.startswith("<frozen ")
        or path.is_relative_to(_STANDARD_LIBRARY)
        or not _INSTALLED.isdisjoint(path.parts)
    )
