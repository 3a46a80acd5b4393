"""The map of a run: heads across, layers down, one column of the monitor in shades, and the worst in words."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wellcond.errors import UnknownChoiceError
from wellcond.pages import style
from wellcond.training.alarms import Alarm
from wellcond.training.series import Series

SHADES = "·▁▂▃▄▅▆▇█"
"""The first is of a number that was not seen."""
LOW_IS_BAD = ("entropy", "v_spread", "rank_q", "rank_k", "rank_v", "rank_o", "rank_qk", "rank_ov", "weight_change")
FULL = {"max_logit": 100.0, "max_logit_low": 100.0, "first_share": 1.0, "self_share": 1.0, "duplicate": 1.0}
"""Where the scale of a column ends, if its numbers do not go further."""
MOST_ALARMS = 6


@dataclass(frozen=True)
class HeadsMap:
    """One column at one step: a shade per head, from 1 (good) to 8 (bad), 0 where it was not seen."""

    column: str
    step: int
    rows: list[tuple[str, np.ndarray, np.ndarray]]
    """Layer, shades, numbers."""
    words: str


def make_map(series: Series, column: str = "max_logit") -> HeadsMap:
    """The map of the last reading in which something of the column was seen.

    Raises: UnknownChoiceError for a column that the series does not have.
    """
    if column not in series.columns:
        raise UnknownChoiceError("column of this run", column, series.columns)
    values = series.column(column).astype(np.float64)
    seen = np.flatnonzero(~np.isnan(values).all(1))
    at = int(seen[-1]) if len(seen) else len(values) - 1
    now = values[at] if len(values) else np.full(series.num_heads, math.nan)
    shades = _shades(column, now)
    rows = [(name, shades[part], now[part]) for name, part in series.parts]
    words = _in_words(series, column, values, at) if len(seen) else f"{column} was not seen in any head yet"
    return HeadsMap(column, series.steps[at] if series.steps else 0, rows, words)


def _shades(column: str, now: np.ndarray) -> np.ndarray:
    known = now[np.isfinite(now)]
    if not len(known):
        return np.where(np.isnan(now), 0, 8)
    low, high = float(known.min()), max(float(known.max()), FULL.get(column, -math.inf))
    low = min(low, 0.0) if column in FULL else low
    share = np.clip((now - low) / (high - low), 0.0, 1.0) if high > low else np.zeros_like(now)
    share = 1.0 - share if column in LOW_IS_BAD and high > low else share
    shades = 1 + np.floor(np.nan_to_num(share) * 7.999)
    return np.where(np.isnan(now), 0, np.where(np.isinf(now), 8, shades)).astype(int)


def _in_words(series: Series, column: str, values: np.ndarray, at: int) -> str:
    now = values[at]
    finite = now[np.isfinite(now)]
    worst = int(np.nanargmin(now) if column in LOW_IS_BAD else np.nanargmax(now))
    name, head = series.heads[worst]
    text = f"{column} of {np.sum(~np.isnan(now))} heads"
    text += f" from {finite.min():.3g} to {finite.max():.3g}" if len(finite) else " is not finite"
    text += f"; worst: {name or 'the attention layer'} head {head}, {now[worst]:.3g}"
    past = np.flatnonzero(~np.isnan(values[: at // 2 + 1, worst])) if at else np.empty(0, int)
    if len(past):
        text += f" ({values[past[-1], worst]:.3g} at step {series.steps[int(past[-1])]})"
    return text


def show_map(series: Series, column: str = "max_logit", *, alarms: Sequence[Alarm] = (), width: int = 100) -> str:
    """The map as text of at most `width` columns, with the latest alarms.

    Example:
        >>> series = Series([("blocks.0", 2), ("blocks.1", 2)], ["max_logit"])
        >>> series.add(10, np.array([[3.0], [40.0], [99.0], [np.nan]]))
        >>> print(show_map(series))
        step 10: max_logit of 3 heads from 3 to 99; worst: blocks.1 head 0, 99
        <BLANKLINE>
        blocks.0  ▁▄
        blocks.1  █·
        <BLANKLINE>
        ▁ low  █ high  · not seen; no alarm
    """
    found = make_map(series, column)
    names = [name or "(model)" for name, _, _ in found.rows]
    longest = max(len(shades) for _, shades, _ in found.rows)
    room = min(max(map(len, names)), max(12, width - 2 - longest))
    lines = [*textwrap.wrap(f"step {found.step}: {found.words}", width), ""]
    for name, (_, shades, _) in zip(names, found.rows, strict=True):
        short = name if len(name) <= room else f"..{name[-(room - 2) :]}"
        cells = "".join(SHADES[shade] for shade in shades)
        step = max(1, width - room - 2)
        parts = [cells[first : first + step] for first in range(0, len(cells), step)]
        lines += [f"{short if number == 0 else '':<{room}}  {part}" for number, part in enumerate(parts)]
    order = "▁ high  █ low" if column in LOW_IS_BAD else "▁ low  █ high"
    raised = f"{len(alarms)} alarm{'' if len(alarms) == 1 else 's'}" if alarms else "no alarm"
    raised += f", the last {MOST_ALARMS}:" if len(alarms) > MOST_ALARMS else ""
    lines += ["", f"{order}  · not seen; {raised}"]
    latest = list(alarms)[-MOST_ALARMS:]
    for alarm, following in zip(latest, [*latest[1:], None], strict=False):
        lines += textwrap.wrap(f"step {alarm.step}, {alarm.severity}: {alarm.verdict}", width, subsequent_indent="  ")
        if following is None or following.remedy != alarm.remedy:
            lines.append(f"  do: {alarm.remedy}")
    return "\n".join(lines)


STYLE = """table.heads{width:auto;margin:4px 0 2px}
table.heads th{padding:0 10px 0 0;border:0;font-weight:500;vertical-align:middle}
table.heads thead th{font-size:11px;font-weight:400;padding:0;text-align:center}
table.heads td{width:22px;min-width:22px;height:22px;padding:0;border:1px solid var(--card)}
.s0{background:repeating-linear-gradient(45deg,var(--line) 0 3px,var(--card) 3px 6px)}
.s1{background:#eef4fa}.s2{background:#cfe1f2}.s3{background:#a6cbe6}.s4{background:#f6d9a8}.s5{background:#f0b36b}
.s6{background:#e3853f}.s7{background:#cc4b2a}.s8{background:#96201c}
.key{display:inline-block;width:14px;height:14px;border:1px solid var(--line)}
.alarms li{margin:0 0 12px}.alarms code{display:block;margin:4px 0;padding:6px 10px;background:var(--page);
border-radius:5px;white-space:pre-wrap;overflow-wrap:anywhere}"""
SHOWN = ("max_logit", "entropy", "first_share", "attention_share", "sec_qk", "kappa_q")
"""Columns that a page has maps of."""


def render_maps(series: Series, *, alarms: Sequence[Alarm] = (), title: str = "Heads of a run") -> str:
    """A self-contained page without scripts: a map of every main column, and the alarms."""
    steps = f"steps {series.steps[0]} to {series.steps[-1]}" if series.steps else "no step yet"
    facts = f"{len(series.steps)} readings of {series.num_heads} heads, {steps}."
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style()}{STYLE}</style></head>\n<body><main>"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{facts}</p>\n'
        f"{maps_as_html(series)}\n{alarms_as_html(alarms)}\n</main></body></html>\n"
    )


def alarms_as_html(alarms: Sequence[Alarm]) -> str:
    """A section with every alarm, its line to type and its source."""
    if not alarms:
        return "<section><h2>Alarms</h2><p>No alarm.</p></section>"
    items = (
        f"<li><b>step {alarm.step}, {alarm.severity}</b>: {html.escape(alarm.verdict)}"
        f"<code>{html.escape(alarm.remedy)}</code><small>{html.escape(alarm.evidence)}</small></li>"
        for alarm in alarms
    )
    return f'<section><h2>Alarms</h2><ul class="alarms">{"".join(items)}</ul></section>'


def maps_as_html(series: Series, columns: Sequence[str] = SHOWN, *, heading: str = "h2") -> str:
    """A section for every column that the series has, in the style sheet of all pages and `STYLE`."""
    return "\n".join(_map_as_html(series, column, heading) for column in columns if column in series.columns)


def _map_as_html(series: Series, column: str, heading: str) -> str:
    found = make_map(series, column)
    most = max((len(shades) for _, shades, _ in found.rows), default=0)
    numbers = "".join(f"<th>{head}</th>" for head in range(most))
    rows = [f"<thead><tr><th></th>{numbers}</tr></thead>"]
    for name, shades, values in found.rows:
        cells = "".join(
            f'<td class="s{shade}" title="head {head}: {value:.4g}"></td>'
            for head, (shade, value) in enumerate(zip(shades, values, strict=True))
        )
        rows.append(f"<tr><th>{html.escape(name or '(model)')}</th>{cells}</tr>")
    low, high = ("high", "low") if column in LOW_IS_BAD else ("low", "high")
    key = f'<i class="key s1"></i> {low} <i class="key s8"></i> {high} <i class="key s0"></i> not seen'
    return (
        f"<section><{heading}>{html.escape(column)}, step {found.step}</{heading}><p>{html.escape(found.words)}.</p>"
        f'<div class="scroll"><table class="heads">{"".join(rows)}</table></div><small>{key}</small></section>'
    )
