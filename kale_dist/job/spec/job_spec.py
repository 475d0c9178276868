"""The stages of a job before it is submitted: `Request`, `Settled`, `JobSpec`. Pure.

Each is made whole from the one before and never changed: `calls.request` makes requests, a backend's `settle` looks up what
they leave open, `JobSpec.complete` adds the snapshot. Users' values were checked by `Options` and the place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

from kale_dist import strategies
from kale_dist.errors import ContractError
from kale_dist.job.spec import names
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.spec.resources import Resources
from kale_dist.job.spec.volumes import Volume, VolumeKind
from kale_dist.wire import VERSION, WRITTEN, Debugging, Offer, Policy, decode, encode, fields_of, seal, unseal

__all__ = [
    "ClusterOptions", "Debugging", "JobSpec", "Policy", "Request", "Resources", "Settled", "Topology", "Volume", "VolumeKind"
]  # fmt: skip


WARM = "warm"
"""`Request.kind` of warm pods."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How many ranks there are and how they are laid out."""

    number_of_processes: int
    """The world size, or the largest one of a range."""
    sizes: tuple[int, ...] = ()
    """The allowed world sizes of a range, ascending; empty for a fixed number."""
    processes_per_pod: int = 1
    """Ranks in one pod or container. The local backend has all ranks on one machine."""

    @property
    def number_of_pods(self) -> int:
        """Pods needed; rank 0 is in the first."""
        return math.ceil(self.number_of_processes / self.processes_per_pod)

    @property
    def fewest_pods(self) -> int:
        """Pods with which the job begins, and goes on."""
        return math.ceil(min(self.sizes, default=self.number_of_processes) / self.processes_per_pod)


def size_on_machine(sizes: Sequence[int], room: int) -> tuple[int, str]:
    """The world size of a range on one machine: the largest for which there is room, or the least; and a sentence about it."""
    world = max((size for size in sizes if size <= room), default=sizes[0])
    return world, f"number_of_processes: {world}, for the whole job: a range is for the pods of a cluster"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a call asked for, checked. Nothing but this machine has been asked yet: the place fills in what is empty."""

    name: str | None = None
    """None for a name made from `label`."""
    label: str
    """What runs, for people: `train Net`, or a function's qualified name."""
    kind: str
    """`training` (made by `distribute`), `call` (made by `launch`), or `warm` (pods that jobs run in one after the other)."""
    topology: Topology
    cuda: bool = False
    threads: int | None = None
    """Threads a rank; None: cores divided by the ranks on the machine."""
    seed: int | None = None
    volumes: tuple[Volume, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the ranks that libraries and drivers read as they begin: they stand in the pods' objects."""
    secrets: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    """All other variables of the call. A `JobSpec` has their names, and `sealed` the values."""
    image: str = ""
    """Reference of the container image; empty on local."""
    recipe: Recipe | None = None
    """What the image is made of, if it is made for this job."""
    resources: Resources = dataclasses.field(default_factory=Resources)
    store: str = ""
    """Where snapshots, checkpoints and results are stored: empty (the notebook sends and fetches them itself), `pvc://claim/folder`, or a URL that fsspec opens."""
    cluster: ClusterOptions = dataclasses.field(default_factory=ClusterOptions)
    strategy: strategies.Settings = dataclasses.field(default_factory=strategies.DDP)
    saves: bool = True
    """Whether it writes checkpoints, from which a later call can resume."""
    keep_warm_s: float | None = None
    """How long its pods wait for the next job; None: they end with this one."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    debugging: Debugging = dataclasses.field(default_factory=Debugging)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settled(Request):
    """The request with what had to be looked up: name, image, namespace, kind, resources and volumes of the pods."""

    name: str
    """DNS-1035 label, unique in its backend."""
    prints_results: bool = False
    """Whether the first pod prints small results into its log, because this user may not connect to pods."""

    def __post_init__(self) -> None:
        names.check(self.name)

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        name: str,
        image: str | None = None,
        recipe: Recipe | None = None,
        prints_results: bool = False,
    ) -> Settled:
        """A request in which a backend has set what it has looked up, with the job's name; without an image, the request's.

        An image that is made has a `recipe`; that of the request is only what was asked for.
        """
        own = {"name": name, "recipe": recipe, "prints_results": prints_results}
        return Settled(**{**fields_of(request, Request), **own, **({} if image is None else {"image": image})})

    def to_json(self) -> dict[str, Any]:
        """A plain object for a record."""
        names_only = dataclasses.replace(self, secrets=tuple((name, "") for name, _ in self.secrets))
        return {**encode(names_only), "strategy": strategies.to_json(self.strategy)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(Settled):
    """Everything that decides what a job is. Equal specs make equal plans."""

    snapshot: str
    """Digest of the snapshot's manifest."""
    blobs: tuple[str, ...] = ()
    """Digests of all that the snapshot needs, its manifest among them, and of `resume`: what ranks must find in their store."""
    snapshot_bytes: int = 0
    """Size of all blobs together."""
    offer: Offer = dataclasses.field(default_factory=Offer)
    """Packages of this machine of which each pod takes what its image lacks."""
    resume: str = ""
    """Digest of an earlier job's checkpoint, from which the training resumes; empty for none."""
    sealed: str = ""
    """The values of `secrets`, sealed with the job's key; empty for none, and in a plan."""
    version: int = dataclasses.field(default=VERSION, metadata=WRITTEN)
    """Version of the formats with which the job was submitted; 2 for those before this field."""

    def check_version(self, ref: str) -> None:
        """Refuse what needs the formats of the job, such as its result. Listing, cancelling and deleting it does not.

        Raises:
            ContractError: Another version of this library has submitted the job.
        """
        if self.version != VERSION:
            raise ContractError(f"{ref} was submitted by another version of kale_dist: install it to fetch the result")

    @classmethod
    def complete(cls, settled: Settled, key: bytes | None, **snapshot: Any) -> JobSpec:
        """A settled request with its snapshot, given as the fields of this class, and its secrets sealed; without a key, as in a plan, left out."""
        named = {"secrets": tuple((name, "") for name, _ in settled.secrets)}
        sealed = "" if key is None else seal(key, dict(settled.secrets))
        return cls(**{**fields_of(settled, Settled), **named}, sealed=sealed, **snapshot)

    def opened(self, key: bytes) -> Self:
        """The specification with its secrets' values, to submit it again."""
        return dataclasses.replace(self, secrets=tuple(unseal(key, self.sealed).items()))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return decode(cls, {"version": 2, **data, "strategy": strategies.from_json(data["strategy"])})
