"""`kale-dist run --in-cluster`: the notebook itself runs in a pod of the cluster, and comes back from there.

It is a job of `launch` like any other, with one rank, whose function executes the notebook. So the rights that jobs need
are enough for it, it is checked, queued, explained and found again as they are, and its bytes travel as theirs do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import io
import json
import lzma
import pathlib
import re
import signal
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from kale_dist import backends, calls, config, overrides, placing
from kale_dist.backends.base import Fetches, JobRef
from kale_dist.contract import LogLine, StateName, Stream
from kale_dist.errors import ConfigError, JobNotFoundError, KaleDistError, KaleDistWarning
from kale_dist.job import Job, inside
from kale_dist.notebook import documents, execution
from kale_dist.notebook.execution import CellRun, Execution
from kale_dist.notebook.following import JobEnd
from kale_dist.notebook.terminal import Terminal
from kale_dist.runtime import notebook_rank
from kale_dist.view import facts
from kale_dist.wording import closest

SETTINGS = tuple(
    sorted({"cuda", "environment", "name", "timeout_s", *overrides.PLACES} - {"context", "processes_per_pod"})
)
"""Arguments of `launch` and `kd.Kubernetes` that the notebook's own pod can be given."""

CANCEL_GRACE_S = 30.0
"""From Ctrl-C on the pod has so long to end its cell, to cancel its jobs and to save the notebook."""

_STAYS_HERE = ("context", "image", "kubeconfig", "namespace")
"""Settings that the notebook finds in its pod by itself."""

_LOOK_S = 0.5
_BAR = re.compile(r"▕.*▏ (\d+) %")
_JOB_ENDED = re.compile(r"[a-z]+://\S+: ")


