"""Metrics as curves: drawn without a script, for pictures that stay as they are, or as data that the page draws.

Numbers stand beside the SVG as HTML, so that they keep their size however wide it is.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kale_dist.job.view import facts
from kale_dist.wire import MEASURED_SOURCES, BatchLoss, MetricRow, Moment, visible

MAX_CURVES = 6
"""Curves in a job's picture; `job.metrics` has all metrics."""

MAX_SERIES = 6
"""Lines in one picture."""

MAX_POINTS = 160
"""Points of one line; more would not be visible at the picture's width."""

MAX_STRIPS = 32
"""Places along the horizontal axis that show their values under the pointer."""

COLOURS = ("#3b82f6", "#f08c00", "#12a594", "#c05bd6", "#e5484d", "#8a8f98")
"""Mid tones that can be distinguished, also by those who see fewer colours, on white and on black."""

GAP_COLOUR = "#e8930c"
"""Of the stretches whose values are nan or infinite, in the page's script, too."""

_TITLES = {
    "memory_gib": "memory, GiB", "gpu_percent": "GPU, %", "gpu_memory_gib": "GPU memory, GiB",
    "data_percent": "waiting for data, %", "exchange_percent": "in exchange, %", "samples_per_s": "samples/s of a rank",
}  # fmt: skip
"""The names of a history's curves."""

_GAP = 3
"""A distance that is so many times the one before is a gap between two attempts."""

HISTORY_TITLE = "Memory, GPUs and waiting"
"""The line under which they are folded, in the page's script, too."""

_FIRST = {"loss": 0, "accuracy": 1, "reward": 1, "mean_token_accuracy": 1}
"""Metrics that stand before the others: trainers of language models have twenty."""

_AS_MEAN = "mean of {} ranks (area: lowest to highest)"
_EACH_BATCH = "train, single batches"
_COLOUR_OF = {"train": COLOURS[0], "eval": COLOURS[1]}
"""Colours by source, the same in every picture. Ranks have the same colours as in the log."""

_HEIGHT = 132
"""Pixels of a picture with its numbers."""

_TOP, _BOTTOM, _RIGHT = 6, 22, 4
"""Pixels around the lines."""

_CHARACTER = 5.9
"""Approximate width of a digit at an axis."""

_MARGIN = 6.0
_LABEL = 14.0
"""Width of what stands beside the vertical axis."""

