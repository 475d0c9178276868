"""Starts a forkserver. Imports as little as it can: what comes before delays the import of torch there."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

MAX_MESSAGE_BYTES = 1 << 16
"""The most bytes of a message between an agent and its fork server."""

_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_LIBRARY = os.path.abspath(__file__).rsplit("/", 4)[0]  # noqa: PTH100 - pathlib takes 5 ms


def environment(base: dict[str, str]) -> dict[str, str]:
    """The environment in which to start a forkserver.

    A BLAS that starts its threads at import would lose them in the fork. CUDA is asked through NVML alone, because
    a process that has initialised CUDA cannot fork usable children.
    """
    return {**base, **dict.fromkeys(_SINGLE_THREAD, "1"), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def launch(base: dict[str, str] | None = None) -> tuple[socket.socket, int]:
    """Start a forkserver, which begins to import torch at once; gives our end of its socket, and its process id.

    Args:
        base: Its variables; None for those of this process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.set_inheritable(True)
    # In a pod the library is on `sys.path` alone: the user's own subprocesses would inherit PYTHONPATH.
    run = f"import runpy, sys; sys.path.insert(0, {_LIBRARY!r}); runpy.run_module('kale_dist.worker', run_name='__main__')"
    command = [
        *(sys.executable, "-P", "-c", run, "forkserver"),
        *("--connection", str(theirs.fileno()), "--agent-pid", str(os.getpid())),
    ]
    with contextlib.closing(theirs):
        pid = os.posix_spawn(sys.executable, command, environment(dict(os.environ if base is None else base)))
    return ours, pid