def run_notebook(
    path: str | pathlib.Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    output: str | pathlib.Path | None = None,
    terminal: Terminal | None = None,
    pod: Mapping[str, Any] | None = None,
    keep: bool = False,
) -> Execution:
    """Execute a notebook in a pod, as `kale_dist.run_notebook` does here.

    The notebook alone travels, and nothing that lies beside it. The pod is removed in the end, also after SIGTERM, which
    does here what Ctrl-C does.

    Args:
        path: The notebook.
        parameters: As for `kale_dist.run_notebook`.
        arguments: Likewise.
        output: Likewise.
        terminal: Likewise.
        pod: Arguments of `launch` and `kd.Kubernetes` for the pod (`SETTINGS`). With a service account, its token is
            there, too.
        keep: Whether the job stays on the cluster, with its log.

    Returns:
        How it went.

    Raises:
        ConfigError: An argument is wrong; nothing was started.
        KaleDistError: The cluster refused the job, or its image cannot execute notebooks.
    """
    path = pathlib.Path(path)
    output, terminal = documents.output_of(path, output), terminal or Terminal(sys.stdout)
    given = dict(pod or {})
    for name in given:
        if name not in SETTINGS:
            remedy = f"{closest(name, SETTINGS)}These can be set: {', '.join(SETTINGS)}"
            raise ConfigError("pod", f"a pod has no setting {name!r}", remedy)
    notebook = execution.prepare(path, parameters or {}, arguments or {}, output)
    settings = config.load()
    if given.get("service_account") or settings.service_account:
        # By its token the notebook starts jobs of its own.
        given.setdefault("mount_service_account_token", True)
    packages = given.get("packages") or ()
    if "auto" in ([packages] if isinstance(packages, str) else packages):
        others = [] if isinstance(packages, str) else [package for package in packages if package != "auto"]
        given["packages"] = [*others, *_packages(notebook, arguments or {}, terminal)]
    source = documents.encode(notebook)
    with _interrupted_by_sigterm():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", KaleDistWarning)
            job = calls.launch(
                notebook_rank.notebook, _library(), source, path.name, dict(arguments or {}), _variables(settings),
                number_of_processes=1, stall_warn_s=None, **placing.gathered({"on": "kubernetes", **given}),
            )  # fmt: skip
        try:
            # A line of this library's own code beside them would say nothing.
            for warning in told:
                terminal.line(f"[kale-dist] {warning.message}")
            terminal.line(f"The notebook runs as {job.ref}")
            interrupted = _follow(job, terminal)
            executed, summary = _brought(job, terminal)
            documents.write(output, executed or source)
            return _execution(job, output, summary, interrupted=interrupted)
        finally:
            terminal.clear()
            _leave(job, terminal, keep=keep)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM do what Ctrl-C does: CI servers and `timeout` send it, and nothing would be cleaned up."""
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _follow(job: Job[bytes], terminal: Terminal) -> bool:
    """Show the job until it has ended; returns whether it was interrupted."""
    ended = threading.Event()

    def show() -> None:
        try:
            # One that is deleted by somebody else is noticed by whoever asks for its state.
            with contextlib.suppress(KaleDistError):
                _show(job.logs(follow=True), terminal)
        finally:
            ended.set()

    # In a thread of its own: an interrupt then arrives here, and what the pod still says is shown.
    threading.Thread(target=show, name="kale_dist notebook log", daemon=True).start()
    try:
        said = ""
        while not ended.wait(_LOOK_S):
            status = job.status
            waits = status.state in (StateName.PENDING, StateName.STARTING)
            if waits and status.reason and status.reason != said:
                said = status.reason
                terminal.line(f"[kale-dist] {facts.clean(said)}")
        # It ends with the job, unless the log cannot be read.
        job.exception()
    except KeyboardInterrupt:
        terminal.line("[kale-dist] Interrupted: the pod ends its cell and its jobs, and saves the notebook")
        backends.get("kubernetes").cancel(JobRef.parse(job.ref), grace_s=CANCEL_GRACE_S)
        # A second interrupt waits for nothing.
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait()
        return True
    return False


def _show(lines: Iterator[LogLine], terminal: Terminal) -> None:
    """Show the notebook's lines as they would be shown without a pod around it."""
    begun = ""
    for line in lines:
        # How the rank fails is told in the end.
        if line.rank is None and not line.text.startswith("Rank 0 "):
            terminal.line(f"[kale-dist] {facts.clean(line.text)}")
        elif line.rank is not None and line.stream is Stream.STDOUT:
            begun += line.text
            if not line.continued:
                _show_line(facts.clean(begun), terminal)
                begun = ""


def _show_line(text: str, terminal: Terminal) -> None:
    bar = _BAR.match(text)
    if bar is not None:
        terminal.progress(text.rpartition(" · ")[2], int(bar[1]), text)
        return
    if _JOB_ENDED.match(text):
        terminal.clear()
    terminal.line(text)


def _brought(job: Job[bytes], terminal: Terminal) -> tuple[bytes, dict[str, Any]]:
    """The notebook as far as it was executed, and its summary; both empty where nothing came back.

    A checkpoint is not signed: whoever can write to the job's store could have made it.
    """
    if job.status.state is StateName.SUCCEEDED:
        executed, summary = notebook_rank.split(job.result())
        return executed, json.loads(summary) if summary else {}
    if not _has_checkpoint(job):
        return b"", {}
    executed, summary = notebook_rank.split(inside(job).files.checkpoint.read_bytes())
    try:
        _check_notebook(json.loads(executed))
        return executed, _checked(json.loads(summary)) if summary else {}
    except (ValueError, TypeError, RecursionError) as error:
        terminal.line(
            "[kale-dist] What the pod had saved of the notebook is left out: it is damaged, or somebody else wrote it "
            f"({facts.clean(f'{type(error).__name__}: {error}')[:200]})"
        )
    return b"", {}


def _check_notebook(notebook: Any) -> None:
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise TypeError("its notebook is none")


