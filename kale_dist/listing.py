"""Jobs as a table for people: of one backend, as it knows them now; of all others, as this machine last saw them."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator, Sequence

from kale_dist import backends, records
from kale_dist.backends.base import Adopts, JobRef, Selects
from kale_dist.following.reader import JobReader
from kale_dist.errors import ConfigError, JobNotFoundError
from kale_dist.status import JobStatus
from kale_dist.view import facts, plain

_MIB = 1 << 20
_ELSEWHERE = tuple(name for name in backends.NAMES if name != "local")


def text(on: str | None, namespace: str | None, ask: str) -> str:
    """The table, and below it what it does not show.

    Args:
        on: The backend to ask; None for this machine's own jobs, and for those elsewhere that it has records of: nothing
            but this machine is asked.
        namespace: Of the cluster; None for the configured one.
        ask: How a backend is asked, up to the backend's name, such as `kale-dist jobs --on`.

    Raises:
        ConfigError: A namespace is named of what has none.
        BackendError: The backend cannot be asked.
    """
    found = list(_asked(on or "local", namespace))
    elsewhere = [] if on else list(last_seen())
    rows = []
    for ref, status in (*found, *elsewhere):
        # Another process may delete a job between the list and the look.
        with contextlib.suppress(JobNotFoundError):
            rows.append(_row(ref, status, asked=on is not None or ref.backend == "local"))
    parts = []
    if rows:
        header = ("name", "state", "ranks", "created", "ran", "size")
        parts.append("\n".join(plain.table(header, rows, right=frozenset((2, 4, 5)))))
    else:
        parts.append("There are no jobs.")
    if on is None:
        parts.append(hint(elsewhere, ask))
    if rows:
        blobs = records.blobs_size()
        parts.append(f"Snapshots, shared by jobs: {blobs / _MIB:,.1f} MiB in {records.blobs_dir()}")
    return "\n\n".join(parts)


def last_seen() -> Iterator[tuple[JobRef, JobStatus]]:
    """Jobs elsewhere that this machine has records of, with what it knows of them; asks nobody."""
    for backend in _ELSEWHERE:
        for ref in map(JobRef.parse, records.refs(backend)):
            with contextlib.suppress(JobNotFoundError):
                yield ref, JobReader(ref.record_name, lambda _: True).status()


def hint(elsewhere: Sequence[tuple[JobRef, JobStatus]], ask: str) -> str:
    """How to ask for what is not shown.

    Args:
        elsewhere: Jobs of `last_seen`.
        ask: As for `text`.
    """
    names = [name for name in _ELSEWHERE if any(ref.backend == name for ref, _ in elsewhere)]
    if not names:
        return f"Only this machine was asked. Elsewhere: {' or '.join(f'{ask} {name}' for name in _ELSEWHERE)}"
    asks = " or ".join(f"{ask} {name}" for name in names)
    return f"Jobs elsewhere are listed as this machine last saw them. As they are now: {asks}"


def _asked(on: str, namespace: str | None) -> Iterator[tuple[JobRef, JobStatus]]:
    backend = backends.get(on)
    if isinstance(backend, Selects):
        chosen = backend.select(namespace=namespace, labels=None)
    elif namespace:
        raise ConfigError("--namespace", f"{on!r} has none", "Add --on kubernetes")
    else:
        chosen = backend.list()
    for ref in chosen:
        with contextlib.suppress(JobNotFoundError):
            if isinstance(backend, Adopts):
                backend.adopt(ref, trust=False)
            yield ref, backend.status(ref)


def _row(ref: JobRef, status: JobStatus, *, asked: bool) -> tuple[str, ...]:
    record = records.read(ref.record_name)
    percent = facts.percent(status)
    done = f" {percent} %" if percent is not None and not status.is_final else ""
    # How long a job has been running nobody knows who has not asked.
    elapsed = facts.elapsed_s(status, time.time()) if asked or status.is_final else None
    size = _folder_size(records.files(ref.record_name).folder) + record.spec.snapshot_bytes
    return (
        ref.name if ref.backend == "local" else str(ref),
        f"{status.state.value}{done}",
        str(record.spec.topology.number_of_processes),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created)),
        facts.duration(elapsed) if elapsed is not None else "",
        f"{size / _MIB:,.1f} MiB",
    )


def _folder_size(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
