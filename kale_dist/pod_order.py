"""What the agents of pods and containers are told: where their input lies, and the order itself. Standard library only.

A pod's agent finds its input in a folder, which on a cluster is a mounted Secret. From its environment it knows which
pod it is; everything else is in the order, the same for all pods of a job.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from typing import Any, Self

from kale_dist.contract import VERSION


class PodVariable(enum.StrEnum):
    """Environment variables that a pod's agent is started with."""

    INPUT = "KALE_DIST_INPUT"
    """Folder with the job's input (`InputFiles`): on a cluster a mounted Secret, which may appear late."""
    WORK = "KALE_DIST_WORK"
    """Writable folder of this pod alone."""
    FIRST_POD = "KALE_DIST_FIRST_POD"
    """Number of the replica type's first pod: 0, or 1 for workers beside a master."""
    REPLICA_INDEX = "KALE_DIST_REPLICA_INDEX"
    """The pod's index in its replica type; with `FIRST_POD` it is the pod's number."""
    CPU_REQUEST = "KALE_DIST_CPU_REQUEST"
    """Millicores that the container has asked for; unset or 0 where nobody knows."""
    ATTEMPT = "KALE_DIST_ATTEMPT"
    """The first attempt that the pod makes, where pods before it were taken away by a suspension; empty: the order's;
    `CALLED_OFF`: none."""
    NODE = "KALE_DIST_NODE"
    """Name of the pod's node; unset where nobody knows."""


CALLED_OFF = "none"
"""In the place of an attempt: the job had ended while it was suspended, and whoever resumes it has nothing done."""


class InputFiles:
    """Names of the files of a job's input. All are there at once or none is.

    Args:
        folder: The mounted Secret, or a folder like it.
    """

    RUNTIME = "runtime.zip"
    """This library's worker side and cloudpickle, for `sys.path`."""
    KEY = "key"
    """The job's 32 secret bytes."""
    ORDER = "order.json"
    """A `PodOrder`."""
    SNAPSHOT = "snapshot.zip"
    """The snapshot's blobs by digest, if they fit; else they come as `PodOrder.source` says."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)

    @property
    def key(self) -> pathlib.Path:
        """The key's file."""
        return self.folder / self.KEY

    @property
    def order(self) -> pathlib.Path:
        """The order's file."""
        return self.folder / self.ORDER

    @property
    def snapshot(self) -> pathlib.Path:
        """The packed blobs."""
        return self.folder / self.SNAPSHOT


class Source(enum.StrEnum):
    """Where the agents of a job get the snapshot's blobs from."""

    INPUT = "input"
    """From `InputFiles.SNAPSHOT`."""
    FOLDER = "folder"
    """From `PodOrder.store`, a folder that all pods and the notebook's own pod see; the notebook has put them there."""
    URL = "url"
    """From `PodOrder.store`, a URL that fsspec opens."""
    STREAM = "stream"
    """The notebook sends them to pod 0's agent; the other agents fetch them from there. If `PodOrder.store` is not
    empty, it is a folder on a volume of the job's, and what lies there already is not sent again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodOrder:
    """What the agents of all pods of one job are told. The same for every pod; the key lies beside it."""

    version: int = VERSION
    job: str
    world_size: int
    processes_per_pod: int
    """Ranks of each pod; the last one may have fewer."""
    head: str
    """Host name of pod 0, whose agent speaks for the job."""
    port: int = 23456
    """MASTER_PORT of rank 0's store. The agents of the job talk at `port + 1`; requests for bytes go to `port + 2`."""
    snapshot: str
    """Digest of the snapshot's manifest."""
    blobs: tuple[str, ...]
    """Digests of all that the snapshot needs."""
    source: Source
    store: str = ""
    """See `Source`. A folder or URL; blobs lie in it by digest, results below `jobs/<job>`."""
    cuda: bool = False
    threads: int | None = None
    seed: int | None = None
    torch_flags: tuple[tuple[str, str | int | float | bool], ...] = ()
    """The notebook's default dtype and global flags, as `ProcessState.torch_flags`."""
    timeout_s: float | None = None
    stall_warn_s: float | None = 300.0
    stall_timeout_s: float | None = None
    max_restarts: int = 0
    """As `JobOrder.max_restarts`."""
    attempt: int = 0
    """As `JobOrder.attempt`: the first one of these pods. Earlier ones ran in pods that were lost."""
    start_wait_s: float = 3600.0
    """Seconds that pod 0 waits for the other pods, and they for it."""
    input_wait_s: float = 600.0
    """Seconds that pod 0 waits for streamed bytes."""
    collect_wait_s: float = 600.0
    """Seconds that pod 0 keeps what the notebook has not fetched yet."""
    log_is_read: bool = True
    """Whether the notebook reads the pods' logs: then small outcomes travel in them, and nobody need wait."""
    work_is_kept: bool = False
    """Whether `PodVariable.WORK` can be read after its agent has ended, as in a container that is left: then everything
    stays where it is, and nobody need wait for the notebook."""

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives. Fields of later versions are passed over."""
        values = {field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data}
        values["blobs"] = tuple(data["blobs"])
        values["source"] = Source(data["source"])
        values["torch_flags"] = tuple((name, value) for name, value in data.get("torch_flags", ()))
        return cls(**values)
