"""The head: the agent of a job's first pod. It judges the job, is the only writer of its folder, and leaves last."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from kale_dist import wire
from kale_dist.errors import KaleDistError, StoreError
from kale_dist.wire import FailureCause, Source, StateName, Verdict
from kale_dist.wire.messages import ToAgent
from kale_dist.worker.agent import ending
from kale_dist.worker.agent.attempt import Site
from kale_dist.worker.agent.job_run import JobRun, open_port
from kale_dist.worker.agent.writer import JobWriter, StdoutCopy
from kale_dist.worker.pod import transfers
from kale_dist.worker.pod.byte_server import ByteServer, HttpServer, ServedJob
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.mpi import Mpirun
from kale_dist.worker.pod.pod import Pod
from kale_dist.worker.pod.prometheus import Gauges, MetricsRequest
from kale_dist.worker.pod.store_copy import RETRY_EACH_S, StoreCopy
from kale_dist.worker.pod.warm_pods import WarmPods

LEAVE_LIMIT_S = 20.0
"""How long relays may take to leave once the job has ended."""

STRAGGLER_LIMIT_S = 60.0
"""How long the head stays for pods that have not joined yet, to answer that the job is over. They would wait otherwise.
A notebook that has all it wants has had them removed."""

DRAIN_LIMIT_S = 60.0
"""How long the pod's log may take to be written out at the end."""

TERM_DRAIN_LIMIT_S = 8.0
"""The same when the pod got SIGTERM."""

STDOUT_OUTCOMES_BYTES = 1 << 20
"""Outcomes ride in stdout, rank 0's first, up to this much together."""

KEPT_COLLECT_S = 60.0
"""How long results are held here that a store keeps as well."""

READ_LIMIT_S = 600.0
"""How long the store may be unreadable for a head that may have to resume from it."""

_LOOK_EACH_S = 0.1


