"""`kale-dist launch`: runs scripts, modules and functions on every rank, with torchrun's output, exit codes and signals."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from kale_dist import places, scripts, wording
from kale_dist.calls import verbs
from kale_dist.cli.arguments import Commands, add_pairs, add_parser
from kale_dist.errors import ConfigError, KaleDistWarning, warnings_as_lines
from kale_dist.job import interrupts
from kale_dist.job.handle import Job, inside
from kale_dist.job.view import facts
from kale_dist.wire import LogLine, StateName, Stream

_TORCHRUN = {
    "--nproc": "Say with --processes how many processes there are in all",
    "--nnodes": "Say with --processes how many processes there are in all, and with --set processes_per_pod N how many a pod has",
    "--standalone": "Leave it out",
    "--max-restarts": "Write it as --set max_restarts N",
}
"""The equivalents of torchrun's options. kale_dist does the rendezvous itself."""


def add_command(commands: Commands) -> None:
    """Add `launch`."""
    made = add_parser(
        commands,
        "launch",
        "run a script, or a function of a module, on several processes",
        _launch,
        more="Its output, exit code and signals are as with torchrun.",
        usage="kale-dist launch [options] SCRIPT [-- ARGUMENT ...]",
        epilog="What follows -- goes to the script: kale-dist launch train.py --processes 4 -- --lr 0.1",
    )
    made.add_argument("script", metavar="SCRIPT", help="a Python file, or module:function")
    made.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    made.add_argument(
        "-n",
        "--processes",
        dest="number_of_processes",
        type=int,
        metavar="N",
        help="in all (here one for each GPU or core, elsewhere two)",
    )
    made.add_argument("--on", choices=places.NAMES, help="where (the configured place, else this machine)")
    made.add_argument("--name", metavar="NAME", help="the job's (made from the script's)")
    add_pairs(made, "--env", dest="environment", what="a variable of every process; may be given several times")
    what = "another argument of kale_dist.launch, Docker or Kubernetes, such as `image registry/torch:2.13` or "
    add_pairs(made, "--set", what=f'{what}`volumes \'{{"/data": "claim"}}\'`')
    made.add_argument(
        "--detach", action="store_true", default=None, help="print the job's reference and return; the job runs on"
    )
    made.add_argument("--json", action="store_true", help="print how it ended as JSON, and all output to stderr")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words before `--`, and those after it, which are the script's."""
    words = list(words)
    if words[:1] != ["launch"] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def refuse(options: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Refuse options that `launch` does not have, and name their equivalents.

    Raises:
        ConfigError: The command is `launch`.
    """
    if options.command is not _launch:
        return
    word = unknown[0]
    option = word.partition("=")[0].replace("_", "-").removesuffix("-per-node")
    if option.startswith("--rdzv") or option in ("--node-rank", "--master-addr", "--master-port"):
        raise ConfigError(word, "processes find each other by themselves", "Leave it out")
    setting = option.lstrip("-").replace("-", "_")
    own = f"To set it for the job, write --set {setting} VALUE. " if setting in verbs.SETTABLE else ""
    near = wording.closest(option, re.findall(r"--[a-z]+", options.parser.format_help()))
    remedy = (
        _TORCHRUN.get(option)
        or f"{near or own}Arguments of the script follow --: launch {options.script} -- {' '.join(unknown)}"
    )
    raise ConfigError(word, "kale-dist launch has no such option", remedy)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on SIGTERM, too, so that jobs are cleaned up: CI servers, `timeout` and pods send it.

    Yields:
        A list to which each signal's number is appended as it arrives.

    Raises:
        KeyboardInterrupt: With the first signal's number.
    """
    caught: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        # It comes to the process and to its group, and would stop the cancelling that the first one began.
        if caught and number == signal.SIGTERM:
            return
        caught.append(number)
        raise KeyboardInterrupt(caught[0])

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, interrupt)
    except ValueError:  # in another thread than the main one
        yield caught
        return
    try:
        yield caught
    except KeyboardInterrupt:
        if caught[1:]:
            print("kale-dist: What was submitted may go on. `kale-dist jobs` lists it", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launch(options: argparse.Namespace) -> int:
    given = _settings(options)
    is_function = not options.module and ":" in options.script
    with interrupted_by_sigterm() as caught:
        with warnings_as_lines():
            warnings.simplefilter("always", KaleDistWarning)
            job: Job[Any] = (
                scripts.call(options.script, options.arguments, **given)
                if is_function
                else scripts.launch(options.script, options.arguments, as_module=options.module, **given)
            )
        if options.detach:
            return print_reference(job, as_json=options.json)
        return follow(job, caught, as_json=options.json, has_value=is_function)


def print_reference(job: Job[Any], *, as_json: bool) -> int:
    """Print the reference of a job that runs on; returns the exit code."""
    print(json.dumps({"ref": job.ref, "name": job.name}) if as_json else job.ref)
    return 0


def follow(job: Job[Any], caught: list[int], *, as_json: bool, has_value: bool) -> int:
    """Print a job's output until it has ended; returns the exit code for it.

    Args:
        job: The job.
        caught: The signals so far: the list of `interrupted_by_sigterm`.
        as_json: Whether stdout gets only a JSON object about the job's end.
        has_value: Whether to print what rank 0 returned.
    """
    shown = _Output(sys.stderr if as_json else sys.stdout)
    try:
        with inside(job).reasons.printed():
            shown.show(inside(job).lines())
        job.exception()
    except KeyboardInterrupt:
        try:
            # Once: a second cancel would end a training without its last checkpoint.
            job.cancel()
            print(f"kale-dist: {job.ref} is cancelled", file=sys.stderr, flush=True)
            deadline = time.monotonic() + job.spec.policy.end_s
            while not job.done() and time.monotonic() < deadline:
                time.sleep(0.05)
        except KeyboardInterrupt:
            print(f"kale-dist: {interrupts.goes_on(job.ref)}", file=sys.stderr)
            return scripts.BY_SIGNAL + caught[0]
        shown.show(job.logs(), known=job.status.reason)
        if kept := facts.kept_checkpoint(job.status):
            print(f"kale-dist: {kept}", file=sys.stderr)
    code = scripts.BY_SIGNAL + caught[0] if caught else scripts.exit_code(job)
    status = job.status
    value = job.result() if has_value and status.state is StateName.SUCCEEDED else None
    if as_json:
        ended = {"ref": job.ref, "name": job.name, "state": status.state, "reason": status.reason, "exit_code": code}
        print(json.dumps(ended | ({"value": value} if has_value else {}), default=repr))
    elif value is not None:
        print(value)
    what, _, _ = status.reason.partition(": ")
    if code and not (what and what in shown.last_of_agent):
        print(f"kale-dist: {job.ref}: {facts.sentence(status, None)}", file=sys.stderr)
    return code


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The call's arguments from the options of the command.

    Raises:
        ConfigError: `--set` names an unknown argument.
    """
    given: dict[str, Any] = {}
    for name, value in options.set.items():
        verbs.check_setting(f"--set {name}", name)
        given[name] = wording.parse(value)
    own = {name: getattr(options, name, None) for name in verbs.SETTABLE}
    return given | {name: value for name, value in own.items() if value is not None}


class _Output:
    """Prints a job's lines to stdout or stderr as its ranks did, each once and without the rank, as torchrun does.

    Args:
        stdout: The stream that takes the ranks' stdout.
    """

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout
        self._shown = 0
        self.last_of_agent = ""

    def show(self, lines: Iterator[LogLine], known: str = "") -> None:
        """Print the lines that were not printed before.

        Args:
            lines: All lines, from the job's first one.
            known: A line of the agent's that need not be printed.
        """
        for line in itertools.islice(lines, self._shown, None):
            self._shown += 1
            stream = self._stdout if line.stream is Stream.STDOUT and line.rank is not None else sys.stderr
            text = line.text
            if line.rank is None:
                self.last_of_agent = str(line)
                if text == known:
                    continue
                text = self.last_of_agent
            print(text + "\n" * (not line.continued), end="", file=stream, flush=True)
