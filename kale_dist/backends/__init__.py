"""Where jobs run. A backend is imported when it is first asked for."""

from __future__ import annotations

from kale_dist.backends.base import Backend

NAMES = ("local",)
"""The words that `on=` takes."""

PLANNED = ("docker", "kubernetes")
"""Words that later versions will take; for an honest error message."""


def get(name: str) -> Backend:
    """The backend of a name, one instance for the whole process.

    Raises:
        KeyError: There is none of this name.
    """
    if name != "local":
        raise KeyError(name)
    from kale_dist.backends import local

    return local.shared()
