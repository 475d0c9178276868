"""Defines what an agent receives: the order of a job, its input in a pod, the messages of the kernel's own agent."""

from __future__ import annotations

import dataclasses
import enum
import math
import signal
from collections.abc import Iterable
from typing import Self

from kale_dist.wire.decoding import WRITTEN

VERSION = 6
"""Version of all formats of this package. Notebook and worker must have the same."""

FIRST_SIGNAL = 128
"""Pods with an exit code from here on may be made again: a signal has ended them, or they had lost the head."""

EXIT_TERMINATED = 143
"""Exit code of a container that got SIGTERM: 128 + SIGTERM."""

EXIT_LOST_HEAD = 144
"""Exit code of a pod whose agent has lost the head. Controllers make pods again whose exit code is 128 or above."""

EXIT_BROKEN = 70
"""Exit code of a rank or an agent in which our own code failed; as EX_SOFTWARE."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 3
"""Asks a rank for its stacks. Real-time, so that nothing else uses it; answered even while C code holds the GIL. Ranks run on Linux."""

STALL_WARN_S = 300.0
"""Default of `stall_warn_s`."""

GRACE_S = 25.0
"""Default of `grace_s`."""

CANCEL_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for ranks that have written a checkpoint before, or shall not write one."""

POD_GRACE_S = 60.0
"""The least time from SIGTERM to SIGKILL that a pod or container gets for its ranks, its last lines and its results."""


class Op(enum.StrEnum):
    """What a message to or from an agent is about. Messages are JSON objects, one a line, with an `op`."""

    TAKE = "take"
    """To the agent: run a job. Field `order`: an `Order` as a JSON object."""
    CANCEL = "cancel"
    """To the agent: end a job. Fields `job`, `grace_s`, and `save` (whether one more checkpoint is written first)."""
    STOP = "stop"
    """To the agent: end when no job is left."""
    SEND = "send"
    """To the agent: pass a message of `wire.messages` on to a rank. Fields `job`, `rank`, `message`."""
    TAKEN = "taken"
    """From the agent: it has the order. Field `job`."""
    WAKE = "wake"
    """From the agent, to every connection: the files of a job have changed. Field `job`."""


def socket_address(name: str) -> str:
    """Address of an agent's socket by its name. It lies in no folder: the kernel forgets it with the agent."""
    return f"\0{name}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """What a process of the notebook's would have inherited; a rank applies it before it unpickles anything."""

    environment: tuple[tuple[str, str], ...]
    """The whole environment: a name that is not here is unset in the rank."""
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int
    limits: tuple[tuple[int, int, int], ...]
    """Resource limits as (RLIMIT number, soft, hard)."""
    torch_flags: tuple[tuple[str, str | int | float | bool], ...]
    """Torch's default dtype and global flags by name, and the level of the log."""
    packages: str = ""
    """A folder of `sys.path` with packages of the notebook's, whose .pth files are read; empty for none."""


class Source(enum.StrEnum):
    """Where the agents of a job get the snapshot's blobs from."""

    INPUT = "input"
    """They are there already: in `Order.store` on this machine, in `InputFiles.SNAPSHOT` in a pod or container."""
    FOLDER = "folder"
    """From `Order.store`, a folder that all pods and the notebook's own pod see; the notebook has put them there."""
    URL = "url"
    """From `Order.store`, a URL that fsspec opens."""
    STREAM = "stream"
    """The notebook sends them to the head; relays fetch them from there. If `Order.store` is not empty, it is a folder on
    a volume of the job's, and what lies there already is not sent again."""


class EndsWith(enum.StrEnum):
    """The ranks whose end ends the attempt."""

    ANY_FAILURE = "any-failure"
    """All ranks have to succeed; the first that fails ends the others."""
    RANK_0 = "rank-0"
    """Rank 0's end, however it is; the others are ended then. A failure of another rank ends the run too."""
    ALL = "all"
    """The last rank's end: one that fails does not end the others."""


