"""One pod's log, from its first line to its last, into the job's mirror: streams that break are taken up again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kale_dist.backends.gathering import gathered
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.mirror import Mirror
from kale_dist.errors import BackendError, JobNotFoundError, KaleDistError, StoreError
from kale_dist.transport import FrameReader, Heartbeat, Item

_SILENCE_S = 45.0
"""An agent says something every 15 s: after three times that, the connection is dead although nobody says so."""

_CONNECT_S = 10.0
_AGAIN_S = 0.5
_POLL_S = 1.0
_OVERLAP_S = 5
"""A stream that is taken up again begins this much before it broke; what was seen is dropped by its number."""

_FORBIDDEN = 403
_NOT_FOUND = 404
_GONE = (400, _NOT_FOUND, 410)
_TRIES = 20
"""How often the log of an ended pod is asked for where the API server, or the node, fails to give it."""

_READ_BYTES = 1 << 16

Ask = Callable[[], Any]


class PodLog:
    """Follows one pod in a thread of its own.

    Args:
        cluster: Where the pod is.
        namespace: The pod's.
        pod: The pod's name.
        uid: Tells it from another pod of the name.
        number: Which of the job's pods it is.
        mirror: Where lines, events and outcomes go.
        key: The job's secret bytes; None if this user has none.
        has_ended: Whether the pod's container has ended or is gone.
        agent: Gives a `PodClient` of the pod, for where logs may not be read.
        on_items: Called after something was taken.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        namespace: str,
        pod: str,
        uid: str,
        number: int,
        mirror: Mirror,
        key: bytes | None,
        has_ended: Callable[[], bool],
        agent: Ask,
        on_items: Callable[[], None],
    ) -> None:
        self.uid = uid
        self.number = number
        self.is_drained = False
        """Whether the pod has ended and all that could be read of it was read."""
        self.last_item = time.monotonic()
        """When something was read last."""
        self._cluster = cluster
        self._namespace = namespace
        self._pod = pod
        self._mirror = mirror
        self._key = key
        self._has_ended = has_ended
        self._agent = agent
        self._on_items = on_items
        self._stopped = threading.Event()
        self._last_read = 0.0
        self._is_rounded = False
        self._is_whole = False
        self._response: Any = None
        threading.Thread(target=self._run, name=f"kale_dist log {pod}", daemon=True).start()

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(Exception):
                response.close()

    def _run(self) -> None:
        from kubernetes.client.exceptions import ApiException

        read = self._stream
        failures = 0
        while not self._stopped.is_set():
            # Asked before reading: what a container has written before it ended is then read for certain.
            ended = self._has_ended()
            try:
                whole = read()
            except ApiException as error:
                whole = False
                if error.status == _FORBIDDEN:
                    read = self._poll_agent
                elif ended and error.status:
                    failures += 1
                    # Nobody has the log any more: the pod is gone, or its node is.
                    if error.status in _GONE or failures == _TRIES:
                        break
            except JobNotFoundError:
                break
            except Exception:  # noqa: BLE001 - whatever broke the stream, it is taken up again
                whole = False
            polls = read == self._poll_agent
            if (ended and (whole or polls)) or (whole and polls):
                self._is_whole = self._is_whole or whole
                break
            self._stopped.wait(_AGAIN_S)
        if not self._stopped.is_set():
            # A folder that is deleted, or full, is noticed by whoever writes the next line.
            with contextlib.suppress(KaleDistError):
                self._mirror.finish(self.uid, self.number, is_whole=self._is_whole)
        self.is_drained = True
        self._on_items()

    def _stream(self) -> bool:
        """Read the container's log until it ends or breaks; whether it came to its end."""
        from kubernetes.client.exceptions import ApiException

        arguments: dict[str, Any] = {}
        if (self._last_read or self._has_ended()) and self._is_replaced():
            raise ApiException(status=_NOT_FOUND, reason="another pod has its name")
        if self._last_read:
            arguments["since_seconds"] = int(_now() - self._last_read) + _OVERLAP_S
        self._response = self._cluster.core.read_namespaced_pod_log(
            self._pod,
            self._namespace,
            container="pytorch",
            follow=True,
            _preload_content=False,
            _request_timeout=(_CONNECT_S, _SILENCE_S),
            **arguments,
        )
        reader = FrameReader(self._key, self.number)
        rejected = 0
        self._mirror.begin(self.uid, self.number)
        try:
            for data in gathered(self._response.stream(_READ_BYTES)):
                if self._stopped.is_set():
                    return False
                self._take(reader.feed_block(data))
                if reader.rejected > rejected:
                    rejected = reader.rejected
                    self._mirror.refuse(self.uid, self.number)
            self._take(reader.finish())
            # The last that an agent writes is a heartbeat. Without it there may be more, unless the container is still
            # there and has ended.
            self._is_whole = self._is_rounded
        finally:
            # What is left of a stream must not be taken for the answer to the next request of its connection.
            self._response.close()
            self._response.release_conn()
            self._response = None
        return True

    def _is_replaced(self) -> bool:
        """Whether another pod has the name by now: the operator makes a new one for one that was deleted."""
        pod = self._cluster.core.read_namespaced_pod(self._pod, self._namespace, _request_timeout=_CONNECT_S)
        return pod.metadata is None or pod.metadata.uid != self.uid

    def _take(self, items: list[Item]) -> None:
        self._last_read, self.last_item = _now(), time.monotonic()
        if items:
            self._is_rounded, self._is_whole = isinstance(items[-1], Heartbeat), False
        self._mirror.take(self.uid, self.number, items)
        self._on_items()

    def _poll_agent(self) -> bool:
        """Ask the pod's agent itself, where `pods/log` is forbidden; whether it has told all that it has."""
        with contextlib.suppress(BackendError, StoreError, OSError):
            agent = self._agent()
            # Asked before reading: what the agent has told before it said that it has ended is then read for certain.
            has_ended = agent.status()["state"] == "ended"
            while items := [
                *agent.log(self._mirror.next_line(self.uid)),
                *agent.events(self._mirror.next_event(self.uid)),
            ]:
                self._take(items)
            self._is_whole = has_ended
            if has_ended and self.number != 0:
                # Pod 0 is told by whoever fetches the results.
                agent.ack()
                return True
        self._stopped.wait(_POLL_S)
        return False


def _now() -> float:
    """Seconds, those that a laptop has slept among them: its pods went on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
