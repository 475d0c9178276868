"""The head: the agent of a job's first pod. It judges the job, is the only writer of its folder, and leaves last."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kale_dist import wire
from kale_dist.errors import KaleDistError, StoreError
from kale_dist.wire import EventKind, FailureCause, Source, StateName, Verdict
from kale_dist.wire.messages import ToAgent
from kale_dist.worker.agent import ending
from kale_dist.worker.agent.attempt import Site
from kale_dist.worker.agent.job_run import JobRun, open_port
from kale_dist.worker.agent.writer import POD_LOG_BYTES, JobWriter, StdoutCopy
from kale_dist.worker.pod import pod_input
from kale_dist.worker.pod.byte_server import ByteServer
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.mpi import Mpirun
from kale_dist.worker.pod.pod import Pod
from kale_dist.worker.pod.prometheus import Gauges, MetricsServer
from kale_dist.worker.pod.warm import WarmPods

LEAVE_LIMIT_S = 20.0
"""How long relays may take to leave once the job has ended."""

STRAGGLER_LIMIT_S = 60.0
"""How long the head stays for pods that have not joined yet, to tell them that the job is over. They would wait otherwise.
A notebook that has all it wants has had them removed."""

TERM_GRACE_S = 25.0
"""From SIGTERM to SIGKILL for ranks when the pod gets SIGTERM: time to write a last checkpoint."""

DRAIN_LIMIT_S = 60.0
"""How long the pod's log may take to be written out at the end."""

TERM_DRAIN_LIMIT_S = 8.0
"""The same when the pod got SIGTERM."""

STDOUT_OUTCOMES_BYTES = 1_000_000
"""Outcomes ride in stdout, rank 0's first, up to this much together."""

KEPT_COLLECT_S = 60.0
"""How long results are held here that a store keeps as well."""

READ_LIMIT_S = 600.0
"""How long the store may be unreadable for a head that may have to resume from it."""

STORE_WARN_S = 60.0
"""A store that cannot be written for so long is warned of."""

_RETRY_EACH_S = 5.0
_LOOK_EACH_S = 0.1
_KEEP_EACH_S = 1.0
_KEEP_SAVING_EACH_S = 60.0
"""How often a checkpoint goes into the store where ranks write them within epochs, besides the last one."""