class PodVariable(enum.StrEnum):
    """Environment variables that a pod's or container's agent is started with."""

    INPUT = "KALE_DIST_INPUT"
    """Folder with the job's input (`InputFiles`): on a cluster a mounted Secret, which may appear late."""
    WORK = "KALE_DIST_WORK"
    """Writable folder of this pod alone."""
    FIRST_POD = "KALE_DIST_FIRST_POD"
    """Number of the replica type's first pod: 0, or 1 for workers beside a master."""
    REPLICA_INDEX = "KALE_DIST_REPLICA_INDEX"
    """The pod's index in its replica type; with `FIRST_POD` it is the pod's number, and pod 0 is the head."""
    CPU_REQUEST = "KALE_DIST_CPU_REQUEST"
    """Millicores that the container has asked for; unset or 0 where it is unknown."""
    NODE = "KALE_DIST_NODE"
    """Name of the pod's node; unset where it is unknown."""


class InputFiles:
    """Names of the files of a job's input, in the mounted Secret or a folder like it. All are there at once or none is."""

    RUNTIME = "runtime.zip"
    """This library's worker side and cloudpickle, for `sys.path`."""
    KEY = "key"
    """The job's 32 secret bytes."""
    ORDER = "order.json"
    """An `Order` without its key."""
    SNAPSHOT = "snapshot.zip"
    """The snapshot's blobs by digest, if they fit; else they come from `Order.source`."""
    CHECKPOINT = "checkpoint"
    """The checkpoint that the ranks of a renewed job resume from."""


