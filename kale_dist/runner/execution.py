"""`kale-dist run`: executes a notebook with nbclient and papermill's conventions, and shows its output live."""

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
from typing import Any, TextIO

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets import default
from traitlets.config import Config

from kale_dist.errors import ConfigError
from kale_dist.runner import documents
from kale_dist.runner.kernel_jobs import JobEnd, KernelJobs, Terminal
from kale_dist.wire import prefix_of, visible
from kale_dist.wording import show

ON_VARIABLE = "KALE_DIST_ON"
"""The variable with the place of jobs whose calls name none: the setting `on` of the configuration."""

SKIP_TAGS = {"skip", "skip-execution"}
"""A cell with one of these tags is not executed: Kale's word, and nbclient's."""

_INTERRUPT_GRACE_S = 10.0
"""How long the kernel may take to end its cell after an interrupt; then it is killed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """The result of one code cell."""

    number: int
    """The cell's number in the notebook, from 1; text cells count."""
    source: str
    state: str
    """`succeeded`, `failed`, `skipped` (by its tag) or `not run`."""
    seconds: float = 0.0
    error: str = ""
    """The traceback of a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The result of a notebook's execution."""

    output: pathlib.Path
    """The file of the executed notebook, with outputs up to where the execution ended."""
    failure: str = ""
    """The failed cell and its traceback; empty after a success."""
    interrupted: bool = False
    cells: tuple[CellResult, ...] = ()
    """The notebook's code cells, in order."""
    jobs: tuple[JobEnd, ...] = ()
    """The jobs that the cells started, in order."""

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object, as `--json` writes it."""
        result = "interrupted" if self.interrupted else "failed" if self.failure else "succeeded"
        return {"result": result, **dataclasses.asdict(self), "output": str(self.output)}


def run_notebook(
    path: str | pathlib.Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    output: str | pathlib.Path | None = None,
    kernel: str | None = None,
    timeout_s: float | None = None,
    on: str | None = None,
    stream: TextIO | None = None,
) -> Execution:
    """Execute a notebook in its own folder, up to its end or its first failing cell.

    Cells tagged `skip` are left out. Kale's other tags name parts of a pipeline; here their cells run in the notebook's
    order.

    Args:
        path: The notebook; it is left as it is.
        parameters: Values for names that its cell tagged `parameters` assigns. They are put into a cell after it.
        output: Where the executed notebook goes; None for `NAME.executed.ipynb` in the working folder. It is saved after
            every cell, and its folder is made.
        kernel: An installed kernel's name; None for the interpreter that runs this, even if the notebook names another one.
        timeout_s: Seconds that a cell may take; None for no limit.
        on: The place of jobs whose calls name none; None for the configured place.
        stream: Where to show what cells print, what ranks log, and a progress bar; None for standard output.

    Returns:
        The result. A cell's failure and an interrupt (Ctrl-C, passed on to the cell) do not raise.

    Raises:
        ConfigError: The notebook cannot be read, it has no such parameter, there is no such kernel, or the output cannot
            be written; nothing was executed.
    """
    path = pathlib.Path(path)
    notebook, output = prepare(path, parameters or {}, output)
    _check(kernel, timeout_s)
    environment = os.environ | ({ON_VARIABLE: on} if on else {})
    with tempfile.TemporaryDirectory(prefix="kale-dist-") as sockets:
        # Only this user can reach these sockets.
        options: dict[str, Any] = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        client = _NotebookClient(
            notebook,
            timeout=timeout_s,
            kernel_name=kernel or "python3",
            kernel_manager_class=AsyncKernelManager if kernel else ThisKernelManager,
            config=Config({"AsyncKernelManager": options, "ThisKernelManager": options}),
            resources={"metadata": {"path": str(path.resolve().parent)}},
        )
        client.attach_output(output.resolve(), Terminal(stream or sys.stdout))
        return _execute(client, output, environment)


def prepare(
    path: pathlib.Path, parameters: Mapping[str, Any], output: str | pathlib.Path | None
) -> tuple[Any, pathlib.Path]:
    """Read a notebook, inject its parameters, and check that its output can be written.

    Returns:
        The notebook, and the file for the executed one.

    Raises:
        ConfigError: Notebook, parameters or output are wrong, as for `run_notebook`.
    """
    notebook = documents.read_notebook(path)
    documents.inject(notebook, parameters)
    target = pathlib.Path(f"{path.stem}.executed.ipynb" if output is None else output)
    documents.check_target("output", target, path)
    return notebook, target


def _check(kernel: str | None, timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(
            "timeout", f"{show(timeout_s)} is not a number of seconds", "Give more than 0, or leave it out"
        )
    if kernel:
        try:
            KernelSpecManager().get_kernel_spec(kernel)
        except NoSuchKernel:
            there = ", ".join(sorted(KernelSpecManager().find_kernel_specs())) or "none"
            raise ConfigError("kernel", f"there is no kernel {kernel!r}", f"Installed kernels: {there}") from None


def _execute(client: _NotebookClient, output: pathlib.Path, environment: Mapping[str, str]) -> Execution:
    failure: list[str] = []
    # An event, because an interrupted join takes the thread for ended.
    ended = threading.Event()

    def execute() -> None:
        try:
            failure.append(client.execute_all(environment))
        except OSError as error:
            failure.append(f"the executed notebook could not be written to {output} ({error.strerror})")
        finally:
            ended.set()

    # A thread, so that interrupts arrive here, and so that Jupyter's event loop may run already.
    threading.Thread(target=execute, name="kale_dist notebook").start()
    interrupted = _wait(ended, client)
    if interrupted:
        client.jobs.cancel()
    jobs = client.jobs.stop()
    return Execution(
        output=output, failure="".join(failure), interrupted=interrupted, cells=client.cell_results(), jobs=jobs
    )


def _wait(ended: threading.Event, client: _NotebookClient) -> bool:
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
    """Knows one kernel: this interpreter. The user's installed kernels may lack kale_dist."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        # The kernel would warn that frozen modules hide files from the debugger.
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", name=kernel_name)


