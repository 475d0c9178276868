"""`kale-dist run --in-cluster`: executes the notebook in a pod of the cluster, and fetches it back.

The pod is an ordinary job of `launch` with one process, whose function executes the notebook. It needs no further rights,
and is checked, queued, explained and found again like any job.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from kale_dist import config, places
from kale_dist.calls import request, verbs
from kale_dist.errors import JobNotFoundError, KaleDistError, KaleDistWarning
from kale_dist.job import records
from kale_dist.job.backend import JobRef
from kale_dist.job.handle import Job, inside
from kale_dist.job.view import facts
from kale_dist.runner import documents, execution
from kale_dist.runner.execution import Execution
from kale_dist.runner.kernel_jobs import Terminal
from kale_dist.wire import StateName, Stream, decode, payload, prefix_of, visible
from kale_dist.worker.rank import notebook_rank

NOTEBOOK_GRACE_S = 30.0
"""How long the pod may take after Ctrl-C to end its cell, cancel its jobs and save the notebook."""

_STAYS_HERE = {f"KALE_DIST_{key}" for key in ("CONTEXT", "IMAGE", "KUBECONFIG", "NAMESPACE")}
"""Settings that are not sent, because a pod has its own."""


def run_notebook(
    path: str | pathlib.Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    output: str | pathlib.Path | None = None,
    timeout_s: float | None = None,
    on: str | None = None,
    pod: Mapping[str, Any] | None = None,
    keep: bool = False,
    stream: TextIO | None = None,
) -> Execution:
    """Execute a notebook in a pod, as `kale_dist.run_notebook` does on this machine.

    The notebook is sent without the files beside it. The pod is removed at the end, also after Ctrl-C.

    Arguments and result are those of `kale_dist.run_notebook`, and two more. `pod` has arguments of `kale_dist.Kubernetes` and
    of `launch` for the pod; a service account's token is mounted, too. With `keep` the job stays on the cluster, with its log.

    Raises:
        ConfigError: An argument is wrong; nothing was started.
        KaleDistError: The cluster refused the job, or its image cannot execute notebooks.
    """
    path, terminal = pathlib.Path(path), Terminal(stream or sys.stdout)
    notebook, target = execution.prepare(path, parameters or {}, output)
    options = {"timeout_s": timeout_s, "on": on}
    settings, place = config.load(), dict(pod or {})
    if place.get("service_account") or settings.service_account:
        place.setdefault("mount_service_account_token", True)
    if "auto" in (packages := place.get("packages") or ()):
        place["packages"] = [*(name for name in packages if name != "auto"), *_packages(notebook, on, terminal)]
    source = documents.encode(notebook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", KaleDistWarning)
        job = _launch(place, payload.library(), source, path.name, options, _variables(settings))
    try:
        # Python would print a line of this library's code with each warning.
        for warning in caught:
            terminal.line(f"{prefix_of(None)} {warning.message}")
        terminal.line(f"The notebook runs as {job.ref}")
        interrupted = _follow(job, terminal)
        if job.status.state is StateName.SUCCEEDED:
            executed, summary = job.result()
            documents.write(target, executed)
            if summary:
                ended = {key: value for key, value in json.loads(summary).items() if key != "result"}
                return decode(Execution, {**ended, "output": target})
            return Execution(output=target, failure="its pod: the command ended without a message; see its log above")
        documents.write(target, _saved(job, terminal) or source)
        return Execution(output=target, failure=_failure(job), interrupted=interrupted)
    finally:
        _leave(job, terminal, keep=keep)


def _launch(place: Mapping[str, Any], *arguments: Any) -> Job[tuple[bytes, bytes]]:
    """Launch the job whose function executes the notebook.

    Args:
        place: Arguments of `kale_dist.Kubernetes` and of `launch`.
        arguments: Arguments of the function that runs in the pod.
    """
    for name in place:
        verbs.check_setting("pod", name)
    options: dict[str, Any] = {
        "number_of_processes": 1,
        "stall_warn_s": None,
        "grace_s": NOTEBOOK_GRACE_S,
        **place,
        "on": "kubernetes",
    }
    return verbs.launch(notebook_rank.notebook, *arguments, **request.gathered(options))


def _follow(job: Job[Any], terminal: Terminal) -> bool:
    """Show the job's log until it has ended; returns whether the wait was interrupted."""
    ended = threading.Event()

    def show() -> None:
        try:
            # The job may be deleted meanwhile.
            with contextlib.suppress(KaleDistError):
                for line in job.logs(follow=True):
                    if line.rank is not None and line.stream is Stream.STDOUT:
                        terminal.line(visible(line.text))
                    # The failure of the process itself is reported at the end.
                    elif line.rank is None and not line.text.startswith("Rank 0 "):
                        terminal.line(visible(str(line)))
        finally:
            ended.set()

    # A thread, so that interrupts arrive here and the pod's later lines are still shown.
    threading.Thread(target=show, name="kale_dist notebook log", daemon=True).start()
    try:
        with inside(job).reasons.printed():
            ended.wait()
        job.exception()  # waits, where the log could not be read
    except KeyboardInterrupt:
        terminal.line(f"{prefix_of(None)} Interrupted: the pod ends its cell and its jobs, and saves the notebook")
        ref = JobRef.parse(job.ref)
        places.get(ref.backend).cancel(ref)
        # A second interrupt waits for nothing.
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait()
        return True
    return False


