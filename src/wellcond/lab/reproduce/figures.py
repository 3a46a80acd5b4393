"""The papers' figures from stored runs: points for a CSV, drawings of them, and a table of their ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from wellcond.lab.report.analysis import ROLES, Analysis, HeadTable
from wellcond.lab.report.figures import curves_of
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import Matching, show_match
from wellcond.lab.report.series import BUDGET, MEAN, Curve, Figure, Panel, Row, curve_rows, with_points
from wellcond.lab.report.table import Table, Values
from wellcond.lab.report.values import MISSING, show, show_seeds
from wellcond.lab.reproduce.catalogue import Entry, PanelSettings
from wellcond.lab.reproduce.stored import Collection, StoredStudy

BOUND = "papers' bound"
TOO_LARGE = "> 1e300"  # see `HeadTable.log10_over_steps`
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
        found = [(panel, s.analysis) for panel in wanted if (s := records.study(panel)) and s.analysis is not None]
        rows = tuple(row for panel, _ in found for row in _rows(id, entry, panel, records))
        panels = with_points((_panel(panel, analysis.unit) for panel, analysis in found), rows)
        if not panels:
            continue
        first = found[0][1]
        names = tuple(dict.fromkeys(row.series for row in rows if row.series != BUDGET))
        name = f"{id}-match" if bars and len(wanted) < len(entry.panels) else id
        figure = Figure(
            name, "", f"{id}: {entry.title} (scale {first.comparison.scale})", "", "bars" if bars else "lines",
            panels, rows, x_label=first.unit, by_epoch=first.unit == "epoch",
        )  # fmt: skip
        series = replace(first.comparison, methods=names, runs=())
        yield figure, series
        if any(panel.log for panel in panels):
            linear = tuple(replace(panel, log=False) for panel in panels)
            yield replace(figure, name=f"{name}-linear", panels=linear), series


def _is_log(settings: PanelSettings) -> bool:
    return settings.quantity not in ("loss", "match")


def _panel(settings: PanelSettings, unit: str) -> Panel:
    label = Y_LABELS[settings.quantity]
    shown = f"{unit}s {label}" if settings.quantity == "match" else label
    return Panel(settings.title, settings.title, shown, log=_is_log(settings))


def _rows(id: str, entry: Entry, settings: PanelSettings, records: Collection) -> list[Row]:
    stored = records.study(settings)
    assert stored is not None and stored.analysis is not None
    analysis = stored.analysis
    if settings.quantity == "match":
        return list(_match_rows(id, entry, settings, stored, analysis))
    curves = _curves(entry, settings, stored, analysis)
    return curve_rows(analysis.comparison, id, settings.title, curves, log=_is_log(settings))


def _curves(entry: Entry, settings: PanelSettings, stored: StoredStudy, analysis: Analysis) -> dict[str, list[Curve]]:
    found = dict[str, list[Curve]]()
    named = {name: stored.label(row) for name, row in entry.rows.items() if stored.label(row) in analysis.heads}
    if settings.quantity == "loss":
        losses = curves_of(analysis, lambda run: run.steps, "loss")
        return {name: losses.get(label, []) for name, label in named.items()}
    if settings.quantity == "jacobian":
        for name, label in named.items():
            found[name] = _over_steps(analysis, label, "pseudo_condition_number")
            found[f"{name}, {BOUND}"] = _over_steps(analysis, label, "papers_bound_log10")
        return found
    # The method with the correction is the last row: W is what it trains, W + C what its forward pass uses.
    label = list(named.values())[-1] if named else ""
    for prefix in {"raw": ("raw_",), "effective": ("",), "both": ("raw_", "")}[settings.of]:
        for role in ROLES:
            name = f"W_{role.upper()}" + ("" if prefix else f" + C_{role.upper()}")
            found[name] = _over_steps(analysis, label, f"{prefix}{settings.quantity}_{role}") if label else []
    return found


def _over_steps(analysis: Analysis, label: str, key: str) -> list[Curve]:
    def read(table: HeadTable) -> list[float]:
        if key.endswith("_log10"):
            return table.log10_over_steps(key).tolist()
        return table.over_steps(key, log=True).tolist()

    return [Curve(t.run, t.steps.tolist(), t.epochs().tolist(), read(t)) for t in analysis.heads.get(label, [])]


def _matchings(entry: Entry, stored: StoredStudy, analysis: Analysis) -> dict[str, Matching | None]:
    """By row; None where there are no runs."""
    found = {name: analysis.matchings.get(stored.label(row)) for name, row in entry.rows.items()}
    return {name: matching if matching and matching.by_seed else None for name, matching in found.items()}


def _match_rows(
    id: str, entry: Entry, settings: PanelSettings, stored: StoredStudy, analysis: Analysis
) -> Iterator[Row]:
    unit, scale = analysis.unit, analysis.comparison.scale
    for name, matching in _matchings(entry, stored, analysis).items():
        if matching is None:
            continue
        total = next(iter(matching.by_seed.values()))
        budget = total.total_epochs if unit == "epoch" else total.total_steps
        for seed, match in matching.by_seed.items():
            value = (match.epoch if unit == "epoch" else match.step) if match.reached else math.inf
            yield Row(id, settings.title, name, str(seed), math.nan, math.nan, float(value or 0.0), scale)
        mean = matching.mean(unit) if matching.reached else math.inf
        yield Row(id, settings.title, name, MEAN, math.nan, math.nan, mean, scale)
        yield Row(id, settings.title, BUDGET, MEAN, math.nan, math.nan, budget, scale)


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
            made += _curve_table_rows(settings, _rows(id, entry, settings, records))
    rows = tuple(shown for shown, _ in made)
    values = tuple({"panel": row[0], "quantity": row[1], "series": row[2], **found} for row, found in made)
    return Table(id.lower(), f"{id}: {entry.title}", HEADER, rows, tuple(notes), frozenset({0, 1, 2, 5, 6}), values)


def _curve_table_rows(settings: PanelSettings, rows: list[Row]) -> Iterator[tuple[tuple[str, ...], Values]]:
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
