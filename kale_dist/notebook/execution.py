"""Executes a whole notebook from the command line, and shows what happens as it goes.

The kernel is the interpreter that runs this, whatever the notebook's metadata call theirs. What cells print and what
ranks log is written line by line; the executed notebook is saved after every cell, so it is there also after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from traitlets import default
from traitlets.config import Config

from kale_dist import overrides
from kale_dist.notebook import documents
from kale_dist.notebook import parameters as notebook_parameters
from kale_dist.notebook.following import JobEnd, KernelJobs
from kale_dist.notebook.terminal import Terminal
from kale_dist.view import facts

_INTERRUPT_GRACE_S = 10.0
"""From the first interrupt on a kernel has so long to end its cell; then it is killed."""


SKIP_TAGS = ("skip", "skip-execution")
"""A cell with one of these tags is not executed: Kale's word, and nbclient's."""

_SAVING_SHARE = 10.0
"""Saving takes at most one part in so many of the time, however large the notebook is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CellRun:
    """How one code cell went."""

    number: int
    """Its place in the notebook, from 1; text cells count."""
    source: str
    state: str
    """`succeeded`, `failed`, `skipped` (by its tag) or `not run`."""
    seconds: float = 0.0
    error: str = ""
    """The traceback of a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the execution of a notebook went."""

    output: pathlib.Path
    """The executed notebook, as far as it came."""
    failure: str = ""
    """Which cell failed, and its traceback; empty after a success."""
    interrupted: bool = False
    cells: tuple[CellRun, ...] = ()
    """Its code cells, in their order."""
    jobs: tuple[JobEnd, ...] = ()
    """The jobs that its cells started, in their order."""


def run_notebook(
    path: str | pathlib.Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    output: str | pathlib.Path | None = None,
    terminal: Terminal | None = None,
) -> Execution:
    """Execute a notebook, in its own folder, up to its end or its first failing cell.

    Cells tagged `skip` are left out. Other tags of Kale (`imports`, `functions`, `block:name`, `prev:name`) name parts of
    a pipeline; here their cells run in the notebook's order.

    Args:
        path: The notebook; it is left as it is.
        parameters: Values for names that its cell tagged `parameters` assigns; they are put into a cell behind it.
        arguments: Set in every `distribute` and `launch` of the notebook in the place of its own, such as
            `{"epochs": 1, "on": "kubernetes"}`.
        output: Where the executed notebook goes; None for `NAME.executed.ipynb` in the working folder. Its folder is
            made.
        terminal: Shows what cells print, what ranks log, and a progress bar; None for standard output.

    Returns:
        How it went. A cell's failure and an interrupt (Ctrl-C, passed on to the cell) do not raise.

    Raises:
        ConfigError: The notebook cannot be read, it has no such parameter, no call has such an argument, or the output
            cannot be written; nothing was executed.
    """
    path = pathlib.Path(path)
    output = documents.output_of(path, output)
    notebook = prepare(path, parameters or {}, arguments or {}, output)
    with tempfile.TemporaryDirectory(prefix="kale-dist-") as sockets:
        client = _Client(notebook, path.resolve().parent, output.resolve(), terminal or Terminal(sys.stdout), sockets)
        return _execute(client, output, arguments or {})


def prepare(
    path: pathlib.Path, parameters: Mapping[str, Any], arguments: Mapping[str, Any], output: pathlib.Path
) -> Any:
    """Read a notebook and put its parameters into it; see that it can be executed and written.

    Args:
        path: The notebook.
        parameters: As for `run_notebook`.
        arguments: Likewise.
        output: Where it will go; its folder is made.

    Raises:
        ConfigError: As `run_notebook`.
    """
    overrides.check(arguments)
    notebook = documents.read(path)
    notebook_parameters.inject(notebook, parameters)
    documents.check_output(path, output)
    return notebook


def _execute(client: _Client, output: pathlib.Path, arguments: Mapping[str, Any]) -> Execution:
    failure: list[str] = []
    # Not the thread's own end: a join that is interrupted takes the thread for ended.
    ended = threading.Event()

    def execute() -> None:
        try:
            failure.append(client.execute_all(arguments))
        except OSError as error:
            failure.append(f"the executed notebook could not be written to {output} ({error.strerror})")
        finally:
            ended.set()

    # In a thread of its own: an interrupt then arrives here, and the kernel's end stays orderly.
    client.jobs.start()
    threading.Thread(target=execute, name="kale_dist notebook").start()
    interrupted = _wait(ended, client)
    if interrupted:
        client.jobs.cancel()
    client.jobs.stop()
    return Execution(
        output=output,
        failure=failure[0] if failure else "",
        interrupted=interrupted,
        cells=client.cell_runs(),
        jobs=client.jobs.ends(),
    )


