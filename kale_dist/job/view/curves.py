"""Draws metrics as curves: each metric's series in a small SVG picture."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

from kale_dist.job.view import facts
from kale_dist.wire import MEASURED_SOURCES, MetricRow

MAX_CURVES = 6
"""Curves in a job's picture; `job.metrics` has all metrics."""

MAX_SERIES = 6
"""Lines in one picture."""

MAX_POINTS = 160
"""Points of one line; more would not be visible at the picture's width."""

MAX_STRIPS = 32
"""Places along the horizontal axis that show their values under the pointer."""

COLOURS = ("#3b82f6", "#f08c00", "#12a594", "#c05bd6", "#e5484d", "#8a8f98")
"""Mid tones that can be told apart, also by those who see fewer colours, on white and on black."""

_COLOUR_OF = {"train": COLOURS[0], "eval": COLOURS[1]}
"""Colours by source, the same in every picture. Ranks have the same colours as in the log."""

_WIDTH, _HEIGHT = 290, 118
_RIGHT, _TOP, _BOTTOM = 6, 8, 20
_CHARACTER = 5.9
"""Approximate width of a digit at an axis."""

_MARGIN = 6.0
_LABEL = 12.0
"""Width of what stands beside the vertical axis."""

_PLAIN_STEPS = (1e-5, 1e7)
"""Smallest and largest step between numbers at an axis that are written without an exponent."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: a metric from one source."""

    label: str
    """`train`, `eval`, `report`, or `rank 1`."""
    colour: str
    points: tuple[tuple[float, float], ...]
    """(epoch, step or running number; value), both finite."""
    last: float
    """The last value, finite or not."""
    axis: str
    """What the horizontal axis counts: `epoch`, `step`, `report` or `trial`."""
    is_joined: bool = True
    """Whether a line joins the points."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One picture: all series of one metric."""

    name: str
    series: tuple[Series, ...]
    vertical: str = ""
    """What stands beside the vertical axis; empty where the name above the picture says it."""
    is_log: bool = False
    """Whether the horizontal axis is logarithmic; all its values are above 0 then."""

    @property
    def summary(self) -> str:
        """The last values in words: `0.12 train, 0.15 eval`."""
        return ", ".join(f"{facts.number(one.last)} {one.label}" for one in self.series)

    @property
    def drawn(self) -> tuple[Series, ...]:
        """The series that are lines: of two points or more."""
        return tuple(one for one in self.series if len(one.points) > 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """The range of values that a picture shows, and how values map to its pixels."""

    left: float
    right: float
    low: float
    high: float
    margin: float
    """Width of the numbers at the vertical axis."""
    is_log: bool = False

    def across(self, x: float) -> float:
        share = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        if self.is_log:
            share = math.log(x / self.left) / math.log(self.right / self.left)
        return self.margin + share * (_WIDTH - self.margin - _RIGHT)

    def down(self, y: float) -> float:
        # Halves, because the difference of two floats may overflow.
        share = (y / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def collect(rows: Iterable[MetricRow]) -> tuple[Curve, ...]:
    """The curves of a job's metrics: loss and accuracy first, the others in the order of their first report.

    Counters of strategies (bytes, staleness), profiles, learning rates and paces are left out, because they would outnumber
    the training's own metrics.
    """
    found: dict[str, dict[tuple[str, int | None], list[tuple[MetricRow, float]]]] = {}
    for row in rows:
        for name, value in row.values if row.source not in MEASURED_SOURCES else ():
            # What a step returned is an average over ranks, no matter which rank sent it.
            rank = row.rank if row.source == "report" else None
            found.setdefault(name, {}).setdefault((row.source, rank), []).append((row, value))
    order = sorted(found, key=lambda name: {"loss": 0, "accuracy": 1}.get(name, 2))
    return tuple(_curve(name, found[name]) for name in order)


def svg(curve: Curve, *, has_titles: bool = True) -> str:
    """Draw a curve as inline SVG in the text colour of the page; empty if no series has two points.

    Args:
        curve: The curve.
        has_titles: Whether the browser shows the values under the pointer itself (`title` elements). Otherwise they are
            in `data-kd-at`, for a page that shows them without the browser's delay.
    """
    series = curve.drawn
    if not series:
        return ""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    low, high = _span(min(ys), max(ys))
    ticks = _ticks(low, high)
    margin = _MARGIN + _CHARACTER * max(len(text) for _, text in ticks)
    margin += _LABEL if curve.vertical else 0.0
    box = _Box(min(xs), max(xs), low, high, margin, curve.is_log)
    axes = {one.axis for one in series}
    parts = [_grid(box, ticks, axes.pop() if len(axes) == 1 else "")]
    if curve.vertical:
        parts.append(
            f'<text transform="translate(9,{_TOP}) rotate(-90)" text-anchor="end" fill="currentColor" '
            f'fill-opacity="0.78">{escape(facts.clean(curve.vertical))}</text>'
        )
    for one in series:
        dashes = ' stroke-dasharray="5 3"' if one.label == "eval" else ""
        corners = [(box.across(x), box.down(y)) for x, y in one.points]
        if not one.is_joined:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{one.colour}"/>' for x, y in corners]
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="1.75"{dashes} '
            'stroke-linejoin="round" stroke-linecap="round"/>'
            f'<circle cx="{corners[-1][0]:.1f}" cy="{corners[-1][1]:.1f}" r="2.5" fill="{one.colour}"/>'
        )
    parts += _strips(series, box, has_titles=has_titles)
    label = escape(f"{curve.name}: {curve.summary}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="10" '
        f'style="display:block;width:100%;height:auto;overflow:visible">{"".join(parts)}</svg>'
    )


def _grid(box: _Box, ticks: Sequence[tuple[float, str]], axis: str) -> str:
    """Draw the lines and numbers of both axes."""
    parts = []
    for value, text in ticks:
        y = box.down(value)
        parts.append(
            f'<line x1="{box.margin:.1f}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.16"/><text x="{box.margin - 4:.1f}" y="{y + 3.5:.1f}" text-anchor="end" '
            f'fill="currentColor" fill-opacity="0.78">{text}</text>'
        )
    if axis:
        first, last = facts.number(box.left), facts.number(box.right)
        for x, anchor, text in (
            (box.margin, "start", f"{axis} {first}"), (_WIDTH - _RIGHT, "end", f"{last}{' (log)' if box.is_log else ''}")
        ):  # fmt: skip
            parts.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - 5}" text-anchor="{anchor}" fill="currentColor" '
                f'fill-opacity="0.78">{escape(text)}</text>'
            )
    return "".join(parts)


