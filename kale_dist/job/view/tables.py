"""Several jobs as text and as HTML: a table of them, and a comparison of their metrics and arguments. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from kale_dist import wire
from kale_dist.job.status import JobStatus
from kale_dist.job.view import curves, facts, markup, plain

MAX_ROWS = 20
"""Rows of a table; the newest jobs are shown."""

_NONE = "There are no jobs."
_METRICS = 3
"""Metrics of a job in the table of all."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One job."""

    status: JobStatus
    arguments: Mapping[str, str]
    """Arguments of its call, as text."""
    created: str
    """When it was submitted, in local time."""

    @property
    def name(self) -> str:
        """The job's name, with its namespace on a cluster."""
        return facts.name(self.status)


def text(rows: Sequence[Row], left_out: int, now: float) -> str:
    """Draw a table of jobs as text; `left_out` is the number of older ones."""
    return "\n".join([*plain.drawn(_table(rows, left_out, now)), *_more(left_out)]) if rows else _NONE


def html(rows: Sequence[Row], left_out: int, now: float) -> str:
    """The table of `text` as HTML."""
    colours = {row.name: markup.colour(row.status) for row in rows}
    table = markup.table(_table(rows, left_out, now), "Jobs", colours=colours) if rows else _NONE
    return markup.frame("Jobs", table + markup.small(_more(left_out)))


def comparison_text(rows: Sequence[Row]) -> str:
    """A comparison of jobs: a row for each, with the arguments in which they differ and their last metrics."""
    table, same = _compared(rows, [_numbers(_series(row.status) + _use(row.status)) for row in rows])
    return "\n".join([*plain.drawn(table), same])


def comparison_html(rows: Sequence[Row]) -> str:
    """The comparison with a picture for each metric, in which each job is a line."""
    table, same = _compared(rows, [_numbers(_series(row.status)) for row in rows])
    most = (
        f"The charts show the first {curves.MAX_SERIES} of {len(rows)} jobs." if len(rows) > curves.MAX_SERIES else ""
    )
    colours = dict(zip((row.name for row in rows), curves.COLOURS, strict=False))
    drawn = markup.table(table, "Compared jobs", colours=colours)
    charts = markup.charts(_curves(rows, _series)) + markup.charts(_curves(rows, _use, is_from_zero=True))
    return markup.frame("Comparison of jobs", f"{drawn}{markup.small([same, most])}{charts}")


def _table(rows: Sequence[Row], first: int, now: float) -> facts.Table:
    cells = []
    for number, row in enumerate(rows, first):
        status = row.status
        elapsed, percent = facts.elapsed_s(status, now), facts.percent(status)
        done = "" if status.is_final or percent is None else f"{percent} %"
        metrics = ", ".join(f"{name} {value}" for name, value in list(_numbers(_series(status)).items())[:_METRICS])
        ran = "" if elapsed is None else facts.duration(elapsed)
        ranks = str(len(status.replicas))
        cells.append((str(number), row.name, facts.state(status), done, ranks, row.created, ran, metrics))
    return facts.Table.of(("", "job", "state", "done", "ranks", "created", "ran", "last metrics"), cells, {0, 3, 4, 6})


def _compared(rows: Sequence[Row], last: Sequence[Mapping[str, str]]) -> tuple[facts.Table, str]:
    """The table of a comparison with the last numbers of each job, and a line of the arguments that are equal in all jobs."""
    names = list(dict.fromkeys(name for row in rows for name in row.arguments))
    differing = [name for name in names if len({row.arguments.get(name) for row in rows}) > 1]
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
    return facts.Table.of(titles, cells, numeric), f"The same in all: {wire.visible(same)}" if same else ""


def _series(status: JobStatus) -> list[tuple[str, curves.Series]]:
    """A job's curves by name, such as `eval/loss`; those of evaluations first."""
    found = [(f"{one.label}/{curve.name}", one) for curve in curves.collect(status.metrics) for one in curve.series]
    return sorted(found, key=lambda named: not named[0].startswith("eval/"))


def _use(status: JobStatus) -> list[tuple[str, curves.Series]]:
    """What a job's ranks used and waited for, as one line."""
    return [(curve.name, curve.series[0]) for curve in curves.collect_history(status.history, is_compared=True)]


def _numbers(found: Sequence[tuple[str, curves.Series]]) -> dict[str, str]:
    return {name: facts.number(one.last) for name, one in found}


def _curves(
    rows: Sequence[Row],
    series_of: Callable[[JobStatus], list[tuple[str, curves.Series]]],
    *,
    is_from_zero: bool = False,
) -> list[curves.Curve]:
    """The pictures of a comparison: in each, a line for each of the first jobs."""
    found: dict[str, list[curves.Series]] = {}
    for row, colour in zip(rows, curves.COLOURS, strict=False):
        for name, one in series_of(row.status):
            found.setdefault(name, []).append(dataclasses.replace(one, label=row.name, colour=colour))
    made = (curves.Curve(name=name, series=tuple(each), is_from_zero=is_from_zero) for name, each in found.items())
    return [curve for curve in made if curve.drawn]


def _more(left_out: int) -> list[str]:
    return [f"and {left_out:,} older"] if left_out else []