_SIDE = 1000
"""Units of the drawing from side to side: it is stretched to its place, lines and dots are not."""

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
    """What the horizontal axis counts: `epoch`, `step`, `report`, `minute` or `trial`."""
    is_joined: bool = True
    """Whether a line joins the points."""
    is_dashed: bool = False
    """Whether it is of an evaluation."""
    is_faint: bool = False
    """Whether it is behind the others: single batches, which jump about."""
    band: tuple[tuple[float, float], ...] = ()
    """The lowest and the highest value at each point, where the line is the mean over ranks."""
    gaps: tuple[tuple[float, float], ...] = ()
    """Stretches of the horizontal axis without a point: the values there are nan or infinite."""
    places: Mapping[str, Mapping[float, float]] = dataclasses.field(default_factory=dict)
    """Where the places of its own axis are on others, such as `step`; of `minute` the times (Unix time)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One picture: all series of one metric."""

    name: str
    series: tuple[Series, ...]
    vertical: str = ""
    """What stands beside the vertical axis; empty where the name above the picture shows it."""
    is_log: bool = False
    """Whether the horizontal axis is logarithmic; all its values are above 0 then."""
    is_from_zero: bool = False
    """Whether the vertical axis begins at 0."""

    @property
    def summary(self) -> str:
        """The last values in words: `0.12 train, 0.15 eval`."""
        shown = [one for one in self.series if not one.is_faint] or self.series
        return ", ".join(f"{facts.number(one.last)} {one.label}" for one in shown)

    @property
    def drawn(self) -> tuple[Series, ...]:
        """The series that are lines, of two points or more, and those of one point that stand on the axis of a line."""
        axes = {one.axis for one in self.series if len(one.points) > 1}
        return tuple(one for one in self.series if one.points and one.axis in axes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """The range of values that a picture shows, and how values map to the drawing's units."""

    left: float
    right: float
    low: float
    high: float
    is_log: bool = False

    def across(self, x: float) -> float:
        share = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        if self.is_log:
            share = math.log(x / self.left) / math.log(self.right / self.left)
        return share * _SIDE

    def down(self, y: float) -> float:
        # Halves, because the difference of two floats may overflow.
        return _SIDE * (1 - (y / 2 - self.low / 2) / (self.high / 2 - self.low / 2))


def collect(rows: Iterable[MetricRow], losses: Sequence[BatchLoss] = ()) -> tuple[Curve, ...]:
    """The curves of a job's metrics: those of `_FIRST` first, the others in the order of their first report.

    Counters of strategies (bytes, staleness), learning rates and paces are left out, because they would outnumber
    the training's own metrics.

    Args:
        rows: What was reported.
        losses: The training loss within epochs, which stands behind the curve of the epochs' losses.
    """
    found: dict[str, dict[tuple[str, int | None], list[tuple[MetricRow, float]]]] = {"loss": {}} if losses else {}
    for row in rows:
        for name, value in row.values if row.source not in MEASURED_SOURCES else ():
            # What a step returned is an average over ranks, no matter which rank sent it.
            rank = row.rank if row.source == "report" else None
            found.setdefault(name, {}).setdefault((row.source, rank), []).append((row, value))
    order = sorted(found, key=lambda name: _FIRST.get(name, len(_FIRST)))
    # Another attempt may have fewer ranks, and so longer epochs: then no place has a number of steps.
    steps = losses[0].steps if len({one.steps for one in losses}) == 1 else None
    curves = (_curve(name, found[name], losses if name == "loss" else (), steps) for name in order)
    return tuple(curve for curve in curves if curve.series)


def collect_history(history: Sequence[Moment], *, is_compared: bool = False) -> tuple[Curve, ...]:
    """The curves of what the ranks of a job used and waited for, over its minutes.

    Args:
        history: The moments.
        is_compared: Whether a curve is one line for the job, the mean over its ranks, and `last` the mean over time, of memory the most.
    """
    found: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in _TITLES}
    bands: dict[str, list[tuple[float, float]]] = {name: [] for name in _TITLES}
    count = max((len(each) for one in history for _, each in one.values), default=0)
    is_mean = is_compared or count > MAX_SERIES
    for moment in history:
        minute = round((moment.time - history[0].time) / 60, 3)
        for name, each in moment.values:
            known = {rank: value for rank, value in enumerate(each) if value is not None and math.isfinite(value)}
            if is_mean and known:
                bands[name].append((min(known.values()), max(known.values())))
                known = {0: math.fsum(known.values()) / len(known)}
            for rank, value in known.items():
                found[name].setdefault(rank, []).append((minute, value))
    made = []
    for name, ranks in found.items():
        series = []
        for rank, points in sorted(ranks.items()):
            kept = _kept(points)
            series.append(
                Series(
                    label=_AS_MEAN.format(count) if is_mean else f"rank {rank}",
                    colour=COLOURS[rank % len(COLOURS)],
                    points=tuple(points[index] for index in kept),
                    last=_whole(points, is_most="memory" in name) if is_compared else points[-1][1],
                    axis=facts.TIME,
                    band=tuple(bands[name][index] for index in kept) if is_mean and not is_compared else (),
                )
            )
        if series:
            made.append(Curve(name=_TITLES[name], series=tuple(series), is_from_zero=True))
    return tuple(made)


def _whole(points: Sequence[tuple[float, float]], *, is_most: bool) -> float:
    """The value of a whole job from values that are each the mean since the one before; or the most.

    A job that waited for pods has a gap, which the first value after it is not the mean of: it weighs as the one before.
    """
    minutes = [after - before for (before, _), (after, _) in itertools.pairwise(points)]
    usual = [now if now <= _GAP * before else before for before, now in itertools.pairwise((*minutes[:1], *minutes))]
    if is_most or not any(usual):
        return max(value for _, value in points)
    return sum(weight * value for weight, (_, value) in zip(usual, points[1:], strict=True)) / sum(usual)


