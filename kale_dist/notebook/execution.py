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
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from traitlets import default
from traitlets.config import Config

from kale_dist.errors import ConfigError
from kale_dist.notebook.following import KernelJobs
from kale_dist.notebook.terminal import Terminal
from kale_dist.view import facts

_INTERRUPT_GRACE_S = 10.0
"""From the first interrupt on a kernel has so long to end its cell; then it is killed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the execution of a notebook went."""

    output: pathlib.Path
    """The executed notebook, as far as it came."""
    failure: str = ""
    """Which cell failed, and its traceback; empty after a success."""
    interrupted: bool = False


def run_notebook(path: pathlib.Path, *, output: pathlib.Path, terminal: Terminal) -> Execution:
    """Execute a notebook, in its own folder, up to its end or its first failing cell.

    Args:
        path: The notebook; it is left as it is.
        output: Where the executed notebook goes. Its folder is made.
        terminal: Shows what cells print, what ranks log, and a progress bar.

    Returns:
        How it went. A cell's failure and an interrupt (Ctrl-C, passed on to the cell) do not raise.

    Raises:
        ConfigError: The notebook cannot be read, or the output cannot be written; nothing was executed.
    """
    notebook = _read(path)
    _check_output(path, output)
    with tempfile.TemporaryDirectory(prefix="kale-dist-") as sockets:
        client = _Client(notebook, path.resolve().parent, output.resolve(), terminal, sockets)
        return _execute(client, output)


def _execute(client: _Client, output: pathlib.Path) -> Execution:
    failure: list[str] = []
    # Not the thread's own end: a join that is interrupted takes the thread for ended.
    ended = threading.Event()

    def execute() -> None:
        try:
            failure.append(client.execute_all())
        finally:
            ended.set()

    # In a thread of its own: an interrupt then arrives here, and the kernel's end stays orderly.
    client.jobs.start()
    threading.Thread(target=execute, name="kale_dist notebook").start()
    interrupted = _wait(ended, client)
    client.jobs.stop()
    return Execution(output=output, failure=failure[0] if failure else "", interrupted=interrupted)


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


def _read(path: pathlib.Path) -> Any:
    try:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(
            "notebook", f"{path} cannot be read ({error.strerror})", "Give the path of an .ipynb file"
        ) from error
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        problem = (
            f"{path} is not a notebook ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        raise ConfigError("notebook", problem, "Give the path of an .ipynb file") from error
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if language.lower() not in ("python", "ipython"):
        raise ConfigError("notebook", f"{path} is written in {language}", "Only Python notebooks can be run")
    return notebook


def _check_output(path: pathlib.Path, output: pathlib.Path) -> None:
    remedy = "Choose another file with -o"
    if output.is_dir():
        raise ConfigError("output", f"{output} is a folder", remedy)
    if output.exists() and output.samefile(path):
        raise ConfigError("output", f"{output} is the notebook itself, which is left as it is", remedy)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{output.parent} cannot be made ({error.strerror})", remedy) from error
    if not os.access(output.parent, os.W_OK):
        raise ConfigError("output", f"{output.parent} is not writable", remedy)


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
        self.jobs = KernelJobs(self._kernel_pid, terminal)

    def execute_all(self) -> str:
        """Execute all cells; returns what failed, or nothing."""
        try:
            asyncio.run(self.async_execute())
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
        self._flush_streams()
        self._save()

    def _flush_streams(self) -> None:
        for rest in self._unfinished.values():
            if rest:
                self._terminal.line(facts.clean(rest))
        self._unfinished.clear()

    def _save(self) -> None:
        fresh = self._output.with_name(f".{self._output.name}.new")
        nbformat.write(self.nb, fresh)  # type: ignore[no-untyped-call]
        fresh.replace(self._output)
