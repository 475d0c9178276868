"""A job as HTML: inline styles, no script, no identifiers, readable on light and dark pages and without any style."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kale_dist.contract import LogLine, RankStateName, StateName
from kale_dist.status import JobStatus
from kale_dist.view import curves, facts

_MAX_NOTES = 8
_MAX_RANKS = 64
_OPEN_UP_TO_RANKS = 8
"""More ranks than these are folded away under a line that counts them."""

_BLUE, _GREEN, _RED, _AMBER, _GREY = "#3b82f6", "#30a46c", "#e5484d", "#e8930c", "#8a8f98"
_STATE_COLOURS = {
    StateName.PENDING: _GREY,
    StateName.STARTING: _AMBER,
    StateName.RUNNING: _BLUE,
    StateName.SUCCEEDED: _GREEN,
    StateName.FAILED: _RED,
    StateName.CANCELLED: _GREY,
}
_RANK_COLOURS = {
    RankStateName.PENDING: _GREY,
    RankStateName.STARTING: _AMBER,
    RankStateName.RUNNING: _BLUE,
    RankStateName.SUCCEEDED: _GREEN,
    RankStateName.FAILED: _RED,
    RankStateName.STOPPED: _GREY,
}

# Text takes the page's own colour and surfaces are veils of grey over the page's own: that is right on any theme, also
# where JupyterLab's variables are missing.
_MONO = "font-family:var(--jp-code-font-family,ui-monospace,SFMono-Regular,Menlo,Consolas,monospace)"
_SANS = "font-family:var(--jp-ui-font-family,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif)"
_LINE = "1px solid var(--jp-border-color2,rgba(128,128,128,.35))"
_WIDE = "overflow-wrap:anywhere;min-width:150px;width:60%"
_VEIL = "rgba(128,128,128,.1)"
_MUTED = "opacity:.72"
# What scrolls does so by keyboard too; JupyterLab would take the arrows for its own.
_KEYS = 'tabindex="0" data-lm-suppress-shortcuts="true"'
_FIGURES = "font-variant-numeric:tabular-nums"


def html(status: JobStatus, tail: Sequence[LogLine] = (), now: float | None = None) -> str:
    """A job as one HTML element.

    Args:
        status: What is known of it.
        tail: The last lines of its log.
        now: The present moment, in seconds since 1970; None leaves out how long a running job has run.

    Returns:
        A `div`; everything that came from the job is escaped.
    """
    return (
        f'<div role="group" aria-label="Job {_text(facts.name(status))}" style="{_SANS};font-size:13px;'
        f"line-height:1.45;box-sizing:border-box;max-width:880px;margin:4px 2px;padding:14px 16px;border:{_LINE};"
        f'border-radius:10px;overflow:hidden;text-align:left">{"".join(parts(status, now).values())}{_log(tail)}</div>'
    )


def parts(status: JobStatus, now: float | None = None) -> dict[str, str]:
    """The picture without its frame and the log, in pieces that can be replaced one by one.

    Args:
        status: What is known of the job.
        now: As in `html`.

    Returns:
        `head`, `progress`, `error`, `curves`, `ranks` and `notes`, in the order in which they are shown; empty where
        there is nothing to show.
    """
    return {
        "head": _head(status, now),
        "progress": _progress(status, now),
        "error": _error(status),
        "curves": _curves(status),
        "ranks": _ranks(status),
        "notes": _notes(status),
    }


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _head(status: JobStatus, now: float | None) -> str:
    colour = _STATE_COLOURS[status.state]
    elapsed = facts.elapsed_s(status, now)
    time = f'<span style="{_MUTED};{_FIGURES}">{facts.duration(elapsed)}</span>' if elapsed is not None else ""
    pill = (
        f'<span style="display:inline-flex;align-items:center;gap:6px;padding:1px 10px 1px 8px;border-radius:999px;'
        f'background:{colour}2b;white-space:nowrap">{_dot(colour)}{status.state.value}</span>'
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px">'
        f'<strong style="font-size:14px;font-weight:600;overflow-wrap:anywhere">{_text(facts.name(status))}</strong> '
        f"{pill} "
        f'<span style="flex:1 1 0"></span>{time}</div>'
        f'<div style="margin-top:6px;overflow-wrap:anywhere">{_text(facts.sentence(status, now))}</div>'
    )


def _dot(colour: str) -> str:
    return (
        f'<span aria-hidden="true" style="display:inline-block;flex:none;width:8px;height:8px;border-radius:50%;'
        f'background:{colour}"></span>'
    )


def _progress(status: JobStatus, now: float | None) -> str:
    percent = facts.percent(status)
    if percent is None:
        return ""
    beside = [f"{percent} %", facts.rate(status), facts.remaining(status, now)]
    words = " · ".join(part for part in beside if part)
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;margin-top:8px">'
        f'<div role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
        'style="flex:1 1 180px;height:8px;border-radius:4px;background:rgba(128,128,128,.22);overflow:hidden">'
        f'<div style="width:{percent}%;height:100%;border-radius:4px;background:{_STATE_COLOURS[status.state]}"></div></div>'
        f'<span style="{_MUTED};{_FIGURES};white-space:nowrap">{_text(words)}</span></div>'
    )


def _error(status: JobStatus) -> str:
    error = facts.first_error(status)
    if error is None:
        return ""
    rank, message = error
    return (
        f'<div style="margin-top:10px;padding:8px 12px;border-left:3px solid {_RED};border-radius:4px;background:{_RED}1c">'
        f'<div style="font-weight:600">Rank {rank}</div>'
        f'<pre style="{_MONO};font-size:12px;margin:2px 0 0;padding:0;background:none;color:inherit;white-space:pre-wrap;'
        f'overflow-wrap:anywhere">{_text(message)}</pre></div>'
    )


def _curves(status: JobStatus) -> str:
    figures = [_figure(curve) for curve in curves.collect(status.metrics)]
    if not figures:
        return ""
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px 20px;margin-top:14px">{"".join(figures)}</div>'


def _figure(curve: curves.Curve) -> str:
    picture = curves.svg(curve)
    legend = "".join(
        f'<span style="display:inline-flex;align-items:center;gap:5px;white-space:nowrap">'
        f"{_dot(curves.COLOURS[index % len(curves.COLOURS)]) if picture else ''}"
        f'<span style="{_MUTED}">{_text(one.label)}</span> '
        f'<span style="{_FIGURES};font-weight:600">{facts.number(one.last)}</span></span> '
        for index, one in enumerate(curve.series)
    )
    return (
        '<div style="flex:1 1 230px;min-width:0;max-width:400px">'
        f'<div style="display:flex;flex-wrap:wrap;align-items:baseline;gap:0 12px;margin-bottom:3px">'
        f'<span style="font-weight:600;overflow-wrap:anywhere">{_text(curve.name)}</span> {legend}</div>'
        f"{picture}{_scale(curve) if picture else ''}</div>"
    )


def _scale(curve: curves.Curve) -> str:
    """What a curve spans, in words: axes with ticks would be unreadable at this size."""
    bounds, epochs = curves.bounds(curve), curves.last_epoch(curve)
    if bounds is None:
        return ""
    along = f"epochs {epochs[0]}–{epochs[1]}" if epochs else ""  # noqa: RUF001 - a range has this dash
    between = f"{facts.number(bounds[0])} to {facts.number(bounds[1])}"
    return (
        f'<div style="display:flex;justify-content:space-between;gap:8px;font-size:11px;margin-top:2px;{_MUTED};{_FIGURES}">'
        f"<span>{between}</span> <span>{along}</span></div>"
    )


def _ranks(status: JobStatus) -> str:
    rows, left_out = facts.rank_rows(status, _MAX_RANKS)
    if not rows:
        return ""
    columns = [
        (title, right, [getattr(row, field) for row in rows])
        for title, field, right in (
            ("epoch", "epoch", True),
            ("step", "step", True),
            ("samples/s", "rate", True),
            ("loss", "loss", True),
            ("memory", "memory", True),
            ("GPU", "gpu", True),
            ("node", "node", False),
            ("remark", "remark", False),
        )
    ]
    shown = [column for column in columns if any(column[2])]
    cell = f"padding:3px 16px 3px 0;border:0;border-bottom:{_LINE};color:inherit;vertical-align:top;"
    head = "".join(
        f'<th scope="col" style="{cell}font-weight:600;text-align:{"right" if right else "left"};{_MUTED}">{title}</th>'
        for title, right in (("rank", False), ("state", False), *((title, right) for title, right, _ in shown))
    )
    body = []
    for index, row in enumerate(rows):
        state = (
            f'<span style="white-space:nowrap">{_dot(_RANK_COLOURS[RankStateName(row.state)])}&nbsp; {row.state}</span>'
        )
        cells = "".join(
            f'<td style="{cell}text-align:{"right" if right else "left"};'
            f'{_WIDE if title == "remark" else "white-space:nowrap"}">{_text(values[index])}</td>'
            for title, right, values in shown
        )
        body.append(
            f'<tr style="background:none"><th scope="row" style="{cell}font-weight:400;text-align:left">{row.rank}</th>'
            f'<td style="{cell}text-align:left">{state}</td>{cells}</tr>'
        )
    more = f'<div style="{_MUTED};margin-top:4px">and {left_out:,} more ranks</div>' if left_out else ""
    # Wide tables scroll sideways, long ones in their place.
    table = (
        f'<div {_KEYS} role="group" aria-label="Ranks" style="overflow:auto;max-height:300px">'
        f'<table style="width:auto;min-width:min(100%,460px);margin:0;border-collapse:collapse;table-layout:auto;'
        f'font-size:12px;{_FIGURES};color:inherit;background:none">'
        f'<thead style="border:0"><tr style="background:none">{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>{more}'
    )
    return f'<div style="margin-top:12px">{_folded(status, table)}</div>'


def _folded(status: JobStatus, table: str) -> str:
    counts = [
        f"{count:,} {state.value}"
        for state in RankStateName
        if (count := sum(replica.state is state for replica in status.replicas))
    ]
    if len(status.replicas) <= _OPEN_UP_TO_RANKS:
        return table
    return (
        f'<details><summary style="cursor:pointer">{len(status.replicas):,} ranks: {", ".join(counts)}</summary>'
        f'<div style="margin-top:6px">{table}</div></details>'
    )


def _notes(status: JobStatus) -> str:
    if not status.notes:
        return ""
    items = "".join(
        f'<li style="margin:0;overflow-wrap:anywhere">{_text(facts.clean(note))}</li>'
        for note in status.notes[-_MAX_NOTES:]
    )
    return f'<ul aria-label="Notes" style="margin:12px 0 0;padding:0 0 0 18px;{_MUTED}">{items}</ul>'


def _log(tail: Sequence[LogLine]) -> str:
    if not tail:
        return ""
    lines = []
    for line in tail:
        colour = _GREY if line.rank is None else curves.COLOURS[line.rank % len(curves.COLOURS)]
        who = "kale-dist" if line.rank is None else line.rank
        lines.append(f'<span style="color:{colour};font-weight:600">[{who}]</span> {_text(facts.log_text(line))}\n')
    # A reversed column begins scrolled to its end, where the newest line is.
    return (
        f'<div {_KEYS} role="group" aria-label="End of the log" style="display:flex;flex-direction:column-reverse;'
        f'max-height:250px;overflow:auto;margin-top:12px;border-radius:6px;background:{_VEIL}">'
        f'<pre style="{_MONO};font-size:12px;line-height:1.4;margin:0;padding:8px 10px;border:0;background:none;'
        f'color:inherit;white-space:pre-wrap;overflow-wrap:anywhere">{"".join(lines)}</pre></div>'
    )
