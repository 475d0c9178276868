"""The whole job as one frozen value. What users give was checked by `Options` and the place; no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from kale_dist import strategies
from kale_dist.errors import ConfigError
from kale_dist.job.spec import names
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.spec.resources import Resources
from kale_dist.job.spec.volumes import Volume, VolumeKind
from kale_dist.wire import STALL_WARN_S

__all__ = ["ClusterOptions", "JobSpec", "Policy", "Resources", "Topology", "Volume", "VolumeKind"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How many ranks there are and how they are laid out."""

    number_of_processes: int
    """The world size."""
    processes_per_pod: int = 1
    """Ranks in one pod or container. The local backend has all ranks on one machine."""

    @property
    def number_of_pods(self) -> int:
        """Pods needed; rank 0 is in the first."""
        return math.ceil(self.number_of_processes / self.processes_per_pod)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Time limits and what happens when the notebook goes away."""

    timeout_s: float | None = None
    """Seconds from the start of the ranks to the job's end; None for no limit."""
    stall_warn_s: float | None = STALL_WARN_S
    """Seconds without progress after which the stacks of all ranks go into the log."""
    stall_timeout_s: float | None = None
    """Seconds without progress after which the job fails; None for never."""
    detach: bool = False
    """Whether the job outlives the notebook."""
    max_restarts: int = 0
    """How often all ranks restart from the last checkpoint after one was lost. Not after an exception of the user's code,
    and not after running out of memory."""

    def __post_init__(self) -> None:
        for field in ("timeout_s", "stall_warn_s", "stall_timeout_s"):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(field, f"{value!r} is not a positive number of seconds", "Give seconds, or None")
        restarts = self.max_restarts
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            problem = f"{restarts!r} is not a whole number of 0 or more"
            raise ConfigError("max_restarts", problem, "Give an int; 0 for none")


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
    image: str = ""
    """Reference of the container image; empty on local."""
    recipe: Recipe | None = None
    """What the image is made of, if it is made for this job; `image` is then its digest, once that is known."""
    resources: Resources = dataclasses.field(default_factory=Resources)
    store: str = ""
    """Where snapshots, checkpoints and results are stored: empty (the notebook sends and fetches them itself), `pvc://claim/folder`, or a URL that fsspec opens."""
    cluster: ClusterOptions = dataclasses.field(default_factory=ClusterOptions)
    strategy: strategies.Settings = dataclasses.field(default_factory=strategies.DDP)
    policy: Policy = dataclasses.field(default_factory=Policy)

    def __post_init__(self) -> None:
        names.check(self.name)

    def to_json(self) -> dict[str, Any]:
        """A plain object for a record."""
        return {**dataclasses.asdict(self), "strategy": strategies.to_json(self.strategy)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives (lists for tuples)."""
        values = dict(data)
        values["blobs"] = tuple(data["blobs"])
        values["topology"] = Topology(**data["topology"])
        values["volumes"] = tuple(Volume(**volume) for volume in data["volumes"])
        values["resources"] = Resources(**_with_tuples(data["resources"]))
        values["cluster"] = ClusterOptions(**_with_tuples(data["cluster"]))
        values["environment"] = tuple((name, value) for name, value in data["environment"])
        values["strategy"] = strategies.from_json(data["strategy"])
        values["recipe"] = Recipe.from_json(data["recipe"]) if data.get("recipe") is not None else None
        values["policy"] = Policy(**data["policy"])
        return cls(**values)


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    """What `json.loads` gave as lists, as tuples, two levels deep."""
    return {
        name: tuple(tuple(item) if isinstance(item, list) else item for item in value)
        if isinstance(value, list)
        else value
        for name, value in data.items()
    }
