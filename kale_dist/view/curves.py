"""Metrics as curves: which series there are, and each group of them as a small SVG picture."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

from kale_dist.status import MetricRow
from kale_dist.view import facts

MAX_CURVES = 6
"""Pictures; further metrics are in `job.metrics`."""

MAX_SERIES = 6
"""Lines in one picture."""

MAX_POINTS = 160
"""Points of one line: more than its picture is wide would only cost bytes."""

COLOURS = ("#3b82f6", "#f08c00", "#12a594", "#c05bd6", "#e5484d", "#8a8f98")
"""Mid tones that can be told apart, also by those who see fewer colours, on white and on black."""

_WIDTH, _HEIGHT = 260, 96
_LEFT, _RIGHT, _TOP, _BOTTOM = 4, 4, 6, 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: a metric from one source."""

    label: str
    """`train`, `eval`, `report`, or `rank 1`."""
    points: tuple[tuple[float, float], ...]
    """(epoch, step or running number; value), both finite."""
    last: float
    """The last value, finite or not."""
    by_epoch: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One picture: all series of one metric."""

    name: str
    series: tuple[Series, ...]

    @property
    def summary(self) -> str:
        """The last values in words: `0.12 train, 0.15 eval`."""
        return ", ".join(f"{facts.number(one.last)} {one.label}" for one in self.series)


def collect(rows: Iterable[MetricRow]) -> tuple[Curve, ...]:
    """The curves of a job's metrics, loss and accuracy first, else in the order of their first report."""
    found: dict[str, dict[tuple[str, int | None], list[tuple[MetricRow, float]]]] = {}
    for row in rows:
        for name, value in row.values:
            # What a step returned is an average over ranks, whoever sent it.
            rank = row.rank if row.source == "report" else None
            found.setdefault(name, {}).setdefault((row.source, rank), []).append((row, value))
    order = sorted(found, key=lambda name: {"loss": 0, "accuracy": 1}.get(name, 2))
    return tuple(_curve(name, found[name]) for name in order[:MAX_CURVES])


def svg(curve: Curve) -> str:
    """A curve as inline SVG that takes its text colour from the page; empty where there is no line to draw."""
    series = [one for one in curve.series if len(one.points) > 1]
    if not series:
        return ""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    box = (min(xs), max(xs), *_span(min(ys), max(ys)))
    lines = []
    for index, one in enumerate(curve.series):
        if one in series:
            colour = COLOURS[index % len(COLOURS)]
            dashes = ' stroke-dasharray="5 3"' if one.label == "eval" else ""
            corners = [_place(point, box) for point in one.points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.75"{dashes} '
                'stroke-linejoin="round" stroke-linecap="round"/>'
                f'<circle cx="{corners[-1][0]:.1f}" cy="{corners[-1][1]:.1f}" r="2.5" fill="{colour}"/>'
            )
    grid = "".join(
        f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity="0.13"/>'
        for y in (_TOP, _HEIGHT / 2, _HEIGHT - _BOTTOM)
    )
    label = escape(f"{curve.name}: {curve.summary}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="display:block;width:100%;height:auto">'
        f"{grid}{''.join(lines)}</svg>"
    )


def bounds(curve: Curve) -> tuple[float, float] | None:
    """The lowest and the highest value that a curve shows; None without a line."""
    ys = [y for one in curve.series if len(one.points) > 1 for _, y in one.points]
    return (min(ys), max(ys)) if ys else None


def last_epoch(curve: Curve) -> tuple[int, int] | None:
    """The first and last epoch that a curve spans; None if it does not run over epochs."""
    drawn = [one for one in curve.series if len(one.points) > 1]
    if not drawn or not all(one.by_epoch for one in drawn):
        return None
    xs = [x for one in drawn for x, _ in one.points]
    return int(min(xs)), int(max(xs))


def _curve(name: str, groups: dict[tuple[str, int | None], list[tuple[MetricRow, float]]]) -> Curve:
    several = len({source for source, _ in groups}) > 1
    series = []
    # By rank, not by who reported first: a rank then has the colour here that it has in the log.
    for (source, rank), rows in sorted(groups.items(), key=lambda group: group[0][1] or 0)[:MAX_SERIES]:
        said = facts.clean(source)
        label = said if rank is None else (f"{said} rank {rank}" if several else f"rank {rank}")
        xs, by_epoch = _positions([row for row, _ in rows])
        points = [(x, value) for x, (_, value) in zip(xs, rows, strict=True) if math.isfinite(value)]
        series.append(
            Series(
                label=label, points=_thin(points), last=rows[-1][1], by_epoch=by_epoch and rows[0][0].epoch is not None
            )
        )
    return Curve(name=facts.clean(name), series=tuple(series))


def _positions(rows: Sequence[MetricRow]) -> tuple[list[float], bool]:
    """Where rows lie on the horizontal axis, and whether that axis counts epochs."""
    for field in ("epoch", "step"):
        found = [getattr(row, field) for row in rows]
        # Reports within an epoch share its number; a line needs a value that grows.
        if None not in found and all(before < after for before, after in itertools.pairwise(found)):
            return [float(value) for value in found], field == "epoch"
    return [float(index) for index in range(len(rows))], False


def _thin(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most `MAX_POINTS` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    kept = {0, len(points) - 1}
    stretches = MAX_POINTS // 2 - 1
    for stretch in range(stretches):
        indices = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        kept.add(min(indices, key=lambda index: points[index][1]))
        kept.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(kept))


def _span(low: float, high: float) -> tuple[float, float]:
    """Bounds that lie apart, also for a line that is level. Halves, for the difference of two floats may overflow."""
    if high / 2 - low / 2 > 0:
        return low, high
    margin = abs(low) / 2 or 1.0
    return low - margin, high + margin


def _place(point: tuple[float, float], box: tuple[float, float, float, float]) -> tuple[float, float]:
    left, right, low, high = box
    across = (point[0] - left) / (right - left) if right > left else 0.5
    up = (point[1] / 2 - low / 2) / (high / 2 - low / 2)
    return (
        _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
        _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
    )
