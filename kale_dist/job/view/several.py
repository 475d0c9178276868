"""Several jobs as text and as HTML: a table of them, and a comparison of their metrics and arguments. Pure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from html import escape

from kale_dist.job.status import JobStatus, values_of
from kale_dist.job.view import curves, facts, markup, plain

MAX_ROWS = 20
"""Rows of a table; the newest jobs are shown."""

_METRICS = 3
"""Metrics of a job in the table of all."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One job."""

    status: JobStatus
    arguments: Mapping[str, str]
    """Arguments of its call, as text."""

    @property
    def name(self) -> str:
        """The job's name, with its namespace on a cluster."""
        return facts.name(self.status)


def text(rows: Sequence[Row], left_out: int, now: float) -> str:
    """A table of jobs; `left_out` says how many older ones there are."""
    return "\n".join([*_lines(_table(rows, left_out, now)), *_more(left_out)]) if rows else "There are no jobs."


def html(rows: Sequence[Row], left_out: int, now: float) -> str:
    """The table of `text` as HTML."""
    if not rows:
        return markup.frame("Jobs", "There are no jobs.")
    more = "".join(f'<div style="margin-top:4px;opacity:.72">{escape(line)}</div>' for line in _more(left_out))
    colours = {row.name: markup.colour(row.status) for row in rows}
    return markup.frame("Jobs", markup.table(_table(rows, left_out, now), "Jobs", colours=colours) + more)


def comparison_text(rows: Sequence[Row]) -> str:
    """A comparison of jobs: a row for each, with the arguments in which they differ and their last metrics."""
    table, same = _compared(rows)
    return "\n".join([*_lines(table), *([same] if same else [])])


def comparison_html(rows: Sequence[Row]) -> str:
    """The comparison with a picture for each metric, in which each job is a line."""
    found = [curve for curve in _curves(rows) if curve.drawn]
    figures = "".join(markup.figure(curve) for curve in found[: curves.MAX_CURVES])
    table, same = _compared(rows)
    missing = []
    if len(rows) > curves.MAX_SERIES:
        missing.append(f"The pictures show the first {curves.MAX_SERIES} of {len(rows)} jobs.")
    if len(found) > curves.MAX_CURVES:
        missing.append(f"and {len(found) - curves.MAX_CURVES} more metrics in job.metrics")
    words = [word for word in (*missing, same) if word]
    notes = "".join(
        f'<div style="margin-top:6px;opacity:.72;overflow-wrap:anywhere">{escape(one)}</div>' for one in words
    )
    plot = (
        f'<div style="display:flex;flex-wrap:wrap;gap:12px 20px;margin-bottom:12px">{figures}</div>' if figures else ""
    )
    colours = dict.fromkeys((row.name for row in rows), "transparent") | {
        row.name: colour for row, colour in zip(rows, curves.COLOURS, strict=False)
    }
    return markup.frame("Comparison of jobs", f"{plot}{markup.table(table, 'Compared jobs', colours=colours)}{notes}")


def _table(rows: Sequence[Row], first: int, now: float) -> facts.Table:
    cells = []
    for number, row in enumerate(rows, first):
        status = row.status
        elapsed, percent = facts.elapsed_s(status, now), facts.percent(status)
        done = "" if status.is_final or percent is None else f"{percent} %"
        metrics = ", ".join(f"{name} {value}" for name, value in list(_last(status).items())[:_METRICS])
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.created)) if status.created else ""
        ran = "" if elapsed is None else facts.duration(elapsed)
        ranks = str(len(status.replicas))
        cells.append((str(number), row.name, facts.state(status), done, ranks, created, ran, metrics))
    return _shown(("", "job", "state", "done", "ranks", "created", "ran", "last metrics"), cells, {0, 3, 4, 6})


def _compared(rows: Sequence[Row]) -> tuple[facts.Table, str]:
    """The table of a comparison, and a line of the arguments that are equal in all jobs."""
    names = list(dict.fromkeys(name for row in rows for name in row.arguments))
    differing = [name for name in names if len({row.arguments.get(name) for row in rows}) > 1]
    last = [_last(row.status) for row in rows]
    metrics = list(dict.fromkeys(name for one in last for name in one))
    cells = [
        (
            str(number), row.name, facts.state(row.status), *(row.arguments.get(name, "") for name in differing),
            *(one.get(name, "") for name in metrics),
        )
        for number, (row, one) in enumerate(zip(rows, last, strict=True))
    ]  # fmt: skip
    same = ", ".join(f"{name}={rows[0].arguments[name]}" for name in names if name not in differing)
    titles = ("", "job", "state", *differing, *metrics)
    numeric = {0, *range(3 + len(differing), len(titles))}
    return _shown(titles, cells, numeric), f"The same in all: {facts.clean(same)}" if same else ""


def _shown(titles: Sequence[str], cells: Sequence[Sequence[str]], numeric: set[int]) -> facts.Table:
    """A table without the columns that are empty in all rows."""
    kept = [index for index in range(len(titles)) if any(row[index] for row in cells)]
    return facts.Table(
        titles=tuple(facts.clean(titles[index]) for index in kept),
        numeric=tuple(index in numeric for index in kept),
        rows=tuple(tuple(facts.clean(row[index]) for index in kept) for row in cells),
        left_out=0,
    )


def _last(status: JobStatus) -> dict[str, str]:
    """The last value of each metric: `eval/loss` to its text, those of evaluations first."""
    names = dict.fromkeys(
        f"{one.label}/{curve.name}" for curve in curves.collect(status.metrics) for one in curve.series
    )
    ordered = sorted(names, key=lambda name: not name.startswith("eval/"))
    found = {name: values_of(status, name) for name in ordered}
    return {name: facts.number(values[-1]) for name, values in found.items() if values}


def _curves(rows: Sequence[Row]) -> list[curves.Curve]:
    found: dict[str, list[curves.Series]] = {}
    for number, (row, colour) in enumerate(zip(rows, curves.COLOURS, strict=False)):
        for curve in curves.collect(row.status.metrics):
            for one in curve.series:
                of_job = dataclasses.replace(one, label=str(number), colour=colour)
                found.setdefault(f"{one.label}/{curve.name}", []).append(of_job)
    ordered = sorted(found.items(), key=lambda item: not item[0].startswith("eval/"))
    return [curves.Curve(name=name, series=tuple(series)) for name, series in ordered]


def _lines(table: facts.Table) -> list[str]:
    right = frozenset(index for index, is_right in enumerate(table.numeric) if is_right)
    return plain.table(table.titles, table.rows, right=right)


def _more(left_out: int) -> list[str]:
    return [f"and {left_out:,} older"] if left_out else []
