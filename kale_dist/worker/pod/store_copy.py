"""What a head puts into the job's store: results, the last checkpoint, and how many restarts are used."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import pathlib
import threading
import time
from collections.abc import Callable

from kale_dist.errors import StoreError
from kale_dist.wire.events import Note
from kale_dist.worker.agent.writer import JobWriter
from kale_dist.worker.pod import transfers
from kale_dist.worker.pod.pod import Pod

RETRY_EACH_S = 5.0
"""How often a store that failed is tried again."""

STORE_WARN_S = 60.0
"""A store that cannot be written for so long is warned of."""

_KEEP_EACH_S = 1.0
_KEEP_SAVING_EACH_S = 60.0
"""How often a checkpoint goes into the store where ranks write them within epochs, besides the last one."""


class StoreCopy:
    """The store's copy of a job's files. All methods but `keep_up` are called in threads.

    Args:
        pod: The job's.
        writer: Gets lines and notes about the store.
        used_restarts: How many restarts are used by now.
    """

    def __init__(self, pod: Pod, writer: JobWriter, used_restarts: Callable[[], int]) -> None:
        self.works = bool(pod.order.store)
        """Whether there is a store that has not refused for good."""
        self.is_complete = False
        """Whether it has all results."""
        self._pod = pod
        self._writer = writer
        self._used_restarts = used_restarts
        self._failing_since: float | None = None
        """Since when it cannot be written; infinite once that was warned of, None while it can."""
        self._lock = threading.Lock()
        self._checkpoint = self._brought_checkpoint = 0
        self._restarts = 0
        self._checkpoint_at = -math.inf

    def note_brought(self) -> None:
        """Note that the checkpoint which is here has come from the store."""
        with contextlib.suppress(FileNotFoundError):
            self._checkpoint = self._brought_checkpoint = self._pod.files.checkpoint.stat().st_mtime_ns

    async def keep_up(self, can_resume: Callable[[], bool]) -> None:
        """Put each checkpoint into the store, and how many restarts are used where the head may come back, until cancelled.

        Args:
            can_resume: Whether the ranks write checkpoints within epochs.
        """
        while self.works:
            await asyncio.sleep(_KEEP_EACH_S if self._failing_since is None else RETRY_EACH_S)
            if self._pod.order.returns_head:
                with contextlib.suppress(OSError, StoreError):
                    await asyncio.to_thread(self.put_restarts)
            if not can_resume() or time.monotonic() - self._checkpoint_at >= _KEEP_SAVING_EACH_S:
                await asyncio.to_thread(self._put_checkpoint)

    def put_results(self, *, goes_on: bool) -> None:
        """Put the results there, and the last checkpoint.

        Args:
            goes_on: Whether the head is made again. Its end counts as no restart if the training has got on.
        """
        paths = sorted(self._pod.files.folder.glob("outcome-*"))
        # A store that has no room for the checkpoint may have some for them.
        are_put = [self.works and self._put(path) for path in paths]
        self.is_complete = self.works and self._put_checkpoint() and all(are_put)
        if goes_on and self._checkpoint != self._brought_checkpoint:
            # A job that gets on each time ends.
            with contextlib.suppress(OSError, StoreError):
                self.put_restarts(loses_head=False)

    def put_restarts(self, *, loses_head: bool = True) -> None:
        """Write beside the checkpoint how many restarts are used; one more if the loss of this head is to count.

        Raises:
            OSError, StoreError: The store cannot be written.
        """
        number = self._used_restarts() + loses_head
        if number != self._restarts:
            transfers.put_used_restarts(self._pod, number)
            self._restarts = number

    def _put_checkpoint(self) -> bool:
        """Put the last checkpoint there, if it is not there yet: the next head resumes from it. Whether none is missing there."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            # Each is a file of its own that takes the place of the one before.
            written = self._pod.files.checkpoint.stat().st_mtime_ns
            if written != self._checkpoint:
                if not (self.works and self._put(self._pod.files.checkpoint)):
                    return False
                self._checkpoint, self._checkpoint_at = written, time.monotonic()
        return True

    def _put(self, path: pathlib.Path) -> bool:
        """Put a file there; whether that went well. It is tried again as long as the job lasts, unless the store refuses it."""
        now, call, log = time.monotonic(), self._pod.loop.call_soon_threadsafe, self._writer.log
        try:
            if path == self._pod.files.checkpoint:
                transfers.put_checkpoint_into_store(self._pod)
            else:
                transfers.put_into_store(self._pod, path)
        except (OSError, StoreError) as error:
            text = f"{path.name} could not be put into the store {self._pod.order.store}: {error}"
            if transfers.is_refusal(error):
                self.works = False
                call(log, f"{text}. The notebook has to fetch it")
            elif self._failing_since is None:
                self._failing_since = now
                call(log, f"{text}. It is tried again as long as the job lasts")
            elif now - self._failing_since >= STORE_WARN_S:
                self._failing_since = math.inf
                text = f"{text}. What is newer is lost with this pod"
                call(functools.partial(self._writer.event, Note(text=text, warns=True)))
            return False
        if self._failing_since is not None:
            self._failing_since = None
            call(log, f"The store {self._pod.order.store} can be written again")
        return True