def unknown(history: Sequence[Moment]) -> str:
    """What a history cannot show, as a remark; else empty."""
    names = {name for moment in history for name, _ in moment.values}
    is_unknown = "data_percent" in names and "exchange_percent" not in names
    return "In exchange: unknown, because Python does not wait for the exchange of GPUs" if is_unknown else ""


def left_out(found: Sequence[Curve]) -> str:
    """How many curves no picture shows, as a remark; else empty."""
    return f"and {len(found) - MAX_CURVES:,} more in job.metrics" if len(found) > MAX_CURVES else ""


def data(found: Sequence[Curve], remark: str = "", began: float | None = None) -> str:
    """The first curves as JSON, for a page that draws them; empty without any.

    Args:
        found: All curves.
        remark: What stands below them; where it is empty, how many are left out.
        began: Where minutes are counted from (Unix time).
    """
    if not found:
        return ""
    charts = [
        {"name": curve.name, "zero": curve.is_from_zero, "series": [_data(one, began) for one in curve.series]}
        for curve in found[:MAX_CURVES]
    ]
    return json.dumps({"charts": charts, "remark": remark or left_out(found)}, separators=(",", ":"))


def _data(one: Series, began: float | None) -> dict[str, Any]:
    described = {
        "label": one.label, "colour": one.colour, "axis": one.axis, "last": facts.number(one.last),
        "dashed": one.is_dashed, "faint": one.is_faint, "points": _rounded(one.points),
    }  # fmt: skip
    more = {"band": _rounded(one.band), "gaps": _rounded(one.gaps), "places": _places(one, began)}
    return described | {name: found for name, found in more.items() if found}


def _places(one: Series, began: float | None) -> dict[str, Any]:
    """Positions of the points and gaps on each other axis that has a value for all of them."""
    found = {}
    xs = {x for x, _ in one.points} | {x for gap in one.gaps for x in gap}
    for axis, known in one.places.items():
        start, unit = (began, 60) if axis == facts.TIME else (0, 1)
        if start is not None and xs <= known.keys():
            # A rank may report before it is known that all run.
            there = {x: round(max(0.0, known[x] - start) / unit, 6) for x in xs}
            gaps = [(there[first], there[last]) for first, last in one.gaps]
            found[axis] = {"points": [there[x] for x, _ in one.points], "gaps": gaps}
    return found


def _rounded(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(float(f"{x:.6g}"), float(f"{y:.6g}")) for x, y in pairs]


def svg(curve: Curve) -> str:
    """Draw a curve in the text colour of the page, without a script; empty if no series has two points.

    The browser itself shows the values under the pointer (`title` elements).
    """
    series = curve.drawn
    if not series:
        return ""
    ys = [y for one in series for _, y in (*one.points, *one.band, *((0.0, low) for low, _ in one.band))]
    low, high = _span(min(0.0, *ys) if curve.is_from_zero else min(ys), max(ys))
    ticks = _ticks(low, high)
    margin = _MARGIN + _CHARACTER * max(len(text) for _, text in ticks) + (_LABEL if curve.vertical else 0.0)
    by_axis = {axis: [one for one in series if one.axis == axis] for axis in dict.fromkeys(one.axis for one in series)}
    boxes = {axis: _box(some, low, high, is_log=curve.is_log) for axis, some in by_axis.items()}
    first = next(iter(boxes.values()))
    drawn = [
        _stroke(f"M0 {first.down(value):.1f}H{_SIDE}", "currentColor", 1, 'stroke-opacity="0.16"') for value, _ in ticks
    ]
    for axis, some in by_axis.items():
        drawn += [_marked(start, end, boxes[axis]) for start, end in sorted({gap for one in some for gap in one.gaps})]
        drawn += [part for one in some for part in _line(one, boxes[axis])]
    drawn += _strips(next(iter(by_axis.values())), first)
    label = escape(f"{curve.name}: {curve.summary}", quote=True)
    return (
        f'<div style="position:relative;height:{_HEIGHT}px;font-size:10px;line-height:1;overflow:hidden">'
        f'<div style="position:absolute;left:{margin:.0f}px;right:{_RIGHT}px;top:{_TOP}px;bottom:{_BOTTOM}px">'
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" '
        f'style="display:block;width:100%;height:100%;overflow:visible">{"".join(drawn)}</svg>'
        f"{_numbers(curve, boxes, ticks, margin)}</div></div>"
    )


