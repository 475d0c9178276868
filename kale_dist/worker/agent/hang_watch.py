"""Tells a hang from slow work by the stacks of ranks, when nothing moves or one has ended before others; ends live ranks that idle."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kale_dist.wire import FailureCause, RankStateName
from kale_dist.wire.events import Note, RankProgress, Waiting
from kale_dist.wire.messages import EndLive
from kale_dist.worker.agent.ending import name_ranks
from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.agent.writer import JobWriter

_THREADS = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/kale_dist/worker/parallel/",
    "/kale_dist/worker/training/",
    "/kale_dist/worker/rank/process_group.py",
    "/kale_dist/worker/rank/joint_saving.py",
)
"""A main thread whose innermost frame is in one of these and that uses no processor time waits for other ranks."""

_BACKWARD = ("/torch/autograd/graph.py", "_engine_run_backward")
"""DistributedDataParallel waits in C++ below this frame, at the end of backward."""

_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/kale_dist/(snapshot|wire|worker)/|^<frozen ")

IDLE_TICKS = 2
"""Clock ticks of processor time in which a thread that waits may look after its timeouts (20 ms)."""

ANSWER_S = 0.2
"""When the answers of near ranks are there; they have `near_rank.ANSWER_S`."""

FAR_ANSWER_S = 0.7
"""The same for ranks behind relays."""

BETWEEN_LOOKS_S = 1.0

LOOKS_AFTER_S = (0.5, 0.7)
"""After a rank has ended: the first look, and from that to the second."""

LATER_LOOKS_S = 2.0

STALL_CHECK_S = 1.0
"""How often it is checked whether something has moved."""

END_NOTICE_S = 300.0
"""How long before the end of live ranks without a cell a warning is given."""

VISITED_WAIT_S = 3600.0
"""How long a rank waits in its debugger for the next line of a person who has come: GPUs are not held for a night."""

Fail = Callable[[FailureCause, str], None]


class HangWatch:
    """Watches over one job from the moment its ranks have their assignments.

    Args:
        ranks: All ranks of the job.
        loop: The agent's loop.
        writer: The job's files.
        has_far_ranks: Whether relays look after some of them.
        stall_warn_s: Seconds without progress after which the stacks go into the log; None for never.
        stall_timeout_s: Seconds without progress after which the job fails; None for never.
        breakpoint_wait_s: Seconds that ranks wait in `breakpoint()` for a person.
        fail: Called when the job has to end, with the cause and a sentence.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        loop: asyncio.AbstractEventLoop,
        writer: JobWriter,
        *,
        has_far_ranks: bool,
        stall_warn_s: float | None,
        stall_timeout_s: float | None,
        breakpoint_wait_s: float,
        fail: Fail,
    ) -> None:
        self._ranks = ranks
        self._answer_s = FAR_ANSWER_S if has_far_ranks else ANSWER_S
        self._loop = loop
        self._writer = writer
        self._stall_warn_s = stall_warn_s
        self._stall_timeout_s = stall_timeout_s
        self._breakpoint_wait_s = breakpoint_wait_s
        self._fail = fail
        self._moves = 0
        self._moved_at = time.monotonic()
        self._has_warned = False
        self._idle_since = time.monotonic()
        self._idle_moves = 0
        self._has_logged_end = False
        self._logged_waiting: list[int] = []
        self._in_first_step = False
        self._tasks = [loop.create_task(self._watch_progress())]

    def progressed(self, progress: RankProgress) -> None:
        """A rank has sent its progress."""
        # Loading and compiling before the first step of a training may take long and is no stall.
        self._in_first_step = not progress.step and progress.epoch == 1

    def rank_done(self) -> None:
        """A rank has ended while others have not: they may wait for it."""
        if len(self._tasks) == 1:
            self._tasks.append(self._loop.create_task(self._watch_others()))

    async def find_hang(self, limit_s: float) -> str:
        """Look whether the ranks hang: whether none has moved for long, and each is at the same line a second later.

        If none moves, their stacks go into the log, unless they are there already.

        Args:
            limit_s: Half of this counts as long, or `stall_warn_s` if that is less.

        Returns:
            Where they are, as part of a sentence; empty if they do not hang.
        """
        is_long = self._idle_s >= min(limit_s / 2, self._stall_warn_s or limit_s)
        if self._idle_s < STALL_CHECK_S:
            return ""
        before = await (self._look() if self._has_warned else self._show())
        await asyncio.sleep(BETWEEN_LOOKS_S)
        after = await self._look()
        is_same = all(number in before and sample.place == before[number].place for number, sample in after.items())
        return describe_hang(who_waits(before, after), after) if after and is_long and is_same else ""

    def stop(self) -> None:
        """The job ends: look no more."""
        for task in self._tasks:
            task.cancel()

    async def _look(self) -> dict[int, Sample]:
        """Take a sample of every rank that has not ended."""
        ranks = [rank for rank in self._ranks if rank.done is None and rank.end is None]
        for rank in ranks:
            rank.ask_stacks()
        await asyncio.sleep(self._answer_s)
        left = _each_backends(min, (rank for rank in self._ranks if rank.done is not None))
        return {
            rank.rank: Sample(
                frames=parse_main_thread(rank.dump), cpu_ticks=rank.cpu_ticks, moves=self._writer.moves[rank.rank],
                dump=rank.dump, is_left=rank.is_beyond(left),
            )
            for rank in ranks
            if rank.done is None and rank.end is None
        }  # fmt: skip

    # -- a rank has ended -------------------------------------------------------------------------------------------

    async def _watch_others(self) -> None:
        """Look whether the ranks that have not ended wait in a collective for those that have."""
        before: dict[int, Sample] = {}
        for pause_s in itertools.chain(LOOKS_AFTER_S, itertools.repeat(LATER_LOOKS_S)):
            await asyncio.sleep(pause_s)
            samples = await self._look()
            if not samples:
                return
            waiting, before = who_waits(before, samples), samples
            if waiting and (waiting != self._logged_waiting or len(waiting) == len(samples)):
                self._log_waiting(waiting, samples)
            if len(waiting) == len(samples):
                left = [rank.rank for rank in self._ranks if rank.done is not None]
                self._fail(FailureCause.LEFT, self._describe_left(left, waiting, samples))
                return

    def _describe_left(self, left: list[int], waiting: list[int], samples: dict[int, Sample]) -> str:
        frame = samples[waiting[0]].user_frame
        place = f" (at {frame})" if frame is not None else ""
        return (
            f"{_capital(name_ranks(left))} ended while {name_ranks(waiting)} {_verb(waiting, 'waits')} for "
            f"{'it' if len(left) == 1 else 'them'} in a collective{place}. "
            "Every rank has to take part in each collective: check for ranks that return or stop early"
        )

    # -- nothing moves ----------------------------------------------------------------------------------------------

    @property
    def _idle_s(self) -> float:
        """Seconds since something moved, as far as that was looked at."""
        now, moves = time.monotonic(), self._writer.moves.total()
        if moves != self._moves:
            self._moves, self._moved_at, self._has_warned = moves, now, False
        return now - self._moved_at

    @property
    def _is_stalled(self) -> bool:
        return self._stall_timeout_s is not None and self._idle_s >= self._stall_timeout_s

    async def _watch_progress(self) -> None:
        """Say where ranks are when none of them moves, fail the job when that lasts, and look whether its disk takes its log."""
        limits = [limit / 4 for limit in (self._stall_warn_s, self._stall_timeout_s) if limit is not None]
        while True:
            await asyncio.sleep(min([STALL_CHECK_S, *limits]))
            self._writer.look_at_disk()
            is_debugged = self._watch_breakpoints()
            is_idle = all(rank.is_idle for rank in self._ranks)
            self._watch_idleness(is_idle=is_idle)
            is_starting = any(rank.state is RankStateName.PENDING for rank in self._ranks)
            if is_debugged or is_idle or is_starting or not self._writer.has_room:
                # Ranks that wait for the disk or a person have not stalled, nor those for which torch is being imported.
                self._moved_at = time.monotonic()
            if self._is_stalled and not self._in_first_step:
                samples = await self._look()
                if self._is_stalled:
                    self._fail_stalled(samples)
                    return
            elif self._stall_warn_s is not None and not self._has_warned and self._idle_s >= self._stall_warn_s:
                self._has_warned = True
                before = await self._show()
                await asyncio.sleep(BETWEEN_LOOKS_S)
                samples = await self._look()
                self._log_waiting(who_waits(before, samples), samples)

    async def _show(self) -> dict[int, Sample]:
        samples = await self._look()
        self._write_stacks(f"No rank has made progress for {self._idle_s:.0f} s. Where each of them is:", samples)
        return samples

    def _watch_breakpoints(self) -> bool:
        """Have ranks go on that no person debugs; returns whether any rank waits at a breakpoint."""
        waiting = [rank for rank in self._ranks if rank.prompt and rank.done is None and rank.end is None]
        if not waiting:
            return False
        # One person debugs one rank after the other.
        limit_s = VISITED_WAIT_S if any(rank.is_visited for rank in waiting) else self._breakpoint_wait_s
        if time.monotonic() - max(rank.attended_at for rank in waiting) >= limit_s:
            ranks = _capital(name_ranks([rank.rank for rank in waiting]))
            why = f"nothing was typed for {limit_s:g} s. Breakpoints to come are passed over"
            self._writer.log(f"{ranks} {'goes' if len(waiting) == 1 else 'go'} on from breakpoint(): {why}")
            for rank in waiting:
                rank.pass_over()
        return True

    def _watch_idleness(self, *, is_idle: bool) -> None:
        """End live ranks that have run no cell for long."""
        now, limit_s = time.monotonic(), self._ranks[0].idle_s
        # A cell may begin and end between two looks.
        moves, self._idle_moves = self._idle_moves, self._writer.moves.total()
        if not is_idle or limit_s is None or moves != self._idle_moves:
            self._idle_since, self._has_logged_end = now, False
            return
        left_s = self._idle_since + limit_s - now
        if 0 < left_s <= min(END_NOTICE_S, limit_s / 2) and not self._has_logged_end:
            self._has_logged_end = True
            # With the hour, because a text is noted once.
            since = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - limit_s + left_s))
            left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"  # noqa: PLR2004
            text = f"The live ranks have run no cell since {since}. They end in {left} if none comes"
            self._writer.event(Note(text=text, warns=True))
        if now - self._idle_since >= limit_s:
            self._idle_since = now
            text = f"The live ranks have run no cell for {limit_s:g} s, and end"
            self._writer.log(text)
            self._writer.event(Note(text=text))
            for rank in self._ranks:
                rank.send(EndLive())

    def _fail_stalled(self, samples: dict[int, Sample]) -> None:
        self._write_stacks(f"No rank has made progress for stall_timeout_s = {self._stall_timeout_s:g} s:", samples)
        waiting = [number for number, sample in samples.items() if sample.may_wait]
        detail = f" {_capital(describe_hang(waiting, samples))}." if samples else ""
        if behind := self._behind():
            took = f"{_capital(name_ranks(behind))} {_verb(behind, 'has')} taken part"
            detail += f" {took} in fewer collectives than the others, who wait."
        self._fail(
            FailureCause.STALLED,
            f"No rank has made progress for {self._stall_timeout_s:g} s (stall_timeout_s).{detail} "
            "The stacks of all ranks are in the log",
        )

    def _behind(self) -> list[int]:
        """Ranks that others are ahead of, where collectives are counted."""
        most = _each_backends(max, self._ranks)
        return [rank.rank for rank in self._ranks if rank.exchanges and rank.exchanges != most]

    def _write_stacks(self, title: str, samples: dict[int, Sample]) -> None:
        self._writer.log(title)
        for number, sample in samples.items():
            text = sample.dump.decode("utf-8", "backslashreplace")
            self._writer.log(f"Rank {number}:\n{text or '(it does not answer: it is starting, or was stopped)'}")

    def _log_waiting(self, waiting: list[int], samples: dict[int, Sample]) -> None:
        self._logged_waiting = waiting
        busy = [number for number in samples if number not in waiting]
        seconds = round(self._idle_s, 1)
        self._writer.event(Waiting(waiting=tuple(waiting), busy=tuple(busy), seconds=seconds))
        for number in waiting:
            frame = samples[number].user_frame
            self._writer.log(f"Rank {number} waits in a collective" + (f": {frame}" if frame is not None else ""))