class ThisKernelManager(AsyncKernelManager):
    """Starts kernels with this interpreter."""

    @default("kernel_spec_manager")
    def _own_kernel_spec_manager(self) -> KernelSpecManager:
        return _ThisInterpreter(parent=self)


class _NotebookClient(NotebookClient):
    """Executes a notebook; shows what its cells print, and saves the notebook after each cell."""

    _terminal: Terminal
    _output: pathlib.Path
    jobs: KernelJobs

    def attach_output(self, output: pathlib.Path, terminal: Terminal) -> None:
        """Set where to save the notebook and where to show its output. Called before the execution."""
        self._output, self._terminal, self._errors = output, terminal, Terminal(sys.stderr)
        self._unfinished: dict[str, str] = {}
        self._results: dict[int, CellResult] = {}
        self._current = -1
        self.jobs = KernelJobs(self._kernel_pid, terminal)

    def execute_all(self, environment: Mapping[str, str]) -> str:
        """Execute all cells; returns the failure, or an empty text."""
        try:
            asyncio.run(self.async_execute(env=dict(environment)))
        except CellExecutionError as error:
            return f"{self._where()} failed:\n{visible(error.traceback).strip()}"
        except DeadKernelError:
            return f"{self._where()} failed: the kernel died"
        except CellTimeoutError:
            return f"{self._where()} failed: it took more than {self.timeout:g} s"
        except Exception as error:  # noqa: BLE001 - the waiting user has to see why the kernel stopped
            return f"{self._where()} failed: {type(error).__name__}: {error}"
        finally:
            self._flush()
            self._save()
        return ""

    def cell_results(self) -> tuple[CellResult, ...]:
        """The result of each code cell."""
        return tuple(
            self._results.get(index, CellResult(number=index + 1, source=cell.source, state="not run"))
            for index, cell in enumerate(self.nb.cells)
            if cell.cell_type == "code"
        )

    async def async_execute_cell(self, cell: Any, cell_index: int, *given: Any, **named: Any) -> Any:
        """Execute one cell, unless it is tagged to be skipped."""
        if cell.cell_type != "code":
            return cell
        if SKIP_TAGS & documents.tags(cell):
            self._results[cell_index] = CellResult(number=cell_index + 1, source=cell.source, state="skipped")
            return cell
        self._current, began, error = cell_index, time.monotonic(), ""
        self.jobs.begin_cell()
        try:
            return await super().async_execute_cell(cell, cell_index, *given, **named)
        except BaseException as problem:
            trace = (
                problem.traceback if isinstance(problem, CellExecutionError) else f"{type(problem).__name__}: {problem}"
            )
            error = visible(trace)
            raise
        finally:
            self._results[cell_index] = CellResult(
                number=cell_index + 1,
                source=cell.source,
                state="failed" if error else "succeeded",
                seconds=round(time.monotonic() - began, 3),
                error=error,
            )
            self._flush()
            self._save()

    def output(self, outs: Any, msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        """Handle a cell's output: show what it prints, and keep it in the notebook."""
        if msg["msg_type"] == "stream":
            stream, text = msg["content"]["name"], msg["content"]["text"]
            *lines, rest = (self._unfinished.pop(stream, "") + text).split("\n")
            self._unfinished[stream] = rest
            for line in map(visible, lines):
                # The library's own messages, such as why a job waits.
                is_own = stream == "stderr" and line.startswith(prefix_of(None))
                (self._errors.line if is_own else self.jobs.cell_line)(line)
        return super().output(outs, msg, display_id, cell_index)

    def signal_kernel(self, number: signal.Signals) -> None:
        """Send a signal to the kernel's process, if there is one."""
        pid = self._kernel_pid()
        if pid is not None:
            os.kill(pid, number)

    def _kernel_pid(self) -> int | None:
        provisioner = getattr(self.km, "provisioner", None)
        return getattr(provisioner, "pid", None) if provisioner is not None and provisioner.has_process else None

    def _where(self) -> str:
        return f"cell {self._current + 1} of {len(self.nb.cells)}" if self._current >= 0 else "the start of the kernel"

    def _flush(self) -> None:
        for rest in self._unfinished.values():
            if rest:
                self._terminal.line(visible(rest))
        self._unfinished.clear()

    def _save(self) -> None:
        documents.write(self._output, documents.encode(self.nb))
