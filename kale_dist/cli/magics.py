"""Magics for notebooks, after `%load_ext kale_dist`: run a cell on every rank, and manage jobs."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import shlex
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from kale_dist import cli, places, wording
from kale_dist.calls import request, verbs
from kale_dist.errors import ConfigError, JobNotFoundError, KaleDistError, note, warnings_as_lines
from kale_dist.job import interrupts
from kale_dist.job.handle import Job
from kale_dist.job.live_job import LiveJob
from kale_dist.worker.rank import cell as on_a_rank

FILENAME = "<%%distribute>"
"""File name of a `%%distribute` cell in tracebacks."""

_IGNORED = re.compile(r"^[ \t]*%matplotlib([ \t].*)?$", re.MULTILINE)
_MAGIC = re.compile(r"\s*(?:[%!]|[^#'\"=]*=\s*[%!](?!=))|.*[^\s#]\?{1,2}\s*$|\s*\?")


@magics_class
class DistributeMagics(Magics):
    """`%%distribute`, `%attach`, and commands of the command line: `%jobs`, `%status`, `%logs`, `%cancel`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._live: LiveJob | None = None
        """The notebook's live ranks, in which cells run."""

    @property
    def _namespace(self) -> dict[str, Any]:
        """The notebook's global names."""
        shell: Any = self.shell
        return cast("dict[str, Any]", shell.user_ns)

    @magic_arguments()
    @argument("-n", "--number-of-processes", type=int, help="How many ranks run the cell")
    @argument("--on", help="Where: local, docker, kubernetes, or a variable that holds a place with its settings")
    @argument("--cuda", action="store_true", default=None, help="One GPU for each rank")
    @argument("--name", help="The job's name")
    @argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Any other argument of kale_dist.launch or of the place, such as volumes",
    )
    @argument("--job", metavar="NAME", help="Keep the job under this name")
    @argument("--no-wait", action="store_true", help="Do not wait: the job is the cell's value")
    @argument("--ranks", help="Of live ranks, those that run the cell: 0,2")
    @argument("--idle", help="With start: live ranks end when they have run no cell for this long, such as 30min")
    @line_cell_magic
    def distribute(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on every rank; as `%distribute`, without a cell, show the launcher form.

        `%distribute start -n 4` starts live ranks, in which all further cells run: variables, models and the process group stay.
        `%distribute restart` and `%distribute stop` are for them. A cell with -n, --on, --cuda or --set is a job of its own. Its value is
        a list with the value of the cell's last expression on each rank.

        The cell sees the notebook's names, and `rank`, `world_size`, `local_rank` and `device`. What it changes or
        assigns stays in the ranks; only the last expression's value comes back.
        """
        if cell is None and not line.strip():
            from kale_dist.calls.form import LauncherForm

            return LauncherForm(self._namespace)
        if cell is None:
            return self._manage_live(*line.split(maxsplit=1))
        options = parse_argstring(self.distribute, line)
        if options.idle is not None:
            raise UsageError("--idle: it belongs to `%distribute start`")
        is_of_own = any(given for name, given in vars(options).items() if name != "ranks")
        if not is_of_own and (self._live is not None or options.ranks is not None):
            job, ranks, text = self._running_live(), _ranks(options.ranks), _plain_python(cell)
            return _explained(lambda: job.run(text, ranks))
        if options.ranks is not None:
            raise UsageError("--ranks: it chooses among live ranks, and the other options make a job of its own")
        if self._live is not None:
            note(f"This cell runs as a job of its own, not in {self._live.ref}, because of its options")
        elif not is_of_own:
            note(
                "There are no live ranks, so this cell is a job of its own. `%distribute start` starts ranks that stay"
            )
        _check_name(options.job)
        return self._run_as_job(options, cell)

    def _manage_live(self, word: str, line: str = "") -> None:
        """Start, restart or stop the live ranks."""
        if word not in ("start", "restart", "stop"):
            near = wording.closest(word, ("start", "restart", "stop"))
            raise UsageError(
                f"{word!r}: %distribute has the words start, restart and stop, and without one shows the form. {near}".rstrip()
            )
        if word != "start" and line:
            raise UsageError(f"{line!r}: %distribute {word} takes no options")
        if word == "restart":
            ended = self._running_live()
            self._live = _explained(ended.restart)
            for name in [name for name, value in self._namespace.items() if value is ended]:
                self._keep(self._live, name)
            note(f"{self._live.ref} is ready: new processes, without variables")
            return
        if word == "stop":
            job, self._live = self._running_live(), None
            job.stop()
            note(f"{job.ref} has ended")
            return
        if self._live is not None and not self._live.done():
            raise UsageError(
                f"{self._live.ref} runs already, and a notebook has one set of live ranks. %distribute stop ends it"
            )
        options = parse_argstring(self.distribute, line)
        if options.ranks is not None or options.no_wait:
            raise UsageError("start: --ranks and --no-wait are for cells")
        _check_name(options.job)
        arguments = self._arguments(options)
        with warnings_as_lines():
            self._live = _explained(lambda: verbs.live(**arguments))
        self._keep(self._live, options.job)
        _explained(self._live.wait_until_ready)
        count = self._live.spec.topology.number_of_processes
        note(f"{self._live.ref} is ready: %%distribute runs a cell in its {count} rank{'' if count == 1 else 's'}")

    def _running_live(self) -> LiveJob:
        if self._live is None:
            raise UsageError("There are no live ranks. `%distribute start -n 4` starts four")
        return self._live

    def _arguments(self, options: Any) -> dict[str, Any]:
        """Arguments of a verb, from the options of a magic's line."""
        arguments = {
            "number_of_processes": options.number_of_processes,
            "on": self._namespace.get(options.on, options.on) if options.on not in places.NAMES else options.on,
            "cuda": options.cuda,
            "name": options.name,
            "idle": options.idle,
            **dict(_assignment(text) for text in options.set),
        }
        return request.gathered({name: value for name, value in arguments.items() if value is not None})

    def _run_as_job(self, options: Any, cell: str) -> Any:
        """Run a cell as a job of its own; gives the values of its last expression, or the job."""
        arguments = self._arguments(options)
        text = _plain_python(cell)
        names = _named(text, self._namespace)
        with warnings_as_lines():
            job: Job[Any] = _explained(lambda: verbs.launch(on_a_rank.cell, text, FILENAME, names, **arguments))
        self._keep(job, options.job)
        if options.no_wait:
            return job
        display(job)
        results = job.results()
        return results if any(result is not None for result in results) else None

    @magic_arguments()
    @argument("ref", help="A job's reference or name")
    @argument("--job", metavar="NAME", help="Keep the job under this name")
    @argument("--trust", action="store_true", help="Also load the results of a job whose key is not on this machine")
    @line_magic
    def attach(self, line: str) -> Job[Any]:
        """Find a job again; the line's value is the job."""
        options = parse_argstring(self.attach, line)
        _check_name(options.job)
        job: Job[Any] = _explained(lambda: verbs.attach(options.ref, trust=options.trust))
        if isinstance(job, LiveJob):
            self._live = job
        self._keep(job, options.job)
        return job

    @line_magic
    def jobs(self, line: str) -> None:
        """List jobs, oldest first: `%jobs --on kubernetes --namespace team --all`."""
        self._command("jobs", line)

    @line_magic
    def status(self, line: str) -> None:
        """Show a job's status: `%status REF`, with a job's reference, its name, or a variable that holds it."""
        self._command("status", line)

    @line_magic
    def logs(self, line: str) -> None:
        """Print a job's log with the rank before each line: `%logs REF --ranks 0,2 --tail 100 -f`."""
        self._command("logs", line)

    @line_magic
    def cancel(self, line: str) -> None:
        """Cancel a job: `%cancel REF`."""
        self._command("cancel", line)

    def _keep(self, job: Job[Any], name: str | None) -> None:
        """Give the notebook a variable of this name with the job."""
        if name is not None:
            self._namespace[name] = job

    def _command(self, command: str, line: str) -> None:
        """Run a command of the command line; a variable that holds a job is replaced by the job's reference."""
        try:
            given = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{line!r}: {str(error).lower()}") from None
        words = [command]
        for word in given:
            held = self._namespace.get(word)
            words.append(held.ref if isinstance(held, Job) else word)
        with contextlib.suppress(SystemExit):  # argparse has printed the error
            cli.main(words)


def load(shell: Any) -> None:
    """Register the magics with a shell, and complete references to jobs."""
    shell.register_magics(DistributeMagics(shell))
    for name in ("%attach", "%cancel", "%status", "%logs"):
        shell.set_hook("complete_command", lambda _shell, event: _references(event.line, event.symbol), str_key=name)


def _named(text: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """A notebook function with the names and imports of a cell, so that the snapshot contains what the cell uses."""
    nodes = list(ast.walk(ast.parse(text)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and not hasattr(builtins, node.id)}
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import)]
    imports += [f"import {node.module}" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    # Imported names would hide the notebook's own of that name.
    inner = "\n  ".join([" def imports():", *imports, "pass"])
    source = f"def names():\n{inner}\n return [{', '.join(sorted(read & namespace.keys()))}]"
    code = next(one for one in compile(source, FILENAME, "exec").co_consts if isinstance(one, types.CodeType))
    made = types.FunctionType(code, namespace, "names")
    made.__module__ = "__main__"
    return made


def _plain_python(cell: str) -> str:
    """The cell without `%matplotlib`, which concerns only the notebook's display.

    Raises:
        UsageError: A line is not Python, or it is another magic or shell command.
    """
    # An empty line in place of the magic's own keeps the line numbers of tracebacks right.
    text = "\n" + _IGNORED.sub("", cell) + "\n"
    try:
        on_a_rank.split(text, FILENAME)
    except SyntaxError as error:
        lines, number = text.splitlines(), error.lineno or 1
        line = lines[number - 1].strip() if number <= len(lines) else ""
        if _MAGIC.match(line):
            raise UsageError(
                f"line {number}, {line!r}: magics and shell commands run in the notebook, not on ranks. "
                "Put it into a cell of its own, or write it in Python"
            ) from None
        raise UsageError(f"line {number}: {error.msg}{f': {line}' if line else ''}") from None
    return text


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"--set: {text!r} sets nothing; write it as timeout_s=60")
    if name not in verbs.SETTABLE:
        near = wording.closest(name, verbs.SETTABLE)
        raise UsageError(f"--set: launch has no argument {name!r} that could be set. {near}".rstrip())
    return name, wording.parse(value)


def _ranks(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ranks: {text!r} names no ranks; write it as 0,2") from None


def _check_name(name: str | None) -> None:
    if name is not None and not name.isidentifier():
        raise UsageError(f"--job: {name!r} cannot be a name in Python")


def _explained(do: Callable[[], Any]) -> Any:
    """Call `do`; IPython shows a mistake in the magic's line as one line, and the stop button without this library's lines."""
    try:
        return do()
    except KeyboardInterrupt as error:
        interrupts.shorten(error)
        raise
    except (ConfigError, JobNotFoundError) as error:
        raise UsageError(str(error)) from None


def _references(line: str, symbol: str) -> Sequence[str]:
    """Completions of the line's last word, from where `symbol` begins: IPython ends words at colons."""
    begun = "" if line.endswith(" ") else line.rsplit(maxsplit=1)[-1]
    try:
        found = verbs.jobs()
    except KaleDistError:
        return []
    # Without a begun word, each job would be listed twice, by reference and by name.
    known = [job.ref for job in found] + ([job.name for job in found] if begun else [])
    return [text[len(begun) - len(symbol) :] for text in known if text.startswith(begun)]
