"""What came out of an id, as data and as files: our numbers and figures beside the paper's, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.records import ROLES, check_stays_inside
from wellcond.lab.report import figures
from wellcond.lab.report.draw import draw_static
from wellcond.lab.report.epochs_to_match import Matching, show_match
from wellcond.lab.report.glue import AVERAGE, SHOWN
from wellcond.lab.report.statistics import NO_PAIRS, PairedDifference, Summary, compare_paired, correct, show_p
from wellcond.lab.report.table import MISSING, Cell, Table, show, show_known, show_seeds, table_csv, table_markdown
from wellcond.lab.reproduce.catalogue import Entry, Part
from wellcond.lab.reproduce.computed import static_tables
from wellcond.lab.reproduce.studies import OWN_METRICS, Collection, StoredStudy, differences_from_paper, may_be_paired
from wellcond.lab.train.run_folder import writing

GAINS = (
    "Gains are over the first row, paired by seed, positive is better; p by the paired t test, Holm over the table; "
    "they agree if our interval contains the paper's, both as shares of the baseline's error."
)
Y_LABELS = {
    "jacobian": "condition number of J",
    "loss": "training loss",
    "match": "to match the default's end",
    "sigma_min": "smallest singular value",
    "sigma_max": "largest singular value",
    "kappa": "condition number",
}


def outcome_tables(id: str, entry: Entry, scale: str, records: Collection) -> list[Table]:
    """The tables of an id: from records, or for what is computed without runs at a scale."""
    if entry.kind == "static":
        return list(static_tables(entry.static, scale))
    notes = entry.notes
    if not any(part.numbers for part in entry.parts):
        what = "prints numbers for this" if entry.kind == "figure" else "has this table"
        notes = [f"No reference: no paper {what}.", *notes]
    notes += list(differences_from_paper(entry, records)) or ["There are no runs of this here."]
    if entry.kind == "figure":
        rows = list(_figure_rows(entry, records))
        return [Table.of(id.lower(), f"{id}: {entry.title}", rows, notes, (0, 1, 2, 5, 6))]
    named = {id if at == 1 else f"{id}-{at}": part for at, part in enumerate(entry.parts, 1)}
    return [_table(name, entry, part, records, [GAINS, *notes] if name == id else []) for name, part in named.items()]


def _table(id: str, entry: Entry, part: Part, records: Collection, notes: list[str]) -> Table:
    """Every number of one metric, the paper's and ours; Holm's correction is over all of them."""
    baseline, base_row = next(iter(entry.rows.items()))
    found, gains = [], []
    for column, source in entry.columns.items():
        name, base_address = part.metric or source.metric, entry.address(column, base_row)
        base_study = records.study(base_address)
        for row_name, row in entry.rows_of(column).items():
            address = entry.address(column, row)
            study = records.study(address)
            values = study.values(row, name) if study else {}
            metric = study.metric(name) if study else OWN_METRICS.get(name, SHOWN)
            paired = {}
            if study and base_study and may_be_paired(study, base_study, address.settings + base_address.settings):
                paired = base_study.values(base_row, name)
            gain = compare_paired(row_name, values, baseline, paired, higher_is_better=metric.higher_is_better)
            gains.append(gain if row_name != baseline else NO_PAIRS)
            found.append((column, row_name, row, study, Summary(values), metric, Summary(paired).mean))
    rows: list[dict[str, Cell]] = []
    for (column, name, row, study, summary, metric, base), gain in zip(found, correct(gains), strict=True):
        tasks, runs = _averaged(entry, column, study), study.comparison.of(study.label(row)) if study else ()
        lost = sum(run.outcome in ("diverged", "failed") for run in runs)
        value, paper_gain = part.mean(name, tasks), part.gain(name, baseline, *tasks)
        paper = part.show(name, column) or MISSING
        if tasks != (column,):
            paper = show_known(value, f"{{:.1f}} (of {', '.join(tasks)})")
        agreement = _agreement(part.share(name, baseline, *tasks), summary.count, metric.error(base), gain)
        judged = gain.count or paper_gain is not None
        ours, numbers = summary.cell(metric)
        if study and summary.count and part.metric == "step_ratio":
            ours += f" ({study.training_time(row)})"
        rows.append(
            {
                "column": (column, {"column": column}),
                "method": (name, {"row": name}),
                "paper": (paper, {"paper": value}),
                "ours": (ours, numbers),
                "n": (f"{summary.count}" + (f" + {lost} lost" if lost else ""), {"lost": lost}),
                "paper's gain": (show_known(paper_gain, "{:+g}"), {"paper_gain": paper_gain}),
                "our gain [95 % interval]": gain.cell(metric),
                "p": show_p(gain.p),
                "p (Holm)": show_p(gain.p_holm),
                "agreement": (agreement if judged else MISSING, {"agreement": agreement}),
            }
        )
    labels = {metric.label for _, _, _, _, summary, metric, _ in found if summary.count}
    label = f" ({labels.pop()})" if len(labels) == 1 else ""
    return Table.of(id.lower(), f"{id}: {entry.title}{label}", rows, notes, (0, 1, 9))


def _averaged(entry: Entry, column: str, study: StoredStudy | None) -> tuple[str, ...]:
    """Columns that a number is the mean of: itself, or those whose tasks of GLUE were run, if these were not all."""
    if entry.columns[column].metric != f"glue:{AVERAGE}" or study is None or study.glue is None:
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


def write_outcome(id: str, entry: Entry, scale: str, records: Collection, folder: Path) -> list[Table]:
    """Write ID.md, a CSV for each table, and CSV and SVG of each figure; returns the tables."""
    tables = outcome_tables(id, entry, scale, records)
    files: dict[str, str | bytes] = {f"{table.name}.csv": table_csv(table) for table in tables}
    text = [f"# {id}: {entry.title}", ""]
    for table in tables:
        text += [f"## {table.title}", "", table_markdown(table), ""]
    for figure in build_figures(id, entry, records):
        name = figure.name.lower()
        files[f"{name}-points.csv"] = figures.write_csv(figure)
        files[f"{name}.svg"] = draw_static(figure)
        text += [f"![{figure.title}]({name}.svg)", ""]
    files[f"{id}.md"] = "\n".join(text)
    check_stays_inside(folder.parent, [folder])
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
        wanted = [name for name, source in entry.columns.items() if (source.quantity == "match") is bars]
        found = {name: study for name in wanted if (study := records.study(entry.address(name))) is not None}
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
    source, analysis = entry.columns[title], stored.analysis
    quantity, label = source.quantity, Y_LABELS[source.quantity]
    if quantity == "jacobian" and stored.comparison.runs[0].record["config"]["tracking"].get("stacked"):
        label += " = [J_Q; J_K; J_V]"
    geometric = entry.readings.get("mean") == "geometric"
    if quantity == "match":
        rows = figures.match_rows(analysis.unit, _matchings(entry, stored))
        return figures.Panel(title, title, f"{analysis.unit}s {label}", rows)
    named = {name: stored.label(row) for name, row in entry.rows.items() if stored.label(row) in analysis.heads}
    if quantity == "loss":
        losses = figures.curves_of(analysis, "steps", "loss")
        curves = {name: losses.get(method, []) for name, method in named.items()}
    elif quantity == "jacobian":
        keys = ("pseudo_condition_number", "papers_bound_log10")
        own, bounds = (figures.measured(analysis, key, geometric=geometric) for key in keys)
        pairs = [((name, own[at]), (f"{name}, papers' bound", bounds[at])) for name, at in named.items()]
        curves = dict(pair for both in pairs for pair in both)
    else:
        # W + C is what the forward pass of the last row uses, the method with the correction.
        first, *_, last = list(named.values()) or [""]
        of_original = entry.readings.get("weights") == "original"
        curves = {}
        if source.of in ("raw", "both"):
            method, prefix = (first, "") if of_original else (last, "raw_")
            for role in ROLES:
                found = figures.measured(analysis, f"{prefix}{quantity}_{role}", geometric=geometric)
                curves[f"W_{role.upper()}"] = found.get(method, [])
        if source.of in ("effective", "both"):
            for role in ROLES:
                found = figures.measured(analysis, f"{quantity}_{role}", geometric=geometric)
                curves[f"W_{role.upper()} + C_{role.upper()}"] = found.get(last, [])
    log = quantity != "loss"
    return figures.curve_panel(title, title, label, curves, log=log, band_of_logs=log and geometric)


def _matchings(entry: Entry, stored: StoredStudy) -> dict[str, Matching]:
    """By row; without seeds where there are no runs."""
    known, none = stored.analysis.matchings, Matching({}, None)
    return {name: known.get(stored.label(row), none) for name, row in entry.rows.items()}


def _figure_rows(entry: Entry, records: Collection) -> Iterator[dict[str, Cell]]:
    """Every curve at its first and last point, mean over seeds; every bar with what it saves."""
    for panel, source in entry.columns.items():
        stored = records.study(entry.address(panel))
        if stored is None:
            yield _figure_row(panel, MISSING, MISSING, n=0)
        elif source.quantity == "match":
            unit, part = stored.analysis.unit, entry.parts[0]
            for name, matching in _matchings(entry, stored).items():
                if not matching.by_seed:
                    yield _figure_row(panel, f"{unit}s to match", name, n=0)
                    continue
                saving, count = matching.mean("saving"), len(matching.by_seed)
                runs = f"{show_seeds(count)}, mean curve {show_match(matching.of_means, unit)}"
                shown = matching.show(unit), show_known(saving, "saves {:.0%}"), runs, part.show(name, panel) or MISSING
                yield _figure_row(
                    panel,
                    f"{unit}s to match",
                    name,
                    *shown,
                    n=count,
                    reached=count - matching.censored,
                    matched=matching.mean(unit),
                    saving=saving,
                    paper=part.mean(name, (panel,)),
                )
        else:
            drawn = _panel(entry, panel, stored)
            for name, seeds in drawn.by_series().items():
                means = [row.value for row in seeds.get(figures.MEAN, [])]
                own = [[row.value for row in rows] for seed, rows in seeds.items() if seed.isdigit()]
                infinite = not means and any(own) and all(math.isinf(value) for values in own for value in values)
                known = means or [math.inf if infinite else math.nan]
                start, end = ("> 1e300" if infinite else show(value) for value in (known[0], known[-1]))
                yield _figure_row(
                    panel,
                    drawn.y_label,
                    name,
                    start,
                    end,
                    show_seeds(len(own)),
                    n=len(own),
                    start=known[0],
                    end=known[-1],
                )


def _figure_row(
    panel: str,
    quantity: str,
    series: str,
    start: str = MISSING,
    end: str = MISSING,
    runs: str = "no runs",
    paper: str = MISSING,
    /,
    **numbers: str | float | None,
) -> dict[str, Cell]:
    return {
        "panel": (panel, {"panel": panel}),
        "quantity": (quantity, {"quantity": quantity}),
        "series": (series, {"series": series}),
        "start, or when matched": (start, numbers),
        "end, or saving": end,
        "runs": runs,
        "paper": paper,
    }
