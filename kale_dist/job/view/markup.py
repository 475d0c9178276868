"""A job as HTML: inline styles, no script, no identifiers, readable on light and dark pages and without any style."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from kale_dist.job.status import JobStatus
from kale_dist.job.view import curves, facts
from kale_dist.wire import LogLine, Moment, RankStateName, StateName, visible

_MAX_NOTES = 8
_HEIGHT = 300
"""Pixels of a table; longer ones scroll."""

_MAX_RANKS = 64
_OPEN_UP_TO_RANKS = 8
"""A table of more ranks is folded under a line with their number."""

_BLUE, _GREEN, _RED, _AMBER, _GREY, _VIOLET = "#3b82f6", "#30a46c", "#e5484d", "#e8930c", "#8a8f98", "#8e4ec6"
_COLOURS = {"starting": _AMBER, "running": _BLUE, "succeeded": _GREEN, "failed": _RED, "lost": _RED}
"""By the state of a job or a rank; the other states are grey."""

# Text takes the page's own colour and surfaces are veils of grey over the page's own: that is right on any theme, also
# where JupyterLab's variables are missing.
_MONO = "font-family:var(--jp-code-font-family,ui-monospace,SFMono-Regular,Menlo,Consolas,monospace)"
_SANS = "font-family:var(--jp-ui-font-family,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif)"
_LINE = "1px solid var(--jp-border-color2,rgba(128,128,128,.35))"
_FADE = "padding-right:16px;margin-right:-16px;mask-image:linear-gradient(to right,#000 calc(100% - 16px),transparent)"
"""Of a table: where it goes on to the right, it fades in the padding of its frame."""

_WIDE = "overflow-wrap:anywhere;min-width:150px;width:60%"
_VEIL = "rgba(128,128,128,.1)"
_MUTED = "opacity:.72"
# What scrolls does so by keyboard too; JupyterLab would take the arrows for its own.
_KEYS = 'tabindex="0" data-lm-suppress-shortcuts="true"'
_FIGURES = "font-variant-numeric:tabular-nums"
_LEGEND = "display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px"
_PRE = (
    f"{_MONO};font-size:12px;margin:2px 0 0;padding:0;background:none;color:inherit;white-space:pre-wrap;"
    "overflow-wrap:anywhere"
)


def html(
    status: JobStatus,
    tail: Sequence[LogLine] = (),
    now: float | None = None,
    *,
    is_frozen: bool = False,
    remark: str = "",
) -> str:
    """Draw a job as one HTML element.

    Args:
        status: The job's status.
        tail: The last lines of its log.
        now: The present time, in seconds since 1970; None leaves out how long a running job has run.
        is_frozen: Whether the picture will not be updated. One of a running job is then grey, and shows how to see the
            job again.
        remark: A note about the picture itself; escaped here.

    Returns:
        A `div`; all text of the job is escaped.
    """
    is_frozen = is_frozen and not status.is_final
    drawn = charts(curves.collect(status.metrics, status.losses))
    history = _history(status.history)
    head, *others = _parts(status, now, drawn, history, is_frozen=is_frozen).values()
    note = f'<div style="margin-top:6px;{_MUTED}">{_text(remark)}</div>' if remark else ""
    return frame(f"Job {facts.name(status)}", f"{head}{note}{''.join(others)}{_log(tail)}")


def frame(label: str, body: str) -> str:
    """Draw the box around a picture.

    Args:
        label: What a screen reader calls it; escaped here.
        body: HTML.
    """
    return (
        f'<div role="group" aria-label="{_text(label)}" style="{_SANS};font-size:13px;'
        f"line-height:1.45;box-sizing:border-box;max-width:1100px;margin:4px 2px;padding:14px 16px;border:{_LINE};"
        f'border-radius:10px;overflow:hidden;text-align:left">{body}</div>'
    )


def parts(
    status: JobStatus, now: float | None = None, *, shows_ranks: bool = True, shows_history: bool = True
) -> dict[str, str]:
    """Draw the parts of a job's picture, without frame and log, so that a page can replace each by itself.

    Args:
        status: The job's status.
        now: The present time, as for `html`.
        shows_ranks: Whether to draw `ranks`, the table; that of many ranks takes as long as all else.
        shows_history: Whether to draw `history`, which changes more rarely than the others.

    Returns:
        `head`, `progress`, `error`, `curves`, `history`, `ranks` and `notes`, in the order in which they are
        shown; empty texts for absent parts. The curves and the history are data, which the page draws.
    """
    drawn = curves.data(curves.collect(status.metrics, status.losses), began=status.started)
    history = None
    if shows_history:
        history = curves.data(curves.collect_history(status.history), curves.unknown(status.history))
    return _parts(status, now, drawn, history, is_frozen=False, shows_ranks=shows_ranks)


def _parts(
    status: JobStatus, now: float | None, drawn: str, history: str | None, *, is_frozen: bool, shows_ranks: bool = True
) -> dict[str, str]:
    return {
        "head": _head(status, now, is_frozen=is_frozen),
        "progress": _progress(status, None if is_frozen else now, is_frozen=is_frozen),
        "error": _error(status),
        "curves": drawn,
        **({} if history is None else {"history": history}),
        **({"ranks": _ranks(status, is_frozen=is_frozen)} if shows_ranks else {}),
        "notes": _notes(status),
    }


def colour(status: JobStatus) -> str:
    """The colour of a job's state."""
    is_doubtful = status.is_nan and status.state in (StateName.RUNNING, StateName.SUCCEEDED)
    return _VIOLET if status.needs_action else _AMBER if is_doubtful else _COLOURS.get(status.state, _GREY)


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _head(status: JobStatus, now: float | None, *, is_frozen: bool) -> str:
    drawn = _GREY if is_frozen else colour(status)
    error = facts.first_error(status)
    sentence = facts.sentence(status, now, error="" if error is None else error[1])
    elapsed = facts.elapsed_s(status, now)
    time = f'<span style="{_MUTED};{_FIGURES}">{facts.duration(elapsed)}</span>' if elapsed is not None else ""
    word = f"was {facts.state(status)}" if is_frozen else facts.state(status)
    pill = (
        f'<span style="display:inline-flex;align-items:center;gap:6px;padding:1px 10px 1px 8px;border-radius:999px;'
        f'background:{drawn}2b;white-space:nowrap">{_dot(drawn)}{word}</span>'
    )
    again = (
        f'<div style="margin-top:6px">As it was when it was last drawn. <code style="{_MONO};font-size:12px;'
        f'background:none;color:inherit">kd.attach(&quot;{_text(visible(status.ref))}&quot;)</code> shows the job again.</div>'
        if is_frozen
        else ""
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px">'
        f"{heading(facts.name(status))} {pill} "
        f'<span style="flex:1 1 0"></span>{time}</div>'
        f'<div style="margin-top:6px;overflow-wrap:anywhere">{_text(sentence)}</div>{again}'
    )


