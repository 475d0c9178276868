"""The whole job as one frozen value. Checks are in `__post_init__`; no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pathlib
from typing import Any, Self

from kale_dist import names
from kale_dist.errors import ConfigError
from kale_dist.recipe import Recipe
from kale_dist.strategies import AllReduce, Strategy
from kale_dist.wording import closest, show

_PULL_POLICIES = ("", "Always", "IfNotPresent", "Never")
_LARGEST_ID = 2**31 - 1


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
    """Folder within the volume that is mounted instead of its root. On a cluster one that is missing is made by the node,
    and only root can write into it."""
    read_only: bool = False
    size_gib: float | None = None
    """Most that an empty folder may hold; None for the node's own limit."""
    in_memory: bool = False
    """Whether an empty folder is kept in memory."""

    def __post_init__(self) -> None:
        for text in (self.mount_path, self.source, self.sub_path):
            if not isinstance(text, str) or "\0" in text:
                raise ConfigError("volumes", f"{show(text)} is not text", "Write paths and names as text")
        if not self.mount_path.startswith("/"):
            raise ConfigError("volumes", f"{self.mount_path!r} is not an absolute path", "Write it as '/data'")
        if ".." in pathlib.PurePosixPath(self.mount_path).parts:
            raise ConfigError("volumes", f"{self.mount_path!r} goes up with '..'", "Write the path that it leads to")
        if not self.source and self.kind is not VolumeKind.EMPTY_DIR:
            raise ConfigError("volumes", f"the source of {self.mount_path!r} is empty", "Name a folder or a claim")
        if self.source and self.kind is VolumeKind.EMPTY_DIR:
            problem = f"the volume at {self.mount_path!r} is an empty folder and has a source, {self.source!r}"
            raise ConfigError("volumes", problem, "Leave the source out, or give another kind")
        if self.sub_path.startswith("/") or ".." in pathlib.PurePosixPath(self.sub_path).parts:
            problem = f"{self.sub_path!r} does not lie within the volume at {self.mount_path!r}"
            raise ConfigError("volumes", problem, "Write it as 'folder/in/it'")
        if self.kind is not VolumeKind.EMPTY_DIR and (self.in_memory or self.size_gib is not None):
            problem = f"the volume at {self.mount_path!r} has a size or lies in memory, as only an empty folder can"
            raise ConfigError("volumes", problem, "Leave `size_gib` and `in_memory` out")
        _check_amount("volumes", "size_gib", self.size_gib)


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
    """Other resources, such as `(("rdma/hca", "1"),)`. A dict at the public edge has them as `{"rdma/hca": 1}`."""

    def __post_init__(self) -> None:
        for field in ("cpu", "cpu_limit", "memory_gib", "shm_gib"):
            _check_amount("resources", field, getattr(self, field))
        if self.cpu_limit is not None and self.cpu_limit < (self.cpu or 0):
            problem = f"{self.cpu_limit:g} is less than the {self.cpu:g} cores of `cpu`"
            raise ConfigError("resources.cpu_limit", problem, "Raise it, or lower `cpu`")
        if self.memory_gib is not None and (self.shm_gib or 0) > self.memory_gib:
            problem = (
                f"{self.shm_gib:g} GiB of /dev/shm are more than the {self.memory_gib:g} GiB of memory they are in"
            )
            raise ConfigError("resources.shm_gib", problem, "Raise `memory_gib`")
        if self.gpus is not None and (isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 0):
            raise ConfigError("resources.gpus", f"{self.gpus!r} is not an int of 0 or more", "GPUs are whole")
        for name, amount in (*self.extended, (self.gpu_resource, "1")):
            if not isinstance(name, str) or "/" not in name or not names.is_qualified_name(name):
                problem = f"{show(name)} is not the name of a resource"
                raise ConfigError("resources", problem, "Write it as the cluster lists it, such as 'nvidia.com/gpu'")
            if not isinstance(amount, str) or not amount.isascii() or not amount.isdecimal():
                problem = f"{show(amount)} of {name} is not a whole number"
                raise ConfigError("resources", problem, "Write it as '1': such resources are whole")


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

    def __post_init__(self) -> None:
        if self.namespace and not names.is_label(self.namespace):
            remedy = "Write lower-case letters, digits and dashes, such as 'team-a'"
            raise ConfigError("cluster.namespace", f"{self.namespace!r} cannot be a namespace", remedy)
        for field in ("priority_class", "service_account", "scheduler"):
            _check_object_name(field, getattr(self, field))
        for secret in self.image_pull_secrets:
            _check_object_name("image_pull_secrets", secret)
        for field, pairs in (
            ("labels", self.labels),
            ("node_selector", self.node_selector),
            ("annotations", self.annotations),
        ):
            _check_pairs(field, pairs)
        if not names.is_label_value(self.queue):
            raise ConfigError("cluster.queue", f"{show(self.queue)} cannot be a queue", "Name a LocalQueue")
        if self.image_pull_policy not in _PULL_POLICIES:
            near = closest(self.image_pull_policy, ("always", "ifnotpresent", "never"))
            remedy = f"{near}Use one of: {', '.join(map(repr, _PULL_POLICIES[1:]))}"
            raise ConfigError("cluster.image_pull_policy", f"there is no policy {self.image_pull_policy!r}", remedy)
        for variable, secret, key in self.secret_environment:
            if not names.is_variable(variable):
                raise ConfigError(
                    "cluster.secret_environment", f"{variable!r} cannot be a variable's name", "Use letters, digits, _"
                )
            if not names.is_object_name(secret) or not names.is_data_key(key):
                problem = f"{show(f'{secret}/{key}')} of {variable} names no key of a Secret"
                raise ConfigError("cluster.secret_environment", problem, "Write it as 'secret/key'")
        for field in ("min_available", "ttl_s", "run_as_user"):
            value, least = getattr(self, field), {"min_available": 1, "ttl_s": 0, "run_as_user": -1}[field]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and least <= value <= _LARGEST_ID):
                raise ConfigError(f"cluster.{field}", f"{value!r} is not an int of {least} or more", "Leave it out")
        if self.min_available is not None and not self.gang:
            raise ConfigError("cluster.min_available", "it means nothing without `gang`", "Set `gang`, or leave it out")
        _check_amount("cluster", "pending_timeout_s", self.pending_timeout_s)
        for field in ("input_wait_s", "collect_wait_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"cluster.{field}", f"{value!r} is not a number of seconds", "Give 0 or more")
        for field in ("tolerations", "affinity", "patch"):
            _check_json(
                field, getattr(self, field), {"tolerations": (list,), "affinity": (dict,), "patch": (dict, list)}[field]
            )


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
    max_restarts: int = 0
    """How often all ranks are started again, from the last checkpoint, after one was lost. Never after an exception of
    the user's code, and never for lack of memory."""

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
        values["recipe"] = Recipe.from_json(data["recipe"]) if data.get("recipe") is not None else None
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


def _check_amount(argument: str, field: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        unit = {"s": "seconds", "gib": "GiB, which are 1024 MiB"}.get(field.rpartition("_")[2], "cores")
        raise ConfigError(f"{argument}.{field}", f"{value!r} is not a number above 0", f"Give a number of {unit}")


def _check_object_name(field: str, name: Any) -> None:
    if not isinstance(name, str) or (name and not names.is_object_name(name)) or (not name and "secret" in field):
        remedy = "Write lower-case letters, digits, dashes and dots, as `kubectl get` lists it"
        raise ConfigError(f"cluster.{field}", f"{show(name)} cannot be a name in a cluster", remedy)


def _check_pairs(field: str, pairs: tuple[tuple[str, str], ...]) -> None:
    """Keys and values of labels, annotations or a node selector."""
    if not isinstance(pairs, tuple):
        raise ConfigError(f"cluster.{field}", f"{show(pairs)} is not a tuple of pairs", "Give `cluster` as a dict")
    for key, value in pairs:
        if not isinstance(key, str) or not names.is_qualified_name(key):
            remedy = "Write letters, digits, '-', '_' and '.', such as 'example.com/team'"
            raise ConfigError(f"cluster.{field}", f"{show(key)} cannot be a key", remedy)
        if not isinstance(value, str):
            raise ConfigError(f"cluster.{field}", f"{show(value)} of {key} is not text", f"Write {str(value)!r}")
        if field != "annotations" and not names.is_label_value(value):
            remedy = "Write at most 63 letters, digits, '-', '_' and '.'; anything else can be an annotation"
            raise ConfigError(f"cluster.{field}", f"{show(value)} of {key} cannot be a label's value", remedy)


def _check_json(field: str, text: Any, kinds: tuple[type, ...]) -> None:
    if text == "":
        return
    try:
        valid = isinstance(text, str) and isinstance(json.loads(text), kinds)
    except ValueError:
        valid = False
    if not valid:
        what = " or ".join("list" if kind is list else "object" for kind in kinds)
        raise ConfigError(f"cluster.{field}", f"{show(text)} is not a JSON {what}", "Give `cluster` as a dict")
