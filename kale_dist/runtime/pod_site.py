"""What every part of a pod's agent works with: where the pod is, what it was told, its files. Standard library only."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Mapping

from kale_dist.blobs import FolderStore
from kale_dist.contract import JobFiles, JobOrder, ProcessState
from kale_dist.pod_order import CALLED_OFF, PodOrder, PodVariable, Source
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.fork_pool import ForkPool
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.loop import Loop
from kale_dist.runtime.mailbox import Mailbox

LISTEN_VARIABLE = "KALE_DIST_LISTEN"
"""Environment variable: the address to listen on, where several agents share one machine; unset for all addresses."""

TERMINATION_LOG_VARIABLE = "KALE_DIST_TERMINATION_LOG"
"""Environment variable: the file for the termination message; unset for the one that a kubelet reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a pod's environment says of it."""

    pod: int
    """The pod's number in its job."""
    input: pathlib.Path
    """Folder with the job's input, which may appear late."""
    work: pathlib.Path
    """Writable folder of this pod alone."""
    listen: str
    """Address to listen on; empty for all."""
    termination_log: pathlib.Path | None
    """Where the pod's last words go; None: nobody reads any."""
    attempt: int | None
    """The first one that the pod makes, if the order does not say a later one; None: the job is over."""


def place_of(environment: Mapping[str, str]) -> Place:
    """Read a pod's environment.

    Raises:
        KeyError: A variable is not set.
        ValueError: A number is none.
    """
    given = environment.get(TERMINATION_LOG_VARIABLE, "")
    log = pathlib.Path(given or "/dev/termination-log")
    attempt = environment.get(PodVariable.ATTEMPT, "")
    return Place(
        pod=int(environment[PodVariable.FIRST_POD]) + int(environment[PodVariable.REPLICA_INDEX]),
        input=pathlib.Path(environment[PodVariable.INPUT]),
        work=pathlib.Path(environment[PodVariable.WORK]),
        listen=environment.get(LISTEN_VARIABLE, ""),
        termination_log=log if given or log.exists() else None,
        attempt=None if attempt == CALLED_OFF else int(attempt or 0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The parts of a pod's agent that its role needs."""

    place: Place
    order: PodOrder
    job: JobOrder
    """The order for the ranks of this pod."""
    key: bytes
    files: JobFiles
    store: FolderStore
    """Where this pod has the snapshot's blobs, or will have them."""
    loop: Loop
    mailbox: Mailbox
    pool: ForkPool
    writer: JobWriter
    end: Callable[[Verdict], None]
    """Call it once there is nothing left to do."""

    def say(self, text: str) -> None:
        """Write a line into the log."""
        self.writer.log.say(text)


def number_of_pods(order: PodOrder) -> int:
    """Pods of a job."""
    return -(-order.world_size // order.processes_per_pod)


def job_order(order: PodOrder, pod: int, files: JobFiles, store: FolderStore, key: bytes) -> JobOrder:
    """The order for the ranks of one pod.

    Args:
        order: That of all pods.
        pod: The pod's number.
        files: The pod's job folder.
        store: Where its blobs are.
        key: The job's secret.
    """
    pods = number_of_pods(order)
    first = pod * order.processes_per_pod
    state = ProcessState(
        environment=tuple(os.environ.items()),
        cwd=os.getcwd(),  # noqa: PTH109 - a text is wanted
        sys_path=tuple(sys.path),
        argv=("kale_dist",),
        umask=_umask(),
        limits=(),
        torch_flags=order.torch_flags,
    )
    return JobOrder(
        job=order.job,
        attempt=order.attempt,
        world_size=order.world_size,
        first_rank=first,
        local_world_size=min(order.processes_per_pod, order.world_size - first),
        group=pod,
        groups=pods,
        master_addr=order.head if pods > 1 else "127.0.0.1",
        master_port=order.port,
        folder=str(files.folder),
        store=str(store.root),
        snapshot=order.snapshot,
        key=key.hex(),
        process=state,
        cuda=order.cuda,
        threads=order.threads,
        seed=order.seed,
        timeout_s=order.timeout_s,
        stall_warn_s=order.stall_warn_s,
        stall_timeout_s=order.stall_timeout_s,
        max_restarts=order.max_restarts,
    )


def own_store(order: PodOrder, work: pathlib.Path) -> FolderStore:
    """Where a pod has the blobs: on the volume that all pods see, else in its own folder."""
    shared = order.source is Source.FOLDER or (order.source is Source.STREAM and order.store)
    return FolderStore(order.store if shared else work / "blobs")


def _umask() -> int:
    """There is no other way to ask than to set it."""
    before = os.umask(0o077)
    os.umask(before)
    return before
