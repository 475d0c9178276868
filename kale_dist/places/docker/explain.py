"""Why a container ended or does not run, as a sentence. One table; the engine's own errors are in `kale_dist.image.engine`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kale_dist.job.backend import LostBy, Trouble
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.wire import FailureCause, fields_of

_GIB = 1 << 30
_SIGKILL = 137
_SIGNALS = {_SIGKILL: "SIGKILL", 143: "SIGTERM"}
"""By the exit code of what one has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContainerEnd:
    """What the engine reports about a container that does not run."""

    name: str
    status: str
    """In the engine's words: `created`, `paused`, `exited`, `dead`."""
    exit_code: int = 0
    is_out_of_memory: bool = False
    """Whether a process in it was OOM killed."""
    error: str = ""
    """Why the engine could not start it."""
    memory_bytes: int = 0
    """Its limit; 0 for none."""
    last_line: str = ""
    """The last line of its output, without blocks of its agent."""

    @property
    def limit(self) -> str:
        """The memory that it could use, for a sentence."""
        return f"its limit of {self.memory_bytes / _GIB:.1f} GiB" if self.memory_bytes else "the machine's memory"


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """The sentence about containers that `fits` accepts."""

    fits: Callable[[ContainerEnd], bool]
    sentence: str
    remedy: str = ""
    _: dataclasses.KW_ONLY
    lost: LostBy = ""
    cause: FailureCause | None = None
    heals: bool = False


_TABLE = (
    _Row(
        lambda end: end.status == "paused", "Container {name} is paused", "Resume it: docker unpause {name}", heals=True
    ),
    _Row(
        lambda end: end.is_out_of_memory and end.exit_code == _SIGKILL,
        "Container {name} was killed because it had used up {limit}",
        "Raise resources.memory, or use less memory",
        lost="out of memory",
        cause=FailureCause.DIED,
    ),
    _Row(lambda end: bool(end.error), "Container {name} could not run: {error}", cause=FailureCause.NOT_STARTED),
    _Row(
        lambda end: end.exit_code == EXIT_CODE,
        "Container {name} could not start its agent: {last_line}",
        "Name an image with Python 3.11 or later and torch, with image=",
        cause=FailureCause.NOT_STARTED,
    ),
    _Row(
        lambda end: end.exit_code in _SIGNALS,
        "Container {name} was ended from outside ({signal}, exit code {exit_code}), not because it ran out of memory",
        "`docker stop`, `docker kill` and `docker rm --force` do that, and stopping the engine",
        lost="killed",
    ),
    _Row(
        lambda end: bool(end.exit_code) and end.last_line.endswith("exec format error"),
        "Container {name} could not start: the image is made for another processor ({last_line})",
        "Name one for the engine's platform, with image=",
        cause=FailureCause.NOT_STARTED,
    ),
    _Row(
        lambda end: bool(end.exit_code and end.last_line),
        "Container {name} ended with exit code {exit_code}; its last line: {last_line}",
    ),
    _Row(lambda end: bool(end.exit_code), "Container {name} ended with exit code {exit_code} and printed nothing"),
)
"""The first row that fits counts."""


def explain(end: ContainerEnd) -> tuple[Trouble | None, LostBy]:
    """The trouble of a container, and how it was lost, if something outside ended it."""
    for row in _TABLE:
        if row.fits(end):
            last = end.last_line or "the image's Python cannot run it"
            values = {**fields_of(end), "limit": end.limit, "last_line": last, "signal": _SIGNALS.get(end.exit_code)}
            trouble = Trouble(
                sentence=row.sentence.format(**values),
                remedy=row.remedy.format(**values),
                heals=row.heals,
                cause=row.cause,
            )
            return trouble, row.lost
    return None, ""
