"""Commands for many jobs: `kale-dist jobs`, `delete`, `sweeps`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from kale_dist import places
from kale_dist.cli import job_commands
from kale_dist.cli.arguments import Commands, add_parser, add_place
from kale_dist.errors import ConfigError, JobNotFoundError
from kale_dist.job import records
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Record
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts, plain

_NEWEST = 20
"""How many jobs are listed without `--all`."""

_ELSEWHERE = tuple(name for name in places.NAMES if name != "local")
_MIB = 1 << 20


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    what = f"list the newest {_NEWEST} jobs, with what they take on the disk of this machine"
    listed = add_parser(commands, "jobs", what, _jobs)
    add_place(
        listed,
        "ask there (default: this machine, for all jobs that it knows)",
        "of the cluster (the configured one); * for all",
    )
    listed.add_argument(
        "--labels", type=_pairs, metavar="NAME=VALUE,...", help="only jobs of a cluster with these labels"
    )
    listed.add_argument("--all", action="store_true", help="list all jobs")
    listed.add_argument("--json", action="store_true", help="as JSON")
    what = "remove jobs, their logs, and the snapshots that no other job needs"
    delete = add_parser(commands, "delete", what, _delete)
    delete.add_argument("refs", nargs="*", metavar="REF", help="a job's name or reference")
    delete.add_argument("--finished", action="store_true", help="all of your jobs that have ended")
    add_place(
        delete, "with --finished: where they ran (local)", "with --finished: only those of this namespace", "local"
    )
    delete.add_argument("--yes", action="store_true", help="do not ask")
    delete.add_argument("--json", action="store_true", help="print what was deleted as JSON; needs --yes")
    searched = add_parser(commands, "sweeps", "list the sweeps of this machine, or show one", _sweeps)
    searched.add_argument("name", nargs="?", metavar="NAME", help="a sweep's name")
    searched.add_argument("--json", action="store_true", help="as JSON")


def _sweeps(options: argparse.Namespace) -> int:
    from kale_dist import sweeps
    from kale_dist.job.view.sweep import sentence

    if options.name:
        picture = sweeps.read(options.name)
        print(job_commands.to_json(picture) if options.json else picture)
        return 0
    pictures = [sweeps.read(name) for name in sweeps.sweeps()]
    if options.json:
        print(job_commands.to_json([dataclasses.asdict(picture) for picture in pictures]))
        return 0
    rows = [(one.name, "ended" if one.is_over else "runs", sentence(one)) for one in pictures]
    print("\n".join(plain.table(("sweep", "state", "trials"), rows)) if rows else "There are no sweeps.")
    return 0


def _pairs(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(separator for _, separator, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE,NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


# -- the list of jobs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """A job in the list."""

    status: JobStatus
    record: Record | None
    """The job's record; None if this machine has none."""
    is_now: bool
    """Whether the status is current; False if it is the last one that this machine saw."""


def _state(job: _Listed) -> str:
    if job.status.queue_position is not None:
        return f"{job.status.state.value}, {job.status.queue_position} in queue"
    percent = None if job.status.is_final else facts.percent(job.status)
    return facts.state(job.status) + ("" if percent is None else f" {percent} %")


def _ranks(job: _Listed) -> str:
    return str(job.record.spec.topology.number_of_processes if job.record else len(job.status.replicas) or "")


def _created_at(job: _Listed) -> float | None:
    return job.record.created if job.record else job.status.created


def _created(job: _Listed) -> str:
    created = _created_at(job)
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if created is not None else ""


def _ran(job: _Listed) -> str:
    elapsed = facts.elapsed_s(job.status, time.time()) if job.is_now or job.status.is_final else None
    return facts.duration(elapsed) if elapsed is not None else ""


def _size(job: _Listed) -> str:
    if job.record is None:
        return ""
    size = job.record.spec.snapshot_bytes
    for path in records.files(job.record.name).folder.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.lstat().st_size
    return f"{size / _MIB:,.1f} MiB"


_COLUMNS: tuple[tuple[str, Callable[[_Listed], str], bool], ...] = (
    ("name", lambda job: job.status.ref.removeprefix("local://"), False),
    ("state", _state, False),
    ("ranks", _ranks, True),
    ("created", _created, False),
    ("ran", _ran, True),
    ("size", _size, True),
)
"""Columns of `kale-dist jobs`: the title, what it shows of a job, and whether it is aligned to the right."""


def _jobs(options: argparse.Namespace) -> int:
    backend = places.get(options.on or "local")
    known = [
        _listed(status, is_now=True) for status in backend.survey(namespace=options.namespace, labels=options.labels)
    ]
    if options.on is None:
        known += [_listed(status, is_now=False) for status in elsewhere()]
    known.sort(key=lambda job: _created_at(job) or 0.0)
    left_out = 0 if options.all else max(0, len(known) - _NEWEST)
    jobs = [_better(backend, job) for job in known[left_out:]]
    if options.json:
        print(job_commands.to_json([_listed_facts(job) for job in jobs]))
        return 0
    rows = [tuple(text(job) for _, text, _ in _COLUMNS) for job in jobs]
    right = frozenset(index for index, (_, _, is_right) in enumerate(_COLUMNS) if is_right)
    table = plain.table([title for title, _, _ in _COLUMNS], rows, right=right)
    parts = ["\n".join(table) if rows else "There are no jobs."]
    if left_out:
        parts.append(f"and {left_out:,} older. All: kale-dist jobs --all{f' --on {options.on}' if options.on else ''}")
    if options.on is None:
        asks = [name for name in _ELSEWHERE if any(job.status.ref.startswith(f"{name}://") for job in known)]
        text = " or ".join(f"kale-dist jobs --on {name}" for name in asks or _ELSEWHERE)
        parts.append(
            f"Jobs elsewhere are listed as this machine last saw them. As they are now: {text}"
            if asks
            else f"Only this machine was asked. Elsewhere: {text}"
        )
    if rows:
        folder = str(records.blobs_dir()).replace(os.path.expanduser("~"), "~", 1)  # noqa: PTH111 - pathlib raises for a user without a home
        parts.append(f"Snapshots, shared by jobs: {records.blobs_size() / _MIB:,.1f} MiB in {folder}")
    print("\n\n".join(parts))
    return 0


