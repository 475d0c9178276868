"""Warm pods: their head takes one job after the other, until none has come for long, a pod is lost, or they are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from kale_dist import wire
from kale_dist.wire import FailureCause, Order, StateName, Verdict
from kale_dist.wire.blobs import unpack_blobs
from kale_dist.wire.events import JobState
from kale_dist.worker.agent.attempt import Site
from kale_dist.worker.agent.job_run import JobRun
from kale_dist.worker.pod import packages
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.pod import Pod

TURN_S = 5.0
"""How long the next job waits for the end of one whose ranks have ended, and whose results are being fetched."""


class WarmPods(JobRun):
    """What a head does in the place of attempts where its pods are warm.

    Args:
        site: Of the set.
        relays: Of the set; None if the head has all ranks.
        pod: The head's.
        make: Makes the head of a job.
    """

    def __init__(self, site: Site, relays: HeadsRelays | None, pod: Pod, make: Callable[[Pod], Any]) -> None:
        super().__init__(site)
        self._relays = relays
        self._pod = pod
        self._make = make
        self._taken: set[str] = set()
        self._next: tuple[Pod, Any] | None = None
        """The job at work, or that begins, and its head."""
        self._is_released = False

    def offer(self, body: bytes) -> dict[str, Any]:
        """Take a job, unless there is one, or blobs of it are missing. One that was taken before is not taken again.

        Args:
            body: Four bytes with the length of the JSON object that follows, see `Pod.of_job`; then blobs, packed.

        Returns:
            `missing`, the digests of blobs that have to be sent before it is offered again; or `busy`, why it is not taken.
        """
        size = 4 + int.from_bytes(body[:4], "big")
        job = json.loads(body[4:size])
        if body[size:]:
            unpack_blobs(body[size:], self._pod.store.root)
        order = wire.decode(Order, job["order"])
        offering = self._offer(job, (*order.blobs, *packages.blobs(order.offer)))
        return asyncio.run_coroutine_threadsafe(offering, self._site.loop).result()

    def release(self) -> None:
        """End when the job at work has ended: the kernels that have used these pods have. Called in a server's thread."""
        self._is_released = True
        self._site.loop.call_soon_threadsafe(self._changed.set)

    async def _offer(self, job: dict[str, Any], needed: Sequence[str]) -> dict[str, Any]:
        # The notebook that gets a result may call again before this head knows that it has all of it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                while self._next is not None and self._next[1].is_ending:  # noqa: ASYNC110 - a moment
                    await asyncio.sleep(0.01)
        name, store = str(job["id"]), self._pod.store
        if name in self._taken:
            return {"missing": []}
        if self._stop is not None or self._is_released or self.verdict is not None:
            return {"busy": "they are ending"}
        if self._next is not None:
            return {"busy": f"they run {self._next[0].order.job}"}
        if not self._taken and name != self.order.job:
            return {"busy": "they were made for another call"}
        if missing := [digest for digest in needed if not store.exists(digest)]:
            return {"missing": missing}
        self._taken.add(name)
        pod = Pod.of_job(self._pod, job)
        self._next = pod, self._make(pod)
        self._changed.set()
        return {"missing": []}

    def cancel(self, cause: FailureCause, reason: str, grace_s: float, *, save: bool = False) -> None:
        """End the job at work, and then the set."""
        super().cancel(cause, reason, grace_s, save=save)
        if self._next is not None:
            self._next[1].terminate()

    async def _run_attempts(self) -> Verdict:
        """Run one job after the other; returns why there is no further one."""
        writer, relays, idle_s = self._site.writer, self._relays, self.order.idle_s
        while True:
            writer.event(JobState(state=StateName.RUNNING, reason="Waits for a call that fits", idle_s=idle_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    while not (self._next or self._stop or self._is_released):
                        self._changed.clear()
                        await self._changed.wait()
            if self._stop is not None:
                return self._stop
            if self._next is None:
                ended = "The kernels that used these pods have ended"
                return Verdict(
                    StateName.SUCCEEDED, None, ended if self._is_released else f"No call came for {idle_s:g} s"
                )
            pod, head = self._next
            writer.event(JobState(state=StateName.RUNNING, reason=f"Runs {pod.order.job}"))
            await head.serve_job()
            await asyncio.to_thread(pod.end_job, pod.order.blobs)
            if relays is not None:
                relays.begin(self._pod, self, writer.log)
                if not relays.are_all_there:
                    return Verdict(StateName.FAILED, FailureCause.LOST, "A pod was lost during the last job")
            self._next = None