def heading(name: str) -> str:
    """Draw the name of a job or a sweep, which breaks after its words; escaped here."""
    broken = re.sub(r"([-/_.])(?=\w)", r"\1<wbr>", _text(name))
    return f'<strong style="font-size:14px;font-weight:600;overflow-wrap:break-word;min-width:0">{broken}</strong>'


def _dot(colour: str) -> str:
    return (
        f'<span aria-hidden="true" style="display:inline-block;flex:none;width:8px;height:8px;border-radius:50%;'
        f'background:{colour}"></span>'
    )


def _progress(status: JobStatus, now: float | None, *, is_frozen: bool) -> str:
    percent = facts.percent(status)
    if percent is None:
        return ""
    filled = _GREY if is_frozen else colour(status)
    words = f"{percent} %" if is_frozen else facts.progress(status, now)
    return (
        '<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;margin-top:8px">'
        f'<div role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
        'style="flex:1 1 180px;height:8px;border-radius:4px;background:rgba(128,128,128,.22);overflow:hidden">'
        f'<div style="width:{percent}%;height:100%;border-radius:4px;background:{filled}"></div></div>'
        f'<span style="{_MUTED};{_FIGURES}">{_text(words)}</span></div>'
    )


def _error(status: JobStatus) -> str:
    error = facts.first_error(status)
    if error is None:
        return ""
    rank, message = error
    replica = next(replica for replica in status.replicas if replica.rank == rank)
    shown = visible(replica.locals)
    where, _, line = visible(replica.where).partition("\n")
    place = f' <span style="font-weight:400;{_MUTED}">in {_text(where)}</span>' if where else ""
    source = f'<pre style="{_PRE};{_MUTED}">    {_text(line)}</pre>' if line else ""
    variables = (
        f'<details style="margin-top:6px"><summary style="cursor:pointer">Local variables</summary>'
        f'<pre style="{_PRE}">{_text(shown)}</pre></details>'
        if shown
        else ""
    )
    return (
        f'<div style="margin-top:10px;padding:8px 12px;border-left:3px solid {_RED};border-radius:4px;background:{_RED}1c">'
        f'<div style="font-weight:600">Rank {rank}{place}</div>{source}'
        f'<pre style="{_PRE}">{_text(message)}</pre>{variables}</div>'
    )


