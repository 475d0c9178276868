"""Compilation and activation checkpointing of a model's blocks, in place: `forward` of each is replaced and put back."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kale_dist.worker.training.trained import alter


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost entries with parameters of the model's lists and sequences; without any, the model itself."""
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or type(module) not in (torch.nn.ModuleList, torch.nn.Sequential):
            continue
        for entry in module.children():
            if type(entry) not in (torch.nn.ModuleList, torch.nn.ModuleDict) and any(True for _ in entry.parameters()):
                found.append(entry)
                inside |= set(map(id, entry.modules()))
    return found or [model]


def alter_blocks(blocks: Iterable[torch.nn.Module], settings: Any, stack: contextlib.ExitStack) -> None:
    """Compile blocks, and drop their activations, which the backward pass then computes once more.

    Args:
        blocks: The modules, each called by itself.
        settings: Of the strategy; `compile` and `activation_checkpointing` say what to do.
        stack: Undoes it.
    """
    for block in blocks:
        forward: Any = block.forward
        if settings.compile:
            function = getattr(forward, "__func__", None)
            # As a method, which a copy of the block calls with the copy.
            forward = types.MethodType(torch.compile(function), block) if function else torch.compile(forward)
        if settings.activation_checkpointing:
            forward = functools.partial(_recomputed, block, forward)
        if settings.compile or settings.activation_checkpointing:
            alter(block, stack, forward=forward)


def _recomputed(block: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (torch.is_grad_enabled() and block.training):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
