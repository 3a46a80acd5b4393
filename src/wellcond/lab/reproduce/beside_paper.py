"""What came out of an id, as data and as files: our numbers and figures beside the paper's, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report import figures
from wellcond.lab.report.glue import AVERAGE, SHOWN
from wellcond.lab.report.match import Matching, show_match
from wellcond.lab.report.plots import draw_static
from wellcond.lab.report.records import ROLES
from wellcond.lab.report.statistics import NO_PAIRS, PairedDifference, Summary, compare_paired, correct, show_p
from wellcond.lab.report.table import (
    MISSING,
    Cell,
    Table,
    Values,
    show,
    show_known,
    show_seeds,
    table_csv,
    table_markdown,
)
from wellcond.lab.reproduce.catalogue import Entry, Part, Source
from wellcond.lab.reproduce.computed import static_tables
from wellcond.lab.reproduce.stored import OWN_METRICS, Collection, StoredStudy, differences_from_paper, may_be_paired
from wellcond.lab.train.run_folder import writing

GLUE_AVERAGE = f"glue:{AVERAGE}"
GAINS = (
    "Gains are over the first row, paired by seed, positive is better; p by the paired t test, Holm over the table; "
    "they agree if our interval contains the paper's, both as shares of the baseline's error."
)
BOUND = "papers' bound"
TOO_LARGE = "> 1e300"  # see `HeadTable.over_steps`
Y_LABELS = {
    "jacobian": "condition number of J", "loss": "training loss", "match": "to match the default's end",
    "sigma_min": "smallest singular value", "sigma_max": "largest singular value", "kappa": "condition number",
}  # fmt: skip


def outcome_tables(id: str, entry: Entry, scale: str, records: Collection | None) -> list[Table]:
    """The tables of an id: from records, or for what is computed without runs at a scale."""
    if entry.kind == "static":
        return list(static_tables(entry.static, scale))
    assert records is not None
    notes = list(_notes(entry, records))
    if entry.kind == "figure":
        return [_figure_table(id, entry, records, notes)]
    named = {id if at == 1 else f"{id}-{at}": part for at, part in enumerate(entry.parts, 1)}
    return [_table(name, entry, part, records, [GAINS, *notes] if name == id else []) for name, part in named.items()]


def _table(id: str, entry: Entry, part: Part, records: Collection, notes: list[str]) -> Table:
    """Every number of one metric, the paper's and ours; Holm's correction is over all of them."""
    baseline, found, gains = entry.baseline, [], []
    base_row = entry.rows[baseline]
    for column, source in entry.columns.items():
        name, base_study = part.metric or source.metric, records.study(source, base_row.variant)
        for row_name, row in entry.rows_of(column).items():
            study = records.study(source, row.variant)
            values = study.values(row, name) if study else {}
            metric = study.metric(name) if study else OWN_METRICS.get(name, SHOWN)
            paired = {}
            if base_study and may_be_paired(study, base_study, (row.variant, base_row.variant)):
                paired = base_study.values(base_row, name)
            gain = compare_paired(row_name, values, baseline, paired, higher_is_better=metric.higher_is_better)
            gains.append(gain if row_name != baseline else NO_PAIRS)
            found.append((column, row_name, row, study, Summary(values), metric, Summary(paired).mean))
    rows: list[dict[str, Cell]] = []
    for (column, name, row, study, summary, metric, base), gain in zip(found, correct(gains), strict=True):
        tasks, lost = _averaged(entry, column, study), study.lost(row) if study else 0
        value, paper_gain = part.mean(name, tasks), part.gain(name, baseline, *tasks)
        paper = part.show(name, column) or MISSING
        if tasks != (column,):
            paper = show_known(value, f"{{:.1f}} (of {', '.join(tasks)})")
        agreement = _agreement(part.share(name, baseline, *tasks), summary.count, metric.error(base), gain)
        judged = gain.count or paper_gain is not None
        rows.append({
            "column": (column, {"column": column}), "method": (name, {"row": name}),
            "paper": (paper, {"paper": value}), "ours": summary.cell(metric),
            "n": (f"{summary.count}" + (f" + {lost} lost" if lost else ""), {"lost": lost}),
            "paper's gain": (show_known(paper_gain, "{:+g}"), {"paper_gain": paper_gain}),
            "our gain [95 % interval]": gain.cell(metric),
            "p": show_p(gain.p), "p (Holm)": show_p(gain.p_holm),
            "agreement": (agreement if judged else MISSING, {"agreement": agreement}),
        })  # fmt: skip
    labels = {metric.label for _, _, _, _, summary, metric, _ in found if summary.count}
    label = f" ({labels.pop()})" if len(labels) == 1 else ""
    return Table.of(id.lower(), f"{id}: {entry.title}{label}", rows, notes, (0, 1, 9))


def _averaged(entry: Entry, column: str, study: StoredStudy | None) -> tuple[str, ...]:
    """Columns that a number is the mean of: itself, or those whose tasks of GLUE were run, if these were not all."""
    if entry.columns[column].metric != GLUE_AVERAGE or study is None or study.glue is None:
        return (column,)
    others = {name: source.metric for name, source in entry.columns.items() if name != column}
    run = tuple(name for name, metric in others.items() if metric.removeprefix("glue:") in study.glue.tasks)
    return run if 0 < len(run) < len(others) else (column,)


def _agreement(share: float | None, count: int, error: float, gain: PairedDifference) -> str:
    """Whether the interval of our gain contains the paper's: within, below, above, or why that is not known.

    Both as shares of the baseline's error, since points of other data mean something else.
    """
    if share is None:
        return "no reference"
    if gain.interval is None or not error > 0:
        return "too few seeds" if count else "no runs"
    low, high = (end / error for end in gain.interval)
    return "above" if low > share else "below" if high < share else "within"


def _notes(entry: Entry, records: Collection) -> Iterator[str]:
    if not entry.has_numbers:
        yield f"No reference: no paper {'prints numbers for this' if entry.kind == 'figure' else 'has this table'}."
    elif entry.paper_note:
        yield f"Paper: {entry.paper_note}"
    if entry.note:
        yield f"Here: {entry.note}."
    yield from list(differences_from_paper(entry, records)) or ["There are no runs of this here."]


def write_outcome(id: str, entry: Entry, scale: str, records: Collection | None, folder: Path) -> list[Table]:
    """Write ID.md, a CSV for each table, and CSV and SVG of each figure; returns the tables.

    Raises: MissingExtraError without matplotlib, RunError if the folder cannot be written.
    """
    tables = outcome_tables(id, entry, scale, records)
    files: dict[str, str | bytes] = {f"{table.name}.csv": table_csv(table) for table in tables}
    text = [f"# {id}: {entry.title}", ""]
    for table in tables:
        text += [f"## {table.title}", "", table_markdown(table), ""]
    for figure in [] if records is None else build_figures(id, entry, records):
        name = figure.name.lower()
        files[f"{name}-points.csv"] = figures.write_csv(figure)
        files[f"{name}.svg"] = draw_static(figure)
        text += [f"![{figure.title}]({name}.svg)", ""]
    files[f"{id}.md"] = "\n".join(text)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return tables


def build_figures(id: str, entry: Entry, records: Collection) -> Iterator[figures.Figure]:
    """The papers' figures from stored runs; none without runs.

    Panels of bars and of lines become figures of their own, and one with logarithmic axes has a second, linear one.
    """
    for bars in (False, True):
        wanted = {name: source for name, source in entry.columns.items() if (source.quantity == "match") is bars}
        found = {name: study for name, source in wanted.items() if (study := records.study(source)) is not None}
        if not found or entry.kind != "figure":
            continue
        panels = tuple(_panel(entry, name, study) for name, study in found.items())
        first = next(iter(found.values())).analysis
        series = dict.fromkeys(row.series for panel in panels for row in panel.rows if row.series != figures.BUDGET)
        name = f"{id}-match" if bars and len(wanted) < len(entry.columns) else id
        title, scale = f"{id}: {entry.title} (scale {first.comparison.scale})", first.comparison.scale
        figure = figures.Figure(name, "", title, "", panels, tuple(series), scale, first.unit, bars).drawable()
        if figure.panels:
            yield figure
        if any(panel.log for panel in figure.panels):
            linear = tuple(replace(panel, log=False) for panel in figure.panels)
            yield replace(figure, name=f"{name}-linear", panels=linear)


def _panel(entry: Entry, title: str, stored: StoredStudy) -> figures.Panel:
    source, unit = entry.columns[title], stored.analysis.unit
    label = Y_LABELS[source.quantity]
    if source.quantity == "match":
        found = {name: one for name, one in _matchings(entry, stored).items() if one is not None}
        return figures.Panel(title, title, f"{unit}s {label}", figures.match_rows(unit, found))
    return figures.curve_panel(title, title, label, _curves(entry, source, stored), log=source.quantity != "loss")


def _curves(entry: Entry, settings: Source, stored: StoredStudy) -> figures.Curves:
    analysis = stored.analysis
    named = {name: stored.label(row) for name, row in entry.rows.items() if stored.label(row) in analysis.heads}
    if settings.quantity == "loss":
        losses = figures.curves_of(analysis, "steps", "loss")
        return {name: losses.get(label, []) for name, label in named.items()}
    if settings.quantity == "jacobian":
        own, bounds = (figures.measured(analysis, key) for key in ("pseudo_condition_number", "papers_bound_log10"))
        pairs = [((name, own[label]), (f"{name}, {BOUND}", bounds[label])) for name, label in named.items()]
        return dict(pair for both in pairs for pair in both)
    # The method with the correction is the last row: W is what it trains, W + C what its forward pass uses.
    label = list(named.values())[-1] if named else ""
    prefixes = {"raw": ("raw_",), "effective": ("",), "both": ("raw_", "")}[settings.of]
    return {
        f"W_{role.upper()}" + ("" if prefix else f" + C_{role.upper()}"): figures.measured(
            analysis, f"{prefix}{settings.quantity}_{role}"
        ).get(label, [])
        for prefix in prefixes
        for role in ROLES
    }


def _matchings(entry: Entry, stored: StoredStudy) -> dict[str, Matching | None]:
    """By row; None where there are no runs."""
    found = {name: stored.analysis.matchings.get(stored.label(row)) for name, row in entry.rows.items()}
    return {name: matching if matching and matching.by_seed else None for name, matching in found.items()}


def _figure_table(id: str, entry: Entry, records: Collection, notes: list[str]) -> Table:
    """Every curve at its first and last point, geometric mean over seeds; every bar with what it saves."""
    rows: list[dict[str, Cell]] = [
        {
            "panel": (panel, {"panel": panel}), "quantity": (quantity, {"quantity": quantity}),
            "series": (series, {"series": series}), "start, or when matched": (start, numbers),
            "end, or saving": end, "runs": runs, "paper": paper,
        }
        for panel, source in entry.columns.items()
        for quantity, series, start, end, runs, paper, numbers in _figure_rows(entry, panel, records.study(source))
    ]  # fmt: skip
    return Table.of(id.lower(), f"{id}: {entry.title}", rows, notes, (0, 1, 2, 5, 6))


def _figure_rows(
    entry: Entry, panel: str, stored: StoredStudy | None
) -> Iterator[tuple[str, str, str, str, str, str, Values]]:
    """Quantity, series, start or when matched, end or saving, runs, the paper's, and the numbers for programs."""
    if stored is None:
        yield MISSING, MISSING, MISSING, MISSING, "no runs", MISSING, {"n": 0}
    elif entry.columns[panel].quantity == "match":
        unit, part = stored.analysis.unit, entry.parts[0]
        for name, matching in _matchings(entry, stored).items():
            if matching is None:
                yield f"{unit}s to match", name, MISSING, MISSING, "no runs", MISSING, {"n": 0}
                continue
            saving, count = matching.mean("saving"), len(matching.by_seed)
            runs = f"{show_seeds(count)}, mean curve {show_match(matching.of_means, unit)}"
            numbers: Values = {
                "n": count, "reached": count - matching.censored, "matched": matching.mean(unit), "saving": saving,
                "paper": part.mean(name, (panel,)),
            }  # fmt: skip
            shown, paper = show_known(saving, "saves {:.0%}"), part.show(name, panel) or MISSING
            yield f"{unit}s to match", name, matching.show(unit), shown, runs, paper, numbers
    else:
        drawn = _panel(entry, panel, stored)
        for name, seeds in drawn.by_series().items():
            by_seed = {seed: [row.value for row in rows] for seed, rows in seeds.items()}
            means, own = by_seed.get(figures.MEAN, []), [values for seed, values in by_seed.items() if seed.isdigit()]
            infinite = not means and any(own) and all(math.isinf(value) for values in own for value in values)
            start, end = (means[0], means[-1]) if means else (math.inf, math.inf) if infinite else (math.nan, math.nan)
            first, last = (TOO_LARGE if infinite else show(value) for value in (start, end))
            numbers = {"n": len(own), "start": start, "end": end}
            yield drawn.y_label, name, first, last, show_seeds(len(own)), MISSING, numbers
