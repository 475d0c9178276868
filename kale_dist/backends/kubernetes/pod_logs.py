"""The logs of all pods of one job: read to their ends, also where the job goes on in other pods, and what is lost is said."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kale_dist.backends.kubernetes import leftovers, restarts
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.pod_log import PodLog
from kale_dist.backends.kubernetes.watching import JobView, NamespaceWatch, PodView
from kale_dist.backends.mirror import Mirror
from kale_dist.backends.pod_client import PodClient
from kale_dist.errors import BackendError, StoreError
from kale_dist.spec import JobSpec
from kale_dist.transport import Heartbeat

T = TypeVar("T")

QUIET_S = 20.0
"""Pods that were left, and that say nothing for so long, are read no more."""

END_S = 20.0
"""Pods that were left may take so long to end by themselves; then the operator is told to end them."""

LONGEST_S = 180.0
"""Pods that were left and run on all the same are read so long: then the job's end waits for them no more."""


@dataclasses.dataclass(slots=True)
class _Left:
    """A PyTorchJob in whose place another one has come."""

    name: str
    since: float = 0.0
    """When it was looked at first after that, on the clock of `time.monotonic()`."""
    is_told: bool = False
    """Whether its agents were asked for what they have, and told to end."""
    freed: float | None = None
    """When its pods were last told to end by the operator, on the same clock; None: not yet."""


