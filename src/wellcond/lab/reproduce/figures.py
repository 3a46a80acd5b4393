"""The papers' figures from stored runs: points for a CSV, drawings of them, and a table of their ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from wellcond.lab.report.analysis import ROLES, Analysis, HeadTable
from wellcond.lab.report.figures import curves_of
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import show_match
from wellcond.lab.report.series import BUDGET, MEAN, Curve, Figure, Panel, Row, curve_rows, with_points
from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING, show, show_seeds
from wellcond.lab.reproduce.catalogue_files import Entry, PanelSettings
from wellcond.lab.reproduce.collect import Collection, StoredStudy
from wellcond.lab.reproduce.paper_numbers import PaperPart, paper_tables

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


@dataclass(frozen=True)
class MadeFigure:
    """A figure, and the comparison that gives its series their colours."""

    figure: Figure
    series: Comparison


def build_figures(id: str, entry: Entry, records: Collection) -> list[MadeFigure]:
    """The figure, and a second one with linear axes where it has logarithmic ones; nothing without runs.

    Panels of bars and of lines become figures of their own.
    """
    made = []
    for bars in (False, True):
        wanted = [p for p in entry.panels if (p.quantity == "match") is bars]
        parts = [part for panel in wanted if (part := _panel(id, entry, panel, records)) is not None]
        rows = tuple(row for _, some in parts for row in some)
        panels = with_points((panel for panel, _ in parts), rows)
        if not panels:
            continue
        first = next(s for p in wanted if (s := records.study(p.study)) is not None and s.comparison is not None)
        assert first.comparison is not None and first.analysis is not None
        names = tuple(dict.fromkeys(row.series for row in rows if row.series != BUDGET))
        name = f"{id}-match" if bars and len(wanted) < len(entry.panels) else id
        figure = Figure(
            name, "", f"{id}: {entry.title} (scale {first.comparison.scale})", "", "bars" if bars else "lines",
            panels, rows, x_label=first.analysis.unit, by_epoch=first.analysis.unit == "epoch",
        )  # fmt: skip
        series = replace(first.comparison, methods=names, runs=())
        made.append(MadeFigure(figure, series))
        if any(panel.log for panel in panels):
            linear = tuple(replace(panel, log=False) for panel in panels)
            made.append(MadeFigure(replace(figure, name=f"{name}-linear", panels=linear), series))
    return made


def _panel(id: str, entry: Entry, settings: PanelSettings, records: Collection) -> tuple[Panel, list[Row]] | None:
    stored = records.study(settings.study)
    if stored is None or stored.analysis is None:
        return None
    log = settings.quantity in ("jacobian", "kappa", "sigma_min", "sigma_max")
    label = Y_LABELS[settings.quantity]
    panel = Panel(
        settings.title, settings.title, f"{stored.analysis.unit}s {label}" if settings.quantity == "match" else label,
        log=log,
    )  # fmt: skip
    if settings.quantity == "match":
        return panel, list(_match_rows(id, entry, settings, stored))
    rows = []
    for name, curves in _curves(entry, settings, stored).items():
        rows += curve_rows(stored.analysis.comparison, id, settings.title, {name: curves}, log=log)
    return panel, rows


def _curves(entry: Entry, settings: PanelSettings, stored: StoredStudy) -> dict[str, list[Curve]]:
    assert stored.analysis is not None
    analysis, found = stored.analysis, dict[str, list[Curve]]()
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
    prefixes = {"raw": ("raw_",), "effective": ("",), "both": ("raw_", "")}[settings.of]
    for prefix in prefixes:
        for role in ROLES:
            key = f"{prefix}{settings.quantity}_{role}"
            name = f"W_{role.upper()}" + ("" if prefix else f" + C_{role.upper()}")
            found[name] = _over_steps(analysis, label, key) if label else []
    return found


def _over_steps(analysis: Analysis, label: str, key: str) -> list[Curve]:
    def read(table: HeadTable) -> list[float]:
        if key.endswith("_log10"):
            return table.log10_over_steps(key).tolist()
        return table.over_steps(key, log=True).tolist()

    return [Curve(t.run, t.steps.tolist(), t.epochs().tolist(), read(t)) for t in analysis.heads.get(label, [])]


def _match_rows(id: str, entry: Entry, settings: PanelSettings, stored: StoredStudy) -> Iterator[Row]:
    assert stored.analysis is not None
    analysis = stored.analysis
    unit, scale = analysis.unit, analysis.comparison.scale
    for name, row in entry.rows.items():
        matching = analysis.matchings.get(stored.label(row))
        if matching is None or not matching.by_seed:
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
    paper = paper_tables().get(id)
    part = paper.parts[0] if paper else None
    rows: list[tuple[str, ...]] = []
    for settings in entry.panels:
        stored = records.study(settings.study)
        if stored is None or stored.analysis is None:
            rows.append((settings.title, MISSING, MISSING, MISSING, MISSING, "no runs", MISSING))
            continue
        if settings.quantity == "match":
            rows += _match_table_rows(entry, settings, stored, part)
            continue
        made = _panel(id, entry, settings, records)
        assert made is not None
        means = [row for row in made[1] if row.seed == MEAN]
        for name in dict.fromkeys(row.series for row in made[1]):
            curve = [row for row in means if row.series == name]
            by_seed = [row for row in made[1] if row.series == name and row.seed.isdigit()]
            seeds = {row.seed for row in by_seed}
            ends = (show(curve[0].value), show(curve[-1].value)) if curve else (MISSING, MISSING)
            if not curve and by_seed and all(math.isinf(row.value) for row in by_seed):
                ends = (TOO_LARGE, TOO_LARGE)
            rows.append((settings.title, Y_LABELS[settings.quantity], name, *ends, show_seeds(len(seeds)), MISSING))
    header = ("panel", "quantity", "series", "start, or when matched", "end, or saving", "runs", "paper")
    return Table(id.lower(), f"{id}: {entry.title}", header, tuple(rows), tuple(notes), frozenset({0, 1, 2, 5, 6}))


def _match_table_rows(
    entry: Entry, settings: PanelSettings, stored: StoredStudy, part: PaperPart | None
) -> Iterator[tuple[str, ...]]:
    assert stored.analysis is not None
    unit = stored.analysis.unit
    for name, row in entry.rows.items():
        matching = stored.analysis.matchings.get(stored.label(row))
        if matching is None or not matching.by_seed:
            yield settings.title, f"{unit}s to match", name, MISSING, MISSING, "no runs", MISSING
            continue
        saving = matching.mean("saving")
        printed = part.show(name, settings.title) if part is not None else ""
        yield (
            settings.title,
            f"{unit}s to match",
            name,
            matching.show(unit),
            MISSING if math.isnan(saving) else f"saves {saving:.0%}",
            f"{show_seeds(len(matching.by_seed))}, mean curve {show_match(matching.of_means, unit)}",
            printed or MISSING,
        )
