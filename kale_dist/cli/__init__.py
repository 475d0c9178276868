"""The command line: look after jobs from any terminal, and run whole notebooks.

Exit codes: 0; 1 if something failed; 2 for a mistake in the command; 130 after Ctrl-C; 141 if the reader of a pipe left. Those
of `launch` are the script's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist import __version__, backends, records, wording
from kale_dist.backends.base import Backend, JobRef
from kale_dist.cli import doctor, image_commands, job_commands, launch_command
from kale_dist.errors import ConfigError, JobNotFoundError, KaleDistError
from kale_dist.following.reader import JobReader
from kale_dist.records import Record
from kale_dist.status import JobStatus
from kale_dist.view import facts, plain

_FAILURE, _USAGE, _INTERRUPTED, _READER_LEFT = 1, 2, 130, 141
_NEWEST = 20
"""So many jobs are listed without `--all`."""

_ELSEWHERE = tuple(name for name in backends.NAMES if name != "local")
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words of the command line; None for those of the process.

    Returns:
        The exit code.
    """
    try:
        try:
            words, after = launch_command.split(sys.argv[1:] if arguments is None else arguments)
            parser = _parser()
            options, unknown = parser.parse_known_args(words)
            if unknown:
                launch_command.refuse(options, unknown)
                parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            options.arguments = after
            code: int = options.command(options)
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        return _complain(error, _USAGE)
    except KaleDistError as error:
        return _complain(error, _FAILURE)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more when it ends; without this it would report the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    return code


def _complain(error: KaleDistError, code: int) -> int:
    print(f"kale-dist: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kale-dist", description="Manage jobs, here and elsewhere, and execute notebooks."
    )
    parser.add_argument("--version", action="version", version=f"kale-dist {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
        made.set_defaults(command=globals()[f"_{name}"])
        return made

    def place(made: argparse.ArgumentParser, on: str, namespace: str, default: str | None = None) -> None:
        made.add_argument("--on", choices=backends.NAMES, default=default, help=on)
        made.add_argument("--namespace", metavar="NAME", help=namespace)

    listed = command("jobs", f"list the newest {_NEWEST} jobs, with what they take on the disk of this machine")
    place(
        listed,
        "ask there (default: this machine, for all jobs that it knows)",
        "of the cluster (the configured one); * for all",
    )
    listed.add_argument(
        "--labels", type=_pairs, metavar="NAME=VALUE,...", help="only jobs of a cluster with these labels"
    )
    listed.add_argument("--all", action="store_true", help="list all jobs")
    listed.add_argument("--json", action="store_true", help="as JSON")
    job_commands.add_commands(commands)
    delete = command("delete", "remove jobs, their logs, and the snapshots that no other job needs")
    delete.add_argument("refs", nargs="*", metavar="REF", help="a job's name or reference")
    delete.add_argument("--finished", action="store_true", help="all of your jobs that have ended")
    place(delete, "with --finished: where they ran (local)", "with --finished: only those of this namespace", "local")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    delete.add_argument("--json", action="store_true", help="print what was deleted as JSON; needs --yes")
    searched = command("sweeps", "list the sweeps of this machine, or show one")
    searched.add_argument("name", nargs="?", metavar="NAME", help="a sweep's name")
    searched.add_argument("--json", action="store_true", help="as JSON")
    examine = command("doctor", "check what jobs need")
    examine.add_argument("--json", action="store_true", help="as JSON")
    place(examine, "where jobs are to run (local)", "of the cluster (the configured one)", "local")
    examine.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig (its current one)")
    launch_command.add_command(commands)
    image_commands.add_command(commands)
    run = command("run", "execute a notebook, and show its jobs' logs and progress")
    run.add_argument("notebook", type=pathlib.Path, metavar="NOTEBOOK")
    out = "where the executed notebook goes (NAME.executed.ipynb)"
    run.add_argument("-o", "--output", type=pathlib.Path, metavar="OUT", help=out)
    value: dict[str, Any] = {
        "nargs": 2,
        "action": launch_command.NameAndValue,
        "default": {},
        "metavar": ("NAME", "VALUE"),
    }
    run.add_argument("-p", "--parameters", **value, help="a value for the cell tagged `parameters`")
    run.add_argument("--kernel", metavar="NAME", help="an installed kernel (the Python that runs this command)")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="how long a cell may take (no limit)")
    run.add_argument("--on", choices=backends.NAMES, help="where jobs run whose calls do not say so")
    run.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write a summary as JSON")
    run.add_argument("--in-cluster", action="store_true", help="run the notebook itself in a pod of the cluster")
    pod = run.add_argument_group("with --in-cluster")
    pod.add_argument("--image", help="the pod's image (the configured one)")
    packages = "installed on top of the image; may be given several times; auto for what executes notebooks and what it imports"
    pod.add_argument("--packages", action="append", default=[], metavar="REQUIREMENT", help=packages)
    pod.add_argument("--namespace", metavar="NAME", help="where the pod runs (the configured one)")
    pod.add_argument(
        "--pod", **value, help='another argument of kale_dist.Kubernetes, such as `resources \'{"memory": "8Gi"}\'`'
    )
    pod.add_argument("--keep", action="store_true", help="leave the pod's job and its log on the cluster")
    return parser