def charts(found: Sequence[curves.Curve], remark: str = "") -> str:
    """Draw the first curves beside each other; empty without any.

    Above several of them stands one legend; each picture has its own last values.

    Args:
        found: All curves.
        remark: What stands below them; where it is empty, how many are left out.
    """
    shown = found[: curves.MAX_CURVES]
    if not shown:
        return ""
    labels = {one.label: one for curve in shown for one in curve.drawn if one.label}
    entries = "".join(_entry(one, one.label) for one in labels.values()) if len(shown) > 1 else ""
    legend = f'<div style="{_LEGEND};margin-bottom:6px">{entries}</div>' if entries else ""
    more = small([remark or curves.left_out(found)])
    # Two and four fill two columns, others three where there is room: rows are as wide as the card.
    least = "max(220px,34%)" if sum(bool(curve.drawn) for curve in shown) in (2, 4) else "220px"
    # Metrics of one value so far stand below, beside each other.
    lines, values = (
        "".join(_figure(curve, is_alone=not entries) for curve in shown if bool(curve.drawn) is has_lines)
        for has_lines in (True, False)
    )
    return (
        f'<div style="margin-top:14px">{legend}<div style="display:grid;gap:12px 20px;'
        f'grid-template-columns:repeat(auto-fit,minmax(min(100%,{least}),1fr))">{lines}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 24px;margin-top:{8 if values else 0}px">{values}</div>{more}</div>'
    )


def _history(history: Sequence[Moment]) -> str:
    """Draw what the ranks used and waited for, folded; empty before there are lines."""
    found = curves.collect_history(history)
    drawn = charts(found, curves.unknown(history)) if any(curve.drawn for curve in found) else ""
    return (
        f'<details style="margin-top:10px"><summary style="cursor:pointer">{curves.HISTORY_TITLE}</summary>{drawn}</details>'
        if drawn
        else ""
    )


def _entry(one: curves.Series, label: str, value: str = "") -> str:
    """Draw a line's entry in a legend."""
    dot = _dot(f"{one.colour}80" if one.is_faint else one.colour) if len(one.points) > 1 else ""
    words = f'<span style="{_MUTED}">{_text(label)}</span>' if label else ""
    figure = f'<span style="{_FIGURES};font-weight:600;white-space:nowrap">{value}</span>' if value else ""
    return f'<span style="display:inline-flex;align-items:center;gap:5px">{dot}{words} {figure}</span> '


def _figure(curve: curves.Curve, *, is_alone: bool) -> str:
    """Draw a curve with its name and last values, and with the labels of its lines where no legend has them."""
    values = "".join(
        _entry(one, one.label if is_alone or one not in curve.drawn else "", facts.number(one.last))
        for one in curve.series
        if one.label and (is_alone or len(curve.series) == 1 or not one.is_faint)
    )
    return (
        '<div style="display:flex;flex-direction:column;justify-content:space-between;min-width:0">'
        '<div style="display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 12px;'
        f'margin-bottom:3px"><span style="font-weight:600;overflow-wrap:break-word;min-width:0">{_text(curve.name)}</span>'
        f'<span style="{_LEGEND}">{values}</span></div>{curves.svg(curve)}</div>'
    )


def small(lines: Sequence[str]) -> str:
    """Draw remarks; escaped here."""
    style = f"{_MUTED};margin-top:6px;overflow-wrap:anywhere"
    return "".join(f'<div style="{style}">{_text(line)}</div>' for line in lines if line)