def _box(series: Sequence[Series], low: float, high: float, *, is_log: bool) -> _Box:
    """The range of the series that have a horizontal axis in common."""
    xs = [x for one in series for x in (*(x for x, _ in one.points), *itertools.chain(*one.gaps))]
    # The first epoch begins at 0, where its batches are drawn.
    left = math.floor(min(xs)) if any(one.label == _EACH_BATCH for one in series) else min(xs)
    return _Box(left, max(xs), low, high, is_log)


def _marked(start: float, end: float, box: _Box) -> str:
    """Shade a stretch without numbers."""
    left, right = box.across(start), box.across(end)
    return (
        f'<rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="{_SIDE}" fill="{GAP_COLOUR}" '
        'fill-opacity="0.18"><title>not a number</title></rect>'
    )


def _stroke(path: str, colour: str, width: float, more: str = "") -> str:
    """Draw a path whose width is in pixels."""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" vector-effect="non-scaling-stroke" '
        f'stroke-linejoin="round" stroke-linecap="round" {more}/>'
    )


def _line(one: Series, box: _Box) -> Iterator[str]:
    """Draw a series: its band, its line and its last point, or all its points."""
    corners = [f"{box.across(x):.1f} {box.down(y):.1f}" for x, y in one.points]
    if one.band:
        places = list(zip(one.points, one.band, strict=True))
        edge = [(x, low) for (x, _), (low, _) in places] + [(x, high) for (x, _), (_, high) in reversed(places)]
        path = "L".join(f"{box.across(x):.1f} {box.down(y):.1f}" for x, y in edge)
        yield f'<path d="M{path}Z" fill="{one.colour}" fill-opacity="0.2"/>'
    if one.is_joined:
        dashes = 'stroke-dasharray="5 5"' if one.is_dashed else 'stroke-opacity="0.5"' if one.is_faint else ""
        yield _stroke(f"M{'L'.join(corners)}", one.colour, 1.25 if one.is_faint else 1.75, dashes)
    # A line of no length with round ends is a dot that stays round.
    dots = [] if one.is_faint else corners[-1:] if one.is_joined else corners
    if dots:
        yield _stroke("".join(f"M{corner}h0" for corner in dots), one.colour, 5.5)


def _numbers(curve: Curve, boxes: Mapping[str, _Box], ticks: Sequence[tuple[float, str]], margin: float) -> str:
    """Write the numbers of all axes and the label of the vertical one, beside the drawing."""
    style = 'style="position:absolute;white-space:nowrap;opacity:.78;'
    parts = [
        f'<span {style}right:100%;margin-right:5px;top:{next(iter(boxes.values())).down(value) / _SIDE:.2%};transform:translateY(-50%)">{text}</span>'
        for value, text in ticks
    ]
    if curve.vertical:
        vertical = escape(visible(curve.vertical))
        parts.append(
            f'<span {style}left:{2 - margin:.0f}px;top:0;writing-mode:vertical-rl;transform:rotate(180deg)">{vertical}</span>'
        )
    ends = (
        " · ".join(f"{axis} {facts.place(axis, box.left)}" for axis, box in boxes.items()),
        " · ".join(f"{facts.place(axis, box.right)}{' (log)' if box.is_log else ''}" for axis, box in boxes.items()),
    )
    parts += [
        f'<span {style}{side}:0;top:100%;margin-top:6px">{escape(text)}</span>'
        for side, text in zip(("left", "right"), ends, strict=True)
    ]
    return "".join(parts)


