"""Makes a forked rank what a process started by the notebook would be: environment, folders, limits, threads, seeds."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pathlib
import random
import resource
import sys
import time

from kale_dist.contract import Assignment, ProcessState
from kale_dist.errors import ContractError
from kale_dist.runtime import loading, processes, torch_flags


def apply(state: ProcessState, modules: pathlib.Path) -> None:
    """Apply the state of the notebook's process. Nothing may have been unpickled before.

    Args:
        state: The notebook's state.
        modules: Folder with the notebook's local modules, for the front of `sys.path`.

    Raises:
        ContractError: The working directory is gone.
    """
    os.environ.clear()
    os.environ.update(dict(state.environment))
    time.tzset()
    os.umask(state.umask)
    for number, soft, hard in state.limits:
        # A limit that this process cannot raise again stays as the agent has it, which came from the notebook too.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(number, (soft, hard))
    try:
        os.chdir(state.cwd)
    except OSError as error:
        raise ContractError(
            f"The notebook's working directory {state.cwd!r} cannot be entered in the rank ({error.strerror}). "
            "Change into a folder that exists (os.chdir) and call again"
        ) from error
    sys.argv[:] = list(state.argv)
    sys.path[:] = [str(modules), *state.sys_path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if loading.has_torch():
        torch_flags.apply(state.torch_flags)


def set_torchrun_environment(assignment: Assignment) -> None:
    """Set the variables that torchrun sets, so that code written for it finds what it looks for.

    Args:
        assignment: The rank's.
    """
    order, rank = assignment.order, assignment.rank
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(assignment.local_rank),
            "WORLD_SIZE": str(order.world_size),
            "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
            "GROUP_RANK": str(assignment.agent),
            "GROUP_WORLD_SIZE": str(order.agents),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(order.world_size),
            "MASTER_ADDR": assignment.master_addr,
            "MASTER_PORT": str(assignment.port),
            "TORCHELASTIC_RUN_ID": order.job,
            "TORCHELASTIC_RESTART_COUNT": str(assignment.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(order.max_restarts),
            # Code that makes a store from the environment must join rank 0's, not open another at the same port.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    if order.agents == 1:
        # The machine's name may resolve to an address that is not listened on.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def set_threads(assignment: Assignment) -> int:
    """Set the number of threads for tensor work. Has to come before any: libgomp cannot change its mind after a fork.

    The user's `threads` argument decides, else the user's OMP_NUM_THREADS, else a fair share of the cores.

    Returns:
        The number of threads.
    """
    fair = max(1, processes.available_cores() // assignment.local_world_size)
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = assignment.order.threads or (int(wanted) if wanted.isdigit() and int(wanted) else fair)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if loading.has_torch():
        import torch

        torch.set_num_threads(threads)
    if threads > 1:
        _raise_blas_threads(threads)
    return threads


def _raise_blas_threads(threads: int) -> None:
    """Undo, for NumPy's own OpenBLAS, the single thread that the forkserver held it to."""
    maps = pathlib.Path("/proc/self/maps").read_text(errors="replace")
    libraries = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line and "/" in line}
    for path in libraries:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in (
                "scipy_openblas_set_num_threads64_",
                "scipy_openblas_set_num_threads",
                "openblas_set_num_threads",
            ):
                setter = getattr(library, name, None)
                if setter is not None:
                    setter(ctypes.c_int(threads))
                    break


def set_seeds(seed: int) -> None:
    """Seed random, NumPy (if it is loaded) and torch. Forked siblings would otherwise draw the same numbers.

    Args:
        seed: This rank's own seed, from 0 to 2**64 - 1.
    """
    random.seed(seed)
    if loading.has_torch():
        import torch

        torch.manual_seed(seed % 2**64)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