def _each_backends(choose: Callable[[Iterable[int]], int], ranks: Iterable[Rank]) -> tuple[int, ...]:
    """The least or most collectives of each backend in which any of some ranks has taken part."""
    return tuple(map(choose, zip(*(rank.exchanges for rank in ranks if rank.exchanges), strict=False)))


_PLURALS = {"has": "have", "is": "are", "waits": "wait"}


def _verb(ranks: Sequence[int], singular: str) -> str:
    return singular if len(ranks) == 1 else _PLURALS[singular]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- what a look shows ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """The frame as `file:line in function`."""
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
    is_left: bool = False
    """Whether it has begun a collective in which a rank that has ended took no part."""
    dump: bytes = b""
    """The stacks of all its threads, as faulthandler writes them."""

    @property
    def may_wait(self) -> bool:
        """Whether the innermost frame is one in which ranks wait for each other."""
        if not self.frames:
            return False
        inner = self.frames[0]
        is_backward = inner.file.endswith(_BACKWARD[0]) and inner.function == _BACKWARD[1]
        return is_backward or any(part in inner.file for part in COLLECTIVE_FILES)

    @property
    def place(self) -> Frame | None:
        """The innermost frame that is the user's own, or any if none is; None if the rank did not answer."""
        return self.user_frame or next(iter(self.frames), None)

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame that is the user's own."""
        return next((frame for frame in self.frames if not _FOREIGN.search(frame.file)), None)