def _sweeps(options: argparse.Namespace) -> int:
    from kale_dist import sweeps
    from kale_dist.view.sweep import sentence

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
    """None if this machine has none."""
    is_now: bool
    """Whether this is how the job is now, and not how it was when this machine last saw it."""


def _name(job: _Listed) -> str:
    return job.status.ref.removeprefix("local://")


def _state(job: _Listed) -> str:
    if job.status.queue_position is not None:
        return f"{job.status.state.value}, {job.status.queue_position} in queue"
    percent = None if job.status.is_final else facts.percent(job.status)
    return job.status.state.value + ("" if percent is None else f" {percent} %")


def _ranks(job: _Listed) -> str:
    return str(job.record.spec.topology.number_of_processes if job.record else len(job.status.replicas) or "")


def _created(job: _Listed) -> str:
    created = job.record.created if job.record else job.status.created
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
    ("name", _name, False),
    ("state", _state, False),
    ("ranks", _ranks, True),
    ("created", _created, False),
    ("ran", _ran, True),
    ("size", _size, True),
)
"""Columns of `kale-dist jobs`: the title, what it shows of a job, and whether it is aligned to the right."""


def _jobs(options: argparse.Namespace) -> int:
    on = options.on or "local"
    limit = None if options.all else _NEWEST
    found, left_out = _look(on, options.namespace, options.labels, limit)
    elsewhere = [] if options.on else list(_last_seen())
    left_out += max(0, len(elsewhere) - _NEWEST) if limit else 0
    jobs = [_listed(status, is_now=True) for status in found]
    jobs += [_listed(status, is_now=False) for status in (elsewhere[-_NEWEST:] if limit else elsewhere)]
    if options.json:
        print(job_commands.to_json([_facts(job) for job in jobs]))
        return 0
    rows = [tuple(text(job) for _, text, _ in _COLUMNS) for job in jobs]
    right = frozenset(index for index, (_, _, is_right) in enumerate(_COLUMNS) if is_right)
    table = plain.table([title for title, _, _ in _COLUMNS], rows, right=right)
    parts = ["\n".join(table) if rows else "There are no jobs."]
    if left_out:
        parts.append(f"and {left_out:,} older. All: kale-dist jobs --all{f' --on {on}' if options.on else ''}")
    if options.on is None:
        asks = [name for name in _ELSEWHERE if any(status.ref.startswith(f"{name}://") for status in elsewhere)]
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


def _facts(job: _Listed) -> dict[str, Any]:
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


def _look(
    on: str, namespace: str | None, labels: Mapping[str, str] | None, limit: int | None = None
) -> tuple[list[JobStatus], int]:
    """How the newest jobs of a place are now, oldest first, and how many others there are."""
    backend = backends.get(on)
    known = list(backend.survey(namespace=namespace, labels=labels))
    statuses = known[-limit:] if limit else known
    return [_better(backend, status) for status in statuses], len(known) - len(statuses)


def _better(backend: Backend, status: JobStatus) -> JobStatus:
    """The status of the user's own job with what only this machine knows: its progress, and whether it was cancelled."""
    ref = JobRef.parse(status.ref)
    if _is_mine(ref):
        with contextlib.suppress(JobNotFoundError):
            seen = backend.status(ref) if not status.is_final else _seen(ref)
            return seen if seen.is_final or not status.is_final else status
    return status


def _seen(ref: JobRef) -> JobStatus:
    """A job as this machine last saw it, without a request."""
    return JobReader(ref.record_name, lambda _: True).status()


def _last_seen() -> Iterator[JobStatus]:
    """Jobs elsewhere that this machine has records of."""
    for backend in _ELSEWHERE:
        for ref in map(JobRef.parse, records.refs(backend)):
            with contextlib.suppress(JobNotFoundError):
                yield _seen(ref)


# -- the other commands ----------------------------------------------------------------------------------------------