class JobHead:
    """Serves one job, in pods that serve others after it.

    Args:
        pod: The job's.
        relays: To the other pods; None if this one has all ranks.
        stdout: The pod's log.
        server: Of the pods, which answers for this job, too; None to make one.

    Raises:
        OSError: A port is taken.
    """

    def __init__(
        self, pod: Pod, relays: HeadsRelays | None, stdout: StdoutCopy, server: ByteServer | None = None
    ) -> None:
        self.relays = relays
        self.stdout = stdout
        self._pod = pod
        order = pod.order
        self._gauges = Gauges(order.job, order.number_of_processes, order.used_restarts) if order.metrics_port else None
        self.writer = JobWriter(
            pod.files,
            pod.loop,
            self._notify,
            # Blocks there do not name their job.
            stdout=stdout if server is None else None,
            observe=(lambda _: None) if self._gauges is None else self._gauges.note,
        )
        self.served = ServedJob(self, key=pod.key, files=pod.files, store=pod.store, writer=self.writer)
        self.server = server or ByteServer(pod.place.listen, order.port + 2, self.served)
        self.server.jobs[order.prefix] = self.served
        self._written: asyncio.Future[None] = pod.loop.create_future()
        mpirun = Mpirun(pod.place.work, relays, self._fail) if order.mpi else None
        site = Site(
            order=pod.own_order, loop=pod.loop, pool=pod.pool, writer=self.writer, elsewhere=relays, is_limited=True,
            beside=mpirun,
        )  # fmt: skip
        self._job = self._make_run(site)
        self._kept = StoreCopy(pod, self.writer, lambda: self._job.used_restarts)
        self._began_at = time.monotonic()
        self._has_blobs = False
        self._is_acknowledged = False
        self._is_terminating = False
        self._on_stdout = False
        self._is_alone = False
        """Whether the results are left behind, as no notebook is connected to fetch them."""

    def _make_run(self, site: Site) -> JobRun:
        """What runs the attempts."""
        return JobRun(site)

    def _fail(self, cause: FailureCause, reason: str) -> None:
        self._job.fail(cause, reason)

    def _notify(self) -> None:
        self.served.notify()
        if self.relays is not None:
            self.relays.limit(has_room=self.writer.has_room)

    # -- the job ----------------------------------------------------------------------------------------------------

    async def serve_job(self) -> None:
        """Serve the job until the notebook has what it wants."""
        if self.relays is not None:
            self.relays.begin(self._pod, self._job, self.writer.log)
        verdict = await self._run_job()
        await self._put_results()
        await self._wait_for_notebook(time.monotonic(), verdict)
        self.server.jobs.pop(self._pod.order.prefix)

    async def _run_job(self) -> Verdict:
        """Run the attempts, and write all that the job's folder will ever have; returns how the job ended."""
        self._serve_metrics()
        preparing = [asyncio.ensure_future(one) for one in (self._prepare(), self._look_at_folders())]
        verdict = await self._job.run()
        self._is_alone = self._pod.order.ends_unfollowed and not self.served.is_attended
        self._copy_outcomes()
        self._job.write_end(verdict)
        self.writer.close(lambda: self._written.set_result(None))
        await self._written
        for one in preparing:
            one.cancel()
        return verdict

    def _serve_metrics(self) -> None:
        """Open the port for Prometheus, until the process ends. A job does not fail for want of it."""
        if self._gauges is None:
            return
        port = self._pod.order.metrics_port
        try:
            HttpServer(self._pod.place.listen, port, MetricsRequest, self._gauges.text)
        except OSError as error:
            self.writer.log(f"Prometheus finds nothing: port {port} (metrics_port) cannot be opened ({error.strerror})")

    def terminate(self) -> None:
        """The pod got SIGTERM."""
        again, self._is_terminating = self._is_terminating, True
        reason = (
            f"Pod {socket.gethostname()} received SIGTERM: the job was suspended or deleted, or the pod was "
            "evicted or ran into its deadline"
        )
        self._job.cancel(FailureCause.SUSPENDED, reason, 0.0 if again else self._pod.order.policy.grace_s, save=True)

    @property
    def is_ending(self) -> bool:
        """Whether its ranks have ended."""
        return self._job.verdict is not None

    async def _prepare(self) -> None:
        """Bring the input, let the ranks start, then put each checkpoint into the store."""
        order = self._pod.order
        try:
            if order.returns_head:
                # Before anything that may kill this pod each time.
                used = await self._ask_store(functools.partial(transfers.used_restarts, self._pod)) or 0
                if used > order.policy.max_restarts:
                    reason = f"The first pod was lost after {used - 1} restarts: max_restarts allows no more"
                    # For lost pods a follower would renew the job.
                    self._job.fail(FailureCause.AGENT_DIED, reason)
                    return
                self._job.used_before = max(used, order.used_restarts)
                await self._ask_store(self._kept.put_restarts)
            laid_out = await asyncio.to_thread(transfers.bring, self._pod, received=self.served.received)
            self._pod.renew_pool()
            if laid_out:
                self.writer.log(laid_out)
            await self._ask_store(functools.partial(transfers.bring_checkpoint, self._pod))
        except Exception as error:  # noqa: BLE001 - the job cannot start, and has to report why
            reason = str(error) if isinstance(error, KaleDistError) else f"{type(error).__name__}: {error}"
            self._job.fail(FailureCause.NOT_STARTED, reason)
            return
        if order.returns_head:
            self._kept.note_brought()
        self._start_job()
        await self._kept.keep_up(lambda: self._job.can_resume)

    async def _look_at_folders(self) -> None:
        """Log which volumes cannot be written into. Most of them are only read; the others would fail, hours later."""
        folders = self._pod.order.folders
        closed = [one for one in folders if not await asyncio.to_thread(os.access, one, os.W_OK)]
        if closed:
            self.writer.log(
                f"{', '.join(closed)}: the processes, which are user {os.getuid()}, cannot write there. If they have to, give run_as_user= or"
                " have the owner open it; if they only read, end the volume's source with ':ro'"
            )

    def _start_job(self) -> None:
        """All input is here."""
        self._has_blobs = True
        if self.relays is not None:
            self.relays.deal_blobs()
        self._job.start()

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
                text, is_refusal = f"The store {order.store} fails: {error}", transfers.is_refusal(error)
                if is_refusal and not order.used_restarts and not order.returns_head:
                    # Some refuse to read what is not there. Whether it can be written shows later.
                    self.writer.log(f"{text}. The training begins at the beginning")
                    return None
                if is_refusal or time.monotonic() >= give_up_at:
                    path = f"{order.store}/jobs/{order.job}/checkpoint"
                    text = f"{text}. A checkpoint of before stays there ({path}): continue from it once that works"
                    if order.returns_head and not is_refusal:
                        self._is_terminating = True
                        self._job.cancel(FailureCause.SUSPENDED, text, 0.0)
                    raise StoreError(text) from error
                if is_first:
                    self.writer.log(f"{text}. It is tried again for {READ_LIMIT_S / 60:g} minutes")
                is_first = False
            await asyncio.sleep(RETRY_EACH_S)

    # -- requests, in the server's threads --------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Digests of the blobs that the notebook has to send."""
        return transfers.missing(self._pod) if self._pod.order.source is Source.STREAM and not self._has_blobs else []

    def cancel(self, grace_s: float, *, save: bool) -> None:
        """The notebook wants the job to end."""
        cancel = functools.partial(self._job.cancel, FailureCause.USER, "The job was cancelled", grace_s, save=save)
        self._pod.loop.call_soon_threadsafe(cancel)

    def send(self, rank: int, message: ToAgent) -> None:
        """The notebook has a message for a rank."""
        self._pod.loop.call_soon_threadsafe(self._job.send, rank, message)

    def acknowledge(self) -> None:
        """The notebook has all it wants."""
        self._is_acknowledged = True

    def offer(self, body: bytes) -> Any:
        """These pods take no other job."""
        del body
        raise FileNotFoundError

    # -- the end ----------------------------------------------------------------------------------------------------

    def _copy_outcomes(self) -> None:
        """Put small outcomes into stdout, where no connection brings them."""
        if not (self._pod.order.outcomes_on_stdout or self._is_alone):
            return
        left, paths = STDOUT_OUTCOMES_BYTES, list(self._pod.files.folder.glob("outcome-*"))
        # By rank, then by attempt.
        paths.sort(key=lambda path: [*map(int, reversed(path.name.split("-")[1:]))])
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

    async def _put_results(self) -> None:
        if self._is_alone and self._pod.order.left_in and not self._kept.works:
            left = copy.copy(self._pod)
            # Of another job of this name, nothing is taken.
            left.order = dataclasses.replace(left.order, store=f"{left.order.left_in}/{wire.mark_of(left.key)}")
            self._kept = StoreCopy(left, self.writer, lambda: self._job.used_restarts)
        goes_on = self._is_terminating and self._pod.order.returns_head
        await asyncio.to_thread(functools.partial(self._kept.put_results, goes_on=goes_on))

    async def _wait_for_notebook(self, ended_at: float, verdict: Verdict) -> None:
        """Stay while the notebook has something to fetch."""
        order = self._pod.order
        tried_at = ended_at
        while self._is_awaited(verdict):
            if order.ends_unfollowed and not (self._is_alone or self.served.is_attended):
                # The notebook's network is gone, or it has ended a moment ago.
                self._is_alone = True
                self._copy_outcomes()
                await self._put_results()
                continue
            limit_s = min(order.collect_wait_s, KEPT_COLLECT_S) if self._kept.is_complete else order.collect_wait_s
            if time.monotonic() - ended_at >= limit_s:
                # The files are closed: this is for a reader of the pod's log.
                kept = "They are lost; give a store with store='pvc://...' to keep them"
                if self._kept.is_complete:
                    kept = f"They are in {order.store or order.left_in}"
                text = f"The results were not fetched within {limit_s:g} s (collect_wait_s). {kept}"
                self.stdout.log(text)
                return
            await asyncio.sleep(_LOOK_EACH_S)
            if self._kept.works and not self._kept.is_complete and time.monotonic() - tried_at >= RETRY_EACH_S:
                await self._put_results()
                tried_at = time.monotonic()

    def _is_awaited(self, verdict: Verdict) -> bool:
        """Whether the notebook still has to come for something."""
        order = self._pod.order
        notebook_sees_store = "://" in order.store or order.source is Source.FOLDER
        if self._is_acknowledged or self._is_terminating or order.work_is_kept:
            return False
        if self._kept.is_complete and (notebook_sees_store or self._is_alone):
            return False
        if verdict.state is not StateName.SUCCEEDED and self._pod.files.checkpoint.exists():
            return True
        return not self._on_stdout


