"""Fetches the results of one run: outcomes, the checkpoint, the last output of pods that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kale_dist.errors import BackendError, StoreError
from kale_dist.job.backend import Look, Place, RunHandle
from kale_dist.job.status import JobStatus
from kale_dist.places.following.client import HeadClient
from kale_dist.places.following.copy import RunCopy
from kale_dist.wire import JobFiles, StateName, Verdict

MAX_PODS, MAX_LINES, MAX_BYTES = 3, 20, 1 << 14
"""Pods that ended badly whose last lines are kept, and how many lines: the first ones that failed say why."""

_NAMED = 3
_MIB = 1 << 20


class Results:
    """Of one run, as it is at one look.

    Args:
        place: Where the run is.
        handle: The run.
        files: Where its files go.
        client: For requests to its head; None where this user has no key.
        look: What the place saw last.
        on_progress: Called with a sentence while something large is on its way, and with an empty one after it.
    """

    def __init__(
        self,
        *,
        place: Place,
        handle: RunHandle,
        files: JobFiles,
        client: HeadClient | None,
        look: Look,
        on_progress: Callable[[str], None],
    ) -> None:
        self._place = place
        self._handle = handle
        self._files = files
        self._client = client
        self._look = look
        self._on_progress = on_progress

    def fetch(self, name: str) -> bool:
        """Bring a file here, as it is now: from the head while it runs, else from its place.

        Args:
            name: Of an outcome, or `checkpoint`.

        Returns:
            Whether it came.

        Raises:
            StoreError: It cannot be written here.
            BackendError: The place cannot be reached.
        """
        target = self._files.folder / name
        if self._client is not None and self._head_runs:
            with contextlib.suppress(BackendError):
                try:
                    self._client.fetch_file(name, target, self._show)
                except StoreError:
                    if not self._files.folder.exists():
                        raise
                else:
                    return True
                finally:
                    self._on_progress("")
        return self._place.fetch(self._handle, name, target)

    def fetch_all(self, verdict: Verdict, copy: RunCopy, status: JobStatus) -> bool:
        """Bring what the end of the job needs.

        Args:
            verdict: How the run ended.
            copy: Its copy, which says what is missing.
            status: Of the job: which ranks its newest attempt has, and whether they wrote a checkpoint.

        Returns:
            Whether all is here that will ever be.
        """
        if self._client is None:
            return True
        is_success, attempt = verdict.state is StateName.SUCCEEDED, copy.last_attempt
        # Parameter servers, and the workers that serve them, are ended when the chief returns, and return nothing.
        returning = status.replicas[:1] if self._handle.spec.cluster.servers else status.replicas
        ranks = [replica.rank for replica in returning if replica.rank not in verdict.lost] if is_success else []
        names = [self._files.outcome(attempt, rank).name for rank in ranks]
        if verdict.rank is not None and copy.verdict is not None:
            names.append(self._files.outcome(attempt, verdict.rank).name)
        # A checkpoint is of use where there is no result.
        if status.checkpoint_epoch is not None and not is_success:
            names.append(self._files.checkpoint.name)
        missing = [name for name in names if not self._is_here(name)]
        if missing and is_success and self._head_runs:
            # Results are worth waiting for: the head keeps them for `collect_wait_s`.
            self._on_progress("The results could not be fetched yet")
            return False
        if missing and is_success:
            what = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
            copy.say(f"Results could not be fetched, because the head ended before they were fetched: {what}")
        return True

    def keep_last_words(self, copy: RunCopy, heard: set[str]) -> None:
        """Copy what other pods printed that ended badly: what they could not hand to their head.

        Args:
            copy: Where to.
            heard: UIDs of pods whose last words are there already; those of others are added.
        """
        ended = [part for part in self._look.parts if part.number and part.state == "ended" and part.exit_code]
        for part in [part for part in ended[:MAX_PODS] if part.uid not in heard]:
            heard.add(part.uid)
            with contextlib.suppress(BackendError):
                said = self._place.last_words(self._handle, part, MAX_BYTES).decode(errors="replace")
                for line in [text for text in said.splitlines() if text.strip()][-MAX_LINES:]:
                    copy.say(f"pod {part.number}: {line}")

    @property
    def _head_runs(self) -> bool:
        return self._look.head is not None and self._look.head.state == "running"

    def _is_here(self, name: str) -> bool:
        """Whether a file is here, after an attempt to bring it."""
        if not (self._files.folder / name).exists():
            with contextlib.suppress(BackendError):
                self.fetch(name)
        return (self._files.folder / name).exists()

    def _show(self, done: int, total: int) -> None:
        if total > _MIB:
            self._on_progress(f"Fetching results: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB")
