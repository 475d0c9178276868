"""The words and numbers in both pictures of a job: state, progress (per cent, rate, time left), table of ranks."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Container, Sequence

from kale_dist.job.status import JobStatus, ReplicaStatus, values_of
from kale_dist.wire import LogLine, RankStateName, StateName, visible
from kale_dist.wire.events import RankProgress

MAX_LINE_CHARACTERS = 600
"""Pictures cut longer lines of the log; the log itself has them whole."""

TIME = "minute"
"""The horizontal axis of time."""

_BEST = {"loss": min, "accuracy": max}
"""Which of the values of an evaluation is the best."""

_WORST_FIRST = ("failed", "lost", "stopped", "pending", "starting", "running", "succeeded")
"""States of ranks in the order in which a table that has no room for all keeps them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text: of ranks, trials or jobs."""

    titles: tuple[str, ...]
    """Titles of the columns; the first column names the rows."""
    numeric: tuple[bool, ...]
    """For each column, whether it is aligned to the right."""
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0
    """How many rows were left out for lack of room."""

    @classmethod
    def of(cls, titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: Container[int]) -> Table:
        """A table without the columns that are empty in all rows; its texts are cleaned here.

        Args:
            titles: Of all columns.
            rows: The cells of all columns.
            numeric: Which columns are aligned to the right.
        """
        kept = [index for index in range(len(titles)) if not rows or any(row[index] for row in rows)]
        return cls(
            titles=tuple(visible(titles[index]) for index in kept),
            numeric=tuple(index in numeric for index in kept),
            rows=tuple(tuple(visible(row[index]) for index in kept) for row in rows),
        )


def log_text(line: LogLine) -> str:
    """A log line's text, cleaned and cut to `MAX_LINE_CHARACTERS`."""
    cut = line.text[: 4 * MAX_LINE_CHARACTERS]
    text = visible(cut)
    if len(cut) < len(line.text) or len(text) > MAX_LINE_CHARACTERS:
        return f"{text[:MAX_LINE_CHARACTERS]} [{len(line.text):,} characters]"
    return text


def number(value: float | None) -> str:
    """A measured number in four digits, or whole: `0.0720`, `12.30`, `8,412`, `1.20e-05`, `64`, `nan`."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:  # noqa: PLR2004 - where plain digits stop being readable
        return f"{value:.2e}"
    return f"{value or 0:,.0f}" if size >= 999.95 or value == int(value) else f"{value:#.4g}"  # noqa: PLR2004 - it is rounded


def place(axis: str, x: float) -> str:
    """A place on a horizontal axis as a person writes it: minutes as `0:00.4`, `0:13` or `1:02:13`, within an epoch `5.56`, else a number."""
    if axis == TIME and 0 < 60 * x < 9.95:  # noqa: PLR2004 - it is rounded
        return f"0:{60 * x:04.1f}"
    if axis == TIME:
        minutes, seconds = divmod(round(60 * x), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"  # noqa: PLR2004
    return f"{x:,.2f}" if axis == "epoch" and x != int(x) else number(x)


def size(used: int, limit: int | None = None) -> str:
    """An amount of memory, with its limit if given: `512 MiB`, `1.4 GiB`, `0.5 of 4.0 GiB`."""
    largest = max(used, limit or 0)
    unit, scale = ("MiB", 1 << 20) if largest < 1 << 30 else ("GiB", 1 << 30) if largest < 1 << 40 else ("TiB", 1 << 40)
    shown = [
        f"{amount / scale:,.1f}" if scale > 1 << 20 and largest < 100 * scale else f"{amount / scale:,.0f}"
        for amount in (used, limit)
        if amount is not None
    ]
    return f"{' of '.join(shown)} {unit}"


def duration(seconds: float) -> str:
    """A span of time: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:  # noqa: PLR2004
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def name(status: JobStatus) -> str:
    """The job's name without its backend."""
    return visible(status.ref.rpartition("://")[2] or status.ref)