def parse_main_thread(dump: bytes) -> tuple[Frame, ...]:
    """Frames of the main thread in faulthandler's text, innermost first.

    faulthandler lists the newest thread first and the main thread last.
    """
    main = _THREADS.split(dump.decode("utf-8", "backslashreplace"))[-1]
    return tuple(Frame(file=file, line=int(line), function=function) for file, line, function in _FRAME.findall(main))


def describe_hang(waiting: Sequence[int], samples: Mapping[int, Sample]) -> str:
    """`rank 1 is in train.py:74 in step, ranks 0 and 2 wait for it`.

    Args:
        waiting: Ranks that wait for others; if all do, each one's own place tells why.
        samples: A look at all ranks.
    """
    places: dict[str, list[int]] = {}
    for number, sample in samples.items():
        if number not in waiting or len(waiting) == len(samples):
            places.setdefault(str(sample.place or "code that answers nothing"), []).append(number)
    shown = [f"{name_ranks(ranks)} {_verb(ranks, 'is')} in {place}" for place, ranks in places.items()][:3]
    if 0 < len(waiting) < len(samples):
        whom = "it" if len(samples) - len(waiting) == 1 else "them"
        shown.append(f"{name_ranks([*waiting])} {_verb(waiting, 'waits')} for {whom}")
    return ", ".join(shown)


def who_waits(before: dict[int, Sample], after: dict[int, Sample]) -> list[int]:
    """Ranks that waited in a collective from one look to the next."""
    return [number for number, sample in after.items() if number in before and waits(before[number], sample)]


def waits(before: Sample, after: Sample) -> bool:
    """Whether a rank waited in a collective from one look to the next, without any progress in between.

    A rank that waits for a GPU uses processor time, in a frame of the user's such as `loss.item()`: there the number of its
    collectives decides.
    """
    if before.is_left and after.is_left:
        return before.moves == after.moves
    return (
        before.may_wait
        and after.may_wait
        and before.moves == after.moves
        and after.cpu_ticks - before.cpu_ticks <= IDLE_TICKS
        and before.user_frame == after.user_frame
    )
