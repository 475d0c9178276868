"""The command line: look after jobs from any terminal, and run whole notebooks.

Exit codes: 0; 1 if something failed; 2 for a mistake in the command; 130 after Ctrl-C; 141 if the reader of a pipe left.
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
from collections.abc import Iterator, Sequence
from typing import Any

from kale_dist import __version__, backends, checks, doctor, image_cli, listing, records, view
from kale_dist.backends.base import Adopts, Backend, JobRef
from kale_dist.contract import LogLine
from kale_dist.errors import BackendError, ConfigError, JobNotFoundError, KaleDistError
from kale_dist.view import facts, plain
from kale_dist.wording import closest

_FAILURE, _USAGE, _INTERRUPTED, _READER_LEFT = 1, 2, 130, 141
_LOOK_S = 5.0
_CANCEL_WAIT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words of the command line; None for those of the process.

    Returns:
        The exit code.
    """
    try:
        try:
            options = _parser().parse_args(arguments)
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
        prog="kale-dist", description="Look after jobs, here and elsewhere, and execute notebooks."
    )
    parser.add_argument("--version", action="version", version=f"kale-dist {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
        made.set_defaults(command=globals()[f"_{name}"])
        return made

    listed = command("jobs", "list all jobs, with what they take on the disk of this machine")
    listed.add_argument("--on", choices=backends.NAMES, help="ask there (this machine, for all that it knows of)")
    listed.add_argument("--namespace", metavar="NAME", help="of the cluster (the configured one); * for all")
    status = command("status", "show how a job is")
    logs = command("logs", "print a job's log, each line behind its rank")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    logs.add_argument("--rank", type=_count, metavar="N", help="only this rank's lines")
    logs.add_argument("--tail", type=_count, metavar="N", help="only the last N lines")
    cancel = command("cancel", "end a job")
    render = command("render", "show what was submitted")
    delete = command("delete", "remove jobs, their logs, and the snapshots that no other job needs")
    delete.add_argument("refs", nargs="*", metavar="REF", help="a job's name or reference")
    delete.add_argument("--finished", action="store_true", help="all of this user's jobs that have ended")
    delete.add_argument("--on", choices=backends.NAMES, default="local", help="where those ran (local)")
    for made in (status, logs, cancel, render):
        made.add_argument("ref", metavar="REF", help="a job's name or reference")
    examine = command("doctor", "check what jobs need")
    examine.add_argument("--json", action="store_true", help="as JSON")
    examine.add_argument("--on", choices=backends.NAMES, default="local", help="where jobs are to run (local)")
    examine.add_argument("--namespace", default="", metavar="NAME", help="of the cluster (the configured one)")
    examine.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig (its current one)")
    image_cli.add_command(commands)
    run = command("run", "execute a notebook, and show its jobs' logs and progress")
    run.add_argument("notebook", type=pathlib.Path, metavar="NOTEBOOK")
    run.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        metavar="OUT",
        help="where the executed notebook goes (NAME.executed.ipynb)",
    )
    run.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action=_Parameter,
        default=[],
        metavar=("NAME", "VALUE"),
        help="a value for the cell tagged `parameters`",
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of every call, such as epochs=1"
    )
    run.add_argument("--on", choices=backends.NAMES, help="where its jobs run, whatever its calls say")
    run.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write a summary as JSON")
    run.add_argument("--junit", type=pathlib.Path, metavar="FILE", help="write a summary as JUnit's XML")
    run.add_argument("--in-cluster", action="store_true", help="run the notebook itself in a pod of the cluster")
    pod = run.add_argument_group("with --in-cluster")
    pod.add_argument("--image", help="the pod's image (the configured one)")
    pod.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="put on top of the image; may be given several times; auto for what executes the notebook and what it imports",
    )
    pod.add_argument("--namespace", metavar="NAME", help="where the pod runs (the configured one)")
    pod.add_argument("--service-account", metavar="NAME", help="of the pod, to start jobs from there")
    pod.add_argument(
        "--pod",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the call that makes the pod, such as resources={'memory_gib': 8}",
    )
    pod.add_argument("--keep", action="store_true", help="leave the pod's job and its log on the cluster")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _find(text: str) -> tuple[Backend, JobRef]:
    """The job of a reference, known to exist."""
    ref = JobRef.parse(text)
    if ref.backend not in backends.NAMES:
        near = closest(ref.backend, backends.NAMES)
        raise ConfigError("REF", f"there is no backend {ref.backend!r}", f"{near}Write it as 'local://name'")
    backend = backends.get(ref.backend)
    if isinstance(backend, Adopts):
        ref = backend.adopt(ref, trust=False)
    backend.status(ref)
    return backend, ref


# -- the commands ----------------------------------------------------------------------------------------------------


def _jobs(options: argparse.Namespace) -> int:
    print(listing.text(options.on, options.namespace, "kale-dist jobs --on"))
    return 0


def _status(options: argparse.Namespace) -> int:
    backend, ref = _find(options.ref)
    status = backend.status(ref)
    print(view.text(status, list(backend.logs(ref, tail=view.LOG_LINES)), time.time()))
    return 0


def _logs(options: argparse.Namespace) -> int:
    backend, ref = _find(options.ref)
    ranks = checks.check_lines(options.rank, options.tail, len(backend.status(ref).replicas))
    _print_lines(backend.logs(ref, follow=options.follow, ranks=ranks, tail=options.tail))
    return 0