def state(status: JobStatus) -> str:
    """The job's state, whether its loss is nan, and whether a person has to act; of warm pods without a job, how long they have waited for one."""
    if status.idle_s and status.idle_since is not None:
        unit, unit_s = ("s", 1) if status.idle_s < 60 else ("min", 60)  # noqa: PLR2004
        limit, waited_s = f"{status.idle_s / unit_s:.3g} {unit}", time.time() - status.idle_since
        # Nobody has seen the end of pods that ended by themselves.
        return f"ended after {limit} idle" if waited_s > status.idle_s else f"idle {waited_s / unit_s:.0f} of {limit}"
    epoch, step = status.nan_since or (0, 0)
    nan = f", loss is nan since epoch {epoch}, step {step}" if status.is_nan else ""
    return f"{status.state.value}{nan}{', needs you' if status.needs_action else ''}"


def elapsed_s(status: JobStatus, now: float | None) -> float | None:
    """Seconds since the ranks started or, before that, since the job was created; None if not known."""
    start = status.started if status.started is not None else status.created
    end = status.ended if status.ended is not None else (None if status.is_final else now)
    return None if start is None or end is None else max(0.0, end - start)


def sentence(status: JobStatus, now: float | None, *, error: str = "") -> str:
    """The job's state in one sentence, with the ranks' present activity.

    Args:
        status: The job's status.
        now: The present time, in seconds since 1970, or None.
        error: The error that stands below the sentence, which does not repeat it.
    """
    elapsed = elapsed_s(status, now)
    after = f" after {duration(elapsed)}" if elapsed is not None else ""
    ranks = len(status.replicas)
    on = f" on {ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""
    reason = "" if error and visible(status.reason).endswith(error) else visible(status.reason)
    match status.state:
        case StateName.PENDING:
            return reason or "Waiting for its ranks to be started"
        case StateName.STARTING:
            return reason or f"Starting{on}"
        case StateName.RUNNING:
            doing = reason or _debugged(status) or _doing(status) or f"Running{on}"
            return f"Attempt {status.attempt + 1}: {doing}" if status.attempt else doing
        case StateName.SUCCEEDED:
            where = f"{on}{f', in attempt {status.attempt + 1}' if status.attempt else ''}"
            if elapsed is not None and status.created is not None and status.started is not None:
                where += f", started in {duration(status.started - status.created)}, ran {duration(elapsed)}"
            else:
                where = after + where
            best = best_evaluation(status)
            return _ended("Succeeded", where, reason) + (f". {best}" if best else "")
        case StateName.CANCELLED:
            kept = kept_checkpoint(status)
            # That it was is said; by whom may be in the reason.
            return _ended("Cancelled", after, "" if reason == "The job was cancelled" else reason) + (
                f". {kept}" if kept else ""
            )
        case StateName.FAILED:
            return _ended("Failed", after, reason)


def best_evaluation(status: JobStatus) -> str:
    """The best loss and accuracy of a training's evaluations, before its weights were nan, and where they were; empty before there are two."""
    found, limit = [], status.nan_since[0] if status.is_nan and status.nan_since else math.inf
    rows = [row for row in status.metrics if row.source == "eval" and (row.epoch or 0) < limit]
    for name, choose in _BEST.items():
        pairs = [(value, row) for row in rows for key, value in row.values if key == name and math.isfinite(value)]
        if len(pairs) > 1:
            value, row = choose(pairs, key=operator.itemgetter(0))
            found.append(f"{name} {number(value)} {f'after epoch {row.epoch}' if row.epoch else f'at step {row.step}'}")
    return f"Best evaluation{' before the nan' if status.is_nan else ''}: {', '.join(found)}" if found else ""


def kept_checkpoint(status: JobStatus) -> str:
    """How to resume a cancelled training from its last checkpoint; empty without one."""
    # A notebook that was executed in a pod has its saved state there, and makes no progress.
    if status.state is not StateName.CANCELLED or not status.is_checkpoint_here or status.fraction is None:
        return ""
    return f"Its last checkpoint is kept: job.retry(resume=True) or `kale-dist retry --resume {visible(status.ref)}` resumes from it"


# -- progress --------------------------------------------------------------------------------------------------------


