"""Torch's global settings that a rank takes over from the notebook: one list, for reading and for setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Flag = str | int | float | bool

_ATTRIBUTES = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.mkldnn.enabled",
    "backends.opt_einsum.enabled",
)
"""Plain attributes below `torch` that are read and set alike, without touching a GPU."""


def read() -> tuple[tuple[str, Flag], ...]:
    """The flags of this process, by name. Never initialises CUDA."""
    import torch

    found: list[tuple[str, Flag]] = [
        ("default_dtype", str(torch.get_default_dtype()).removeprefix("torch.")),
        ("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ("deterministic_algorithms", torch.are_deterministic_algorithms_enabled()),
        ("deterministic_warn_only", torch.is_deterministic_algorithms_warn_only_enabled()),
        ("fill_uninitialized_memory", torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        ("grad_enabled", torch.is_grad_enabled()),
        ("anomaly_enabled", torch.is_anomaly_enabled()),
        ("anomaly_check_nan", torch.is_anomaly_check_nan_enabled()),
    ]
    found += [(name, bool(_get(name))) for name in _ATTRIBUTES]
    return tuple(found)


def apply(flags: tuple[tuple[str, Flag], ...]) -> None:
    """Set flags as `read` gave them. Names that this version does not know are passed over."""
    import torch

    given: dict[str, Any] = dict(flags)
    setters: dict[str, Callable[[Any], Any]] = {
        "default_dtype": lambda value: torch.set_default_dtype(getattr(torch, value)),
        "float32_matmul_precision": torch.set_float32_matmul_precision,
        "grad_enabled": torch.set_grad_enabled,
        "fill_uninitialized_memory": lambda value: setattr(
            torch.utils.deterministic, "fill_uninitialized_memory", value
        ),
    }
    for name, value in given.items():
        if name in setters:
            setters[name](value)
        elif name in _ATTRIBUTES and _get(name) != value:
            _set(name, value)
    if "deterministic_algorithms" in given:
        torch.use_deterministic_algorithms(
            given["deterministic_algorithms"], warn_only=bool(given.get("deterministic_warn_only", False))
        )
    if given.get("anomaly_enabled"):
        torch.autograd.set_detect_anomaly(True, check_nan=bool(given.get("anomaly_check_nan", True)))


def _get(name: str) -> Any:
    import torch

    target: Any = torch
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _set(name: str, value: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(_get(owner), attribute, value)