def _delete(options: argparse.Namespace) -> int:
    if not options.refs and not options.finished:
        raise ConfigError("REF", "no job is named", "Name one or more, or pass --finished")
    if options.namespace and not (options.finished and options.on == "kubernetes"):
        raise ConfigError("--namespace", "it selects finished jobs of a cluster", "Add --finished --on kubernetes")
    # All are looked up first: a mistyped name deletes nothing.
    found = [(text, *job_commands.find(text)) for text in options.refs]
    for text, _, ref in found:
        if not _is_mine(ref) and text != str(ref):
            remedy = f"To delete it all the same, write its full reference: kale-dist delete {ref}"
            raise ConfigError("REF", f"{text} belongs to another user", remedy)
    chosen = {ref: backend for _, backend, ref in found}
    if options.finished:
        chosen |= dict.fromkeys(_finished(options.on, options.namespace), backends.get(options.on))
    if options.json and not options.yes:
        raise ConfigError("--json", "nothing can be asked then", "Add --yes")
    if not chosen:
        print("[]" if options.json else "None of your jobs has ended.")
        return 0
    if not options.json and not _agreed(chosen, yes=options.yes):
        print("Nothing was deleted.")
        return _FAILURE
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


def _is_mine(ref: JobRef) -> bool:
    """Whether this user holds the job's key: names, uids and accounts of a cluster may be shared."""
    return records.read_key(ref.record_name) is not None


def _agreed(chosen: Iterable[JobRef], *, yes: bool) -> bool:
    """Show what would be deleted, and ask.

    Raises:
        ConfigError: There is no terminal at which to ask.
    """
    count = 0
    for ref in chosen:
        print(f"{ref}{'' if _is_mine(ref) else '  (of another user)'}")
        count += 1
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes", "nothing was deleted: there is no terminal to ask at", "Add --yes to delete these jobs"
        )
    answer = input(f"Delete {count} job{'s' if count > 1 else ''}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _finished(on: str, namespace: str | None) -> list[JobRef]:
    """This user's jobs that have ended."""
    backend = backends.get(on)
    mine = [ref for ref in map(JobRef.parse, records.refs(on)) if _is_mine(ref)]
    if namespace:
        mine = [ref for ref in mine if ref.name.startswith(f"{namespace}/")]
    # The place's own word for those that ended unseen.
    surveyed = {status.ref for status in backend.survey(namespace=namespace) if status.is_final}
    return [ref for ref in mine if str(ref) in surveyed or _has_ended(ref)]


def _has_ended(ref: JobRef) -> bool:
    try:
        return _seen(ref).is_final
    except JobNotFoundError:
        return False


def _doctor(options: argparse.Namespace) -> int:
    if options.on != "kubernetes" and (options.namespace or options.context):
        raise ConfigError("--namespace", "only a cluster has namespaces and contexts", "Add --on kubernetes")
    found = doctor.examine(options.on, namespace=options.namespace or "", context=options.context)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{check.verdict:<7}  {check.name:<{width}}  {check.sentence}")
            if check.remedy:
                first, *more = check.remedy.splitlines()
                print(f"{'':7}  {'':{width}}  -> {first}")
                # A Role can be copied from here.
                print("".join(f"{line}\n" for line in more), end="")
    return _FAILURE if any(check.verdict is doctor.Verdict.FAILED for check in found) else 0


def _run(options: argparse.Namespace) -> int:
    with wording.needing("notebook", "run", "to run a notebook"):
        from kale_dist.notebook_runner import documents, execution, in_cluster
    pod = {name: wording.parse(value) for name, value in options.pod.items()}
    pod |= {name: getattr(options, name) for name in ("image", "packages", "namespace") if getattr(options, name)}
    if options.in_cluster:
        if options.kernel:
            raise ConfigError("--kernel", "the notebook runs with the Python of the pod's image", "Leave it out")
        run_notebook = functools.partial(in_cluster.run_notebook, pod=pod, keep=options.keep)
    elif pod or options.keep:
        raise ConfigError("run", "there is no pod to be set up", "Add --in-cluster, or leave out the pod's options")
    else:
        run_notebook = functools.partial(execution.run_notebook, kernel=options.kernel)
    if options.json is not None:
        documents.check_target("--json", options.json, options.notebook)
    with launch_command.interrupted_by_sigterm():
        result = run_notebook(
            options.notebook,
            parameters={name: wording.parse(value) for name, value in options.parameters.items()},
            output=options.output,
            timeout_s=options.timeout,
            on=options.on,
        )
    if options.json is not None:
        summary = {"notebook": str(options.notebook), **result.to_json()}
        documents.write(options.json, json.dumps(summary, indent=2).encode())
    if result.failure:
        print(f"{options.notebook}, {result.failure}", file=sys.stderr)
    print(f"Executed notebook: {result.output}", file=sys.stderr if result.failure else sys.stdout)
    if result.interrupted:
        return _INTERRUPTED
    return _FAILURE if result.failure else 0