def _wait(ended: threading.Event, client: _Client) -> bool:
    """Wait for the execution's end; returns whether it was interrupted."""
    try:
        ended.wait()
    except KeyboardInterrupt:
        client.signal_kernel(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait(_INTERRUPT_GRACE_S)
        while not ended.is_set():
            client.signal_kernel(signal.SIGKILL)
            ended.wait(1.0)
        return True
    return False


class _ThisInterpreter(KernelSpecManager):
    """Knows one kernel: the interpreter that runs this. The user's own list may name others that lack kale_dist."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        # Frozen modules hide the debugger's files, of which the kernel would complain.
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", name=kernel_name)


class ThisKernelManager(AsyncKernelManager):
    """Starts kernels with this interpreter, and talks to them through sockets that only this user can reach."""

    @default("kernel_spec_manager")
    def _own_kernel_spec_manager(self) -> KernelSpecManager:
        return _ThisInterpreter(parent=self)


class _Client(NotebookClient):
    """Executes a notebook; passes on what its cells print and saves it after each of them."""

    def __init__(
        self, notebook: Any, folder: pathlib.Path, output: pathlib.Path, terminal: Terminal, sockets: str
    ) -> None:
        super().__init__(
            notebook,
            timeout=None,
            kernel_name="python3",
            kernel_manager_class=ThisKernelManager,
            config=Config({"ThisKernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            resources={"metadata": {"path": str(folder)}},
            on_cell_execute=self._begin_cell,
            on_cell_executed=self._end_cell,
        )
        self._output = output
        self._terminal = terminal
        self._unfinished: dict[str, str] = {}
        self._cell_number = 0
        self._began = 0.0
        self._runs: dict[int, CellRun] = {}
        self._saved_at = self._saving_s = 0.0
        self.jobs = KernelJobs(self._kernel_pid, terminal)

    def execute_all(self, arguments: Mapping[str, Any]) -> str:
        """Execute all cells, with some arguments of their calls set; returns what failed, or nothing."""
        environment = dict(os.environ)
        if arguments:
            environment[overrides.VARIABLE] = overrides.encode(arguments)
            listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            self._terminal.line(f"Set in every call: {listed}")
        try:
            asyncio.run(self.async_execute(env=environment))
        except CellExecutionError as error:
            trace = error.traceback if self._terminal.is_tty else facts.clean_lines(error.traceback)
            return f"{self._where()} failed:\n{trace.strip()}"
        except DeadKernelError:
            return f"{self._where()} failed: the kernel died"
        except Exception as error:  # noqa: BLE001 - whatever stopped the kernel is told to the user, who waits for it
            return f"{self._where()} failed: {type(error).__name__}: {error}"
        finally:
            self._flush_streams()
            self._save()
        return ""

    def cell_runs(self) -> tuple[CellRun, ...]:
        """How each code cell went."""
        return tuple(
            self._runs.get(index, CellRun(number=index + 1, source=cell.source, state="not run"))
            for index, cell in enumerate(self.nb.cells)
            if cell.cell_type == "code"
        )

    async def async_execute_cell(self, cell: Any, cell_index: int, *given: Any, **named: Any) -> Any:
        """Execute one cell, unless its tags say otherwise."""
        if cell.cell_type == "code":
            if set(SKIP_TAGS) & set(cell.metadata.get("tags") or ()):
                self._runs[cell_index] = CellRun(number=cell_index + 1, source=cell.source, state="skipped")
                return cell
            self._began = time.monotonic()
        try:
            return await super().async_execute_cell(cell, cell_index, *given, **named)
        except BaseException as error:
            if cell.cell_type == "code":
                trace = error.traceback if isinstance(error, CellExecutionError) else f"{type(error).__name__}: {error}"
                self._note(cell, cell_index, "failed", facts.clean_lines(trace))
            raise

    def _note(self, cell: Any, cell_index: int, state: str, error: str = "") -> None:
        self._runs[cell_index] = CellRun(
            number=cell_index + 1,
            source=cell.source,
            state=state,
            seconds=time.monotonic() - self._began,
            error=error,
        )

    def signal_kernel(self, number: signal.Signals) -> None:
        """Send a signal to the kernel's process, if there is one."""
        pid = self._kernel_pid()
        if pid is not None:
            os.kill(pid, number)

    def output(self, outs: Any, msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        """Show what a cell prints, beside keeping it."""
        if msg["msg_type"] == "stream":
            stream, text = msg["content"]["name"], msg["content"]["text"]
            *lines, rest = (self._unfinished.pop(stream, "") + text).split("\n")
            self._unfinished[stream] = rest
            for line in lines:
                self.jobs.cell_line(facts.clean(line))
        return super().output(outs, msg, display_id, cell_index)

    def _kernel_pid(self) -> int | None:
        provisioner = getattr(self.km, "provisioner", None)
        return getattr(provisioner, "pid", None) if provisioner is not None and provisioner.has_process else None

    def _where(self) -> str:
        return f"cell {self._cell_number} of {len(self.nb.cells)}" if self._cell_number else "the start of the kernel"

    def _begin_cell(self, cell: Any, cell_index: int) -> None:  # noqa: ARG002 - nbclient passes both by name
        self._cell_number = cell_index + 1
        self.jobs.begin_cell()

    def _end_cell(self, cell: Any, cell_index: int, execute_reply: Any) -> None:  # noqa: ARG002 - likewise
        self._note(cell, cell_index, "succeeded")
        self._flush_streams()
        if time.monotonic() - self._saved_at >= _SAVING_SHARE * self._saving_s:
            self._save()

    def _flush_streams(self) -> None:
        for rest in self._unfinished.values():
            if rest:
                self._terminal.line(facts.clean(rest))
        self._unfinished.clear()

    def _save(self) -> None:
        began = time.monotonic()
        documents.write(self._output, documents.encode(self.nb))
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began
