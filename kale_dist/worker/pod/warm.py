"""Warm pods: their head takes one job after the other, until none has come for long, a pod is lost, or they are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kale_dist import wire
from kale_dist.wire import EventKind, FailureCause, Order, Source, StateName, Verdict
from kale_dist.wire.blobs import unpack_blobs
from kale_dist.worker.agent.attempt import Site
from kale_dist.worker.agent.job_run import JobRun
from kale_dist.worker.pod.pod import Pod

TURN_S = 5.0
"""How long the next job waits for the end of one whose ranks have ended, and whose results are being fetched."""


class Job(Protocol):
    """The head of one job."""

    def told_to_end(self) -> None:
        """The pods get SIGTERM, or are cancelled."""

    def run(self) -> Awaitable[int]:
        """Serve the job to its end."""

    @property
    def is_ending(self) -> bool:
        """Whether its ranks have ended."""


class WarmPods(JobRun):
    """What a head does with the jobs of warm pods, in the place of attempts.

    Args:
        site: Of the set.
        pod: The head's.
        make: Makes the head of a job.
    """

    def __init__(self, site: Site, pod: Pod, make: Callable[[Pod], Job]) -> None:
        super().__init__(site)
        self._pod = pod
        self._make = make
        self._taken: set[str] = set()
        self._next: tuple[Pod, Job] | None = None
        """The job at work, or that begins."""
        self._is_released = False

    # -- requests, in the server's threads ----------------------------------------------------------------------------

    def offer(self, body: bytes) -> dict[str, Any]:
        """Take a job, unless there is one, or blobs of it are missing. One that was taken before is not taken again.

        Args:
            body: Four bytes that say how long the JSON object is that follows, see `Pod.of_job`; then blobs, packed, or nothing.

        Returns:
            `missing`, the digests of the blobs to send before it is offered again; none where it is taken. `busy`: with what.
        """
        size = 4 + int.from_bytes(body[:4], "big")
        job = json.loads(body[4:size])
        order = wire.decode(Order, job["order"])
        if body[size:]:
            unpack_blobs(body[size:], self._pod.store.root)
        return asyncio.run_coroutine_threadsafe(self._offer(job, order), self._site.loop).result()

    def release(self) -> None:
        """End when the job at work has ended: the kernels that have used these pods are gone."""
        self._is_released = True
        self._site.loop.call_soon_threadsafe(self._changed.set)

    # -- in the loop --------------------------------------------------------------------------------------------------

    async def _offer(self, job: dict[str, Any], order: Order) -> dict[str, Any]:
        # The notebook that gets a result may call again before the head knows that it has all of it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                while self._next is not None and self._next[1].is_ending:  # noqa: ASYNC110 - a moment
                    await asyncio.sleep(0.01)
        name = str(job["id"])
        if name in self._taken:
            return {"missing": []}
        if self._stop is not None or self._is_released or self.verdict is not None:
            return {"busy": "they are ending"}
        if self._next is not None:
            return {"busy": f"they run {self._next[0].order.job}"}
        if not self._taken and name != self.order.job:
            return {"busy": "they were made for another call"}
        store = self._pod.store
        if order.source is Source.STREAM and (missing := [one for one in order.blobs if not store.exists(one)]):
            return {"missing": missing}
        self._taken.add(name)
        pod = Pod.of_job(self._pod, job)
        if digest := job.get("checkpoint"):
            (pod.place.input / wire.InputFiles.CHECKPOINT).hardlink_to(store.path(digest))
        self._next = pod, self._make(pod)
        self._changed.set()
        return {"missing": []}

    def cancel(self, cause: FailureCause, reason: str, grace_s: float, *, save: bool = False) -> None:
        """End the job at work, and then the set."""
        super().cancel(cause, reason, grace_s, save=save)
        if self._next is not None:
            self._next[1].told_to_end()

    async def _run_attempts(self) -> Verdict:
        """Run one job after the other; returns why there is no further one."""
        writer, relays, idle_s = self._site.writer, self._site.relays, self.order.idle_s
        while True:
            writer.event(EventKind.STATE, state=str(StateName.RUNNING), reason="", cause="", idle_s=idle_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    while not (self._next or self._stop or self._is_released):
                        self._changed.clear()
                        await self._changed.wait()
            if self._stop is not None:
                return self._stop
            if self._next is None:
                told = "The kernels that used these pods have ended"
                told = told if self._is_released else f"No call came for {idle_s:g} s"
                return Verdict(StateName.SUCCEEDED, None, told)
            await self._run_job(*self._next)
            if relays is not None:
                relays.begin(self._pod, self, writer.say)
                if not relays.are_all_there:
                    return Verdict(StateName.FAILED, FailureCause.LOST, "A pod was lost during the last job")
            self._next = None

    async def _run_job(self, pod: Pod, job: Job) -> None:
        self._site.writer.event(
            EventKind.STATE, state=str(StateName.RUNNING), reason=f"Runs {pod.order.job}", cause="", idle_s=None
        )
        try:
            await job.run()
        finally:
            await asyncio.to_thread(pod.end_job, pod.order.blobs)