def _listed_facts(job: _Listed) -> dict[str, Any]:
    """A job of the list for JSON."""
    status = job.status
    times = {name: getattr(status, name) for name in ("created", "started", "ended")}
    if job.record is not None:
        times["created"] = job.record.created
    return {**job_commands.ended(status), **times, "number_of_processes": len(status.replicas), "is_now": job.is_now}


def _listed(status: JobStatus, *, is_now: bool) -> _Listed:
    record = None
    with contextlib.suppress(JobNotFoundError):
        record = records.read(JobRef.parse(status.ref).record_name)
    return _Listed(status=status, record=record, is_now=is_now)


def _better(backend: Backend, job: _Listed) -> _Listed:
    """For the user's own jobs of the place that was asked, with what only this machine knows: progress, and a cancellation."""
    status, ref = job.status, JobRef.parse(job.status.ref)
    if job.is_now and is_mine(ref):
        with contextlib.suppress(JobNotFoundError):
            seen = backend.status(ref) if not status.is_final else _seen(ref)
            return dataclasses.replace(job, status=seen) if seen.is_final or not status.is_final else job
    return job


def _seen(ref: JobRef) -> JobStatus:
    """The status of a job as this machine last saw it, without a request to its place."""
    return JobReader(ref.record_name, lambda _: True).status()


def elsewhere() -> Iterator[JobStatus]:
    """The last seen status of each job that ran elsewhere and has a record on this machine."""
    for backend in _ELSEWHERE:
        for ref in map(JobRef.parse, records.refs(backend)):
            with contextlib.suppress(JobNotFoundError):
                yield _seen(ref)


# -- delete -----------------------------------------------------------------------------------------------------------


def _delete(options: argparse.Namespace) -> int:
    if not options.refs and not options.finished:
        raise ConfigError("REF", "no job is named", "Name one or more, or pass --finished")
    if options.namespace and not (options.finished and options.on == "kubernetes"):
        raise ConfigError("--namespace", "it selects finished jobs of a cluster", "Add --finished --on kubernetes")
    # All jobs are looked up first, so that a mistyped name deletes nothing.
    found = [(text, *job_commands.find_job(text)) for text in options.refs]
    for text, _, ref in found:
        if not is_mine(ref) and text != str(ref):
            remedy = f"To delete it all the same, write its full reference: kale-dist delete {ref}"
            raise ConfigError("REF", f"{text} belongs to another user", remedy)
    chosen = {ref: backend for _, backend, ref in found}
    if options.finished:
        chosen |= dict.fromkeys(_finished(options.on, options.namespace), places.get(options.on))
    if options.json and not options.yes:
        raise ConfigError("--json", "nothing can be asked then", "Add --yes")
    if not chosen:
        print("[]" if options.json else "None of your jobs has ended.")
        return 0
    if not options.json and not _agreed(chosen, yes=options.yes):
        print("Nothing was deleted.")
        return 1
    deleted = []
    for ref, backend in chosen.items():
        with contextlib.suppress(JobNotFoundError):
            backend.delete(ref)
            deleted.append(str(ref))
            if not options.json:
                print(f"{ref} deleted")
    if options.json:
        print(json.dumps(deleted))
    return 0


def is_mine(ref: JobRef) -> bool:
    """Whether this user holds the job's key; names, uids and cluster accounts may be shared."""
    return records.read_key(ref.record_name) is not None


def _agreed(chosen: Collection[JobRef], *, yes: bool) -> bool:
    """List the jobs to delete, and ask the user to confirm.

    Raises:
        ConfigError: There is no terminal to ask at.
    """
    for ref in chosen:
        print(f"{ref}{'' if is_mine(ref) else '  (of another user)'}")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes", "nothing was deleted: there is no terminal to ask at", "Add --yes to delete these jobs"
        )
    answer = input(f"Delete {len(chosen)} job{'s' if len(chosen) > 1 else ''}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _finished(on: str, namespace: str | None) -> list[JobRef]:
    """This user's jobs in a place that have ended."""
    backend = places.get(on)
    mine = [ref for ref in map(JobRef.parse, records.refs(on)) if is_mine(ref)]
    if namespace:
        mine = [ref for ref in mine if ref.name.startswith(f"{namespace}/")]
    # The place knows of jobs that ended while no process of this machine followed them.
    surveyed = {status.ref for status in backend.survey(namespace=namespace) if status.is_final}
    return [ref for ref in mine if str(ref) in surveyed or _has_ended(ref)]


def _has_ended(ref: JobRef) -> bool:
    try:
        return _seen(ref).is_final
    except JobNotFoundError:
        return False
