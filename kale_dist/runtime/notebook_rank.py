"""A whole notebook as the work of one rank: what `kale-dist run --in-cluster` has its pod do.

The rank unpacks the whole of this library, of which a pod has only the worker side, and has a program of its own execute
the notebook with it. As the notebook is saved, it is put where a checkpoint lies: so it also comes back from a job that
fails or is cancelled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import lzma
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

from kale_dist.contract import EventKind, PodVariable
from kale_dist.errors import ImageError
from kale_dist.runtime import context

NEEDED = ("ipykernel", "jupyter_client", "nbclient", "nbformat")
"""Modules that execute notebooks."""

PROGRAM = "kale_dist.notebook.in_pod"
"""The module of the program; it reads `REQUEST` in its working folder, and writes `OUTPUT` and `SUMMARY` there."""

REQUEST, OUTPUT, SUMMARY = "request.json", "executed.ipynb", "summary.json"

_LOOK_S = 0.5
_OF_A_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", *PodVariable,
)  # fmt: skip
"""Variables that speak of this rank: the notebook is none."""


class NotebookFailedError(Exception):
    """A cell failed, or the notebook could not be executed; the summary has the traceback."""


def notebook(
    package: bytes, source: bytes, name: str, arguments: Mapping[str, Any], settings: Mapping[str, str]
) -> bytes:
    """Execute a notebook.

    Args:
        package: The whole library, as a zip file of sources that is compressed as a whole.
        source: The notebook.
        name: Its file name.
        arguments: Set in all of its calls.
        settings: Variables with the settings of whoever runs it.

    Returns:
        As `join` makes it. After a failure, and while it runs, the same lies in the job's checkpoint.

    Raises:
        ImageError: The image lacks what executes notebooks.
        NotebookFailedError: A cell failed, or something else.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise ImageError(
            f"The pod's image lacks what executes notebooks: {', '.join(missing)}. Have it put on top of the image with "
            "--package auto (or --package ipykernel --package nbclient), or name an image that has it with --image"
        )
    # Whoever ends the job ends the program by the same signal, and this rank waits for what it still writes.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    # Not removed: the pod's folders go with the pod.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kale-dist-"))
    library, work = folder / "library", folder / "work"
    with zipfile.ZipFile(io.BytesIO(lzma.decompress(package))) as packed:
        packed.extractall(library)
    work.mkdir()
    (work / name).write_bytes(source)
    (folder / REQUEST).write_text(json.dumps({"notebook": str(work / name), "arguments": dict(arguments)}))
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK} | dict(settings)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(library), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", PROGRAM]
    kept = _Kept(folder)
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.STDOUT) as running:
        while running.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(_LOOK_S)
            kept.renew()
    if running.returncode == 0:
        return kept.bundle()
    summary = kept.summary()
    problem = json.loads(summary)["failure"] if summary else f"its program ended with code {running.returncode}"
    raise NotebookFailedError(problem.partition("\n")[0].rstrip(":"))


def join(notebook: bytes, summary: bytes) -> bytes:
    """Notebook and summary in one.

    Args:
        notebook: As far as it has been executed.
        summary: One line of JSON; empty if there is none yet.
    """
    return summary.strip() + b"\n" + notebook


def split(bundle: bytes) -> tuple[bytes, bytes]:
    """The inverse of `join`."""
    summary, _, executed = bundle.partition(b"\n")
    return executed, summary


class _Kept:
    """Keeps the executed notebook in the job's folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._output, self._summary = folder / OUTPUT, folder / SUMMARY
        self._seen: tuple[int, bool] | None = None

    def bundle(self) -> bytes:
        return join(self._output.read_bytes(), self.summary())

    def summary(self) -> bytes:
        return self._summary.read_bytes() if self._summary.exists() else b""

    def renew(self) -> None:
        """Take in what was saved since the last time."""
        files = context.context().files
        if files is None or not self._output.exists():
            return
        now = (self._output.stat().st_mtime_ns, self._summary.exists())
        if now != self._seen:
            self._seen = now
            fresh = files.checkpoint.with_name(".checkpoint.new")
            fresh.write_bytes(self.bundle())
            fresh.replace(files.checkpoint)
            context.emit(
                EventKind.CHECKPOINT, epoch=0, path=files.checkpoint.name, bytes=files.checkpoint.stat().st_size
            )
            context.mark_progress()
