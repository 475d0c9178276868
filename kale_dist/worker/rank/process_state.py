"""Makes a forked rank what a process started by the notebook would be: environment, folders, limits, threads, seeds.

The state is read in the notebook and applied in the rank, before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import operator
import os
import pathlib
import random
import resource
import site
import sys
import time
from collections.abc import Iterable
from typing import Any

from kale_dist.errors import ContractError
from kale_dist.snapshot import loading
from kale_dist.wire import Assignment, ProcessState
from kale_dist.wire.files import umask
from kale_dist.worker.agent import processes

ONLY_LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of the ranks' own connections."""

_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))

Flag = tuple[str, str | int | float | bool]

_LOG_LEVEL = "logging_level"
_MATMUL_PRECISION = "float32_matmul_precision"
_ATTRIBUTES = (
    "backends.mkldnn.enabled", "backends.opt_einsum.enabled",
    *(f"backends.mkldnn.{name}.fp32_precision" for name in ("matmul", "conv", "rnn")),
)  # fmt: skip
_CUDA_ATTRIBUTES = (
    "backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic", "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    # Last: the older switches above set them, too, and torch refuses a mixture of both that differs.
    "backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision",
)  # fmt: skip


def capture(cuda: bool) -> ProcessState:  # noqa: FBT001 - the one thing it depends on
    """The state of this process that ranks take over. Reads only; nothing of CUDA is initialised.

    Args:
        cuda: Whether the job uses CUDA; without it, CUDA's own flags are left out.
    """
    cwd = _cwd()
    return ProcessState(
        environment=tuple(os.environ.items()),
        cwd=cwd,
        # An empty entry means the current folder, which a rank may change before it imports.
        sys_path=tuple(dict.fromkeys(str(pathlib.Path(cwd, entry)) for entry in sys.path if isinstance(entry, str))),
        # What follows `ipykernel_launcher.py` is the kernel's, and a function that parses its arguments would refuse it.
        argv=tuple(sys.argv[: 1 if "kernel_launcher" in "".join(sys.argv[:1]) else None]),
        umask=umask(),
        limits=tuple((number, *resource.getrlimit(number)) for number in _LIMITS),
        torch_flags=read_flags(cuda=cuda),
    )


def _cwd() -> str:
    try:
        return str(pathlib.Path.cwd())
    except FileNotFoundError:
        # The folder was deleted under the notebook; a rank needs one that is there.
        return str(pathlib.Path.home())


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
    if state.packages:
        site.addsitedir(state.packages)
    apply_flags(state.torch_flags)


def set_torchrun_environment(assignment: Assignment) -> None:
    """Set the variables that torchrun sets, so that code written for it finds what it looks for.

    Args:
        assignment: The rank's.
    """
    order, attempt, rank = assignment.order, assignment.attempt, assignment.rank
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(assignment.local_rank),
            "WORLD_SIZE": str(attempt.world_size),
            "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
            "GROUP_RANK": str(assignment.group_rank),
            "GROUP_WORLD_SIZE": str(len(attempt.members)),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(attempt.world_size),
            "MASTER_ADDR": assignment.master_addr,
            "MASTER_PORT": str(attempt.port),
            processes.JOB_VARIABLE: order.job,
            "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(order.policy.max_restarts),
        }
    )
    if not order.cuda:
        # Accelerate leaves ranks without an accelerator alone, each with all data, unless this asks for the CPU.
        os.environ.setdefault("ACCELERATE_USE_CPU", "True")
    if attempt.is_on_one_machine:
        # Only this machine's processes are to reach the ranks, and the machine's name may resolve to an address that is not listened on.
        for name in ONLY_LOOPBACK:
            os.environ.setdefault(name, "lo")
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    else:
        # Code that makes a store from the environment must join rank 0's, not open another at the same port.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


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


# -- settings of torch and of logging ---------------------------------------------------------------------------------


def read_flags(*, cuda: bool) -> tuple[Flag, ...]:
    """The settings of this process: the level of its log if that was set, and torch's if it is imported. CUDA is not initialised.

    Args:
        cuda: Whether to read those of CUDA too.
    """
    level = logging.getLogger().level
    log: list[Flag] = [(_LOG_LEVEL, level)] if level != logging.WARNING else []
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return tuple(log)
    flags: list[Flag] = [
        *log,
        ("default_dtype", str(torch.get_default_dtype()).removeprefix("torch.")),
        ("deterministic_algorithms", bool(torch.are_deterministic_algorithms_enabled())),
        ("deterministic_warn_only", bool(torch.is_deterministic_algorithms_warn_only_enabled())),
        ("anomaly_detection", bool(torch.is_anomaly_enabled())),
        # Torch has no question for it, but an operation shows it.
        ("flush_denormal", not bool((torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1.0).item())),
    ]
    # `torch.get_default_device()` would initialise CUDA to find the number of a device that was set without one.
    if (chosen := getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)) is not None:  # noqa: SLF001
        flags.append(("default_device", str(chosen.device)))
    # Where the notebook has used the newer switches (`fp32_precision`), the older one cannot be read.
    with contextlib.suppress(RuntimeError):
        flags.append((_MATMUL_PRECISION, str(torch.get_float32_matmul_precision())))
    for name in (*_ATTRIBUTES, *(_CUDA_ATTRIBUTES if cuda else ())):
        with contextlib.suppress(AttributeError, RuntimeError):
            value = operator.attrgetter(name)(torch)
            if isinstance(value, bool | int | float | str):
                flags.append((name, value))
    return tuple(flags)


def apply_flags(flags: Iterable[Flag]) -> None:
    """Make this process's settings like those that were read. Flags that this torch does not know are passed over.

    Args:
        flags: What `read_flags` gave.
    """
    given = dict(flags)
    if _LOG_LEVEL in given:
        # What the notebook's steps log shall not vanish in the ranks.
        logging.basicConfig(level=int(given.pop(_LOG_LEVEL)))
    if not given or not loading.has_torch():
        return
    import torch

    given.pop("default_device", None)
    if "default_dtype" in given:
        torch.set_default_dtype(getattr(torch, str(given.pop("default_dtype"))))
    if _MATMUL_PRECISION in given:
        torch.set_float32_matmul_precision(str(given.pop(_MATMUL_PRECISION)))
    if "deterministic_algorithms" in given:
        warn_only = bool(given.pop("deterministic_warn_only", False))
        torch.use_deterministic_algorithms(bool(given.pop("deterministic_algorithms")), warn_only=warn_only)
    if given.pop("anomaly_detection", False):
        torch.autograd.set_detect_anomaly(True)
    if given.pop("flush_denormal", False):
        torch.set_flush_denormal(True)
    for name, value in given.items():
        owner, _, attribute = name.rpartition(".")
        with contextlib.suppress(AttributeError, RuntimeError):
            if operator.attrgetter(name)(torch) != value:
                setattr(operator.attrgetter(owner)(torch), attribute, value)


def set_default_device(flags: Iterable[Flag], own: str) -> None:
    """Let tensors be made where the notebook makes them: on the CPU, or on the rank's own device for any accelerator.

    Args:
        flags: What `read_flags` gave.
        own: The rank's device.
    """
    wanted = str(dict(flags).get("default_device", "cpu"))
    if wanted != "cpu":
        import torch

        torch.set_default_device(wanted if wanted == "meta" else own)