def _strips(series: Sequence[Series], box: _Box) -> list[str]:
    """Draw transparent strips that hold the values at their place, for the pointer."""
    places = sorted({x for one in series for x, _ in one.points})
    if len(places) > MAX_STRIPS:
        places = [places[index * (len(places) - 1) // (MAX_STRIPS - 1)] for index in range(MAX_STRIPS)]
    middles = [box.across(x) for x in places]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(middles)), float(_SIDE)]
    strips = []
    for x, (start, end) in zip(places, itertools.pairwise(edges), strict=True):
        values = []
        for one in series:
            index = bisect.bisect_right(one.points, x, key=operator.itemgetter(0))
            if index:
                values.append(f"{facts.number(one.points[index - 1][1])} {one.label}")
        text = escape(f"{series[0].axis} {facts.place(series[0].axis, x)}: {', '.join(values)}", quote=True)
        place = f'x="{start:.1f}" y="0" width="{max(0.0, end - start):.1f}" height="{_SIDE}" fill="transparent"'
        strips.append(f"<rect {place}><title>{text}</title></rect>")
    return strips


def _curve(
    name: str,
    groups: dict[tuple[str, int | None], list[tuple[MetricRow, float]]],
    losses: Sequence[BatchLoss],
    steps: int | None,
) -> Curve:
    several = len({source for source, _ in groups}) > 1
    xs_of_losses, ends = _within_epochs(losses)
    series = _each_batch(losses, xs_of_losses, "step" if ends else "epoch", steps)
    for source in dict.fromkeys(source for source, _ in groups):
        ranks = {rank: rows for (one, rank), rows in groups.items() if one == source}
        order = sorted(ranks, key=lambda rank: rank or 0)
        made = [_of_rank(source, rank, ranks[rank], ends, steps, several=several) for rank in order]
        if len(made) > MAX_SERIES:
            made = [_mean(made, several=several)]
        series += [dataclasses.replace(one, points=_thin(one.points)) for one in made]
    # Of two equal lines, the second lies over the first, which shows between its dashes.
    series = [
        dataclasses.replace(one, is_dashed=one.is_dashed or any(_are_equal(one, other) for other in series[:at]))
        for at, one in enumerate(series)
    ]
    return Curve(name=visible(name), series=tuple(series))


def _of_rank(
    source: str,
    rank: int | None,
    rows: Sequence[tuple[MetricRow, float]],
    ends: Mapping[int, float],
    steps: int | None,
    *,
    several: bool,
) -> Series:
    word = visible(source)
    label = word if rank is None else (f"{word} rank {rank}" if several else f"rank {rank}")
    rows = _newest(rows)
    # Beside lines of training and evaluation, those of ranks begin with the third colour.
    colour = _COLOUR_OF.get(source) or COLOURS[((rank or 0) + (2 if several else 0)) % len(COLOURS)]
    # Both lines of a function's second training have the third colour.
    kind, _, number = source.partition(" ")
    if kind in _COLOUR_OF and number.isdecimal():
        colour = COLOURS[2 + (int(number) - 2) % (len(COLOURS) - 2)]
    xs, axis = _positions([row for row, _ in rows])
    if axis == "epoch" and ends:
        xs, axis = [ends.get(int(x), x) for x in xs], "step"
    points = [(x, value) for x, (_, value) in zip(xs, rows, strict=True)]
    return Series(
        label=label, colour=colour, points=_finite(points), last=rows[-1][1], axis=axis, is_dashed=kind == "eval",
        gaps=_gaps(points), places=_elsewhere([row for row, _ in rows], xs, axis, steps),
    )  # fmt: skip


def _elsewhere(
    rows: Sequence[MetricRow], xs: Sequence[float], axis: str, steps: int | None
) -> dict[str, dict[float, float]]:
    """The places of rows on the other axes; an epoch has so many steps, if that is known."""
    found = {"step": [x * steps for x in xs]} if axis == "epoch" and steps else {}
    for other in ("epoch", "step", facts.TIME):
        values = [getattr(row, "time" if other == facts.TIME else other) for row in rows]
        if other not in (axis, *found) and _grows(values):
            found[other] = values
    return {other: dict(zip(xs, values, strict=True)) for other, values in found.items()}


def _are_equal(one: Series, other: Series) -> bool:
    """Whether two lines are equal as far as both go: one rank may be a little ahead."""
    are_lines = min(len(one.points), len(other.points)) > 1 and one.axis == other.axis
    return are_lines and all(map(operator.eq, one.points, other.points))


def _finite(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in points if math.isfinite(y))