TRAINERS_VARIABLE = "KALE_DIST_TRAINERS"
"""With this variable of the user's, 0, ranks tell nothing of other people's trainers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Holds what a call asks of its agents: time limits, and what happens when a rank or the notebook goes away."""

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
    grace_s: float = GRACE_S
    """Seconds in which ranks that are to leave write a checkpoint; those that write none get them between SIGTERM and SIGKILL."""

    def cancel_grace_s(self, *, save: bool) -> float:
        """Seconds that ranks get when the job is cancelled, to save in, or only to end."""
        return self.grace_s if save else min(CANCEL_GRACE_S, self.grace_s)

    @property
    def end_s(self) -> float:
        """Seconds in which a job that is cancelled has ended."""
        return self.grace_s + CANCEL_GRACE_S + 5.0

    @property
    def pod_grace_s(self) -> int:
        """Whole seconds from SIGTERM to SIGKILL of a pod or container: those of the ranks, and 35 for what comes before and after."""
        return math.ceil(max(POD_GRACE_S, self.grace_s + 35.0))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Debugging:
    """What ranks do for the person who debugs them: from the configuration, and from where the call was made."""

    breakpoint_wait_s: float = 600.0
    """Seconds that a rank waits in `breakpoint()` for a person; 0 where there is none, as in CI: it goes on at once."""
    show_locals: str = "summary"
    """How much an error shows of local variables: `none`, `summary` (numbers, shapes, types), `full` (texts and reprs, too)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An installed distribution of the notebook's that a pod takes if its image lacks it."""

    name: str
    """In the canonical spelling: `scikit-learn`."""
    version: str
    identity: str = ""
    """Of its files, as `distributions.identity` has it; empty for one that is editable or was changed since its installation: no image has it."""
    blobs: tuple[str, ...] = ()
    """Digests of its files as compressed archives; what a later one has replaces what an earlier one has. Empty where it cannot run on Linux."""
    size_bytes: int = 0
    """Of its files."""
    packed_bytes: int = 0
    """Of its blobs."""
    is_compiled: bool = False
    links_torch: bool = False
    """Whether its compiled parts need the libraries of one version of torch."""
    glibc: int = 0
    """The minor version of the glibc that it needs at least: 28 for 2.28; 0 for none."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Libraries of the system that it needs, each with a file that does."""
    requires: tuple[tuple[str, str], ...] = ()
    """What it requires of torch, and of what is imported with torch, such as `("numpy", ">=1.24")`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The notebook's packages, of which each pod takes what its image lacks (`packages="here"`)."""

    packages: tuple[Package, ...] = ()
    python: str = ""
    """The notebook's, such as `3.11`."""
    torch: str = ""
    platform: str = ""
    """What its compiled packages run on, such as `linux x86_64`."""

    @property
    def blobs(self) -> tuple[str, ...]:
        """Digests of all that may be asked for."""
        return tuple(digest for package in self.packages for digest in package.blobs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the agents of a job are to do: the same for all of them, on every backend. Made by `orders.order_of`."""

    version: int = dataclasses.field(default=VERSION, metadata=WRITTEN)
    job: str
    """The job's name."""
    object: str
    """The object's name, such as `<name>-2`. It is part of each outcome's signature, so an outcome of an earlier object is rejected."""
    used_restarts: int = 0
    """How many restarts earlier heads of the job have used, as far as the notebook knew."""
    number_of_processes: int
    """How many were asked for, at most; how many there are is in each `Attempt`."""
    sizes: tuple[int, ...] = ()
    """World sizes that an attempt may have, from the least to `number_of_processes`: one of a fixed number, several of a range."""
    processes_per_agent: int
    """Ranks of each agent at most."""
    head: str = ""
    """Host name of the head; empty where there is only one agent and it is on this machine."""
    port: int = 0
    """MASTER_PORT of rank 0's store; relays connect to `port + 1`, requests for bytes go to `port + 2`. 0: any free one,
    where one agent has all ranks."""
    folder: str = ""
    """The job's folder; empty in a pod, whose agent has its own."""
    store: str = ""
    """Where the snapshot's blobs are: see `Source`. A folder or URL; results lie in it below `jobs/<job>`."""
    source: Source = Source.INPUT
    snapshot: str
    """Digest of the snapshot's manifest."""
    blobs: tuple[str, ...] = ()
    """Digests of all that the snapshot needs, and `resume`."""
    offer: Offer = dataclasses.field(default_factory=Offer)
    """Packages for the ranks, as far as a pod's image lacks them."""
    resume: str = ""
    """Digest of an earlier job's checkpoint, from which rank 0 resumes where this job has none of its own; empty for none."""
    key: str = dataclasses.field(repr=False, default="")
    """The job's secret, in hexadecimal; empty in files, where it lies beside the order."""
    sealed: str = ""
    """Variables for the agents and the ranks, sealed with the job's key."""
    process: ProcessState | None = dataclasses.field(repr=False, default=None)
    """What the ranks take over from the notebook's process; None: they keep their agent's environment (in a pod)."""
    torch_flags: tuple[tuple[str, str | int | float | bool], ...] = ()
    """The notebook's default dtype and global flags, for ranks without a `process`."""
    cuda: bool = False
    gpus_each: int = 1
    """GPUs of each rank in a job with CUDA."""
    threads: int | None = None
    """Threads a rank; None: cores divided by ranks of the agent, at least 1."""
    seed: int | None = None
    """Seed of rank 0; rank r gets seed + r. None: a random one, drawn by the head."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    """What the call decides."""
    debugging: Debugging = dataclasses.field(default_factory=Debugging)
    replaces_pods: bool = False
    """Whether a pod that is lost is made again, by its controller, so that an attempt may wait for it."""
    returns_head: bool = False
    """Whether the head's pod is made again, too: it resumes from `store`, where it counts the restarts."""
    ends_with: EndsWith = EndsWith.ANY_FAILURE
    checkpoint: str = ""
    """Digest of the blob that the job resumes from, of which only the head needs it; empty where the input or the store has it, or none is there."""
    servers: int = 0
    """How many of the last agents are parameter servers of TensorFlow."""
    mpi: bool = False
    """Whether mpirun runs beside the ranks, so that they are in `MPI.COMM_WORLD`."""
    note: str = ""
    """A sentence for the log and the status, such as why the agent had to be started."""
    start_wait_s: float = 3600.0
    """Seconds from their own start that the head waits for relays, and they for it; on a cluster `pending_timeout_s`."""
    input_wait_s: float = 600.0
    """Seconds that the head waits for the notebook's next bytes."""
    collect_wait_s: float = 600.0
    """Seconds that the head keeps what the notebook has not fetched yet."""
    outcomes_on_stdout: bool = True
    """Whether small outcomes ride in the head's stdout, so that they come back without a connection."""
    ends_unfollowed: bool = False
    """Whether the head ends at once where no notebook is connected at the job's end, once its stdout has small outcomes, and `left_in` others."""
    left_in: str = ""
    """Folder of a volume, as the head sees it, for results that nobody fetches; empty for none."""
    folders: tuple[str, ...] = ()
    """Paths of volumes that ranks may write into, as far as the call says."""
    metrics_port: int = 0
    """Port at which the head answers Prometheus; 0 for none."""
    prefix: str = ""
    """What comes before the paths of requests about a job in warm pods; their agents fill it in."""
    idle_s: float = 0.0
    """Of warm pods: they take one job after the other, until none has come for so long. `job` is then the name of the set, and of
    the first job that it takes. 0: the pods run this job."""
    work_is_kept: bool = False
    """Whether the head's folder can be read after its end, as in a container: then it does not wait for the notebook."""

    @property
    def agents(self) -> int:
        """How many agents were asked for; number 0 is the head."""
        return -(-self.number_of_processes // self.processes_per_agent)

    @property
    def may_lose_pods(self) -> bool:
        """Whether an attempt can follow the loss of a pod: with another pod in its place, or with fewer ranks."""
        return self.replaces_pods or len(self.sizes) > 1

    def size_with(self, agents: int) -> int:
        """World size of an attempt in so many agents: the largest that is allowed; 0 if there are too few of them."""
        places = min(agents * self.processes_per_agent, self.number_of_processes)
        return max((size for size in self.sizes or (self.number_of_processes,) if size <= places), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One agent of an attempt, and its ranks."""

    agent: int
    """The agent's number in the job; 0 is the head."""
    first_rank: int
    processes: int

    @property
    def ranks(self) -> range:
        """The ranks that the agent runs."""
        return range(self.first_rank, self.first_rank + self.processes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Once through with one set of ranks. Only an attempt has a world size."""

    number: int
    """How often this head has started the ranks before."""
    members: tuple[Member, ...]
    """The head's agent first, in the order of their ranks."""
    port: int
    """MASTER_PORT: where rank 0's store listens. On one machine nobody does: the store is a file there."""
    seed: int
    """Rank 0's; rank r gets seed + r."""
    restarts: int = 0
    """How often the ranks were started before in all, also by earlier heads of the job."""

    @classmethod
    def form(cls, order: Order, agents: Iterable[int], *, number: int, port: int, seed: int, restarts: int = 0) -> Self:
        """Number the ranks through agents, each of which gets as many as the order allows it.

        Args:
            order: The job. Its `sizes` are the numbers of ranks that there may be.
            agents: Numbers of the agents that are ready, the head's first; the last ones may get no rank.
            number: The attempt's.
            port: MASTER_PORT.
            seed: Rank 0's.
            restarts: How often the ranks were started before.
        """
        ready, members, per = tuple(agents), [], order.processes_per_agent
        size = order.size_with(len(ready))
        for agent, first in zip(ready, range(0, size, per), strict=False):
            members.append(Member(agent=agent, first_rank=first, processes=min(per, size - first)))
        return cls(number=number, members=tuple(members), port=port, seed=seed, restarts=restarts)

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return sum(member.processes for member in self.members)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are one agent's: then nothing of theirs listens to other machines, unless the user names an interface."""
        return len(self.members) == 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one rank gets from its agent: the order, the attempt, and which rank it is."""

    order: Order
    """With this agent's own folder, store, key and process."""
    attempt: Attempt
    rank: int

    @property
    def group_rank(self) -> int:
        """The place of the rank's agent among those of the attempt."""
        return next(place for place, member in enumerate(self.attempt.members) if self.rank in member.ranks)

    @property
    def local_rank(self) -> int:
        """The rank among those of its agent."""
        return self.rank - self.attempt.members[self.group_rank].first_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks its agent has."""
        return self.attempt.members[self.group_rank].processes

    @property
    def master_addr(self) -> str:
        """Where rank 0's store is."""
        return "127.0.0.1" if self.attempt.is_on_one_machine else self.order.head