def progress(status: JobStatus, now: float | None) -> str:
    """The text beside the progress bar: `31 % · 8,000 samples/s · about 22 s left`; empty if the progress is not known."""
    done = percent(status)
    if done is None:
        return ""
    return " · ".join(part for part in (f"{done} %", rate(status), remaining(status, now)) if part)


def percent(status: JobStatus) -> int | None:
    """The progress in whole per cent; 100 only after the job has succeeded."""
    fraction = status.fraction
    if fraction is None or not math.isfinite(fraction):
        return None
    limit = 100 if status.state is StateName.SUCCEEDED else 99
    return max(0, min(limit, int(fraction * 100)))


def rate(status: JobStatus) -> str:
    """Samples a second of all running ranks together, or at the end the mean over the training's epochs.

    Each rank measures its own, in `worker/training/data/batches.py`.
    """
    if status.is_final and (paces := [one for one in values_of(status, "pace/samples_per_s") if one > 0]):
        # Epochs have equally many samples.
        total = statistics.harmonic_mean(paces)
    else:
        shown = (one.progress for one in status.replicas if status.is_final or one.state is RankStateName.RUNNING)
        total = sum(progress.samples_per_s or 0.0 for progress in shown if progress is not None)
    return f"{number(total)} samples/s" if total > 0 else ""


def remaining(status: JobStatus, now: float | None) -> str:
    """The time left at the present pace, such as `about 20 s left`; empty while an estimate would be a guess."""
    fraction, elapsed = status.fraction, elapsed_s(status, now)
    if status.state is not StateName.RUNNING or fraction is None or elapsed is None:
        return ""
    told = status.replicas[0].progress
    if told is not None and told.training:
        return "" if told.left_s is None else _about(told.left_s)
    if not 0 < fraction < 1 or elapsed < (2 if fraction > 0.03 else 10):  # noqa: PLR2004 - earlier figures jump about
        return ""
    return _about(elapsed * (1 - fraction) / fraction)


def _about(left_s: float) -> str:
    left = max(1, round(left_s))
    return f"about {left} s left" if left < 60 else f"about {duration(left)} left"  # noqa: PLR2004


# -- ranks -----------------------------------------------------------------------------------------------------------


def first_error(status: JobStatus) -> tuple[int, str] | None:
    """The rank that failed first and its error; None if the job has not failed, or if that rank gave no error.

    If another rank is known to have failed first (such as a killed one), the errors that followed stay in their rows
    of the table.
    """
    if status.state is not StateName.FAILED:
        return None
    for replica in status.replicas:
        if replica.error and status.failed_rank in (None, replica.rank):
            return replica.rank, visible(replica.error)
    return None


def table(status: JobStatus, limit: int) -> Table:
    """The table of at most `limit` ranks: failed ones are kept first, then those that others wait for, the slowest before the rest.

    The error of `first_error` is not repeated.
    """
    replicas = list(status.replicas)
    if len(replicas) > limit:
        replicas = sorted(replicas, key=_worst_first)[:limit]
        replicas.sort(key=lambda replica: replica.rank)
    above = first_error(status)
    rows = [[*(cell(replica) for _, _, cell in _COLUMNS), _remark(replica, above)] for replica in replicas]
    numeric = {index for index, (_, is_numeric, _) in enumerate(_COLUMNS) if is_numeric}
    titles = [*(title for title, _, _ in _COLUMNS), "remark"]
    return dataclasses.replace(Table.of(titles, rows, numeric), left_out=len(status.replicas) - len(replicas))


def _worst_first(replica: ReplicaStatus) -> tuple[int, float, int]:
    pace = replica.progress.samples_per_s if replica.progress is not None else None
    return _WORST_FIRST.index(replica.state), math.inf if pace is None else pace, replica.rank


