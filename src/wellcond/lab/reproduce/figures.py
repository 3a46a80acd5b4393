"""The papers' figures from stored runs: points for a CSV, drawings of them, and a table of their ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from wellcond.lab.report.analysis import ROLES, Analysis
from wellcond.lab.report.figures import curves_of, match_rows, measured
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import Matching, show_match
from wellcond.lab.report.series import BUDGET, MEAN, Curve, Figure, Kind, Panel, Row, curve_rows, with_points
from wellcond.lab.report.table import Table, Values
from wellcond.lab.report.values import MISSING, show, show_seeds
from wellcond.lab.reproduce.catalogue import Entry, PanelSettings
from wellcond.lab.reproduce.stored import Collection, StoredStudy

BOUND = "papers' bound"
TOO_LARGE = "> 1e300"  # see `HeadTable.over_steps`
Y_LABELS = {
    "jacobian": "condition number of J",
    "loss": "training loss",
    "match": "to match the default's end",
    "sigma_min": "smallest singular value",
    "sigma_max": "largest singular value",
    "kappa": "condition number",
}
HEADER = ("panel", "quantity", "series", "start, or when matched", "end, or saving", "runs", "paper")


def build_figures(id: str, entry: Entry, records: Collection) -> Iterator[tuple[Figure, Comparison]]:
    """Figures, each with the comparison that gives its series their colours; none without runs.

    Panels of bars and of lines become figures of their own, and one with logarithmic axes has a second, linear one.
    """
    for bars in (False, True):
        wanted = [panel for panel in entry.panels if (panel.quantity == "match") is bars]
        found = [(panel, s, s.analysis) for panel in wanted if (s := records.study(panel)) and s.analysis is not None]
        rows = tuple(row for panel, study, analysis in found for row in _rows(id, entry, panel, study, analysis))
        panels = with_points((_panel(panel, analysis.unit) for panel, _, analysis in found), rows)
        if panels:
            first = found[0][2]
            names = tuple(dict.fromkeys(row.series for row in rows if row.series != BUDGET))
            name = f"{id}-match" if bars and len(wanted) < len(entry.panels) else id
            title = f"{id}: {entry.title} (scale {first.comparison.scale})"
            kind: Kind = "bars" if bars else "lines"
            figure = Figure(name, "", title, "", kind, panels, rows, x_label=first.unit)
            series = replace(first.comparison, methods=names, runs=())
            yield figure, series
            if any(panel.log for panel in panels):
                linear = tuple(replace(panel, log=False) for panel in panels)
                yield replace(figure, name=f"{name}-linear", panels=linear), series


def _panel(settings: PanelSettings, unit: str) -> Panel:
    label, is_match = Y_LABELS[settings.quantity], settings.quantity == "match"
    shown = f"{unit}s {label}" if is_match else label
    return Panel(settings.title, settings.title, shown, log=not is_match and settings.quantity != "loss")


def _rows(id: str, entry: Entry, settings: PanelSettings, stored: StoredStudy, analysis: Analysis) -> Sequence[Row]:
    scale = analysis.comparison.scale
    if settings.quantity == "match":
        found = {name: one for name, one in _matchings(entry, stored, analysis).items() if one is not None}
        return match_rows(id, settings.title, scale, analysis.unit, found)
    return curve_rows(scale, id, _panel(settings, analysis.unit), _curves(entry, settings, stored, analysis))


def _curves(entry: Entry, settings: PanelSettings, stored: StoredStudy, analysis: Analysis) -> dict[str, list[Curve]]:
    named = {name: stored.label(row) for name, row in entry.rows.items() if stored.label(row) in analysis.heads}
    if settings.quantity == "loss":
        losses = curves_of(analysis, lambda run: run.steps, "loss")
        return {name: losses.get(label, []) for name, label in named.items()}
    found = dict[str, list[Curve]]()
    if settings.quantity == "jacobian":
        for name, label in named.items():
            found[name] = measured(analysis, "pseudo_condition_number")[label]
            found[f"{name}, {BOUND}"] = measured(analysis, "papers_bound_log10")[label]
        return found
    # The method with the correction is the last row: W is what it trains, W + C what its forward pass uses.
    label = list(named.values())[-1] if named else ""
    for prefix in {"raw": ("raw_",), "effective": ("",), "both": ("raw_", "")}[settings.of]:
        for role in ROLES:
            name = f"W_{role.upper()}" + ("" if prefix else f" + C_{role.upper()}")
            found[name] = measured(analysis, f"{prefix}{settings.quantity}_{role}").get(label, [])
    return found


def _matchings(entry: Entry, stored: StoredStudy, analysis: Analysis) -> dict[str, Matching | None]:
    """By row; None where there are no runs."""
    found = {name: analysis.matchings.get(stored.label(row)) for name, row in entry.rows.items()}
    return {name: matching if matching and matching.by_seed else None for name, matching in found.items()}


def figure_table(id: str, entry: Entry, records: Collection, notes: list[str]) -> Table:
    """Every curve at its first and last point, geometric mean over seeds; every bar with what it saves."""
    made: list[tuple[tuple[str, ...], Values]] = []
    for settings in entry.panels:
        stored = records.study(settings)
        if stored is None or stored.analysis is None:
            made.append(((settings.title, MISSING, MISSING, MISSING, MISSING, "no runs", MISSING), {"n": 0}))
        elif settings.quantity == "match":
            made += _match_table_rows(entry, settings, stored, stored.analysis)
        else:
            made += _curve_table_rows(settings, _rows(id, entry, settings, stored, stored.analysis))
    rows = tuple(shown for shown, _ in made)
    values = tuple({"panel": row[0], "quantity": row[1], "series": row[2], **found} for row, found in made)
    return Table(id.lower(), f"{id}: {entry.title}", HEADER, rows, tuple(notes), frozenset({0, 1, 2, 5, 6}), values)


def _curve_table_rows(settings: PanelSettings, rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], Values]]:
    for name in dict.fromkeys(row.series for row in rows):
        means = [row.value for row in rows if row.series == name and row.seed == MEAN]
        by_seed = [row for row in rows if row.series == name and row.seed.isdigit()]
        count = len({row.seed for row in by_seed})
        start, end = (means[0], means[-1]) if means else (math.nan, math.nan)
        shown = (show(start), show(end)) if means else (MISSING, MISSING)
        if not means and by_seed and all(math.isinf(row.value) for row in by_seed):
            start, end, shown = math.inf, math.inf, (TOO_LARGE, TOO_LARGE)
        texts = (settings.title, Y_LABELS[settings.quantity], name, *shown, show_seeds(count), MISSING)
        yield texts, {"n": count, "start": start, "end": end}


def _match_table_rows(
    entry: Entry, settings: PanelSettings, stored: StoredStudy, analysis: Analysis
) -> Iterator[tuple[tuple[str, ...], Values]]:
    unit, part = analysis.unit, entry.parts[0]
    for name, matching in _matchings(entry, stored, analysis).items():
        first = (settings.title, f"{unit}s to match", name)
        if matching is None:
            yield (*first, MISSING, MISSING, "no runs", MISSING), {"n": 0}
            continue
        saving, count = matching.mean("saving"), len(matching.by_seed)
        texts = (
            *first,
            matching.show(unit),
            MISSING if math.isnan(saving) else f"saves {saving:.0%}",
            f"{show_seeds(count)}, mean curve {show_match(matching.of_means, unit)}",
            part.show(name, settings.title) or MISSING,
        )
        yield texts, {"n": count, "reached": len(matching.reached), "matched": matching.mean(unit), "saving": saving,
                      "paper": part.value(name, settings.title)}  # fmt: skip
