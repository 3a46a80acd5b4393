"""`rebuild_glue`: the tables of GLUE from the records, as markdown, CSV and JSON; same records, same bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.files import to_json, write_atomically
from wellcond.lab.report.formats import show_interval, show_mean, show_p
from wellcond.lab.report.glue_scores import AVERAGE, NO_METRICS, TITLES, GlueScores, different_settings, load_glue
from wellcond.lab.report.run_record import Metric
from wellcond.lab.report.statistics import PairedDifference, Summary, compare_paired, correct, required_pairs
from wellcond.lab.report.table import Table, plain_markdown, table_csv, table_markdown
from wellcond.lab.report.table_values import Values, difference_values, summary_values
from wellcond.lab.report.values import MISSING, number

SCHEMA = 1
SHOWN = Metric("score", higher_is_better=True, percent=True)
NAMES = {"f1": "F1", "accuracy_mismatched": "accuracy, mismatched", AVERAGE: "mean of the tasks"}


def rebuild_glue(folder: Path) -> Path:
    """Write glue.md, glue.csv and glue.json from the records of `wellcond glue`.

    Args:
        folder: of a pre-trained run, whose files go into its folder glue, or of a comparison, whose files go into it.

    Returns: path of glue.md.

    Raises: RunRecordError if there are no records, or they cannot be put into one table; nothing is then written.
    """
    scores = load_glue(folder)
    statistics = statistics_table(scores)
    parts = [f"# GLUE: {plain_markdown(scores.title)}", table_markdown(scores_table(scores))]
    parts += ["## Each task", table_markdown(statistics)]
    others = others_table(scores)
    parts += ["## Other metrics", table_markdown(others)] if others.rows else []
    home = scores.folder if scores.comparison else scores.folder / "glue"
    write_atomically(home / "glue.csv", table_csv(statistics))
    write_atomically(home / "glue.json", to_json(glue_json(scores), indent=1) + "\n")
    write_atomically(home / "glue.md", "\n\n".join(parts) + "\n")
    return home / "glue.md"


def scores_table(scores: GlueScores) -> Table:
    """A row for each method, a column for each task: mean and standard deviation."""
    columns = (*scores.tasks, AVERAGE)
    rows = [
        (method, *(_shown(Summary(scores.values(method, column))) for column in columns)) for method in scores.methods
    ]
    header = ("method", *(TITLES.get(column, "Avg.") for column in columns))
    return Table("glue", f"GLUE: {scores.title}", header, tuple(rows), tuple(find_notes(scores)))


def statistics_table(scores: GlueScores) -> Table:
    """A row for each method and task, with differences to the baseline and what else must be compared."""
    rows = []
    values: list[Values] = []
    differences = find_differences(scores)
    for column in (*scores.tasks, AVERAGE):
        title, metric = TITLES.get(column, "Avg."), _name(AVERAGE if column == AVERAGE else scores.metric(column))
        for method in scores.methods:
            summary = Summary(scores.values(method, column))
            cells = (title, metric, method, str(summary.count), _plain(summary.mean), _plain(summary.std))
            found: list[PairedDifference | None] = [
                d for (name, _), d in differences.items() if name == column and d.method == method
            ]
            for difference in found or [None]:
                rows.append((*cells, *_difference_cells(difference)))
                named: Values = {"task": title, "metric": metric, "method": method}
                minus = "" if difference is None else difference.baseline
                values.append(
                    named
                    | summary_values(summary, SHOWN)
                    | {"metric": metric, "minus": minus}
                    | difference_values(difference, SHOWN)
                )
    header = (
        "task", "metric", "method", "n", "mean", "std",
        "minus", "pairs", "difference", "95 % interval", "p", "p (Holm)",
    )  # fmt: skip
    notes = (
        "Differences are paired by seed of pre-training; positive is better. Holm's correction is over all rows of the "
        "tasks, and for the mean over its own rows. Below three pairs there is no interval and no p.",
    )
    return Table(
        "glue_statistics", "Each task", header, tuple(rows), notes if differences else (), frozenset({0, 1, 2, 6}),
        tuple(values),
    )  # fmt: skip


def others_table(scores: GlueScores) -> Table:
    """The metrics of a task that its column does not show."""
    columns = [(task, metric) for task in scores.tasks for metric in scores.others(task)]
    rows = tuple(
        (method, *(_shown(Summary(scores.values(method, task, metric))) for task, metric in columns))
        for method in scores.methods
    )
    header = ("method", *(f"{TITLES[task]} {_name(metric)}" for task, metric in columns))
    return Table("glue_others", "Other metrics", header, rows if columns else ())


def find_differences(scores: GlueScores) -> dict[tuple[str, tuple[str, str]], PairedDifference]:
    """By column and pair of methods: every method minus the baseline, and the pairs that must be compared."""
    comparison = scores.comparison
    if comparison is None:
        return {}
    pairs = [(method, comparison.baseline) for method in scores.methods if method != comparison.baseline]
    pairs = list(dict.fromkeys([*pairs, *required_pairs(comparison)]))

    def of(columns: Sequence[str]) -> dict[tuple[str, tuple[str, str]], PairedDifference]:
        keys = [(column, pair) for column in columns for pair in pairs]
        found = [
            compare_paired(a, scores.values(a, column), b, scores.values(b, column), higher_is_better=True)
            for column, (a, b) in keys
        ]
        return dict(zip(keys, correct(found), strict=True))

    return of(scores.tasks) | of([AVERAGE])


def find_notes(scores: GlueScores) -> list[str]:
    """What a reader must know to read the table."""
    seeds = sorted({int(record["seed"]) for record in scores.all_records()})
    tuned = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} of fine-tuning"
    each = f"seeds of pre-training, each with {tuned}" if scores.comparison else tuned
    notes = [
        f"Scores times 100 on the validation split after the last epoch, scale {scores.scale}; mean and standard "
        f"deviation over {each}.",
        "Metrics: " + ", ".join(f"{TITLES[task]} {_name(scores.metric(task))}" for task in scores.tasks) + ".",
        "Rows to train and to evaluate on: "
        + ", ".join(f"{TITLES[task]} {_sizes(scores, task)}" for task in scores.tasks)
        + ".",
        "Corrections of a conditioned model were folded into its weights before fine-tuning.",
    ]
    missing = [title for task, title in TITLES.items() if task not in scores.tasks]
    if missing:
        notes.append(f"Avg. is the mean of {len(scores.tasks)} tasks of eight; not run: {', '.join(missing)}.")
    return notes + _warnings(scores)


def _warnings(scores: GlueScores) -> list[str]:
    notes = []
    for task in scores.tasks:
        states = Counter(str(r["status"]) for r in scores.all_records(task) if r["status"] != "finished")
        if states:
            told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            notes.append(f"{TITLES[task]}: of {_count(scores, task)} runs {told}; they are in no mean.")
    equal = {task: sum(_is_constant(record) for record in scores.all_records(task)) for task in scores.tasks}
    if any(equal.values()):
        told = ", ".join(f"{TITLES[task]} {count} of {_count(scores, task)}" for task, count in equal.items() if count)
        notes.append(f"Runs whose predictions are all equal (Matthews and correlations are then 0): {told}.")
    if scores.comparison is not None:
        lost = [run for run in scores.comparison.runs if not run.finished]
        notes += [f"{run.method}, seed {run.seed}: pre-training is {run.status}, so there is no score." for run in lost]
    firsts = [next(iter(scores.all_records(task)))["config"] for task in scores.tasks]
    parts = ("optimizer", "schedule", "training")
    differing = {
        line for other in firsts[1:] for part in parts for line in different_settings(firsts[0][part], other[part])
    }
    if differing:
        notes.append("Tasks were fine-tuned with different settings: " + "; ".join(sorted(differing)) + ".")
    return notes


def glue_json(scores: GlueScores) -> dict[str, Any]:
    """Everything in the tables, and the scores of every run."""
    columns = (*scores.tasks, AVERAGE)
    return {
        "schema": SCHEMA,
        "kind": "wellcond-glue",
        "title": scores.title,
        "scale": scores.scale,
        "tasks": {task: scores.metric(task) for task in scores.tasks},
        "not_run": [task for task in TITLES if task not in scores.tasks],
        "seeds_of": "pre-training" if scores.comparison else "fine-tuning",
        "methods": {
            method: {column: _summary(scores, method, column) for column in columns} for method in scores.methods
        },
        "differences": [
            {"task": column, **vars(difference), "values": _keyed(difference.values)}
            for (column, _), difference in find_differences(scores).items()
        ],
        "runs": [
            {
                "method": run.method,
                "seed": run.seed,
                "task": task,
                "fine_tuning_seed": seed,
                "status": record["status"],
                "config_hash": record["config_hash"],
                "scores": _scores(record),
            }
            for run in scores.runs
            for task in scores.tasks
            for seed, record in run.records.get(task, {}).items()
        ],
        "notes": find_notes(scores),
    }


def _scores(record: dict[str, Any]) -> dict[str, Any]:
    final = record.get("final") or {}
    return {name: value for name, value in final.items() if name == "constant" or name not in NO_METRICS}


def _is_constant(record: dict[str, Any]) -> bool:
    return number((record.get("final") or {}).get("constant")) == 1


def _count(scores: GlueScores, task: str) -> int:
    return len(list(scores.all_records(task)))


def _summary(scores: GlueScores, method: str, column: str) -> dict[str, Any]:
    summary = Summary(scores.values(method, column))
    return {"n": summary.count, "mean": summary.mean, "std": summary.std, "values": _keyed(summary.values)}


def _keyed(values: dict[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in sorted(values.items())}


def _sizes(scores: GlueScores, task: str) -> str:
    found = {(r["data"]["train"], r["data"]["evaluation"]) for r in scores.all_records(task) if r.get("data")}
    return " and ".join(f"{train:,}/{evaluation:,}" for train, evaluation in sorted(found)) or MISSING


def _name(metric: str) -> str:
    return NAMES.get(metric, metric.capitalize() if metric in ("matthews", "pearson", "spearman") else metric)


def _shown(summary: Summary) -> str:
    return show_mean(summary.mean, summary.std, SHOWN)


def _plain(value: float) -> str:
    return MISSING if math.isnan(value) else SHOWN.show(value)


def _difference_cells(difference: PairedDifference | None) -> tuple[str, ...]:
    if difference is None:
        return (MISSING,) * 6
    mean = MISSING if math.isnan(difference.mean) else SHOWN.show(difference.mean, sign=True)
    interval = show_interval(difference.interval, SHOWN)
    return (difference.baseline, str(difference.count), mean, interval, show_p(difference.p), show_p(difference.p_holm))
