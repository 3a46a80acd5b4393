"""The map of a run: heads across, layers down, one column of the monitor in shades, and the worst in words."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wellcond.errors import UnknownChoiceError
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
    ends = np.cumsum([count for _, count in series.layers])
    parts = [slice(int(end) - count, int(end)) for end, (_, count) in zip(ends, series.layers, strict=True)]
    rows = [(name, shades[part], now[part]) for (name, _), part in zip(series.layers, parts, strict=True)]
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
    return np.where(np.isnan(now), 0, np.where(np.isinf(now), 8, 1 + np.floor(np.nan_to_num(share) * 7.999))).astype(
        int
    )


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
    lines += ["", f"{order}  · not seen; {raised}"]
    for alarm in list(alarms)[-MOST_ALARMS:]:
        lines += textwrap.wrap(f"step {alarm.step}, {alarm.severity}: {alarm.verdict}", width, subsequent_indent="  ")
        lines.append(f"  do: {alarm.remedy}")
    return "\n".join(lines)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}th{font-weight:500;text-align:left;padding-right:1rem}
td{width:1.4rem;height:1.4rem;border:1px solid #fff;text-align:center}
.s0{background:repeating-linear-gradient(45deg,#eee 0 3px,#fff 3px 6px)}
.s1{background:#eef4fa}.s2{background:#cfe1f2}.s3{background:#a6cbe6}.s4{background:#f6d9a8}.s5{background:#f0b36b}
.s6{background:#e3853f}.s7{background:#cc4b2a}.s8{background:#96201c}code{background:#f3f4f6;padding:.1rem .3rem}"""


def render_maps(series: Series, *, alarms: Sequence[Alarm] = (), title: str = "Heads of a run") -> str:
    """A self-contained page without scripts: a map of every main column, and the alarms."""
    columns = [name for name in ("max_logit", "entropy", "first_share", "attention_share", "sec_qk", "kappa_q")
               if name in series.columns]  # fmt: skip
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if alarms:
        items = "".join(
            f"<li><b>step {alarm.step}, {alarm.severity}</b>: {html.escape(alarm.verdict)}<br>"
            f"<code>{html.escape(alarm.remedy)}</code><br><small>{html.escape(alarm.evidence)}</small></li>"
            for alarm in alarms
        )
        parts.append(f"<h2>Alarms</h2><ul>{items}</ul>")
    else:
        parts.append("<p>No alarm.</p>")
    for column in columns:
        found = make_map(series, column)
        parts.append(f"<h2>{html.escape(column)}, step {found.step}</h2><p>{html.escape(found.words)}</p><table>")
        for name, shades, numbers in found.rows:
            cells = "".join(
                f'<td class="s{shade}" title="head {head}: {number:.4g}"></td>'
                for head, (shade, number) in enumerate(zip(shades, numbers, strict=True))
            )
            parts.append(f"<tr><th>{html.escape(name or '(model)')}</th>{cells}</tr>")
        parts.append("</table>")
    page = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>{page}</body></html>\n"
    )