def _checked(summary: Any) -> dict[str, Any]:
    """A summary that has what it should have.

    Raises:
        TypeError: It has something else.
    """
    kinds = {"failure": str, "interrupted": bool, "cells": list, "jobs": list}
    if not isinstance(summary, dict) or any(not isinstance(summary.get(key), kind) for key, kind in kinds.items()):
        raise TypeError("its summary is none")
    for cell in summary["cells"]:
        _check_fields(CellRun(**cell), cell)
    for end in summary["jobs"]:
        _check_fields(JobEnd(**end), end)
    return summary


def _check_fields(made: CellRun | JobEnd, values: Mapping[str, Any]) -> None:
    kinds: dict[Any, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    for field in dataclasses.fields(made):
        value = values.get(field.name, field.default)
        if isinstance(value, bool) or not isinstance(value, kinds[field.type]):
            raise TypeError(f"{field.name} of a {type(made).__name__} is {value!r}")


def _has_checkpoint(job: Job[bytes]) -> bool:
    """Whether the notebook as it was last saved is here; one that only the job's store has is fetched."""
    backend, path = backends.get("kubernetes"), inside(job).files.checkpoint
    if not path.exists() and isinstance(backend, Fetches):
        # A job that never began has none.
        with contextlib.suppress(KaleDistError):
            backend.fetch(JobRef.parse(job.ref), path.name)
    return path.exists()


def _execution(job: Job[bytes], output: pathlib.Path, summary: Mapping[str, Any], *, interrupted: bool) -> Execution:
    status, failure = job.status, str(summary.get("failure", ""))
    if status.state is not StateName.SUCCEEDED and not interrupted and (summary.get("interrupted") or not failure):
        error = job.exception()
        if isinstance(error.__cause__ if error is not None else None, KaleDistError) and not summary:
            raise error.__cause__  # type: ignore[union-attr,misc]
        failure = f"its pod: {facts.sentence(status, None)}{f'{chr(10)}{failure}' if failure else ''}"
    return Execution(
        output=output,
        failure=failure,
        interrupted=interrupted,
        cells=tuple(CellRun(**cell) for cell in summary.get("cells", ())),
        jobs=tuple(JobEnd(**end) for end in summary.get("jobs", ())),
    )


def _leave(job: Job[bytes], terminal: Terminal, *, keep: bool) -> None:
    if keep:
        terminal.line(f"{job.ref} is kept: kale-dist logs {job.ref}; kale-dist delete {job.ref}")
        return
    try:
        job.delete()
    except JobNotFoundError:
        pass
    except KaleDistError as error:
        terminal.line(f"{job.ref} could not be removed: {error}")


# -- what travels ----------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> bytes:
    """The whole of this library as a zip file that is compressed as a whole: so it fits into the job's Secret."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, file in sorted(_files(importlib.resources.files("kale_dist"), "kale_dist")):
            packed.writestr(zipfile.ZipInfo(name), file.read_bytes())
    return lzma.compress(buffer.getvalue(), preset=9)


def _files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    for item in folder.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            yield from _files(item, f"{name}/{item.name}")
        elif item.is_file():
            yield f"{name}/{item.name}", item


def _variables(settings: config.Config) -> dict[str, str]:
    """What is configured here, for the calls of the notebook."""
    left_out = {f"KALE_DIST_{key.upper()}" for key in _STAYS_HERE}
    return {name: value for name, value in settings.as_environment().items() if name not in left_out}


def _packages(notebook: Any, arguments: Mapping[str, Any], terminal: Terminal) -> Sequence[str]:
    """What executes notebooks, and what this one imports, as it is installed here."""
    from kale_dist.image import auto

    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    named = {
        found
        for source in sources
        for found in re.findall(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", source, re.MULTILINE)
    }
    if "kubernetes" in (arguments.get("on"), *re.findall("kubernetes", "\n".join(sources))):
        named |= {"kubernetes", "yaml"}
    report = auto.find({*notebook_rank.NEEDED, *named})
    for line in (*report.lines, *report.notes):
        terminal.line(f"[kale-dist] {line}")
    return report.packages
