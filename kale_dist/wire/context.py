"""Holds where a rank stands in its job, and sends what it reports about itself. Harmless outside a job.

Events go to the agent through a pipe of the rank's own. Only the process that the agent started writes into it: the
DataLoader workers it forks have the same descriptor, and stay silent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kale_dist import wire
from kale_dist.errors import ConfigError
from kale_dist.wire import JobFiles, MetricRow, events
from kale_dist.wire.events import RankProgress

MIN_INTERVAL_S = 0.1
"""Progress and signs of life are sent at most this often."""

ALL_RANKS_PER_S = 1000
"""All ranks of a job together send them at most this often: their head reads each of them."""

_MAX_NAME = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Where this process stands in its job."""

    rank: int = 0
    local_rank: int = 0
    """The rank among those of this machine, container or pod."""
    world_size: int = 1
    local_world_size: int = 1
    device: str = "cpu"
    """`cpu`, or `cuda:N` with the GPU that is this rank's."""
    job: str = ""
    """The job's name; empty outside a job."""
    attempt: int = 0
    """How often the ranks were started again before, in these or other pods: after a loss, to grow, or by the notebook. A job that was
    suspended may count from 0 again."""
    max_restarts: int = 0
    """How often they may be in all."""
    in_job: bool = False
    """Whether this process is a rank of a job."""
    folder: pathlib.Path | None = None
    """The job's folder; None outside a job."""
    owner: str = ""
    """Names the job in what it leaves on volumes: no other job has this, also of the same name. Empty outside a job."""
    resume: pathlib.Path | None = None
    """The checkpoint of an earlier job from which the training resumes, in rank 0; None for none."""

    @property
    def interval_s(self) -> float:
        """Seconds from one progress or sign of life of this rank to its next one."""
        return max(MIN_INTERVAL_S, self.world_size / ALL_RANKS_PER_S)

    @property
    def files(self) -> JobFiles | None:
        """The files of the job's folder; None outside a job."""
        return None if self.folder is None else JobFiles(self.folder)


class _Channel:
    """The write end of a rank's event pipe."""

    def __init__(self, descriptor: int, place: Context, attempt: int) -> None:
        self._descriptor = descriptor
        self._rank = place.rank
        self._attempt = attempt
        self._interval_s = place.interval_s
        self._pid = os.getpid()
        # Reentrant: a signal handler of the user's may report while the main thread is in here.
        self._lock = threading.RLock()
        self._held: events.Event | None = None
        self._last_sent = -math.inf
        self._last_moved = -math.inf

    def send(self, what: Any, *, is_of_job: bool = False) -> None:
        if os.getpid() != self._pid:
            return
        event = events.Event(what, time.time(), None if is_of_job else self._rank, self._attempt)
        with self._lock:
            if isinstance(what, RankProgress) and not self._is_due(what):
                self._held = event
                return
            if self._held is not None and _phase(what) != _phase(self._held.what):
                self._flush()
            self._held = None
            self._write(event)

    def moved(self) -> None:
        now = time.monotonic()
        if now - self._last_moved >= self._interval_s and os.getpid() == self._pid:
            self._last_moved = now
            with self._lock:
                self._write(events.Event(events.Alive(), time.time()))

    def flush(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._write(held)

    def _is_due(self, progress: RankProgress) -> bool:
        now = time.monotonic()
        if now - self._last_sent >= self._interval_s or progress.step in (0, 1, progress.steps):
            self._last_sent = now
            self._last_moved = now
            return True
        return False

    def _write(self, event: events.Event) -> None:
        data = memoryview(wire.encode_json(event.record()))
        # The agent may have gone; the rank is about to be killed then, and an error here would only confuse.
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]


_current = Context()
_channel: _Channel | None = None
_asked: Callable[[], bool] = bool


def context() -> Context:
    """Where this process stands in its job; outside a job, rank 0 of 1 with `in_job` False."""
    return _current


def report(**metrics: Any) -> None:
    """Send numbers to the notebook, where they appear in `job.metrics`, from any rank at any time.

    Outside a job it only checks them. There is no limit to the rate but the eye's: a few times a second is plenty.

    Args:
        **metrics: Numbers by name: int, float, or tensors and arrays with one element. `epoch` and `step`, if they
            are among them and whole, mark where the other values belong. Without others, nothing is sent. A name has
            1 to 200 printable characters.

    Raises:
        ConfigError: A value is not a number, or a name is too long or not printable.
    """
    values = {name: _number(name, value) for name, value in metrics.items()}
    place = {
        name: int(values.pop(name)) for name in ("epoch", "step") if name in values and float(values[name]).is_integer()
    }
    if values:
        emit(MetricRow(values=tuple(values.items()), epoch=place.get("epoch"), step=place.get("step")))


