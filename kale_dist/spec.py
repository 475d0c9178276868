"""The whole job as one frozen value. Checks are in `__post_init__`; no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
import enum
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


class VolumeKind(enum.StrEnum):
    """What a volume is made of."""

    FOLDER = "folder"
    """A folder of this machine (local, docker)."""
    CLAIM = "claim"
    HOST_PATH = "host_path"
    EMPTY_DIR = "empty_dir"
    CONFIG_MAP = "config_map"
    SECRET = "secret"  # noqa: S105 - a kind, not a password


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A folder that all ranks see."""

    mount_path: str
    """Absolute path in the rank."""
    source: str = ""
    """A folder of this machine (local, docker); the name of a claim, ConfigMap or Secret, or a path of the node
    (kubernetes); empty for an empty folder."""
    kind: VolumeKind | None = None
    """None: a folder on local and docker, a claim on kubernetes."""
    sub_path: str = ""
    """Folder within the volume that is mounted instead of its root."""
    read_only: bool = False
    size_gib: float | None = None
    """Most that an empty folder may hold; None for the node's own limit."""
    in_memory: bool = False
    """Whether an empty folder is kept in memory."""

    def __post_init__(self) -> None:
        if not self.mount_path.startswith("/"):
            raise ConfigError("volumes", f"{self.mount_path!r} is not an absolute path", "Write it as '/data'")
        if not self.source and self.kind is not VolumeKind.EMPTY_DIR:
            raise ConfigError("volumes", f"the source of {self.mount_path!r} is empty", "Name a folder or a claim")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one rank asks for. A pod asks for as many times this as it has ranks."""

    cpu: float | None = None
    """Cores requested; None: 1 on a cluster, no request elsewhere."""
    cpu_limit: float | None = None
    """Most cores; None for no limit, unless a quota of the namespace demands one."""
    memory_gib: float | None = None
    """Memory requested, and its limit; None: 2 GiB on a cluster, no limit elsewhere. Holds /dev/shm, too."""
    gpus: int | None = None
    """None: 1 with `cuda=True`, else 0."""
    gpu_resource: str = "nvidia.com/gpu"
    shm_gib: float | None = None
    """Size of /dev/shm, by which DataLoader workers pass batches; None: half of the memory, at most 8 GiB a pod."""
    extended: tuple[tuple[str, str], ...] = ()
    """Other resources, such as `(("rdma/hca", "1"),)`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Where and how pods run. What is JSON here is given as dicts and lists at the public edge."""

    namespace: str = ""
    """Empty: the configured one, that of the kubeconfig's context, or the notebook's own pod's."""
    context: str = ""
    """Of the kubeconfig; empty for its current one."""
    master: bool | None = None
    """One master and workers, or workers only. None: with a master, unless the namespace forbids what it needs."""
    labels: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: str = ""
    """JSON list, as in a pod."""
    affinity: str = ""
    """JSON object, as in a pod."""
    priority_class: str = ""
    service_account: str = ""
    mount_service_account_token: bool = False
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str = ""
    scheduler: str = ""
    queue: str = ""
    """Kueue's local queue."""
    gang: bool = False
    """Whether all pods are scheduled together or none is."""
    min_available: int | None = None
    """With `gang`: pods that have to be there; None for all."""
    secret_environment: tuple[tuple[str, str, str], ...] = ()
    """(variable, Secret, key of it)."""
    run_as_user: int | None = None
    """User and group of the processes; None: the notebook pod's own in a pod, else 1000. -1: left to the cluster."""
    ttl_s: int | None = None
    """Seconds after its end when the cluster deletes the job; None for never."""
    pending_timeout_s: float | None = None
    """Seconds from submission after which a job that has not started fails; None for never."""
    input_wait_s: float = 600.0
    collect_wait_s: float = 600.0
    patch: str = ""
    """JSON: an object is merged into the PyTorchJob strategically, a list is a JSON patch. Applied last."""


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
    image: str = ""
    """Reference of the container image; empty on local."""
    resources: Resources = dataclasses.field(default_factory=Resources)
    store: str = ""
    """Where bytes travel: empty (by themselves), `pvc://claim/folder`, or a URL that fsspec opens."""
    cluster: ClusterOptions = dataclasses.field(default_factory=ClusterOptions)
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
        values["volumes"] = tuple(_volume_from_json(volume) for volume in data["volumes"])
        values["resources"] = Resources(**_with_tuples(data["resources"]))
        values["cluster"] = ClusterOptions(**_with_tuples(data["cluster"]))
        values["environment"] = tuple((name, value) for name, value in data["environment"])
        values["strategy"] = AllReduce(**data["strategy"])
        values["policy"] = Policy(**data["policy"])
        return cls(**values)


def _volume_from_json(data: dict[str, Any]) -> Volume:
    kind = data.get("kind")
    return Volume(**{**data, "kind": None if kind is None else VolumeKind(kind)})


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    """What `json.loads` gave as lists, as tuples, two levels deep."""
    return {
        name: tuple(tuple(item) if isinstance(item, list) else item for item in value)
        if isinstance(value, list)
        else value
        for name, value in data.items()
    }