class Head:
    """Serves one job; in warm pods, the one of each job and their own.

    Args:
        pod: The pod.
        within: The head of the warm pods that this job runs in; None where they run only this job.

    Raises:
        OSError: A port is taken.
    """

    def __init__(self, pod: Pod, within: Head | None = None) -> None:
        self._pod = pod
        self._within = within
        self.stdout: StdoutCopy = StdoutCopy() if within is None else within.stdout
        order = pod.order
        self._gauges = Gauges(order.job, order.number_of_processes, order.used_restarts) if order.metrics_port else None
        self.writer = JobWriter(
            pod.files,
            pod.loop,
            self._notify,
            limit_bytes=POD_LOG_BYTES,
            # Blocks there do not say whose they are.
            stdout=self.stdout if within is None else None,
            observe=(lambda _: None) if self._gauges is None else self._gauges.note,
        )
        self.server: ByteServer = ByteServer(
            pod.place.listen,
            pod.order.port + 2,
            key=pod.key,
            files=pod.files,
            store=pod.store,
            writer=self.writer,
            missing=self._missing,
            cancel=self._cancel,
            tell=self._tell,
            acknowledge=self._acknowledged,
            within=None if within is None else within.server,
            prefix=order.prefix,
        )
        self.relays: HeadsRelays | None = None if within is None else within.relays
        if order.agents > 1 and within is None:
            self.relays = HeadsRelays(
                order,
                pod.key,
                pod.files,
                open_port(pod.place.listen, order.port + 1, 1024),
                say=self.writer.say,
            )
        self._written: asyncio.Future[None] = pod.loop.create_future()
        self._released: Callable[[], None] = lambda: None
        mpirun = None
        if order.mpi:
            mpirun = Mpirun(pod.place.work, self.relays, self._fail)
        site = Site(
            order=pod.own_order, loop=pod.loop, pool=pod.pool, writer=self.writer, elsewhere=self.relays, is_limited=True,
            beside=mpirun,
        )  # fmt: skip
        self._job = JobRun(site)
        if order.idle_s:
            self._job = warm = WarmPods(site, self.relays, pod, functools.partial(Head, within=self))
            self.server.offer, self._released = warm.offer, warm.release
        self._began_at = time.monotonic()
        self._has_blobs = False
        self._is_acknowledged = False
        self._is_told_to_end = False
        self._on_stdout = False
        self._store_works = bool(order.store)
        """Whether there is a store that has not refused for good."""
        self._failing_since: float | None = None
        """Since when it cannot be written; infinite once that was warned of, None while it can."""
        self._is_kept = False
        """Whether the store has all results."""
        self._store_lock = threading.Lock()
        self._kept_checkpoint = self._brought_checkpoint = 0
        self._kept_restarts = 0
        self._kept_at = -math.inf

    def _fail(self, cause: FailureCause, reason: str) -> None:
        self._job.fail(cause, reason)

    def _notify(self) -> None:
        self.server.notify()
        if self.relays is not None:
            self.relays.limit(has_room=self.writer.has_room)

    # -- the job ----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve the job to its end; gives the exit code."""
        if self.relays is not None and self._within is None:
            await self.relays.serve(self._job)
        elif self.relays is not None:
            self.relays.begin(self._pod, self._job, self.writer.say)
        self._serve_metrics()
        preparing = asyncio.ensure_future(self._prepare())
        verdict = await self._job.run()
        self._copy_outcomes()
        self._job.write_end(verdict)
        self.writer.close(lambda: self._written.set_result(None))
        await self._written
        preparing.cancel()
        if self._within is not None:
            await asyncio.to_thread(self._put_results_into_store)
            await self._wait_for_notebook(time.monotonic(), verdict)
            self.server.close()
            return 0
        # The pod ends even if something hangs from here on.
        signal.alarm(int(self._pod.order.collect_wait_s + STRAGGLER_LIMIT_S + DRAIN_LIMIT_S + 60))
        message = ending.termination_message(verdict)
        ending.write_termination(self._pod.place.termination_log, message)
        ended_at = time.monotonic()
        if self.relays is not None and self._is_told_to_end and self._pod.order.returns_head:
            # Without a goodbye they come back as well, and join the next head.
            self.relays.close()
        elif self.relays is not None:
            self.relays.end()
        await asyncio.to_thread(self._put_results_into_store)
        await self._wait_for_relays(ended_at)
        await self._wait_for_notebook(ended_at, verdict)
        if self.relays is not None:
            self.relays.close()
        limit_s = TERM_DRAIN_LIMIT_S if self._is_told_to_end else DRAIN_LIMIT_S
        await asyncio.to_thread(self.stdout.drain, limit_s)
        self.server.close()
        return ending.exit_code(verdict, told_to_end=self._is_told_to_end)

    def _serve_metrics(self) -> None:
        """Open the port for Prometheus, until the process ends. A job does not fail for want of it."""
        if self._gauges is None:
            return
        port = self._pod.order.metrics_port
        try:
            MetricsServer(self._pod.place.listen, port, self._gauges.text)
        except OSError as error:
            self.writer.say(f"Prometheus finds nothing: port {port} (metrics_port) cannot be opened ({error.strerror})")

    def told_to_end(self) -> None:
        """The pod got SIGTERM."""
        again, self._is_told_to_end = self._is_told_to_end, True
        reason = (
            f"Pod {socket.gethostname()} received SIGTERM: the job was suspended or deleted, or the pod was "
            "evicted or ran into its deadline"
        )
        self._job.cancel(FailureCause.SUSPENDED, reason, 0.0 if again else TERM_GRACE_S, save=True)

    @property
    def is_ending(self) -> bool:
        """Whether its ranks have ended."""
        return self._job.verdict is not None

    async def _prepare(self) -> None:
        """Bring the input, let the ranks start, then put each checkpoint into the store."""
        order = self._pod.order
        if order.idle_s:
            self._job.start()
            return
        try:
            if order.returns_head:
                # Before anything that may kill this pod each time.
                used = await self._ask_store(functools.partial(pod_input.used_restarts, self._pod)) or 0
                if used > order.policy.max_restarts:
                    told = f"The first pod was lost after {used - 1} restarts: max_restarts allows no more"
                    # For lost pods a follower would renew the job.
                    self._job.fail(FailureCause.AGENT_DIED, told)
                    return
                self._job.used_before = max(used, order.used_restarts)
                await self._ask_store(self._keep_restarts)
            await asyncio.to_thread(pod_input.bring, self._pod, received=self.server.received)
            await self._ask_store(functools.partial(pod_input.bring_checkpoint, self._pod))
        except Exception as error:  # noqa: BLE001 - the job cannot start, and has to say why
            told = str(error) if isinstance(error, KaleDistError) else f"{type(error).__name__}: {error}"
            self._job.fail(FailureCause.NOT_STARTED, told)
            return
        if order.returns_head and self._pod.files.checkpoint.exists():
            self._kept_checkpoint = self._brought_checkpoint = self._pod.files.checkpoint.stat().st_mtime_ns
        self._has_blobs = True
        if self._within is None:
            # From here no rank is forked that the job does not need.
            self._pod.pool.wanted_spares = 0
        if self.relays is not None:
            self.relays.deal_blobs()
        self._job.start()
        while self._store_works:
            await asyncio.sleep(_KEEP_EACH_S if self._failing_since is None else _RETRY_EACH_S)
            if order.returns_head:
                with contextlib.suppress(OSError, StoreError):
                    await asyncio.to_thread(self._keep_restarts)
            if not self._job.can_save or time.monotonic() - self._kept_at >= _KEEP_SAVING_EACH_S:
                await asyncio.to_thread(self._keep_checkpoint)

    async def _ask_store(self, ask: Callable[[], int | None]) -> int | None:
        """Ask the store what earlier heads have left, for minutes if need be: no training begins over a checkpoint.

        Raises:
            StoreError: It cannot be read. Where the controller makes this pod again, the next head tries again.
        """
        order, give_up_at, is_first = self._pod.order, time.monotonic() + READ_LIMIT_S, True
        while True:
            try:
                return await asyncio.to_thread(ask)
            except (OSError, StoreError) as error:
                told, is_refusal = f"The store {order.store} fails: {error}", pod_input.is_refusal(error)
                if is_refusal and not order.used_restarts and not order.returns_head:
                    # Some refuse to read what is not there. Whether it can be written shows later.
                    self.writer.say(f"{told}. The training begins at the beginning")
                    return None
                if is_refusal or time.monotonic() >= give_up_at:
                    path = f"{order.store}/jobs/{order.job}/checkpoint"
                    told = f"{told}. A checkpoint of before stays there ({path}): continue from it once that works"
                    if order.returns_head and not is_refusal:
                        self._is_told_to_end = True
                        self._job.cancel(FailureCause.SUSPENDED, told, 0.0)
                    raise StoreError(told) from error
                if is_first:
                    self.writer.say(f"{told}. It is tried again for {READ_LIMIT_S / 60:g} minutes")
                is_first = False
            await asyncio.sleep(_RETRY_EACH_S)

    # -- requests, in the server's threads --------------------------------------------------------------------------

    def _missing(self) -> list[str]:
        """Digests of the blobs that the notebook has to send."""
        return pod_input.missing(self._pod) if self._pod.order.source is Source.STREAM and not self._has_blobs else []

    def _cancel(self, grace_s: float, save: bool) -> None:  # noqa: FBT001 - called by position from the server's threads
        """The notebook wants the job to end."""
        cancel = functools.partial(self._job.cancel, FailureCause.USER, "The job was cancelled", grace_s, save=save)
        self._pod.loop.call_soon_threadsafe(cancel)

    def _tell(self, rank: int, message: ToAgent) -> None:
        """The notebook has a message for a rank."""
        self._pod.loop.call_soon_threadsafe(self._job.tell, rank, message)

    def _acknowledged(self) -> None:
        """The notebook has all it wants."""
        self._is_acknowledged = True
        self._released()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _copy_outcomes(self) -> None:
        """Put small outcomes into stdout, before the verdict, after which it is not read."""
        if not self._pod.order.outcomes_on_stdout:
            return
        left, paths = STDOUT_OUTCOMES_BYTES, sorted(self._pod.files.folder.glob("outcome-*"), key=_by_rank)
        self._on_stdout = True
        for path in paths:
            size = path.stat().st_size
            if size > left:
                self._on_stdout = False
                continue
            left -= size
            _, attempt, rank = path.name.split("-")
            for block in wire.encode_outcome(int(attempt), int(rank), path.read_bytes()):
                self.stdout.offer(block, always=True)

    async def _wait_for_relays(self, ended_at: float) -> None:
        """Stay while relays are leaving, or may still come and have to learn of the end."""
        relays = self.relays
        while relays is not None:
            waited_s = time.monotonic() - ended_at
            may_come = time.monotonic() - self._began_at < self._pod.order.start_wait_s
            may_come = bool(relays.may_return or (relays.never_came and may_come))
            may_come = may_come and not (self._is_told_to_end or self._is_acknowledged)
            if not ((relays.connected and waited_s < LEAVE_LIMIT_S) or (may_come and waited_s < STRAGGLER_LIMIT_S)):
                return
            await asyncio.sleep(_LOOK_EACH_S)

    async def _wait_for_notebook(self, ended_at: float, verdict: Verdict) -> None:
        """Stay while the notebook has something to fetch."""
        order = self._pod.order
        tried_at = ended_at
        while self._is_awaited(verdict):
            limit_s = min(order.collect_wait_s, KEPT_COLLECT_S) if self._is_kept else order.collect_wait_s
            if time.monotonic() - ended_at >= limit_s:
                # The files are closed: this is for a reader of the pod's log.
                kept = (
                    f"They are in {order.store}/jobs/{order.job}"
                    if self._is_kept
                    else ("They are lost; give a store with store='pvc://...' to keep them")
                )
                text = f"The results were not fetched within {limit_s:g} s (collect_wait_s). {kept}"
                self.stdout.say(text)
                return
            await asyncio.sleep(_LOOK_EACH_S)
            if self._store_works and not self._is_kept and time.monotonic() - tried_at >= _RETRY_EACH_S:
                await asyncio.to_thread(self._put_results_into_store)
                tried_at = time.monotonic()

    def _is_awaited(self, verdict: Verdict) -> bool:
        """Whether the notebook still has to come for something."""
        order = self._pod.order
        notebook_sees_store = "://" in order.store or order.source is Source.FOLDER
        if self._is_acknowledged or self._is_told_to_end or order.work_is_kept:
            return False
        if self._is_kept and notebook_sees_store:
            return False
        if verdict.state is not StateName.SUCCEEDED and self._pod.files.checkpoint.exists():
            return True
        return not self._on_stdout

    # -- the store, in threads ----------------------------------------------------------------------------------------

    def _put_results_into_store(self) -> None:
        paths = sorted(self._pod.files.folder.glob("outcome-*"))
        # A store that has no room for the checkpoint may have some for them.
        are_put = [self._store_works and self._put(path) for path in paths]
        self._is_kept = self._store_works and self._keep_checkpoint() and all(are_put)
        if self._is_told_to_end and self._pod.order.returns_head and self._kept_checkpoint != self._brought_checkpoint:
            # A job that gets on each time ends.
            with contextlib.suppress(OSError, StoreError):
                self._keep_restarts(loses_head=False)

    def _keep_restarts(self, *, loses_head: bool = True) -> None:
        """Write beside the checkpoint how many restarts are used; one more if the loss of this head is to count.

        Raises:
            OSError, StoreError: The store cannot be written.
        """
        number = self._job.used_restarts + loses_head
        if number != self._kept_restarts:
            pod_input.put_used_restarts(self._pod, number)
            self._kept_restarts = number

    def _keep_checkpoint(self) -> bool:
        """Put the last checkpoint into the store, if it is not there yet: the next head resumes from it. Whether none is missing there."""
        with self._store_lock, contextlib.suppress(FileNotFoundError):
            # Each is a file of its own that takes the place of the one before.
            written = self._pod.files.checkpoint.stat().st_mtime_ns
            if written != self._kept_checkpoint:
                if not (self._store_works and self._put(self._pod.files.checkpoint)):
                    return False
                self._kept_checkpoint, self._kept_at = written, time.monotonic()
        return True

    def _put(self, path: Any) -> bool:
        """Put a file into the store; whether that went well. It is tried again as long as the job lasts, unless the store refuses it."""
        now, told = time.monotonic(), self._pod.loop.call_soon_threadsafe
        try:
            if path == self._pod.files.checkpoint:
                pod_input.put_checkpoint_into_store(self._pod)
            else:
                pod_input.put_into_store(self._pod, path)
        except (OSError, StoreError) as error:
            text = f"{path.name} could not be put into the store {self._pod.order.store}: {error}"
            if pod_input.is_refusal(error):
                self._store_works = False
                told(self.writer.say, f"{text}. The notebook has to fetch it")
            elif self._failing_since is None:
                self._failing_since = now
                told(self.writer.say, f"{text}. It is tried again as long as the job lasts")
            elif now - self._failing_since >= STORE_WARN_S:
                self._failing_since = math.inf
                text = f"{text}. What is newer is lost with this pod"
                told(functools.partial(self.writer.event, EventKind.NOTE, text=text, warns=True))
            return False
        if self._failing_since is not None:
            self._failing_since = None
            told(self.writer.say, f"The store {self._pod.order.store} can be written again")
        return True


def _by_rank(path: Any) -> tuple[int, int]:
    _, attempt, rank = path.name.split("-")
    return int(rank), int(attempt)
