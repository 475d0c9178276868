"""Lets the interpreter end while threads ask the cluster.

A daemon thread that comes back to Python after the interpreter has begun to end is unwound by it (before Python 3.14). The
kubernetes client's methods are called through pydantic's compiled code, which cannot be unwound: the process would abort.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 3.0
"""How long the interpreter's end waits for requests that are under way. Those that still wait then sleep through it."""

_changed = threading.Condition()
_under_way = 0
_leaves = False


class Gated:
    """Mixed into an API of the client: other threads make no requests once the interpreter has begun to end."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return functools.partial(_call, found) if not name.startswith("_") and callable(found) else found


def _call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    global _under_way  # noqa: PLW0603 - of the process, as its end is
    with _changed:
        if _leaves and threading.current_thread() is not threading.main_thread():
            # The thread waits for nothing, and goes with the process.
            _changed.wait_for(lambda: False)
        _under_way += 1
    try:
        return method(*args, **options)
    finally:
        with _changed:
            _under_way -= 1
            _changed.notify_all()


def _leave() -> None:
    global _leaves  # noqa: PLW0603 - as above
    with _changed:
        _leaves = True
        _changed.wait_for(lambda: not _under_way, LIMIT_S)


atexit.register(_leave)
