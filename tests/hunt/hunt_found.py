"""What the hunt has found: each difference is a line, known with its reason or mended and tried again in each gate."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Found:
    """A case that was wrong."""

    case: str
    """A line that `Case.read` takes. All cases with these rows count as the same; `a|b` means either."""
    why: str
    is_mended: bool = False
    seed: str = ""
    """By which draw it was found."""


FOUND: tuple[Found, ...] = ()
