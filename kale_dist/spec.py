"""The whole job as one frozen value. Checks are in `__post_init__`; no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from kale_dist import names
from kale_dist.errors import ConfigError
from kale_dist.strategies import AllReduce, Strategy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How many ranks there are and how they are laid out."""

    number_of_processes: int
    """The world size."""
    processes_per_pod: int = 1
    """Ranks in one pod or container. The local backend has all ranks on one machine."""

    def __post_init__(self) -> None:
        for field in ("number_of_processes", "processes_per_pod"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(field, f"{value!r} is not a whole number", "Give an int of 1 or more")
            if value < 1:
                raise ConfigError(field, f"{value} is less than 1", "Give an int of 1 or more")

    @property
    def number_of_pods(self) -> int:
        """Pods needed; rank 0 is in the first."""
        return math.ceil(self.number_of_processes / self.processes_per_pod)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A folder that all ranks see."""

    mount_path: str
    """Absolute path in the rank."""
    source: str
    """A folder of this machine (local, docker) or a claim's name (kubernetes)."""

    def __post_init__(self) -> None:
        if not self.mount_path.startswith("/"):
            raise ConfigError("volumes", f"{self.mount_path!r} is not an absolute path", "Write it as '/data'")
        if not self.source:
            raise ConfigError("volumes", f"the source of {self.mount_path!r} is empty", "Name a folder or a claim")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Time limits and what happens when the notebook goes away."""

    timeout_s: float | None = None
    """Seconds from the start of the ranks to the job's end; None for no limit."""
    stall_warn_s: float | None = 300.0
    """Seconds without progress after which the stacks of all ranks go into the log."""
    stall_timeout_s: float | None = None
    """Seconds without progress after which the job fails; None for never."""
    detach: bool = False
    """Whether the job outlives the notebook."""

    def __post_init__(self) -> None:
        for field in ("timeout_s", "stall_warn_s", "stall_timeout_s"):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(field, f"{value!r} is not a positive number of seconds", "Give seconds, or None")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Everything that decides what a job is. Equal specs make equal plans."""

    name: str
    """DNS-1035 label, unique in its backend."""
    label: str
    """What runs, for people: `train Net`, or a function's qualified name."""
    kind: str
    """`training` (made by `distribute`) or `call` (made by `launch`)."""
    snapshot: str
    """Digest of the snapshot's manifest."""
    blobs: tuple[str, ...] = ()
    """Digests of all that the snapshot needs, its manifest among them: what ranks must find in their store."""
    snapshot_bytes: int = 0
    """Size of all blobs together."""
    topology: Topology
    cuda: bool = False
    threads: int | None = None
    """Threads a rank; None: cores divided by the ranks on the machine."""
    seed: int | None = None
    volumes: tuple[Volume, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set in the ranks, beyond what the backend gives them."""
    strategy: Strategy = dataclasses.field(default_factory=AllReduce)
    policy: Policy = dataclasses.field(default_factory=Policy)

    def __post_init__(self) -> None:
        names.check(self.name)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError("seed", f"{self.seed!r} is not an int", "Give an int, or None for a random seed")
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ConfigError(
                "threads", f"{self.threads!r} is not an int of 1 or more", "Leave it out for a fair share"
            )

    def to_json(self) -> dict[str, Any]:
        """A plain object for a record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives (lists for tuples)."""
        values = dict(data)
        values["blobs"] = tuple(data["blobs"])
        values["topology"] = Topology(**data["topology"])
        values["volumes"] = tuple(Volume(**volume) for volume in data["volumes"])
        values["environment"] = tuple((name, value) for name, value in data["environment"])
        values["strategy"] = AllReduce(**data["strategy"])
        values["policy"] = Policy(**data["policy"])
        return cls(**values)
