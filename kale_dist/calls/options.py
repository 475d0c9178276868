"""The options that `distribute` and `launch` both take, checked: how and where a call runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from kale_dist import trackers
from kale_dist.calls.checks import check_count, check_flag
from kale_dist.errors import ConfigError
from kale_dist.job.backend import Backend
from kale_dist.job.spec import names
from kale_dist.job.spec.place_settings import Place
from kale_dist.wire import Policy
from kale_dist.wording import show

_OWN_PREFIX = "KALE_DIST_"
_SET_BY_US = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip

_MOST_THREADS = 4096
"""Of a rank. Far more would take those of the agent, and with it other jobs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How and where a call runs, for all verbs. Fields as arguments of `distribute`."""

    number_of_processes: int | None = None
    cuda: bool | None = None
    name: str | None = None
    on: str | Place | Backend | None = None
    environment: Any = None
    """A dict as given; then pairs of name and value."""
    threads: int | None = None
    seed: int | None = None
    track: Any = ()
    """As given; then settings of trackers."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    """All arguments that only agents read."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The options among the arguments of a verb, by name."""
        policy = Policy(**{name: given[name] for name in _POLICY if name in given})
        return cls(**{name: given[name] for name in _OWN if name in given}, policy=policy)

    def __post_init__(self) -> None:
        for count in ("number_of_processes", "threads"):
            if getattr(self, count) is not None:
                check_count(count, getattr(self, count))
        if (self.threads or 0) > _MOST_THREADS:
            remedy = "Give the cores of one rank, or None for its fair share"
            raise ConfigError("threads", f"{show(self.threads)} is more than any machine has cores", remedy)
        if self.cuda is not None:
            check_flag("cuda", self.cuda)
        if self.name is not None:
            names.check(self.name)
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31):
            # What numpy, random and torch all take, with room for the ranks.
            raise ConfigError(
                "seed", f"{show(seed)} is not an int from 0 to 2**31 - 1", "Give one, or None for a random one"
            )
        object.__setattr__(self, "environment", _variables(self.environment))
        object.__setattr__(self, "track", trackers.resolve(self.track))


_POLICY = tuple(field.name for field in dataclasses.fields(Policy))
_OWN = tuple(field.name for field in dataclasses.fields(Options) if field.name != "policy")
NAMES = (*_OWN, *_POLICY)
"""Arguments that `distribute` and `launch` both have."""


def _variables(environment: Any) -> tuple[tuple[str, str], ...]:
    given = {} if environment is None else environment
    if not isinstance(given, Mapping):
        raise ConfigError("environment", f"{show(environment)} is not a dict", "Write it as {'NAME': 'value'}")
    for name, value in given.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError("environment", f"{show(name)} cannot be a variable's name", "Use letters, digits and _")
        if not isinstance(value, str) or "\0" in value:
            remedy = f"Write {str(value)!r}" if "\0" not in str(value) else "Leave out the NUL character"
            raise ConfigError("environment", f"the value {show(value)} of {name} is not text", remedy)
        if name in _SET_BY_US or name.startswith(_OWN_PREFIX):
            raise ConfigError("environment", f"{name} is set in each rank by kale_dist", "Leave it out")
    return tuple(sorted(given.items()))
