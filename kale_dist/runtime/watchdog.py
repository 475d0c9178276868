"""Tells a hang from slow work: stacks of ranks, who waits in a collective, how long nothing has moved. No I/O."""

from __future__ import annotations

import dataclasses
import re

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/kale_dist/training/",
    "/kale_dist/runtime/group.py",
)
"""A main thread whose innermost frame is in one of these and that uses no processor time waits for other ranks."""

_BACKWARD = ("/torch/autograd/graph.py", "_engine_run_backward")
"""DistributedDataParallel waits in C++ below this frame, at the end of backward."""

_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/kale_dist/(runtime|training)/|^<frozen ")

IDLE_TICKS = 2
"""Clock ticks of processor time in which a thread that waits may look after its timeouts (20 ms)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """As in `file:line in function`."""
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One look at a rank."""

    frames: tuple[Frame, ...]
    """Stack of the main thread, innermost first; empty if the rank did not answer."""
    cpu_ticks: int
    """Processor time that the rank has used so far, in clock ticks."""
    moves: int
    """Signs of progress that the rank has given so far."""

    @property
    def may_wait(self) -> bool:
        """Whether the innermost frame is one in which ranks wait for each other."""
        if not self.frames:
            return False
        inner = self.frames[0]
        if inner.file.endswith(_BACKWARD[0]) and inner.function == _BACKWARD[1]:
            return True
        return any(part in inner.file for part in COLLECTIVE_FILES)

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame that is the user's own."""
        for frame in self.frames:
            if not _FOREIGN.search(frame.file):
                return frame
        return None


def parse_main_thread(dump: bytes) -> tuple[Frame, ...]:
    """Frames of the main thread in faulthandler's text, innermost first.

    faulthandler lists the newest thread first and the main thread last.
    """
    frames: list[Frame] = []
    for line in dump.decode("utf-8", "backslashreplace").splitlines():
        if _THREAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(Frame(file=found[1], line=int(found[2]), function=found[3]))
    return tuple(frames)


def waits(before: Sample, after: Sample) -> bool:
    """Whether a rank waited in a collective from one look to the next, without any progress in between."""
    return (
        before.may_wait
        and after.may_wait
        and before.moves == after.moves
        and after.cpu_ticks - before.cpu_ticks <= IDLE_TICKS
        and before.user_frame == after.user_frame
    )


def name_ranks(ranks: list[int]) -> str:
    """`rank 0`, `ranks 0, 2 and 3`."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


class StallClock:
    """Measures how long a job has made no progress.

    Args:
        warn_s: Seconds after which to warn, once for each stall; None for never.
        fail_s: Seconds after which the job is to fail; None for never.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, warn_s: float | None, fail_s: float | None, now: float) -> None:
        self._warn_s = warn_s
        self._fail_s = fail_s
        self._moved_at = now
        self._warned = False

    def moved(self, now: float) -> None:
        """Something moved."""
        self._moved_at = now
        self._warned = False

    def idle_s(self, now: float) -> float:
        """Seconds since something moved."""
        return now - self._moved_at

    def warning_is_due(self, now: float) -> bool:
        """Whether to warn now; says so once for each stall."""
        due = self._warn_s is not None and not self._warned and self.idle_s(now) >= self._warn_s
        self._warned = self._warned or due
        return due

    def failure_is_due(self, now: float) -> bool:
        """Whether the job is to fail now."""
        return self._fail_s is not None and self.idle_s(now) >= self._fail_s

    def next_look_s(self, now: float) -> float | None:
        """Seconds until one of the two may be due; None for never."""
        limits = [self._fail_s] if self._warned else [self._warn_s, self._fail_s]
        waits_s = [limit - self.idle_s(now) for limit in limits if limit is not None]
        return max(0.0, min(waits_s)) if waits_s else None
