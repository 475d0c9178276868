"""A sweep as text and as HTML: one sentence, a curve of the trials' values, and a row for each trial. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import Any

from kale_dist.job.view import curves, facts, markup, plain

MAX_ROWS = 40
"""Rows of the table: the best trial and the newest ones. `sweep.trials` has all of them."""

_HEIGHT = 520
"""Pixels of the table: some twenty rows."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One trial."""

    number: int
    """The trial's number, from 0, in the order in which the trials began."""
    params: dict[str, Any]
    """The parameters that the call has asked Optuna's trial for."""
    state: str
    """`waiting`, `running`, `complete`, `pruned`, `failed`, or `repeated`: lost, and its parameters are tried again."""
    value: float | None
    """The metric's last value; None if it was not reported."""
    reports: int
    """How many values of the metric were reported."""
    reason: str
    """Why the trial failed; empty otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepPicture:
    """A sweep at one time; notebooks show it as HTML, others as text."""

    name: str
    metric: str
    wanted: int
    """How many trials there are to be."""
    is_maximised: bool
    is_over: bool
    """Whether the sweep has ended."""
    rows: tuple[TrialRow, ...]
    error: str = ""
    """Why the sweep ended early; empty otherwise."""

    @property
    def best(self) -> TrialRow | None:
        """The best complete trial; None if there is none."""
        complete = [row for row in self.rows if row.state == "complete" and row.value is not None]
        if not complete:
            return None
        sign = -1 if self.is_maximised else 1
        return min(complete, key=lambda row: sign * (row.value or 0.0))

    def count(self, state: str) -> int:
        """How many trials are in a state."""
        return sum(row.state == state for row in self.rows)

    def __repr__(self) -> str:
        """The picture as text."""
        return text(self)

    def _repr_html_(self) -> str:
        return html(self)


def sentence(picture: SweepPicture) -> str:
    """A sweep in a sentence: `5 of 12 trials, 2 running, 3 pruned; best eval/accuracy 0.97 (trial 4: lr=0.01)`."""
    ended = picture.count("complete") + picture.count("pruned")
    words = [f"{ended} of {picture.wanted} trials"]
    words += [f"{count} {state}" for state in ("running", "pruned", "failed") if (count := picture.count(state))]
    said = ", ".join(words)
    best = picture.best
    early = f"; ended early: {facts.clean(picture.error)}" if picture.error else ""
    if best is None:
        return f"{said}; no {picture.metric}{early or ' yet'}"
    return f"{said}; best {picture.metric} {facts.number(best.value)} (trial {best.number}: {_params(best)}){early}"


def text(picture: SweepPicture) -> str:
    """Draw a sweep as text."""
    table = _table(picture)
    numeric = frozenset(index for index, is_numeric in enumerate(table.numeric) if is_numeric)
    lines = plain.table(table.titles, table.rows, right=numeric)
    return "\n".join([f"{facts.clean(picture.name)}: {sentence(picture)}", "", *lines, *_left_out(picture)])


def html(picture: SweepPicture) -> str:
    """Draw a sweep as one HTML element with inline styles and no script; all text of trials is escaped."""
    best = picture.best
    notes = "".join(f'<div style="opacity:.72">{escape(line)}</div>' for line in _left_out(picture))
    table = markup.table(_table(picture), "Trials", bold=str(best.number) if best is not None else "", height=_HEIGHT)
    curve = _curve(picture)
    plot = f'<div style="margin-top:10px">{markup.figure(curve)}</div>' if curve.drawn else ""
    return markup.frame(
        f"Sweep {facts.clean(picture.name)}",
        f'<strong style="font-size:14px;font-weight:600">{escape(facts.clean(picture.name))}</strong> '
        f"{'ended' if picture.is_over else 'is running'}"
        f'<div style="margin-top:6px;overflow-wrap:anywhere">{escape(sentence(picture))}</div>{plot}'
        f'<div style="margin-top:10px">{table}</div>{notes}',
    )


def _table(picture: SweepPicture) -> facts.Table:
    has_reasons = any(row.reason for row in picture.rows)
    header = ("trial", "state", picture.metric, "reports", *(("reason",) if has_reasons else ()), "parameters")
    rows = tuple(
        (
            str(row.number),
            row.state,
            facts.number(row.value),
            str(row.reports),
            *((facts.clean(row.reason),) if has_reasons else ()),
            _params(row),
        )
        for row in _shown(picture)
    )
    numeric = (True, False, True, True, *((False,) if has_reasons else ()), False)
    return facts.Table(titles=tuple(map(facts.clean, header)), rows=rows, numeric=numeric, left_out=0)


def _shown(picture: SweepPicture) -> Iterator[TrialRow]:
    newest = picture.rows[-MAX_ROWS:]
    best = picture.best
    if best is not None and best not in newest:
        yield best
    yield from newest


def _left_out(picture: SweepPicture) -> list[str]:
    more = len(picture.rows) - MAX_ROWS
    return [f"{more} older trials are in sweep.trials."] if more > 0 else []


def _params(row: TrialRow) -> str:
    return facts.clean(", ".join(f"{name}={_param(value)}" for name, value in row.params.items()))


def _param(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _curve(picture: SweepPicture) -> curves.Curve:
    """The curve of a sweep: each trial's value, and the best value so far."""
    values = [
        (float(row.number), row.value)
        for row in picture.rows
        if row.value is not None and row.state in ("complete", "pruned")
    ]
    better = max if picture.is_maximised else min
    best: list[tuple[float, float]] = []
    for row in picture.rows:
        if row.state == "complete" and row.value is not None:
            best.append((float(row.number), better([row.value, *(value for _, value in best[-1:])])))
    series = tuple(
        curves.Series(
            label=label, colour=colour, points=tuple(points), last=points[-1][1], axis="trial", is_joined=points is best
        )
        for label, colour, points in (
            ("each trial", curves.COLOURS[1], values),
            ("best so far", curves.COLOURS[0], best),
        )
        if points
    )
    return curves.Curve(name=picture.metric, series=series)
