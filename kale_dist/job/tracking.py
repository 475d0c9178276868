"""Follows a job and sends its metrics to its trackers, in a thread each. A failing tracker never fails the job."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.errors import KaleDistError, ResultUnavailableError, log
from kale_dist.job.handle import Job, inside
from kale_dist.job.status import JobStatus
from kale_dist.trackers import TrackedJob, Tracker, Writer
from kale_dist.wire import MetricRow, Moment, StateName
from kale_dist.wire.blobs import fresh

_END_S = 60.0
"""How long a wait for a job also waits for its trackers after the job's end: their servers may be slow."""
_GIT_S = 10.0


def begin(job: Job[Any], trackers: Sequence[Tracker], params: Mapping[str, Any]) -> None:
    """Track a job from its start.

    Args:
        job: The job, just submitted.
        trackers: Settings, checked.
        params: The training's parameters.
    """
    for tracker in trackers:
        _Tracking(job, tracker, _Bookmark(params=params)).start()


def again(job: Job[Any], trackers: Sequence[Tracker]) -> None:
    """Track a job that was found again, running or ended. A tracker that had begun continues where it stopped."""
    for tracker in trackers:
        _Tracking(job, tracker, _Bookmark.read(_file(job, tracker))).start()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Bookmark:
    """How much a tracker was sent; kept in a file of the job's folder."""

    run_id: str = ""
    sent: int = 0
    """Rows that were sent to the tracker."""
    moments: int = 0
    """Moments of the history that were."""
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, file: pathlib.Path) -> _Bookmark:
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return cls()


class _Tracking:
    """Sends one job's metrics to one tracker."""

    def __init__(self, job: Job[Any], tracker: Tracker, bookmark: _Bookmark) -> None:
        self._job = job
        self._tracker = tracker
        self._bookmark = bookmark
        self._last: MetricRow | None = None
        self._statuses: queue.SimpleQueue[JobStatus] = queue.SimpleQueue()
        self._problem = ""
        self._thread = threading.Thread(target=self._follow, name=f"kale_dist {tracker.word} {job.name}", daemon=True)

    def start(self) -> None:
        """Follow the job until it has ended."""
        inside(self._job).after_wait.append(self._finish)
        self._unsubscribe = self._job.subscribe(self._statuses.put)
        self._thread.start()

    def _finish(self) -> None:
        """After a wait for the job, in its caller's thread: let the tracker get all rows, and print its failure."""
        with contextlib.suppress(KaleDistError):
            if self._thread.is_alive() and (status := self._job.status).is_final:
                self._statuses.put(status)
                self._thread.join(_END_S)
                if self._thread.is_alive():
                    self._problem = f"it has not taken everything within {_END_S:.0f} s"
        problem, self._problem = self._problem, ""
        if problem:
            log(
                f"{self._tracker.word}: {problem}. The job is not affected; job.track({self._tracker.word!r}) continues"
            )

    def _follow(self) -> None:
        try:
            bookmark = self._bookmark
            tags = bookmark.tags or _tags(self._job)
            run = TrackedJob(name=self._job.name, ref=self._job.ref, params=bookmark.params, tags=tags)
            writer = self._tracker.open(run, bookmark.run_id)
            self._keep(run_id=writer.run_id, tags=tags)
            while True:
                status = self._newest()
                self._log(writer, status.metrics)
                self._log_history(writer, status.history)
                if status.is_final:
                    break
            self._end(writer, status.state)
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and the job must not notice
            self._problem = f"{type(error).__name__}: {error}".rstrip(". \n")
        finally:
            self._unsubscribe()

    def _newest(self) -> JobStatus:
        """Wait for a status, and return the latest one."""
        status = self._statuses.get()
        with contextlib.suppress(queue.Empty):
            while True:
                status = self._statuses.get_nowait()
        return status

    def _log(self, writer: Writer, rows: tuple[MetricRow, ...]) -> None:
        sent = self._bookmark.sent
        if sent > len(rows) or (self._last is not None and rows[sent - 1] != self._last):
            # After a restart from a checkpoint, rows of epochs that are repeated are no longer there.
            last = self._last
            sent = len(rows) if last is None else sum(row.time <= last.time for row in rows)
        if new := rows[sent:]:
            # A trainer may send its metrics to the same tracker itself.
            writer.log(tuple(row for row in new if self._tracker.word not in row.reported_to), sent)
            self._last = new[-1]
        self._keep(sent=len(rows))

    def _log_history(self, writer: Writer, history: tuple[Moment, ...]) -> None:
        for number, moment in enumerate(history[self._bookmark.moments :], self._bookmark.moments):
            if rows := tuple(moment.rows(step=round(moment.time - history[0].time))):
                writer.log(rows, number)
        self._keep(moments=len(history))

    def _end(self, writer: Writer, state: StateName) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model.pt"
            if self._tracker.model and state is StateName.SUCCEEDED and self._job.spec.kind == "training":
                import torch

                try:
                    torch.save(inside(self._job).model_state(), model)
                except ResultUnavailableError as error:
                    self._problem = f"it has not got the model: {error}"
            writer.end(state, model if model.exists() else None)

    def _keep(self, **changes: Any) -> None:
        bookmark = dataclasses.replace(self._bookmark, **changes)
        if bookmark != self._bookmark:
            self._bookmark = bookmark
            with fresh(_file(self._job, self._tracker)) as part:
                part.write_text(json.dumps(dataclasses.asdict(bookmark), default=str))


def _file(job: Job[Any], tracker: Tracker) -> pathlib.Path:
    return inside(job).files.folder / f"tracked-{tracker.word}.json"


def _tags(job: Job[Any]) -> dict[str, str]:
    torch = sys.modules.get("torch")
    tags = {
        "snapshot": job.spec.snapshot,
        "backend": job.ref.partition("://")[0],
        "processes": str(job.spec.topology.number_of_processes),
        "strategy": type(job.spec.strategy).__name__,
        "python": platform.python_version(),
        "torch": str(getattr(torch, "__version__", "")),
        # Not by an import, which would reach all that the package names.
        "kale_dist": sys.modules["kale_dist"].__version__,
    }
    commit = _git("rev-parse", "HEAD").decode(errors="replace").strip()
    if commit:
        tags["git_commit"] = commit
        if changes := _git("diff", "HEAD"):
            tags["git_diff_sha256"] = hashlib.sha256(changes).hexdigest()
    return tags


def _git(*arguments: str) -> bytes:
    """The output of a git command in the notebook's folder; empty without git or a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S).stdout
    return b""