class Head(JobHead):
    """Serves the pod and its job.

    Args:
        pod: The pod.

    Raises:
        OSError: A port is taken.
    """

    def __init__(self, pod: Pod) -> None:
        order, relays, stdout = pod.order, None, StdoutCopy()

        def log(text: str) -> None:
            self.writer.log(text)

        if order.agents > 1:
            listener = open_port(pod.place.listen, order.port + 1, 1024)
            relays = HeadsRelays(order, pod.key, pod.files, listener, log=log)
        super().__init__(pod, relays, stdout)

    async def run(self) -> int:
        """Serve to the end; gives the exit code."""
        if self.relays is not None:
            await self.relays.serve(self._job)
        verdict = await self._run_job()
        # The pod ends even if something hangs from here on.
        signal.alarm(int(self._pod.order.collect_wait_s + STRAGGLER_LIMIT_S + DRAIN_LIMIT_S + 60))
        message = ending.termination_message(verdict)
        ending.write_termination(self._pod.place.termination_log, message)
        ended_at = time.monotonic()
        if self.relays is not None and self._is_terminating and self._pod.order.returns_head:
            # Without a goodbye they come back as well, and join the next head.
            self.relays.close()
        elif self.relays is not None:
            self.relays.end()
        await self._put_results()
        await self._wait_for_relays(ended_at)
        await self._wait_for_notebook(ended_at, verdict)
        if self.relays is not None:
            self.relays.close()
        limit_s = TERM_DRAIN_LIMIT_S if self._is_terminating else DRAIN_LIMIT_S
        await asyncio.to_thread(self.stdout.drain, limit_s)
        self.server.close()
        return ending.exit_code(verdict, is_terminated=self._is_terminating)

    def _start_job(self) -> None:
        # From here no rank is forked that the job does not need.
        self._pod.pool.wanted_spares = 0
        super()._start_job()

    async def _wait_for_relays(self, ended_at: float) -> None:
        """Stay while relays are leaving, or may still come and have to learn of the end."""
        relays = self.relays
        while relays is not None:
            waited_s = time.monotonic() - ended_at
            may_come = time.monotonic() - self._began_at < self._pod.order.start_wait_s
            may_come = bool(relays.may_return or (relays.never_came and may_come))
            may_come = may_come and not (self._is_terminating or self._is_acknowledged)
            if not ((relays.connected and waited_s < LEAVE_LIMIT_S) or (may_come and waited_s < STRAGGLER_LIMIT_S)):
                return
            await asyncio.sleep(_LOOK_EACH_S)


class WarmHead(Head):
    """Serves warm pods, which take one job after the other."""

    def _make_run(self, site: Site) -> JobRun:
        self._warm = WarmPods(
            site, self.relays, self._pod, lambda job: JobHead(job, self.relays, self.stdout, self.server)
        )
        return self._warm

    def acknowledge(self) -> None:
        """The kernels that have used these pods have ended."""
        super().acknowledge()
        self._warm.release()

    def offer(self, body: bytes) -> Any:
        """Take a job; see `WarmPods.offer`."""
        return self._warm.offer(body)

    async def _prepare(self) -> None:
        self._warm.start()
