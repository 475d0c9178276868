"""A job as plain text, for terminals and for notebooks that show no HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kale_dist.job.status import JobStatus
from kale_dist.job.view import curves, facts
from kale_dist.wire import LogLine, MetricRow, StateName, visible

_BAR_CELLS = 24
_PARTS = " ▏▎▍▌▋▊▉"
_MAX_NOTES = 8
_MAX_RANKS = 16


def text(status: JobStatus, tail: Sequence[LogLine] = (), now: float | None = None) -> str:
    """Draw a job as a few lines of text, without escape sequences.

    Args:
        status: The job's status.
        tail: The last lines of its log.
        now: The present time, in seconds since 1970; None leaves out how long a running job has run.

    Returns:
        Lines without a newline at the end.
    """
    error = facts.first_error(status)
    sentence = facts.sentence(status, now, error="" if error is None else error[1])
    lines = [f"{visible(status.ref)}  {facts.state(status)}", sentence]
    progress = progress_line(status, now)
    if progress:
        lines.append(progress)
    lines += [f"{curve.name}: {curve.summary}" for curve in curves.collect(status.metrics)[: curves.MAX_CURVES]]
    ranks = facts.table(status, _MAX_RANKS)
    if ranks.rows:
        titles = tuple("" if title == "remark" else title for title in ranks.titles)
        lines += drawn(dataclasses.replace(ranks, titles=titles))
    if ranks.left_out:
        lines.append(f"and {ranks.left_out:,} more")
    if error is not None:
        lines.append(f"error of rank {error[0]}: {error[1]}")
    for note in status.notes[-_MAX_NOTES:]:
        lines.append(f"{'warning' if note in status.warnings else 'note'}: {visible(note)}")
    if tail:
        lines += ["", *(f"{line.prefix} {facts.log_text(line)}".rstrip() for line in tail)]
    return "\n".join(lines)


def progress_line(status: JobStatus, now: float | None) -> str:
    """Bar, per cent, samples a second and time left in one line; empty if the progress is not known."""
    percent = facts.percent(status)
    if percent is None or status.state is StateName.SUCCEEDED:
        return ""
    return f"{bar(percent / 100)} {facts.progress(status, now)}"


def metrics_line(row: MetricRow) -> str:
    """The metrics of an epoch's training or evaluation in a line: `epoch 3, eval: loss 0.412, accuracy 0.91`."""
    values = ", ".join(f"{visible(name)} {facts.number(value)}" for name, value in row.values)
    return f"{f'epoch {row.epoch}, ' if row.epoch is not None else ''}{row.source}: {values}"


def bar(fraction: float) -> str:
    """A bar of block characters."""
    eighths = round(max(0.0, min(1.0, fraction)) * _BAR_CELLS * 8)
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (_PARTS[part] if part else "")
    return f"▕{drawn:<{_BAR_CELLS}}▏"


def drawn(found: facts.Table) -> list[str]:
    """The lines of a table."""
    return table(found.titles, found.rows, right=frozenset(index for index, flag in enumerate(found.numeric) if flag))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """The lines of a table; each column is as wide as its content, those in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
