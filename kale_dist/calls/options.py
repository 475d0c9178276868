"""The options that `distribute` and `launch` both take, checked: how and where a call runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kale_dist import trackers
from kale_dist.errors import ConfigError
from kale_dist.job.backend import Backend
from kale_dist.job.spec import names
from kale_dist.job.spec.checks import FLAG, NO_NUL, Check, check_fields, keep, number, pairs, setting, text, whole
from kale_dist.job.spec.place_settings import Place
from kale_dist.wire import GRACE_S, STALL_WARN_S

T = TypeVar("T")

_SET_BY_US = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip

_MOST_THREADS = 4096
"""Of a rank. Far more would take those of the agent, and with it other jobs."""

_MOST_GRACE_S = 600
"""For so long a pod that hangs may keep a node from being drained, or a job's cancel from ending it."""

_RANGE_RESTARTS = 10
"""Losses that a job of a range of processes survives, if the call gives no number: there pods are expected to go."""


def _is_size(value: Any) -> bool:
    """Whether a value is a number of processes, or the least and the largest of a range."""
    ends = value if isinstance(value, tuple | list) else (value, value)
    are_whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    return len(ends) == 2 and are_whole and 1 <= ends[0] <= ends[1]  # noqa: PLR2004 - two ends


_LIMIT = number("a positive number of seconds", "Give seconds, or None").or_(None)
_GRACE = number(
    f"a number of seconds from 0 to {_MOST_GRACE_S}",
    "Give how long a save takes, such as 60",
    may_be_0=True,
    most=_MOST_GRACE_S,
)
_SIZE = Check(
    _is_size,
    "{} is neither a whole number of 1 or more nor a range of two, the smaller first",
    "Give an int such as 4, or on a cluster a range such as (2, 8)",
)
_FREE = dataclasses.replace(
    names.FREE_VARIABLE, test=lambda name: name not in _SET_BY_US and names.FREE_VARIABLE.test(name)
)
_NAME = text(
    lambda name: bool(name) and "=" not in name and "\0" not in name,
    "{} cannot be a variable's name",
    "Use letters, digits and _",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How and where a call runs, for all verbs. Fields as arguments of `distribute`."""

    number_of_processes: int | tuple[int, int] | None = setting(None, _SIZE.or_(None))
    cuda: bool | None = setting(None, FLAG.or_(None))
    name: str | None = None
    on: str | Place | Backend | None = None
    environment: Any = None
    """A dict as given; then pairs of name and value."""
    threads: int | None = setting(
        None, whole(1, _MOST_THREADS, "Give the cores of one rank, or None for its fair share").or_(None)
    )
    # What numpy, random and torch all take, with room for the ranks.
    seed: int | None = setting(None, whole(0, 2**31 - 1, "Give one, or None for a random one").or_(None))
    track: Any = ()
    """As given; then settings of trackers."""
    timeout_s: float | None = setting(None, _LIMIT)
    stall_warn_s: float | None = setting(STALL_WARN_S, _LIMIT)
    stall_timeout_s: float | None = setting(None, _LIMIT)
    max_restarts: int | None = setting(None, whole(0, remedy="Give an int; 0 for none").or_(None))
    """As given; then a number."""
    grace_s: float = setting(GRACE_S, _GRACE)
    detach: bool = setting(False, FLAG)  # noqa: FBT003 - a default

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name is not None:
            names.check(self.name)
        size = self.number_of_processes
        if isinstance(size, Sequence):
            size = (size[0], size[1]) if size[0] < size[1] else size[0]
        is_range = isinstance(size, tuple)
        if is_range and self.max_restarts == 0:
            problem = f"0 with a range of processes {size}, where a pod that goes is a loss"
            raise ConfigError("max_restarts", problem, f"Leave it out (then {_RANGE_RESTARTS}), or give more")
        if self.max_restarts is None:
            keep(self, max_restarts=_RANGE_RESTARTS if is_range else 0)
        keep(self, number_of_processes=size)
        keep(self, environment=_variables(self.environment), track=trackers.resolve(self.track))


def of(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Make a class of a verb's arguments from those that are its fields.

    Args:
        kind: `Options` or `Training`.
        arguments: The verb's own, by name.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: arguments[field.name] for field in fields if field.name in arguments})


NAMES = tuple(field.name for field in dataclasses.fields(Options))
"""Arguments that `distribute` and `launch` both have."""


def _variables(environment: Any) -> tuple[tuple[str, str], ...]:
    listed = pairs("environment", {} if environment is None else environment, "{'NAME': 'value'}", _NAME, NO_NUL)
    for name, _ in listed:
        _FREE("environment", name)
    return tuple(sorted(listed))