def _gaps(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """From the last number before each run of nan and infinite values to the first after it, or to the end."""
    found, last = [], len(points) - 1
    for is_finite, run in itertools.groupby(range(len(points)), lambda index: math.isfinite(points[index][1])):
        first, *others = run
        if not is_finite:
            found.append((points[max(0, first - 1)][0], points[min(last, [first, *others][-1] + 1)][0]))
    return tuple(found[-MAX_POINTS:])


def _newest(rows: Sequence[tuple[MetricRow, float]]) -> list[tuple[MetricRow, float]]:
    """Leave out rows of steps that came once more: a training that resumed, or a second evaluation of the same step."""
    kept: list[tuple[MetricRow, float]] = []
    lowest = math.inf
    for row, value in reversed(rows):
        if row.step is None or row.epoch is not None or row.source == "report" or row.step < lowest:
            lowest = lowest if row.step is None else row.step
            kept.append((row, value))
    return kept[::-1]


def _mean(made: Sequence[Series], *, several: bool) -> Series:
    """Return the mean of many ranks, between the lowest and the highest: 256 lines would show nothing."""
    values: dict[float, list[float]] = {}
    for one in made:
        for x, value in one.points:
            values.setdefault(x, []).append(value)
    points = [(x, math.fsum(value / len(values[x]) for value in values[x])) for x in sorted(values)]
    kept = _kept(points)
    return Series(
        label=_AS_MEAN.format(len(made)),
        colour=COLOURS[2 if several else 0],
        points=tuple(points[index] for index in kept),
        last=sum(one.last / len(made) for one in made),
        axis=made[0].axis,
        gaps=made[0].gaps,
        band=tuple((min(values[points[index][0]]), max(values[points[index][0]])) for index in kept),
    )


def _within_epochs(losses: Sequence[BatchLoss]) -> tuple[list[float], dict[int, float]]:
    """The positions of losses in epochs; where the length of an epoch is not known in steps, with each epoch's last step."""
    if all(one.steps for one in losses):
        return [one.epoch - 1 + one.step / (one.steps or 1) for one in losses], {}
    xs, before, ends = list[float](), 0.0, dict[int, float]()
    for epoch, its in itertools.groupby(losses, operator.attrgetter("epoch")):
        xs += [before + one.step for one in its]
        ends[epoch] = before = xs[-1]
    return xs, ends


def _each_batch(losses: Sequence[BatchLoss], xs: Sequence[float], axis: str, steps: int | None) -> list[Series]:
    points: list[tuple[float, float]] = []
    for x, one in zip(xs, losses, strict=True):
        # Another attempt may have fewer ranks, and so longer epochs.
        if not points or x > points[-1][0]:
            points.append((x, one.loss))
    finite = _finite(points)
    if len(finite) <= 1:
        return []
    return [
        Series(
            label=_EACH_BATCH, colour=_COLOUR_OF["train"], points=_thin(finite), last=losses[-1].loss,
            axis=axis, is_faint=True, gaps=_gaps(points),
            places={
                "step": {x: x * steps for x in xs} if steps else {},
                facts.TIME: {x: one.time for x, one in zip(xs, losses, strict=True)},
            },
        )
    ]  # fmt: skip


def _positions(rows: Sequence[MetricRow]) -> tuple[list[float], str]:
    """The rows' positions on the horizontal axis, and what the axis counts."""
    for field in ("epoch", "step"):
        found = [getattr(row, field) for row in rows]
        # Reports within an epoch share its number.
        if _grows(found):
            return [float(value) for value in found], field
    return [float(index) for index in range(1, len(rows) + 1)], "report"


def _grows(values: Sequence[Any]) -> bool:
    """Whether a line can have these places: all are known, and each is behind the one before."""
    return None not in values and all(before < after for before, after in itertools.pairwise(values))


def _kept(points: Sequence[tuple[float, float]]) -> Sequence[int]:
    """Which points are drawn, at most `MAX_POINTS`: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return range(len(points))
    kept = {0, len(points) - 1}
    stretches = MAX_POINTS // 2 - 1
    for stretch in range(stretches):
        indices = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        kept.add(min(indices, key=lambda index: points[index][1]))
        kept.add(max(indices, key=lambda index: points[index][1]))
    return sorted(kept)


def _thin(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(points[index] for index in _kept(points))


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