def check_name(argument: str, name: str) -> None:
    """Check that the name of a metric can be shown.

    Raises:
        ConfigError: It cannot; it names the argument.
    """
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        problem = f"the name of a metric, {name[:40]!r}, cannot be shown"
        raise ConfigError(argument, problem, f"Name it by 1 to {_MAX_NAME} printable characters")


def _number(name: str, value: Any) -> float | int:
    """A metric as a plain number, whose name can be shown."""
    check_name("metrics", name)
    item = getattr(value, "item", None)
    if item is not None and not isinstance(value, numbers.Number):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):
            shape = tuple(getattr(value, "shape", ()))
            raise ConfigError(name, f"has shape {shape}, not one element", "Reduce it first: .mean()") from None
    if isinstance(value, bool) or (isinstance(value, numbers.Integral) and abs(int(value)) <= 2**63):
        return int(value)
    if isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):
            return float(value)
        raise ConfigError(name, "is too large a number for a metric", "Report its logarithm, for example")
    item = getattr(value, "item", None)
    if item is not None and isinstance(item(), int | float):
        return float(item())
    raise ConfigError(name, f"{value!r} is not a number", "Report ints, floats, or tensors with one element")


def emit(what: Any, *, is_of_job: bool = False) -> None:
    """Send one event. Outside a job, and in forked children of a rank, nothing happens.

    Progress is thinned to one in `Context.interval_s`; the last one of each phase always goes out.

    Args:
        what: Of one of the classes of `wire.events`; time, rank and attempt are added.
        is_of_job: Whether it holds for the whole job.
    """
    if _channel is not None:
        _channel.send(what, is_of_job=is_of_job)


def log(text: str, *, warns: bool = False, nan: tuple[int, int] | None = None) -> None:
    """Print a sentence for the user into the job's log, and send it as a note; a warning is repeated to who waits for the job."""
    print(text, flush=True)  # noqa: T201 - the rank's output is the job's log
    emit(events.Note(text=text, warns=warns, nan=nan))


log_once = functools.cache(log)
"""The same, but once for each sentence."""

_OF_VERSIONS = (AttributeError, ImportError, TypeError)
"""What is raised where a package has other names or arguments."""

_not_shown: set[str] = set()


@contextlib.contextmanager
def only_shown(what: str, *, errors: tuple[type[Exception], ...] = _OF_VERSIONS) -> Iterator[None]:
    """Let a rank go on without `what` it only shows, where a package no longer has what that takes; this is logged once.

    Args:
        what: It, as the subject of a sentence.
        errors: Those that may be met. Code of other people's may raise any.
    """
    try:
        yield
    except errors as error:
        if what not in _not_shown:
            _not_shown.add(what)
            log(f"{what} cannot be shown with the versions of this environment: {type(error).__name__}: {error}")


def mark_progress() -> None:
    """Tell the agent that something moved, so that it does not take the rank for stalled. Cheap enough for each batch."""
    if _channel is not None:
        _channel.moved()


def mark_exchanges(counts: Iterable[int]) -> None:
    """Tell the agent in how many collectives of each backend this rank has taken part: a sign that it moves, too."""
    emit(events.Alive(exchanges=tuple(counts)))


def may_lose(sets: Iterable[Iterable[int]]) -> None:
    """Tell the agent that the others carry on, from now on, when ranks are lost: all but one of each of these sets."""
    emit(events.Dispensable(sets=tuple(map(tuple, sets))))


def can_save(*, can: bool = True, has_saved: bool = False, resumes: bool = False) -> None:
    """Tell the agent whether this rank saves soon after `is_asked_to_save` is True.

    Args:
        can: Whether it does.
        has_saved: Whether it just has: all of its part is written.
        resumes: Whether the job resumes from that by itself, as `distribute` does.
    """
    emit(events.Saves(can=can, has_saved=has_saved, resumes=resumes))


def is_asked_to_save() -> bool:
    """Whether the agent has asked this rank to save since the last call. Never waits."""
    return _asked()


def flush() -> None:
    """Send a progress event that was held back. For the end of the rank."""
    if _channel is not None:
        _channel.flush()


def activate(place: Context, descriptor: int, asked: Callable[[], bool] = _asked, *, attempt: int = 0) -> None:
    """Make this process a rank. Called once, by the worker.

    Args:
        place: Where the rank stands.
        descriptor: Write end of its event pipe.
        asked: What `is_asked_to_save` calls.
        attempt: The number of the attempt among those of its head.
    """
    global _current, _channel, _asked  # noqa: PLW0603 - one process is one rank, for good
    _current, _asked = place, asked
    _channel = _Channel(descriptor, place, attempt)


def _phase(what: Any) -> tuple[str, int] | None:
    return (what.phase, what.epoch) if isinstance(what, RankProgress) else None
