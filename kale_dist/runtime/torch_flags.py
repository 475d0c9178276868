"""Torch's global settings: read in the notebook, applied in the rank."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterable
from typing import Any

Flag = tuple[str, str | int | float | bool]

_ATTRIBUTES = ("backends.mkldnn.enabled", "backends.opt_einsum.enabled")
_CUDA_ATTRIBUTES = (
    "backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic", "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)  # fmt: skip


def read(*, cuda: bool) -> tuple[Flag, ...]:
    """The settings of this process, nothing if it has not imported torch. CUDA is not initialised.

    Args:
        cuda: Whether to read those of CUDA too.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    flags: list[Flag] = [
        ("default_dtype", str(torch.get_default_dtype()).removeprefix("torch.")),
        ("deterministic_algorithms", bool(torch.are_deterministic_algorithms_enabled())),
        ("deterministic_warn_only", bool(torch.is_deterministic_algorithms_warn_only_enabled())),
        ("float32_matmul_precision", str(torch.get_float32_matmul_precision())),
        ("anomaly_detection", bool(torch.is_anomaly_enabled())),
        ("flush_denormal", _flushes_denormal(torch)),
    ]
    for name in (*_ATTRIBUTES, *(_CUDA_ATTRIBUTES if cuda else ())):
        with contextlib.suppress(AttributeError, RuntimeError):
            value = operator.attrgetter(name)(torch)
            if isinstance(value, bool | int | float | str):
                flags.append((name, value))
    return tuple(flags)


def apply(flags: Iterable[Flag]) -> None:
    """Make this process's settings like those that were read. Flags that this torch does not know are passed over.

    Args:
        flags: What `read` gave.
    """
    import torch

    given = dict(flags)
    if "default_dtype" in given:
        torch.set_default_dtype(getattr(torch, str(given.pop("default_dtype"))))
    if "float32_matmul_precision" in given:
        torch.set_float32_matmul_precision(str(given.pop("float32_matmul_precision")))
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


def _flushes_denormal(torch: Any) -> bool:
    """Torch has no question for it, but an operation shows it."""
    return not bool((torch.tensor(1e-310, dtype=torch.float64) * 1.0).item())