def _remark(replica: ReplicaStatus, above: tuple[int, str] | None) -> str:
    """The remark on a rank: its error unless it stands `above`, the signal that ended it, or that it waits for the others."""
    remarks = []
    if replica.error and above is not None and above[1] == visible(replica.error):
        remarks += [] if replica.rank == above[0] else ["the same error"]
    elif replica.error:
        remarks.append(visible(replica.error.split("\n", 1)[0])[:200])
    # The signal that ends a stopped rank is the agent's.
    if replica.signal and replica.state is not RankStateName.STOPPED:
        remarks.append(f"ended by {visible(replica.signal)}")
    elif replica.exit_code and not replica.error:
        remarks.append(f"exit code {replica.exit_code}")
    if replica.breakpoint is not None:
        remarks.append(f"in breakpoint() at {visible(replica.breakpoint.where)}")
    elif replica.in_collective is not None and replica.state is RankStateName.RUNNING:
        remarks.append("waits for the others" if replica.in_collective else "the others wait for it")
    return "; ".join(remarks)


def _epoch(replica: ReplicaStatus) -> str:
    progress = replica.progress
    return f"{progress.epoch:,}/{progress.epochs:,}" if progress and progress.epochs else ""


def _memory(replica: ReplicaStatus) -> str:
    usage = replica.usage
    if usage is None or usage.memory_bytes is None:
        return ""
    return size(usage.memory_bytes, usage.memory_limit_bytes)


def _gpu(replica: ReplicaStatus) -> str:
    usage = replica.usage
    if usage is None:
        return ""
    parts = [] if usage.gpu_percent is None else [f"{usage.gpu_percent} %"]
    if usage.gpu_memory_bytes is not None:
        parts.append(size(usage.gpu_memory_bytes, usage.gpu_memory_limit_bytes))
    return ", ".join(parts)


def _node(replica: ReplicaStatus) -> str:
    reported = replica.usage.node if replica.usage is not None and replica.pod else None
    return " ".join(visible(replica.node or reported or "").split())


def _step(progress: RankProgress | None) -> str:
    if progress is None or not (progress.step or progress.steps):
        return ""
    count = f"{progress.step:,}/{progress.steps:,}" if progress.steps else f"{progress.step:,}"
    return count if progress.phase == "train" else f"{visible(progress.phase)} {count}"


def _doing(status: JobStatus) -> str:
    progress = status.replicas[0].progress if status.replicas else None
    if progress is None or not (progress.epochs or progress.step or progress.steps):
        return ""
    count = _step(progress).rpartition(" ")[2].replace("/", " of ")
    if not progress.epochs:
        # A bar, or a training of steps.
        what = {"train": "step", "eval": "evaluation"}.get(progress.phase, f"{visible(progress.phase)}:")
        doing = f"{what} {count}".strip()
    else:
        where = {"train": "step ", "eval": "evaluation, step "}.get(progress.phase, f"{visible(progress.phase)}, step ")
        doing = f"epoch {progress.epoch:,} of {progress.epochs:,}{f', {where}{count}' if count else ''}"
    doing = f"training {progress.training}, {doing}" if progress.training > 1 else doing
    return doing[:1].upper() + doing[1:]


def _debugged(status: JobStatus) -> str:
    """Which rank waits in `breakpoint()`, and how to get there."""
    for replica in status.at_breakpoints[:1]:
        if replica.breakpoint is not None:
            return f"Rank {replica.rank} waits in breakpoint() at {visible(replica.breakpoint.where)}: job.debug(rank={replica.rank})"
    return ""


def _ended(word: str, time: str, reason: str) -> str:
    return (
        f"{word}{time}: {reason[:1].lower() + reason[1:] if reason[1:2].islower() else reason}"
        if reason
        else word + time
    )


_COLUMNS: tuple[tuple[str, bool, Callable[[ReplicaStatus], str]], ...] = (
    ("rank", True, lambda replica: str(replica.rank)),
    ("state", False, lambda replica: replica.state.value),
    ("epoch", True, _epoch),
    ("step", True, lambda replica: _step(replica.progress)),
    ("samples/s", True, lambda replica: number(replica.progress.samples_per_s) if replica.progress else ""),
    ("loss", True, lambda replica: number(replica.progress.loss) if replica.progress else ""),
    ("memory", True, _memory),
    ("GPU", True, _gpu),
    ("node", False, _node),
)
"""Each column's title, whether it is aligned to the right, and its text for a rank. The remark is added last."""