def _cancel(options: argparse.Namespace) -> int:
    backend, ref = _find(options.ref)
    backend.cancel(ref)
    deadline = time.monotonic() + _CANCEL_WAIT_S
    while not (status := backend.status(ref)).is_final:
        if time.monotonic() > deadline:
            raise BackendError(f"{ref} has not ended within {_CANCEL_WAIT_S:.0f} s of its cancellation", retryable=True)
        time.sleep(0.05)
    print(f"{ref}: {facts.sentence(status, None)}")
    return 0


def _render(options: argparse.Namespace) -> int:
    backend, ref = _find(options.ref)
    print(backend.plan(records.read(ref.record_name).spec).text, end="")
    return 0


def _delete(options: argparse.Namespace) -> int:
    if not options.refs and not options.finished:
        raise ConfigError("REF", "no job is named", "Name one or more, or pass --finished")
    # All are looked up first: a mistyped name deletes nothing.
    found = [_find(text) for text in options.refs]
    if options.finished:
        found += _finished(options.on)
    for backend, ref in {ref: (backend, ref) for backend, ref in found}.values():
        with contextlib.suppress(JobNotFoundError):
            backend.delete(ref)
            print(f"{ref} deleted")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    if options.on == "kubernetes":
        found = doctor.examine_cluster(options.namespace, options.context)
    elif options.namespace or options.context:
        raise ConfigError("--namespace", "only a cluster has namespaces and contexts", "Add --on kubernetes")
    elif options.on == "docker":
        found = doctor.examine_docker()
    else:
        found = doctor.examine()
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
    try:
        from kale_dist.notebook import execution, parameters, summary
        from kale_dist.notebook.terminal import Terminal
    except ImportError as error:
        missing = f"{error.name} is not installed"
        raise ConfigError("run", missing, "Install what it needs: pip install 'kale-dist[notebook]'") from error
    arguments = dict(_assignment(text) for text in options.set)
    if options.on is not None:
        arguments["on"] = options.on
    for option, file in (("--json", options.json), ("--junit", options.junit)):
        if file is not None:
            summary.check(option, file)
    run_notebook = execution.run_notebook
    if options.in_cluster:
        from kale_dist import in_cluster

        run_notebook = functools.partial(in_cluster.run_notebook, pod=_pod(options), keep=options.keep)
    elif _pod(options) or options.keep:
        others = "set the jobs' own with --set image=..." if options.image else "leave out the pod's options"
        raise ConfigError("run", "there is no pod to be set up", f"Add --in-cluster, or {others}")
    result = run_notebook(
        options.notebook,
        parameters={name: parameters.parse(value) for name, value in options.parameter},
        arguments=arguments,
        output=options.output,
        terminal=Terminal(sys.stdout),
    )
    for file, write in ((options.json, summary.as_json), (options.junit, summary.as_junit)):
        if file is not None:
            file.write_text(write(result, str(options.notebook)))
    if result.failure:
        print(f"{options.notebook}, {result.failure}", file=sys.stderr)
    print(f"Executed notebook: {result.output}", file=sys.stderr if result.failure else sys.stdout)
    if result.interrupted:
        return _INTERRUPTED
    return _FAILURE if result.failure else 0


class _Parameter(argparse.Action):
    """A name and its value. Written as `--set` wants it, the next word would be taken for the value."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
        if "=" in values[0]:
            raise argparse.ArgumentError(self, f"{values[0]!r} is no name. Write it as NAME VALUE, with a blank")
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values])


def _pod(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the call that makes the notebook's own pod; empty if nothing is said about it."""
    pod = dict(_assignment(text, "--pod", "resources={'memory_gib': 8}") for text in options.pod)
    said = {"namespace": options.namespace, "service_account": options.service_account}
    pod |= {name: value for name, value in said.items() if value}
    if options.image:
        pod["image"] = options.image
    if options.package:
        pod["packages"] = options.package
    return pod


def _assignment(text: str, option: str = "--set", example: str = "epochs=1") -> tuple[str, Any]:
    from kale_dist.notebook import parameters

    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(option, f"{text!r} sets nothing", f"Write it as {example}")
    return name.strip(), parameters.parse(value)


# -- inside ----------------------------------------------------------------------------------------------------------


def _print_lines(lines: Iterator[LogLine]) -> None:
    clean = sys.stdout.isatty()
    for line in lines:
        # A file or another program gets what the rank wrote; a terminal gets nothing that could command it.
        text = f"{plain.prefix(line)} {facts.clean(line.text)}" if clean else str(line)
        print(text, flush=True)


def _finished(on: str) -> list[tuple[Backend, JobRef]]:
    """This user's jobs that have ended: those of others on the same engine or cluster are theirs."""
    backend = backends.get(on)
    running, ended = [JobRef.parse(ref) for ref in records.refs(on)], []
    # Of a job that nobody has followed it takes a look elsewhere to know.
    deadline = time.monotonic() + (_LOOK_S if on != "local" else 0)
    while running:
        ended += [ref for ref in running if _has_ended(backend, ref)]
        running = [ref for ref in running if ref not in ended]
        if time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    return [(backend, ref) for ref in ended]


def _has_ended(backend: Backend, ref: JobRef) -> bool:
    try:
        return backend.status(ref).is_final
    except JobNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
