"""A whole notebook as the work of one rank: what `kale-dist run --in-cluster` has its pod do.

A pod has only the worker side of this library. So all of it comes as an argument, and executes the notebook in a process
of its own. The notebook, as it is saved, is also kept as the job's checkpoint, for a job that is cancelled or lost.
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

from kale_dist.errors import ImageError
from kale_dist.wire import PodVariable, context, events
from kale_dist.wire.blobs import fresh

NEEDED = ("ipykernel", "jupyter_client", "nbclient", "nbformat")
"""Modules that execute notebooks."""

PROGRAM = "kale_dist.runner.in_cluster"
"""The module that executes the notebook, in a process of its own."""

_LOOK_S = 0.5
_OF_A_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", *PodVariable,
)  # fmt: skip
"""Variables that speak of this rank: the notebook is none."""


def notebook(
    library: bytes, source: bytes, name: str, options: Mapping[str, Any], settings: Mapping[str, str]
) -> tuple[bytes, bytes]:
    """Execute a notebook.

    Args:
        library: The whole of this library, as a zip file of sources that is compressed as a whole.
        source: The notebook.
        name: Its file name.
        options: Other arguments of `run_notebook`.
        settings: Variables with the settings of the user who runs it.

    Returns:
        The notebook as far as it was executed, and how it went, as JSON: it reports failures, and is empty if
        the program ended without a result.

    Raises:
        ImageError: The image lacks what executes notebooks.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise ImageError(
            f"The pod's image lacks what executes notebooks: {', '.join(missing)}. Have it installed on top of the image with "
            "--packages auto (or --packages ipykernel --packages nbclient), or name an image that has it with --image"
        )
    # A cancel sends SIGTERM to all processes of the rank: that program ends its cell and saves the notebook meanwhile.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kale-dist-"))  # the pod's folders go with the pod
    with zipfile.ZipFile(io.BytesIO(lzma.decompress(library))) as packed:
        packed.extractall(folder / "library")
    (folder / "work").mkdir()
    (folder / "work" / name).write_bytes(source)
    executed, summary = folder / "executed.ipynb", folder / "summary.json"
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK} | dict(settings)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "library"), os.environ.get("PYTHONPATH"))))
    files = [str(file) for file in (folder / "work" / name, executed, summary)]
    command = [sys.executable, "-P", "-m", PROGRAM, *files, json.dumps(dict(options))]
    kept = 0
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.STDOUT) as running:
        while running.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(_LOOK_S)
            if executed.exists() and executed.stat().st_mtime_ns != kept:
                kept = executed.stat().st_mtime_ns
                _keep(executed.read_bytes())
    return executed.read_bytes() if executed.exists() else source, summary.read_bytes() if summary.exists() else b""


def _keep(saved: bytes) -> None:
    """Put the notebook, as it was last saved, where a checkpoint lies."""
    files = context.context().files
    if files is not None:
        with fresh(files.checkpoint) as file:
            file.write_bytes(saved)
        context.emit(events.CheckpointWritten(epoch=0, path=files.checkpoint.name, bytes=len(saved)))
        context.mark_progress()