def _saved(job: Job[Any], terminal: Terminal) -> bytes:
    """The notebook as the pod last saved it; empty if none came back."""
    ref = JobRef.parse(job.ref)
    backend, file = places.get(ref.backend), records.files(ref.record_name).checkpoint
    if not file.exists():
        with contextlib.suppress(KaleDistError):
            backend.fetch(ref, file.name)
    try:
        saved = file.read_bytes()
        # A checkpoint is not signed: everyone who can write to the job's store may have written it.
        if isinstance(json.loads(saved).get("cells"), list):
            return saved
    except FileNotFoundError:
        return b""
    except (ValueError, AttributeError, RecursionError):
        pass
    terminal.line(f"{prefix_of(None)} The file that the pod saved is not a notebook, and is ignored")
    return b""


def _failure(job: Job[Any]) -> str:
    """The failure of a pod that returned no notebook.

    Raises:
        KaleDistError: The rank raised it, such as for an image that cannot execute notebooks.
    """
    error = job.exception()
    if error is not None and isinstance(error.__cause__, KaleDistError):
        raise error.__cause__
    return f"its pod: {facts.sentence(job.status, None)}"


def _leave(job: Job[Any], terminal: Terminal, *, keep: bool) -> None:
    if keep:
        terminal.line(f"{job.ref} is kept: kale-dist logs {job.ref}; kale-dist delete {job.ref}")
        return
    try:
        job.delete()
    except JobNotFoundError:
        pass
    except KaleDistError as error:
        terminal.line(f"{job.ref} could not be removed: {error}")


# -- what is sent ----------------------------------------------------------------------------------------------------


def _variables(settings: config.Config) -> dict[str, str]:
    """This machine's configuration as variables, for the calls of the notebook."""
    return {name: value for name, value in settings.as_environment().items() if name not in _STAYS_HERE}


def _in_pod(notebook: str, output: str, summary: str, options: str) -> None:
    """Execute a notebook in its pod; `notebook_rank` starts this.

    Args:
        notebook: The notebook's file.
        output: The file for the executed notebook.
        summary: The file for the result, as JSON.
        options: Other arguments of `run_notebook`, as JSON.
    """
    # A cancelled job ends as after Ctrl-C: first the cell ends, then the notebook is saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = execution.run_notebook(notebook, output=output, **json.loads(options))
    documents.write(pathlib.Path(summary), json.dumps(result.to_json()).encode())


def _packages(notebook: Any, on: str | None, terminal: Terminal) -> Sequence[str]:
    """The requirements for executing notebooks and for this one's imports, in the versions installed here."""
    from kale_dist.image import auto

    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    named = set(re.findall(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", text, re.MULTILINE))
    if on == "kubernetes" or "kubernetes" in text.lower():
        named |= {"kubernetes", "yaml"}
    report = auto.find_packages({*notebook_rank.NEEDED, *named})
    for line in (*report.lines, *report.notes):
        terminal.line(f"{prefix_of(None)} {line}")
    return report.packages


if __name__ == "__main__":
    _in_pod(*sys.argv[1:])