def _strips(series: Sequence[Series], box: _Box, *, has_titles: bool) -> list[str]:
    """Draw transparent strips that hold the values at their place, for the pointer."""
    places = sorted({x for one in series for x, _ in one.points})
    if len(places) > MAX_STRIPS:
        places = [places[index * (len(places) - 1) // (MAX_STRIPS - 1)] for index in range(MAX_STRIPS)]
    middles = [box.across(x) for x in places]
    edges = [box.margin, *((a + b) / 2 for a, b in itertools.pairwise(middles)), float(_WIDTH)]
    strips = []
    for x, (start, end) in zip(places, itertools.pairwise(edges), strict=True):
        values = []
        for one in series:
            index = bisect.bisect_right(one.points, x, key=lambda point: point[0])
            if index:
                values.append(f"{facts.number(one.points[index - 1][1])} {one.label}")
        text = escape(f"{series[0].axis} {facts.number(x)}: {', '.join(values)}", quote=True)
        place = f'x="{start:.1f}" y="0" width="{max(0.0, end - start):.1f}" height="{_HEIGHT}" fill="transparent"'
        strips.append(
            f"<rect {place}><title>{text}</title></rect>" if has_titles else f'<rect {place} data-kd-at="{text}"/>'
        )
    return strips


def _curve(name: str, groups: dict[tuple[str, int | None], list[tuple[MetricRow, float]]]) -> Curve:
    several = len({source for source, _ in groups}) > 1
    series = []
    for (source, rank), rows in sorted(groups.items(), key=lambda group: group[0][1] or 0)[:MAX_SERIES]:
        word = facts.clean(source)
        label = word if rank is None else (f"{word} rank {rank}" if several else f"rank {rank}")
        # Beside lines of training and evaluation, those of ranks begin with the third colour.
        colour = _COLOUR_OF.get(source) or COLOURS[((rank or 0) + (2 if several else 0)) % len(COLOURS)]
        xs, axis = _positions([row for row, _ in rows])
        points = [(x, value) for x, (_, value) in zip(xs, rows, strict=True) if math.isfinite(value)]
        series.append(Series(label=label, colour=colour, points=_thin(points), last=rows[-1][1], axis=axis))
    return Curve(name=facts.clean(name), series=tuple(series))


def _positions(rows: Sequence[MetricRow]) -> tuple[list[float], str]:
    """The rows' positions on the horizontal axis, and what the axis counts."""
    for field in ("epoch", "step"):
        found = [getattr(row, field) for row in rows]
        # Reports within an epoch share its number; a line needs a value that grows.
        if None not in found and all(before < after for before, after in itertools.pairwise(found)):
            return [float(value) for value in found], field
    return [float(index) for index in range(1, len(rows) + 1)], "report"


def _thin(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Reduce to at most `MAX_POINTS` points: the lowest and the highest of each stretch, so that no spike is lost."""
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
    """Bounds of the vertical axis that differ, even for a level line. Halves, because a difference may overflow."""
    if high / 2 - low / 2 > 0:
        return low, high
    margin = abs(low) / 2 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """About four round values between two bounds with their texts, or else the bounds themselves."""
    rough = (high / 2 - low / 2) / 1.5
    smallest, largest = _PLAIN_STEPS
    if not smallest <= rough <= largest or max(abs(low), abs(high)) > largest * rough:
        return [(low, facts.number(low)), (high, facts.number(high))]
    power = 10.0 ** math.floor(math.log10(rough))
    found = {step: range(math.ceil(low / step), math.floor(high / step) + 1) for step in (power, 2 * power, 5 * power)}
    step = min(found, key=lambda step: abs(len(found[step]) - 4))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(count * step, f"{count * step:,.{decimals}f}") for count in found[step]]
