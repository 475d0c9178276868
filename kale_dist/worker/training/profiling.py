"""Measures where a rank's time goes: always for data, collectives and checkpoints; for all phases of some steps if a profile is asked for.

Phases exclude each other: what is exchanged within the backward pass counts as exchange. What is in no other phase (the model's
forward, the criterion, what the step does besides) is `forward`, so that they add up to the time of the steps.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kale_dist.wire import PHASES, EventKind, context
from kale_dist.worker.training.trained import alter

FIRST_STEP = 2
"""The first step is left out: memory, caches and lazy parts are made in it."""

MOVING = "moving"
"""The phase in which a batch is moved to the device: from ordinary memory, it waits for the GPU."""

_COLLECTIVE = "collective"
_SILENT = "6"
"""A level above all of torch's tracer."""


class Clock:
    """Adds up the time of phases in the thread that trains."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = collections.defaultdict(float)
        """Seconds of each phase since the process began."""
        self.synchronise: Callable[[], None] | None = None
        """Waits for the GPU while a profile is taken, so that its work counts in the phase that started it."""
        self.is_marking = False
        """Whether phases are marked in a trace."""
        self._thread = threading.get_ident()
        self._stack: list[tuple[str, Any]] = []
        self._since = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within as this phase."""
        if threading.get_ident() != self._thread:
            yield
            return
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin a phase within the present one."""
        self._turn()
        mark: Any = torch.profiler.record_function(name) if self.is_marking else None
        if mark is not None:
            mark.__enter__()
        self._stack.append((name, mark))

    def leave(self) -> None:
        """End a phase."""
        self._turn()
        _, mark = self._stack.pop()
        if mark is not None:
            mark.__exit__(None, None, None)

    def _turn(self) -> None:
        if self.synchronise is not None:
            self.synchronise()
        now = time.perf_counter()
        if self._stack:
            self.totals[self._stack[-1][0]] += now - self._since
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


def time_spent(device: torch.device) -> dict[str, float | None]:
    """Where the time of this process has gone since it began, as a progress event has it: seconds, None where it is not known.

    Args:
        device: The rank's. Python does not wait for the exchange of a GPU.
    """
    names = {"data_s": "data", "exchange_s": _COLLECTIVE, "checkpoint_s": "checkpoint"}
    found = {field: round(CLOCK.totals[name], 4) for field, name in names.items()}
    return found | ({} if device.type == "cpu" else {"exchange_s": None})


class Profiler:
    """Takes the profile of some steps, in a rank with data.

    Args:
        steps: How many, from the second on. An epoch that is shorter ends it.
        device: The rank's.
        strategy: Its exchanges count as such.
    """

    def __init__(self, steps: int, device: torch.device, strategy: Any) -> None:
        self.trace: bytes | None = None
        """The Chrome trace, compressed by gzip; None before it is written."""
        self._steps = steps
        self._device = device
        self._strategy = strategy
        self._taken = 0
        self._profile: Any = None
        self._stack = contextlib.ExitStack()
        self._is_on = self._is_done = False

    def begin_step(self, epoch: int) -> None:
        """Called when the user's step asks for its next batch."""
        if self._is_done:
            return
        if self._is_on and self._taken > self._steps:
            self.end(epoch)
        elif self._profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Otherwise it writes two lines of its own into the log.
            os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
            self._profile = torch.profiler.profile(activities=activities)
            # Takes long the first time, and not equally long in all ranks: before the first step.
            self._profile.prepare_trace()
        elif not self._is_on and self._taken == FIRST_STEP - 1:
            self._begin()

    def took_batch(self) -> None:
        """Called when the user's step gets its batch."""
        self._taken += 1

    def _begin(self) -> None:
        self._is_on = True
        self._profile.start_trace()
        CLOCK.is_marking = True
        if self._device.type == "cuda":
            CLOCK.synchronise = torch.cuda.synchronize
        stack = self._stack
        before: Any = torch.autograd.backward
        torch.autograd.backward = CLOCK.phase("backward")(before)
        stack.callback(setattr, torch.autograd, "backward", before)
        methods = ("complete", "stepped", "end_batch")
        alter(
            self._strategy, stack, **{name: CLOCK.phase("exchange")(getattr(self._strategy, name)) for name in methods}
        )
        stack.callback(register_optimizer_step_pre_hook(lambda *_: CLOCK.enter("optimizer")).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: CLOCK.leave()).remove)
        self._before = dict(CLOCK.totals)
        CLOCK.enter("forward")

    def end(self, epoch: int) -> None:
        """Write the trace and the phases' times. Called after the last step of the profile, or at the end of an epoch."""
        if not self._is_on or self._is_done:
            return
        self._is_done = True
        CLOCK.leave()
        CLOCK.is_marking, CLOCK.synchronise = False, None
        self._stack.close()
        self._profile.stop_trace()
        spent = {name: CLOCK.totals[name] - self._before.get(name, 0.0) for name in (*PHASES, MOVING, _COLLECTIVE)}
        spent["exchange"] += spent[_COLLECTIVE]
        spent["data"] += spent[MOVING]
        steps = self._taken - FIRST_STEP + 1
        values: dict[str, float] = {"steps": steps, "step_s": sum(spent[name] for name in PHASES) / steps}
        values |= {f"{name}_s": spent[name] / steps for name in PHASES}
        context.emit(EventKind.METRICS, values=values, epoch=epoch, source="profile")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "trace.json.gz"
            self._profile.export_chrome_trace(str(file))
            self.trace = file.read_bytes()
        self._profile = None