class PodLogs:
    """Of one job. For one thread.

    Args:
        cluster: Where it runs.
        watch: Of its namespace.
        spec: The job.
        mirror: Where lines, events and outcomes go.
        key: The job's secret bytes; None if this user has none.
        agent: Gives the agent of a pod by name and number; raises `BackendError` without the key.
        on_items: Called after something was taken, from any thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        watch: NamespaceWatch,
        spec: JobSpec,
        mirror: Mirror,
        key: bytes | None,
        agent: Callable[[str, int], PodClient],
        on_items: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._watch = watch
        self._spec = spec
        self._mirror = mirror
        self._key = key
        self._agent = agent
        self._on_items = on_items
        self._names = [spec.name]
        self._left: list[_Left] = []
        self._logs: dict[str, PodLog] = {}
        self._is_counted = False

    def turn_to(self, number: int) -> None:
        """The job goes on in another one of its PyTorchJobs.

        Args:
            number: Which one; those before it are read to their ends.
        """
        before = len(self._names) - 1
        self._names = [restarts.name_of(self._spec.name, each) for each in range(number + 1)]
        self._left += [_Left(name) for name in self._names[before:number]]

    def number(self, pod: PodView) -> int:
        """Which of the job's pods it is."""
        return self._watch.view(self._names[-1]).number(pod, has_master=self._spec.cluster.master is not False)

    def read(self) -> None:
        """Begin to read pods that have started."""
        views = [self._watch.view(name) for name in self._names]
        pods = [pod for view in views for pod in view.pods]
        for pod in pods:
            if pod.has_started and pod.uid not in self._logs:
                self._logs[pod.uid] = self._open(pod)
        if views[-1].pods and not self._is_counted:
            # All pods there are have been listed.
            self._is_counted = True
            self._count_gone(views)

    def leave(self, free: Callable[[JobView], None]) -> None:
        """Let the pods before the last ones end: what they still have is read first.

        Args:
            free: Frees what they hold.
        """
        for left in tuple(self._left):
            view, now = self._watch.view(left.name), time.monotonic()
            left.since = left.since or now
            late = now - left.since > END_S
            if not self._is_counted and not late:
                continue
            spare = leftovers.replacements(view)
            pods = [pod for pod in view.pods if pod.has_started and pod not in spare]
            running = [pod for pod in pods if pod.is_running]
            self._tell(left, running)
            logs = {pod.uid: self._logs[pod.uid] for pod in pods if pod.uid in self._logs}
            unread = {uid for uid, log in logs.items() if not log.is_drained and not _is_quiet(log, left.since)}
            may_free = (late or not running) and unread <= {pod.uid for pod in running}
            if may_free and (left.freed is None or (running and now - left.freed > END_S)):
                # Once more, where the cluster has refused it.
                left.freed = now
                free(view)
            elif left.freed is not None and (not unread or now - left.since > LONGEST_S):
                self._left.remove(left)
                self._finish(logs.values())

    @property
    def has_left(self) -> bool:
        """Whether that is done for all of them."""
        return not self._left

    def are_drained(self, view: JobView) -> bool:
        """Whether all pods of a PyTorchJob have ended, and all that could be read of any was read."""
        alive = {pod.uid for pod in view.pods if not pod.has_ended}
        return not alive and self.are_read

    @property
    def are_read(self) -> bool:
        """Whether all that could be read was read."""
        return all(log.is_drained for log in self._logs.values())

    def stop(self) -> None:
        """Read no more."""
        for log in self._logs.values():
            log.stop()

    def ask(self, uid: str, number: int, question: Callable[[PodClient], Sequence[T]]) -> Sequence[T] | None:
        """What a pod's stream has skipped, from its agent; None if that cannot be asked. From any thread."""
        pod = self._find(uid)
        if pod is not None and pod.is_running:
            with contextlib.suppress(BackendError, StoreError, OSError):
                return question(self._agent(pod.name, number))
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _find(self, uid: str) -> PodView | None:
        return next((pod for name in self._names for pod in self._watch.view(name).pods if pod.uid == uid), None)

    def _open(self, pod: PodView) -> PodLog:
        def has_ended() -> bool:
            now = self._find(pod.uid)
            return now is None or now.has_ended

        number = self.number(pod)
        return PodLog(
            cluster=self._cluster,
            namespace=self._spec.cluster.namespace,
            pod=pod.name,
            uid=pod.uid,
            number=number,
            mirror=self._mirror,
            key=self._key,
            has_ended=has_ended,
            agent=lambda: self._agent(pod.name, number),
            on_items=self._on_items,
        )

    def _tell(self, left: _Left, running: Iterable[PodView]) -> None:
        if not left.is_told:
            left.is_told = True
            for pod in running:
                threading.Thread(target=self._end, args=(pod,), name=f"kale_dist end {pod.name}", daemon=True).start()

    def _end(self, pod: PodView) -> None:
        """Have an agent say what its stream has not brought yet, and then end. In a thread."""
        with contextlib.suppress(BackendError, StoreError, OSError):
            number = self.number(pod)
            agent = self._agent(pod.name, number)
            told = agent.status()
            said = Heartbeat(next_line=int(told["next_line"]), next_event=int(told["next_event"]))
            self._mirror.take(pod.uid, number, [said])
            if told["state"] != "ended":
                agent.cancel(0.0)
            agent.ack()

    def _finish(self, logs: Iterable[PodLog]) -> None:
        for log in logs:
            if not log.is_drained:
                log.stop()
                self._mirror.finish(log.uid, log.number, is_whole=False)

    def _count_gone(self, views: Sequence[JobView]) -> None:
        """Say of which pods there is nothing to be read any more."""
        there = {pod.uid for view in views for pod in view.pods}
        known = self._mirror.unfinished
        for uid, number in known.items():
            if uid not in there:
                self._mirror.finish(uid, number, is_whole=False)
        if self._mirror.is_continued:
            return
        for view in views[:-1]:
            gone = set(range(self._spec.topology.number_of_pods)) - {self.number(pod) for pod in view.pods}
            if gone:
                self._mirror.say(
                    f"What {_pods(sorted(gone))} of {view.name} said is lost here: gone before this machine followed the job"
                )


def _is_quiet(log: PodLog, since: float) -> bool:
    return time.monotonic() - max(since, log.last_item) > QUIET_S


def _pods(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers))
    return f"pod {shown}" if len(numbers) == 1 else f"the {len(numbers)} pods {shown}"
