"""Sends a snapshot that no store holds to pod 0 of a job, once that runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kale_dist import records
from kale_dist.backends.mirror import Mirror
from kale_dist.backends.pod_client import PodClient
from kale_dist.blobs import FolderStore
from kale_dist.errors import BackendError, StoreError
from kale_dist.spec import JobSpec

_PAUSE_S = 1.0
_MIB = 1 << 20


class Sender:
    """Sends in a thread of its own, which ends when everything is there.

    Args:
        spec: The job.
        mirror: For what the log says of it.
        agent: Gives the agent of the pod of a name.
        show: Told what is being done, as a sentence; empty for nothing.
        progress: Makes a callback that shows how far it is, behind a sentence.
        stopped: Set when nobody follows the job any longer.
    """

    def __init__(
        self,
        spec: JobSpec,
        mirror: Mirror,
        agent: Callable[[str], PodClient],
        show: Callable[[str], None],
        progress: Callable[[str], Callable[[int, int], None]],
        stopped: threading.Event,
    ) -> None:
        self._spec = spec
        self._mirror = mirror
        self._agent = agent
        self._show = show
        self._progress = progress
        self._stopped = stopped
        self._thread: threading.Thread | None = None
        self._pods: set[str] = set()

    def send(self, pod: str, uid: str) -> None:
        """Send to this pod what it lacks, unless that was done or is being done.

        Args:
            pod: Its name.
            uid: Its UID.
        """
        if uid not in self._pods and (self._thread is None or not self._thread.is_alive()):
            name = f"kale_dist send {self._spec.name}"
            self._thread = threading.Thread(target=self._send, args=(pod, uid), name=name, daemon=True)
            self._thread.start()

    def _send(self, pod: str, uid: str) -> None:
        try:
            agent = self._agent(pod)
            missing = agent.status()["missing"]
            if missing:
                size = agent.upload(FolderStore(records.blobs_dir()), missing, self._progress("Sending the snapshot"))
                self._mirror.say(
                    f"The snapshot was sent to {pod}: {size / _MIB:,.1f} MiB in {len(missing)} of "
                    f"{len(self._spec.blobs)} blobs"
                )
            else:
                self._mirror.say("The snapshot lies in the job's store already: nothing had to be sent")
            self._pods.add(uid)
        except (BackendError, StoreError, OSError) as error:
            self._show(f"The snapshot could not be sent yet: {error}")
            # The agent may not listen yet; it waits for `input_wait_s`.
            self._stopped.wait(_PAUSE_S)
        else:
            self._show("")
