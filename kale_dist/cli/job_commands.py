"""Commands for one job: `kale-dist status`, `logs`, `events`, `fetch`, `debug`, `cancel`, `retry`, `render`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from kale_dist.calls import verbs
from kale_dist.cli import launch_command
from kale_dist.cli.arguments import Commands, add_parser
from kale_dist.errors import BackendError, ConfigError
from kale_dist.job import job_watch, records, view
from kale_dist.job.backend import Backend, JobRef
from kale_dist.job.handle import Job, check_lines
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts, plain
from kale_dist.wire import LogLine, visible


def add_commands(commands: Commands) -> None:
    """Add the commands."""

    def command(name: str, what: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = add_parser(commands, name, what, run)
        made.add_argument("ref", metavar="REF", help="a job's name or reference")
        made.add_argument("--json", action="store_true", help="as JSON")
        return made

    command("status", "show a job's status", _status)
    logs = command("logs", "print a job's log, with the rank before each line", _logs)
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing until the job has ended")
    logs.add_argument("--ranks", type=_counts, metavar="N,...", help="only the lines of these ranks")
    logs.add_argument("--tail", type=_count, metavar="N", help="only the last N lines")
    logs.add_argument("--raw", action="store_true", help="with control characters, which can do much to a terminal")
    command("events", "print the cluster's events of a job and its pods", _events)
    fetch = command("fetch", "write the trained weights to a file, or what a function returned", _fetch)
    fetch.add_argument(
        "-o", "--output", metavar="FILE", help="where to (model.pt, or result.pt for a function's value)"
    )
    fetch.add_argument("--value", action="store_true", help="what a function returned, also where it got a model")
    fetch.add_argument("--partial", action="store_true", help="the last checkpoint, also of a job that runs or failed")
    fetch.add_argument("--force", action="store_true", help="replace a file that exists")
    debug = command("debug", "debug ranks that wait in breakpoint(), with pdb", _debug)
    debug.add_argument("--rank", type=_count, metavar="N", help="only this rank (all that wait, one after the other)")
    cancel = command("cancel", "end a job; a training writes one more checkpoint first", _cancel)
    cancel.add_argument("--no-save", action="store_true", help="end it at once, without that checkpoint")
    retry = command("retry", "submit the same call again, as a new job, and show its output", _retry)
    retry.add_argument(
        "--resume", action="store_true", help="a training from its last checkpoint, not from the beginning"
    )
    retry.add_argument("--detach", action="store_true", help="print the new job's reference and return")
    command("render", "show what was submitted", _render)


def find_job(text: str) -> tuple[Backend, JobRef]:
    """Find the backend and the full reference of an existing job.

    Raises:
        ConfigError: The text is not a reference.
        JobNotFoundError: There is no such job.
    """
    ref = JobRef.parse(text)
    backend = verbs.named_backend("REF", ref.backend)
    ref = backend.adopt(ref, trust=None)
    backend.status(ref)
    return backend, ref


def to_json(value: Any) -> str:
    """A status, or parts of one, as JSON text."""
    plain_value = (
        dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    )
    return json.dumps(plain_value, indent=2, default=str)


def ended(status: JobStatus) -> dict[str, Any]:
    """The main fields of a job's status, for JSON."""
    return {
        "ref": status.ref, "state": status.state, "reason": status.reason, "queue_position": status.queue_position
    }  # fmt: skip


def _status(options: argparse.Namespace) -> int:
    backend, ref = find_job(options.ref)
    status = backend.status(ref)
    if options.json:
        print(to_json(status))
    else:
        print(view.text(status, list(backend.logs(ref, tail=view.LOG_LINES)), time.time()))
    return 0


def _logs(options: argparse.Namespace) -> int:
    backend, ref = find_job(options.ref)
    ranks = check_lines(options.ranks, options.tail, len(backend.status(ref).replicas))
    with job_watch.Reasons(backend, ref).printed() if options.follow else contextlib.nullcontext():
        lines = backend.logs(ref, follow=options.follow, ranks=ranks, tail=options.tail)
        _print_lines(lines, as_json=options.json, is_raw=options.raw)
    return 0


def _print_lines(lines: Iterator[LogLine], *, as_json: bool, is_raw: bool) -> None:
    for line in lines:
        if as_json:
            # One object a line, so that a program can read while the job runs.
            text = json.dumps(
                {"rank": line.rank, "stream": line.stream.name.lower(), "time": line.time, "text": line.text}
            )
        else:
            text = f"{line.prefix} {line.text}" if is_raw else visible(str(line))
        print(text, flush=True)


def _events(options: argparse.Namespace) -> int:
    found = _job(options.ref).events()
    if options.json:
        print(to_json([dataclasses.asdict(event) for event in found]))
        return 0
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            "warning" if event.is_warning else "",
            *map(visible, (event.about, event.reason, event.message)),
        )
        for event in found
    ]
    table = plain.table(["time", "", "object", "reason", "message"], rows)
    print(
        "\n".join(table)
        if rows
        else "There are no events: a cluster keeps them for an hour, and no other place has any."
    )
    return 0


def _fetch(options: argparse.Namespace) -> int:
    job = _job(options.ref)
    if not options.partial and not job.done() and all(one.state.has_ended for one in job.status.replicas):
        # Its results are on their way.
        job.wait()
    if not options.partial and not job.done():
        remedy = "Wait for its end, or take its last checkpoint with --partial"
        raise BackendError(f"{job.ref} has not ended yet. {remedy}", retryable=True)
    path = job.save(options.output, partial=options.partial, value=options.value, replace=options.force)
    size = sum(one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file())
    print(json.dumps({"ref": job.ref, "file": str(path), "bytes": size}) if options.json else path)
    return 0


def _debug(options: argparse.Namespace) -> int:
    _job(options.ref).debug(options.rank)
    return 0


def _cancel(options: argparse.Namespace) -> int:
    backend, ref = find_job(options.ref)
    backend.cancel(ref, save=not options.no_save)
    limit_s = records.read(ref.record_name).spec.policy.end_s
    deadline = time.monotonic() + limit_s
    while not (status := backend.status(ref)).is_final:
        if time.monotonic() > deadline:
            problem = f"{ref} has not ended within {limit_s:.0f} s of its cancellation"
            raise BackendError(problem, retryable=True)
        time.sleep(0.05)
    print(json.dumps(ended(status)) if options.json else f"{ref}: {facts.sentence(status, None)}")
    return 0


def _retry(options: argparse.Namespace) -> int:
    first = _job(options.ref)
    if options.detach and first.ref.startswith("local://") and not first.spec.policy.detach:
        problem = "a job on this machine ends with this command"
        raise ConfigError("--detach", problem, "Leave it out, or make the call again with detach=True")
    with launch_command.interrupted_by_sigterm() as caught:
        job = first.retry(resume=options.resume)
        if options.detach:
            return launch_command.print_reference(job, as_json=options.json)
        return launch_command.follow(job, caught, as_json=options.json, has_value=False)


def _render(options: argparse.Namespace) -> int:
    backend, ref = find_job(options.ref)
    plan = backend.plan(records.read(ref.record_name).spec)
    print(to_json(plan.spec.to_json()) if options.json else plan.text, end="\n" if options.json else "")
    return 0


def _job(text: str) -> Job[Any]:
    _, ref = find_job(text)
    return verbs.attach(str(ref))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]
