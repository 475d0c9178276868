"""What the head and the relays of a job share: where their pod is, the order and the key. No torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, Self

from kale_dist import wire
from kale_dist.wire import JobFiles, Order, PodVariable, ProcessState, Source
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.files import umask
from kale_dist.worker.agent import processes
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.pod import packages

LISTEN_VARIABLE = "KALE_DIST_LISTEN"
"""Environment variable: the address to listen on, where several agents share one machine; unset for all addresses."""

TERMINATION_LOG_VARIABLE = "KALE_DIST_TERMINATION_LOG"
"""Environment variable: the file for the termination message; unset for the one that a kubelet reads."""


LOST_HEAD = "KALE_DIST_LOST_HEAD"
"""Variable of an agent that has begun again in its container because it had lost the head."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodPlace:
    """Holds what a pod's environment states of it."""

    pod: int
    """The pod's number in its job; 0 is the head."""
    input: pathlib.Path
    """Folder with the job's input, which may appear late."""
    work: pathlib.Path
    """Writable folder of this pod alone."""
    listen: str
    """Address to listen on; empty for all."""
    termination_log: pathlib.Path | None
    """Where the pod's last words go; None: they are not read."""
    has_lost_head: bool = False
    """Whether it has begun again in its container because it had lost the head."""


def place_of(environment: Mapping[str, str]) -> PodPlace:
    """Read a pod's environment.

    Raises:
        KeyError: A variable is not set.
        ValueError: A number is none.
    """
    given = environment.get(TERMINATION_LOG_VARIABLE, "")
    log = pathlib.Path(given or "/dev/termination-log")
    return PodPlace(
        pod=int(environment[PodVariable.FIRST_POD]) + int(environment[PodVariable.REPLICA_INDEX]),
        input=pathlib.Path(environment[PodVariable.INPUT]),
        work=pathlib.Path(environment[PodVariable.WORK]),
        listen=environment.get(LISTEN_VARIABLE, ""),
        termination_log=log if given or log.exists() else None,
        has_lost_head=LOST_HEAD in environment,
    )


class Pod:
    """What a head or a relay works with.

    Args:
        place: Where it is.
        order: As the input has it.
        key: The job's secret.
        pool: Where its ranks come from.
        within: The warm pod in which it is one job of several; None where it is the only one.
    """

    def __init__(self, place: PodPlace, order: Order, key: bytes, pool: ForkPool, within: Pod | None = None) -> None:
        self.place = place
        self.key = key
        self.pool = pool
        self.within = within
        self.job: Mapping[str, Any] = {}
        """In a warm pod: what `of_job` was given."""
        self.loop = asyncio.get_running_loop()
        self.files = JobFiles(place.work / "job")
        shared = order.source is Source.FOLDER or (order.source is Source.STREAM and order.store)
        own = FolderStore(order.store if shared else place.work / "blobs")
        self.store: FolderStore = own if within is None else within.store
        self.order = order
        """The order that all agents of the job have."""
        self._environment = dict(os.environ)
        os.environ.update(wire.unseal(key, order.sealed))
        self.tree = (within or self).place.work / "packages"
        """Where the notebook's packages are, if the order offers any."""
        if order.offer.packages:
            os.environ.update(packages.variables(self.tree, os.environ))
        state = ProcessState(
            environment=tuple(os.environ.items()),
            cwd=self._cwd(),
            sys_path=tuple(packages.search_path(self.tree) if order.offer.packages else sys.path),
            packages=str(packages.library(self.tree)) if order.offer.packages else "",
            argv=("kale_dist",),
            umask=umask(),
            limits=(),
            torch_flags=order.torch_flags,
        )
        self.own_order = dataclasses.replace(
            order, folder=str(self.files.folder), store=str(self.store.root), key=key.hex(), process=state
        )
        """For the ranks of this pod."""
        limits_s = order.start_wait_s + order.input_wait_s + order.collect_wait_s
        self._over_at = None if order.policy.timeout_s is None else time.monotonic() + order.policy.timeout_s + limits_s

    @classmethod
    def of_job(cls, warm: Pod, job: Mapping[str, Any]) -> Self:
        """A warm pod's next job, with a folder and a key of its own. Blobs of the job before stay, so that they need not be sent again.

        Args:
            warm: The pod.
            job: `id`, `order`, and `sealed`: the job's key, sealed with that of the pods.
        """
        place = dataclasses.replace(warm.place, work=warm.place.work / "jobs" / str(job["id"]))
        place = dataclasses.replace(place, input=place.work / "input")
        key = bytes.fromhex(wire.unseal(warm.key, job["sealed"])["key"])
        JobFiles(place.work / "job").folder.mkdir(mode=0o700, parents=True)
        place.input.mkdir(mode=0o700)
        order = dataclasses.replace(wire.decode(Order, job["order"]), prefix=f"/jobs/{job['id']}")
        found = cls(place, order, key, warm.pool, warm)
        found.job = job
        return found

    def end_job(self, keep: Collection[str]) -> None:
        """Remove what a warm pod's job has left, but for some blobs. Blocks for a moment."""
        processes.end_orphans(limit_s=1.0, spare=self.pool.pid)
        os.environ.clear()
        os.environ.update(self._environment)
        shutil.rmtree(self.place.work, ignore_errors=True)
        for digest in set(self.store.list()) - {*keep, *packages.blobs(self.order.offer)}:
            self.store.delete(digest)

    def renew_pool(self) -> None:
        """Start the fork server again if it has imported other packages of the image than this job's ranks are to have."""
        if (loaded := packages.preloaded(self.order.offer)) != self.pool.packages:
            self.pool.restart(loaded, {**self._environment, **packages.variables(self.tree, self._environment)})

    def _cwd(self) -> str:
        """The ranks' working folder: where it is the user's home, as in a container, each job of a warm pod has one of its own."""
        there = os.getcwd()  # noqa: PTH109 - a text is wanted
        if self.within is None or there != os.environ.get("HOME"):
            return there
        own = self.place.work / "home"
        own.mkdir(exist_ok=True)
        return str(own)

    @property
    def is_overdue(self) -> bool:
        """Whether the job should have ended long ago: the pod that gets SIGTERM now has passed its deadline."""
        return self._over_at is not None and time.monotonic() > self._over_at


class Problem(Exception):  # noqa: N818 - it never leaves this package
    """Why a pod's agent cannot begin; a sentence."""
