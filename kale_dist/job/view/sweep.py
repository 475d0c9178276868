"""A sweep as text and as HTML: one sentence, a curve of the trials' values, and a row for each trial. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import Any

from kale_dist import wire
from kale_dist.job.view import curves, facts, markup, plain

MAX_ROWS = 40
"""Rows of the table: the best trial and the newest ones. `sweep.trials` has all of them."""

_MAX_PARAMETERS = 5
"""Pictures of the metric over a parameter."""

_LOG_FROM = 100.0
"""A parameter whose largest value is more than so many times its smallest has a logarithmic axis."""

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
    ref: str | None = None
    """The job's reference; None where the call returned no job."""


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
    listed = ", ".join(words)
    best = picture.best
    early = f"; ended early: {wire.visible(picture.error)}" if picture.error else ""
    if best is None:
        return f"{listed}; no {picture.metric}{early or ' yet'}"
    return f"{listed}; best {picture.metric} {facts.number(best.value)} (trial {best.number}: {_params(best)}){early}"


def text(picture: SweepPicture) -> str:
    """Draw a sweep as text."""
    lines = plain.drawn(_table(picture))
    return "\n".join([f"{wire.visible(picture.name)}: {sentence(picture)}", "", *lines, *_notes(picture)])


def html(picture: SweepPicture) -> str:
    """Draw a sweep as one HTML element with inline styles and no script; all text of trials is escaped."""
    best = picture.best
    table = markup.table(_table(picture), "Trials", bold=str(best.number) if best is not None else "", height=_HEIGHT)
    plot = markup.charts([curve for curve in (_curve(picture), *_by_parameter(picture)) if curve.drawn])
    return markup.frame(
        f"Sweep {wire.visible(picture.name)}",
        f"{markup.heading(wire.visible(picture.name))} "
        f"{'ended' if picture.is_over else 'is running'}"
        f'<div style="margin-top:6px;overflow-wrap:anywhere">{escape(sentence(picture))}</div>{plot}'
        f'<div style="margin-top:10px">{table}</div>{markup.small(_notes(picture))}',
    )


def _table(picture: SweepPicture) -> facts.Table:
    rows = [
        (
            str(row.number), row.state, facts.number(row.value), str(row.reports), row.reason, _params(row),
            (row.ref or "").rpartition("/")[2],
        )
        for row in _shown(picture)
    ]  # fmt: skip
    return facts.Table.of(("trial", "state", picture.metric, "reports", "reason", "parameters", "job"), rows, {0, 2, 3})


def _shown(picture: SweepPicture) -> Iterator[TrialRow]:
    newest = picture.rows[-MAX_ROWS:]
    best = picture.best
    if best is not None and best not in newest:
        yield best
    yield from newest


def _notes(picture: SweepPicture) -> list[str]:
    more = len(picture.rows) - MAX_ROWS
    notes = [f"{more} older trials are in sweep.trials."] if more > 0 else []
    shown = next((row for row in (picture.best, *picture.rows) if row is not None and row.ref), None)
    if shown is not None:
        notes.append(
            f"sweep.trials[{shown.number}].job on the last line of a cell shows the job of trial {shown.number}."
        )
    return notes


def _params(row: TrialRow) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.params.items()}
    return wire.visible(", ".join(f"{name}={value}" for name, value in shown.items()))


def _curve(picture: SweepPicture) -> curves.Curve:
    """The curve of a sweep: each trial's value, and the best value so far."""
    values = [(float(row.number), row.value or 0.0) for row in _with_values(picture)]
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
    return curves.Curve(name=picture.metric, series=series, vertical=picture.metric)


def _with_values(picture: SweepPicture) -> list[TrialRow]:
    return [row for row in picture.rows if row.value is not None and row.state in ("complete", "pruned")]


def _by_parameter(picture: SweepPicture) -> Iterator[curves.Curve]:
    """A picture for each of the first parameters that are numbers: the metric of each trial over the parameter's value."""
    rows = _with_values(picture)
    names = dict.fromkeys(name for row in rows for name in row.params)
    numeric = [name for name in names if all(type(row.params.get(name, 0)) in (int, float) for row in rows)]
    for name in numeric[:_MAX_PARAMETERS]:
        points = sorted((float(row.params[name]), row.value or 0.0) for row in rows if name in row.params)
        xs = [x for x, _ in points]
        if xs and xs[0] < xs[-1]:
            one = curves.Series(
                label="", colour=curves.COLOURS[1], points=tuple(points), last=points[-1][1],
                axis=wire.visible(name), is_joined=False,
            )  # fmt: skip
            is_log = xs[0] > 0 and xs[-1] > _LOG_FROM * xs[0]
            title = wire.visible(f"{picture.metric} by {name}")
            yield curves.Curve(name=title, series=(one,), vertical=picture.metric, is_log=is_log)
