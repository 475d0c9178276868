"""Measures where a rank's time goes: data, collectives and checkpoints.

Phases exclude each other: an exchange within the wait for data counts as exchange.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

MOVING = "moving"
"""The phase in which a batch is moved to the device: from ordinary memory, it waits for the GPU, and so is no wait for data."""

_COLLECTIVE = "collective"


class Clock:
    """Adds up the time of phases in the thread that trains."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = collections.defaultdict(float)
        """Seconds of each phase since the process began."""
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within as this phase."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.totals[self._stack[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def watching_collectives(self) -> Iterator[None]:
        """Count the waits for collectives of this process."""
        self._thread = threading.get_ident()
        if not dist.is_available():
            yield
            return
        kind: Any = dist.Work
        before, kind.wait = kind.wait, self.phase(_COLLECTIVE)(kind.wait)
        try:
            yield
        finally:
            kind.wait = before


CLOCK = Clock()
"""This rank's clock; a process is one rank."""


timed = CLOCK.phase(_COLLECTIVE)
"""Decorates functions whose time counts as that of a collective."""


def collective_s() -> float:
    """Return the seconds in collectives since the process began; with NCCL, those in which the process itself waits."""
    return CLOCK.totals[_COLLECTIVE]


def time_spent(device: torch.device) -> dict[str, Any]:
    """Where the time of this process has gone since it began, as a progress event has it: seconds, None where it is not known.

    Args:
        device: The rank's. Python does not wait for the exchange of a GPU.
    """
    names = {"data_s": "data", "exchange_s": _COLLECTIVE, "checkpoint_s": "checkpoint"}
    found = {field: round(CLOCK.totals[name], 4) for field, name in names.items()}
    return found | ({} if device.type == "cpu" else {"exchange_s": None})
