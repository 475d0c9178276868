"""Modules that get their shapes in the first forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kale_dist.training.strategies.all_reduce import GradientExchange


def follow_lazy_modules(modules: Iterable[torch.nn.Module], exchange: GradientExchange) -> None:
    """Have modules that get their shapes in the first forward pass start from rank 0's values.

    Ranks draw from different seeds, so their own initial values would differ.
    """
    for module in modules:
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            handle: list[Any] = []

            def settle(module: torch.nn.Module, _: Any, handle: list[Any] = handle) -> None:
                if not any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
                    exchange.adopt(module.parameters(recurse=False))
                    handle.pop().remove()

            # Torch's own hook, which makes the parameters, was registered by the constructor and so runs before.
            handle.append(module.register_forward_pre_hook(settle))
