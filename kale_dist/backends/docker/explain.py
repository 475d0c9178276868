"""Why a container ended or does not run, as a sentence. One table; the engine's own errors are in `kale_dist.engine`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kale_dist.backends.base import LostBy, Trouble
from kale_dist.contract import FailureCause
from kale_dist.manifests.bootstrap import EXIT_CODE

_GIB = 1 << 30
_SIGKILL, _SIGTERM = 137, 143


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """What the engine says of a container that does not run."""

    name: str
    status: str
    """In the engine's words: `created`, `paused`, `exited`, `dead`."""
    exit_code: int = 0
    is_out_of_memory: bool = False
    """Whether the kernel killed a process in it because there was no memory left."""
    error: str = ""
    """Why the engine could not start it."""
    memory_bytes: int = 0
    """Its limit; 0 for none."""
    last_line: str = ""
    """The last line that it printed, other than what its agent writes for the notebook."""

    @property
    def limit(self) -> str:
        """The memory that it could use."""
        return f"its limit of {self.memory_bytes / _GIB:.1f} GiB" if self.memory_bytes else "the machine's memory"


_Row = tuple[Callable[[End], bool], str, str, LostBy, FailureCause | None, bool]

_TABLE: tuple[_Row, ...] = (
    # when, sentence, remedy, lost by, cause, whether it heals
    (
        lambda end: end.status == "paused",
        "Container {name} is paused",
        "Resume it: docker unpause {name}", "", None, True,
    ),
    (
        lambda end: end.is_out_of_memory and end.exit_code == _SIGKILL,
        "Container {name} was killed because it had used up {limit}",
        "Raise resources.memory, or use less memory", "out of memory", FailureCause.DIED, False,
    ),
    (
        lambda end: bool(end.error),
        "Container {name} could not run: {error}",
        "", "", FailureCause.NOT_STARTED, False,
    ),
    (
        lambda end: end.exit_code == EXIT_CODE,
        "Container {name} could not start its agent: {last_line}",
        "Name an image with Python 3.11 or later and torch, with image=", "", FailureCause.NOT_STARTED, False,
    ),
    (
        lambda end: end.exit_code == _SIGKILL,
        "Container {name} was killed from outside (SIGKILL, exit code 137), not because it ran out of memory",
        "`docker kill` or `docker rm --force` do that, and stopping the engine", "killed", None, False,
    ),
    (
        lambda end: end.exit_code == _SIGTERM,
        "Container {name} received SIGTERM",
        "`docker stop` does that, and stopping the engine", "killed", None, False,
    ),
    (
        lambda end: bool(end.exit_code) and end.last_line.endswith("exec format error"),
        "Container {name} could not start: the image is made for another processor ({last_line})",
        "Name one for the engine's platform, with image=", "", FailureCause.NOT_STARTED, False,
    ),
    (
        lambda end: bool(end.exit_code and end.last_line),
        "Container {name} ended with exit code {exit_code}; its last line: {last_line}",
        "", "", None, False,
    ),
    (
        lambda end: bool(end.exit_code),
        "Container {name} ended with exit code {exit_code} and printed nothing",
        "", "", None, False,
    ),
)  # fmt: skip
"""The first row that fits counts."""


def explain(end: End) -> tuple[Trouble | None, LostBy]:
    """What is wrong with a container, and whether something outside ended it."""
    for fits, sentence, remedy, lost, cause, heals in _TABLE:
        if fits(end):
            values: dict[str, Any] = {field.name: getattr(end, field.name) for field in dataclasses.fields(end)}
            values |= {"limit": end.limit, "last_line": end.last_line or "the image's Python cannot run it"}
            trouble = Trouble(
                sentence=sentence.format(**values), remedy=remedy.format(**values), heals=heals, cause=cause
            )
            return trouble, lost
    return None, ""