def _ranks(status: JobStatus, *, is_frozen: bool) -> str:
    found = facts.table(status, _MAX_RANKS)
    if not found.rows:
        return ""
    colours = {state.value: _GREY if is_frozen else _COLOURS.get(state, _GREY) for state in RankStateName}
    more = f'<div style="{_MUTED};margin-top:4px">and {found.left_out:,} more ranks</div>' if found.left_out else ""
    drawn = table(found, "Ranks", colours=colours)
    return f'<div style="margin-top:12px">{_folded(status, drawn + more)}</div>'


def table(
    found: facts.Table, label: str, *, bold: str = "", height: int = _HEIGHT, colours: Mapping[str, str] | None = None
) -> str:
    """Draw a table whose first column names its rows; wide and long tables scroll.

    Args:
        found: Titles and rows; escaped here.
        label: What a screen reader calls it.
        bold: The name of a row in bold type.
        height: The greatest height in pixels.
        colours: The colour of a dot before the second column's text, by this text; None for no dots.
    """
    cell = f"padding:3px 12px 3px 0;border:0;border-bottom:{_LINE};color:inherit;vertical-align:top;text-align:"
    # The number of a rank or a trial names its row: it is the row's header.
    sides = ["left", *("right" if numeric else "left" for numeric in found.numeric[1:])]
    sides[-1] += ";padding-right:2px"
    head = "".join(
        f'<th scope="col" style="{cell}{side};font-weight:600;white-space:nowrap;{_MUTED}">{_text(title)}</th>'
        for title, side in zip(found.titles, sides, strict=True)
    )
    body = []
    for name, *others in found.rows:
        shown = [_text(value) for value in others]
        if colours is not None:
            shown[0] = f"{_dot(colours.get(others[0], 'transparent'))}&nbsp; {shown[0]}"
        body += [
            f'<tr style="background:none{";font-weight:600" if name == bold else ""}">',
            f'<th scope="row" style="{cell}left;font-weight:inherit">{_text(name)}</th>',
            *(
                f'<td style="{cell}{side};{_WIDE if title in ("remark", "reason", "last metrics") else "white-space:nowrap"}">{value}</td>'
                for title, side, value in zip(found.titles[1:], sides[1:], shown, strict=True)
            ),
            "</tr>",
        ]
    return (
        f'<div {_KEYS} role="group" aria-label="{label}" style="overflow:auto;max-height:{height}px;{_FADE}">'
        f'<table style="width:100%;margin:0;border-collapse:collapse;table-layout:auto;font-size:12px;{_FIGURES};color:inherit;background:none">'
        f'<thead style="border:0"><tr style="background:none">{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


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
        f'<li style="margin:0;overflow-wrap:anywhere">{"<b>Warning:</b> " * (note in status.warnings)}{_text(visible(note))}</li>'
        for note in status.notes[-_MAX_NOTES:]
    )
    return f'<ul aria-label="Notes" style="margin:12px 0 0;padding:0 0 0 18px;{_MUTED}">{items}</ul>'


def _log(tail: Sequence[LogLine]) -> str:
    if not tail:
        return ""
    lines = []
    for line in tail:
        colour = _GREY if line.rank is None else curves.COLOURS[line.rank % len(curves.COLOURS)]
        # Mixed with the colour of the page's text: readable on light and on dark pages.
        style = f"color:color-mix(in srgb,{colour} 55%,currentColor);font-weight:600"
        lines.append(f'<span style="{style}">{line.prefix}</span> {_text(facts.log_text(line))}\n')
    # A reversed column begins scrolled to its end, where the newest line is.
    return (
        f'<div {_KEYS} role="group" aria-label="End of the log" style="display:flex;flex-direction:column-reverse;'
        f'max-height:250px;overflow:auto;margin-top:12px;border-radius:6px;background:{_VEIL}">'
        f'<pre style="{_MONO};font-size:12px;line-height:1.4;margin:0;padding:8px 10px;border:0;background:none;'
        f'color:inherit;white-space:pre-wrap;overflow-wrap:anywhere">{"".join(lines)}</pre></div>'
    )
